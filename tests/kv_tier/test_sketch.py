"""The sketch's constants: what they keep, and what their file refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kv_kernels.ref.sketch import sketch_build, unpack_codes
from kv_tier.meta.errors import ConfigError
from kv_tier.sketch import Moments, load_maps, mean_moments, moments_of, save_maps, solve_maps

HEADS, DIM = 2, 16


def sample(seed: int, count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (queries, keys), each [kv_head, count, head_dim], with few strong directions that the heads do not share."""
    generator = torch.Generator().manual_seed(7)
    mix = torch.randn(HEADS, DIM, DIM, generator=generator)
    generator.manual_seed(seed)
    strength = 2.0 ** -torch.arange(DIM)
    queries = torch.randn(HEADS, count, DIM, generator=generator)
    keys = torch.randn(HEADS, count, DIM, generator=generator) * strength @ mix + 3.0
    return queries, keys


def moments(seed: int = 0) -> list[Moments]:
    return [moments_of(*sample(seed))]


def test_moments_are_second_moments_of_queries_and_centred_ones_of_keys() -> None:
    queries, keys = sample(0, 50)
    found = moments_of(queries, keys)
    torch.testing.assert_close(
        found.query[1], (queries[1].T @ queries[1] / 50).double(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(found.key[1], torch.cov(keys[1].T.double(), correction=0))
    both = mean_moments([found, found])
    torch.testing.assert_close(both.key_mean, keys.double().mean(1))


def test_codes_tell_the_logits_of_another_text() -> None:
    maps = solve_maps(moments(), 8, num_positions=99)
    queries, keys = sample(1, 300)
    codes = unpack_codes(sketch_build(keys, maps.key_map[0], maps.offset[0])).float()
    wanted = queries[:, :20] @ keys.mT
    got = (queries[:, :20] @ maps.query_map[0]) @ codes.mT
    wanted, got = (logits - logits.mean(-1, keepdim=True) for logits in (wanted, got))
    assert float((got - wanted).square().mean() / wanted.square().mean()) < 0.02


def test_codes_do_not_depend_on_how_many_keys_share_a_call() -> None:
    maps = solve_maps(moments(), 8, num_positions=99)
    keys = sample(2, 257)[1].bfloat16()
    together = sketch_build(keys, maps.key_map[0], maps.offset[0])
    for begin, end in ((0, 1), (1, 8), (8, 257)):
        alone = sketch_build(keys[:, begin:end], maps.key_map[0], maps.offset[0])
        assert torch.equal(alone, together[:, begin:end])


def test_the_map_of_keys_has_few_bits() -> None:
    maps = solve_maps(moments(), 8, num_positions=99)
    assert torch.equal(maps.key_map, maps.key_map.half().float())
    assert (maps.num_directions, maps.entry_bytes) == (8, 4)


@pytest.mark.parametrize("directions", [0, 7, DIM + 2])
def test_directions_out_of_range_are_refused(directions: int) -> None:
    with pytest.raises(ConfigError, match="num_directions"):
        solve_maps(moments(), directions, num_positions=99)


def test_constants_return_from_their_file(tmp_path: Path) -> None:
    maps = solve_maps(moments(), 6, num_positions=99, entry_tokens=2)
    save_maps(maps, "weights", tmp_path / "sketch.npz")
    found = load_maps(tmp_path / "sketch.npz", "weights")
    assert torch.equal(found.key_map, maps.key_map)
    assert torch.equal(found.query_map, maps.query_map)
    assert (found.entry_tokens, found.num_positions) == (2, 99)
    assert (
        found.digest()
        == maps.digest()
        != solve_maps(moments(3), 6, num_positions=99, entry_tokens=2).digest()
    )


def test_constants_of_other_weights_or_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sketch.npz"
    save_maps(solve_maps(moments(), 6, num_positions=99), "weights", path)
    with pytest.raises(ConfigError, match="calibrate again"):
        load_maps(path, "others")
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"version": np.array(99)}))
    with pytest.raises(ConfigError, match="version 99"):
        load_maps(path, "weights")


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 damaged"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "sketch.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="kvdrive calibrate"):
        load_maps(tmp_path / "sketch.npz", "weights")
