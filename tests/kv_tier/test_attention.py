from __future__ import annotations

import pytest
import torch

from kv_tier.attention import FOLDED_QUERIES, ExactAttention, attend_masked, attend_selected, causal_mask
from tests.models.attention_model import attend, full_attention

HEADS, GROUP, DIM, SCALE = 2, 3, 16, 0.25


def draw(
    num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens)
    shape = (num_tokens, HEADS, DIM)
    query = torch.randn(num_tokens, HEADS, GROUP, DIM).to(dtype)
    return query, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def run_tiles(plan: ExactAttention, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    result = query
    for number, (begin, end) in enumerate(plan.tiles):
        result = plan.attend(query, number, k[begin:end].transpose(0, 1), v[begin:end].transpose(0, 1), SCALE)
    return result


@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 24, 31])
@pytest.mark.parametrize("count", [1, 2, 8, 17])
@pytest.mark.parametrize("tile_tokens", [8, 16, 8192])
def test_tiles_add_up_to_full_attention(first: int, count: int, tile_tokens: int) -> None:
    query, k, v = draw(first + count)
    plan = ExactAttention(first, count, torch.float32, tile_tokens)
    expected = full_attention(query[None], k[None], v[None], SCALE)[0]
    torch.testing.assert_close(run_tiles(plan, query[first:], k, v), expected[first:], atol=2e-6, rtol=2e-5)


def test_tiles_lie_at_absolute_multiples() -> None:
    assert ExactAttention(13, 6, torch.float32, 8).tiles == [(0, 8), (8, 16), (16, 19)]
    assert ExactAttention(16, 1, torch.float32, 8).tiles == [(0, 8), (8, 16), (16, 17)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_definition(dtype: torch.dtype) -> None:
    query, k, v = draw(60, dtype)
    plan = ExactAttention(20, 40, dtype, 16)
    expected = full_attention(query[None], k[None], v[None], SCALE)[0, 20:]
    out = run_tiles(plan, query[20:], k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.02)


def test_the_mask_hides_later_positions_only() -> None:
    mask = causal_mask(3, 5, 1, torch.float32)
    assert (mask == 0).tolist() == [
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, True, True, True, False],
    ]


@pytest.mark.parametrize("count", [1, FOLDED_QUERIES // GROUP, FOLDED_QUERIES // GROUP + 1])
def test_both_layouts_of_the_queries_agree_with_the_definition(count: int) -> None:
    query, k, v = draw(count + 5)
    mask = causal_mask(count, count + 5, 5, torch.float32)
    out, lse = attend_masked(query[5:], k.transpose(0, 1), v.transpose(0, 1), mask, SCALE)
    expected = full_attention(query[None], k[None], v[None], SCALE)[0, 5:]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    logits = (query[-1].float() @ k.permute(1, 2, 0)) * SCALE
    torch.testing.assert_close(lse[-1], logits.logsumexp(-1))


def test_one_token_attends_the_gathered_positions_that_are_not_masked() -> None:
    query, k, v = draw(21)
    mask = torch.zeros(1, 1, 1, 24)
    mask[..., 21:] = float("-inf")
    keys, values = (torch.nn.functional.pad(t.transpose(0, 1), (0, 0, 0, 3), value=7.0)[None] for t in (k, v))
    out = attend_selected(query[-1:], keys, values, mask, SCALE)[0]
    for head in range(HEADS):
        expected = attend(query[-1, head], k[:, head], v[:, head], list(range(21)), SCALE)
        torch.testing.assert_close(out[head], expected)


def test_batch_mates_change_no_bit_of_the_attention() -> None:
    torch.manual_seed(3)
    query, k, v = (torch.randn(5, 3, n, 64).to(torch.bfloat16) for n in (3, 1024, 1024))
    mask = torch.zeros(5, 1, 1, 1024, dtype=torch.bfloat16)
    for i in range(5):
        mask[i, ..., 1024 - i :] = float("-inf")
    together = attend_selected(query, k, v, mask, 0.125)
    for i in range(5):
        one = slice(i, i + 1)
        assert torch.equal(together[one], attend_selected(query[one], k[one], v[one], mask[one], 0.125))
