from __future__ import annotations

import pytest
import torch

from kv_tier.frames import DUMMY_FRAME, FrameArena
from tests.models.synthetic_engine import GEOMETRY


def test_every_frame_but_the_dummy_is_handed_out_once() -> None:
    arena = FrameArena(GEOMETRY, 9)
    assert arena.num_usable == arena.num_free == 8
    first, second = arena.alloc(5), arena.alloc(3)
    assert sorted(first + second) == list(range(1, 9))
    assert DUMMY_FRAME not in first + second
    arena.check_integrity(first + second)
    arena.free(first)
    arena.check_integrity(second)
    assert arena.num_free == 5


def test_integrity_notices_a_leaked_and_a_doubled_frame() -> None:
    arena = FrameArena(GEOMETRY, 5)
    held = arena.alloc(2)
    with pytest.raises(AssertionError):
        arena.check_integrity(held[:1])
    arena.free(held[:1])
    with pytest.raises(AssertionError):
        arena.check_integrity(held)


def test_token_rows_address_the_token_in_every_head() -> None:
    arena = FrameArena(GEOMETRY, 6)
    frames, offsets = torch.tensor([4, 1, 4]), torch.tensor([3, 0, 1])
    values = torch.randn(3, GEOMETRY.num_kv_heads, GEOMETRY.head_dim).to(GEOMETRY.dtype)
    rows = arena.token_rows(frames, offsets)
    arena.k_tokens[1].index_copy_(0, rows, values.view(-1, GEOMETRY.head_dim))
    for token, (frame, offset) in enumerate(zip(frames.tolist(), offsets.tolist(), strict=True)):
        assert torch.equal(arena.k[1][:, frame, offset], values[token])
    assert int(arena.k[0].count_nonzero()) == 0
