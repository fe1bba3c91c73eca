"""The key sketch's constants: which few directions of a head's keys tell its logits, and the file that holds them.

A logit is q . k. With C_q the second moment of a head's queries, C_k the covariance of its keys and S = C_q^(1/2), the
directions that keep most of the logits' variance are the leading eigenvectors E of S C_k S:

    key   -> codes z = floor((k - mean) K), K = S E / step        4 bits each
    query -> weights w = q A, A = C_k K (K^T C_k K + 1/12)^-1      the best linear reading of the codes

so that w . z is the logit, less what was left out and a constant that no softmax sees. 1/12 is the variance of rounding.
``kv_kernels.ref.sketch`` defines codes and scores. The maps belong to a model's weights (``kvdrive calibrate``), and their
digest to the selection's identity. An *entry* is the mean of ``entry_tokens`` consecutive keys, one key by default.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kv_kernels.ref.sketch import CODE_CENTRE
from kv_tier.meta.errors import ConfigError

VERSION: Final = 1
STEP: Final = (
    0.4  # of a standard deviation; keys have longer tails than the normal distribution, whose best is 0.335
)
ROUNDING_VARIANCE: Final = 1 / 12  # of codes, in steps
CODE_LIMIT: Final = 127  # maps are stored as int8
ARRAYS: Final = ("key_codes", "key_scales", "query_codes", "query_scales", "offset")


@dataclass(frozen=True)
class Moments:
    """Second moments of the queries and keys of one layer, after RoPE, float64.

    Args:
        query: [kv_head, head_dim, head_dim], mean of q q^T over tokens and the group.
        key_mean: [kv_head, head_dim].
        key: [kv_head, head_dim, head_dim], covariance.
    """

    query: torch.Tensor
    key_mean: torch.Tensor
    key: torch.Tensor


def moments_of(queries: torch.Tensor, keys: torch.Tensor) -> Moments:
    """Measure one layer.

    Args:
        queries: [kv_head, query, head_dim], the group's queries among the others.
        keys: [kv_head, entry, head_dim].
    """
    q, k = queries.double(), keys.double()
    mean = k.mean(1)
    centred = k - mean[:, None]
    return Moments(q.mT @ q / q.shape[1], mean, centred.mT @ centred / k.shape[1])


def mean_moments(texts: Sequence[Moments]) -> Moments:
    """Average the moments of several texts of one layer; each text's keys stay centred on their own mean."""

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).mean(0)

    return Moments(
        mean([t.query for t in texts]), mean([t.key_mean for t in texts]), mean([t.key for t in texts])
    )


@dataclass(frozen=True)
class SketchMaps:
    """Constants of one model: two maps in int8 with a scale per direction.

    Args:
        key_codes, query_codes: [layer, kv_head, head_dim, direction] int8.
        key_scales, query_scales: [layer, kv_head, direction] float16.
        offset: [layer, kv_head, direction] float32, added to a mapped key before rounding.
        entry_tokens: consecutive keys averaged into an entry.
        num_positions: how far the calibration texts reached; beyond, keys turn away from what was measured.
    """

    key_codes: torch.Tensor
    key_scales: torch.Tensor
    query_codes: torch.Tensor
    query_scales: torch.Tensor
    offset: torch.Tensor
    entry_tokens: int
    num_positions: int

    @cached_property
    def key_map(self) -> torch.Tensor:
        """[layer, kv_head, head_dim, direction] float32 whose values float16 holds: few bits, so that float64 adds
        their products with keys without rounding, in whatever order."""
        return _unpacked(self.key_codes, self.key_scales)

    @cached_property
    def query_map(self) -> torch.Tensor:
        """[layer, kv_head, head_dim, direction] float32."""
        return _unpacked(self.query_codes, self.query_scales)

    @property
    def num_directions(self) -> int:
        return self.key_codes.shape[-1]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one (layer, KV head)."""
        return self.num_directions // 2

    def digest(self) -> str:
        """Return what identifies the constants: a hash over version and values."""
        state = hashlib.sha256(f"key_sketch/{VERSION}/{self.entry_tokens}/{self.key_codes.shape}".encode())
        for name in ARRAYS:
            state.update(np.ascontiguousarray(getattr(self, name).numpy()).tobytes())
        return state.hexdigest()


def _unpacked(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.float() * scales.float()[:, :, None]).half().float()


def _packed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [kv_head, head_dim, direction] to int8 and a float16 scale per direction."""
    scales = (values.abs().amax(1) / CODE_LIMIT).half()
    codes = values / scales.to(values.dtype)[:, None]
    return codes.round().clamp(-CODE_LIMIT, CODE_LIMIT).to(torch.int8), scales


def solve_maps(
    moments: Sequence[Moments], num_directions: int, *, num_positions: int, entry_tokens: int = 1
) -> SketchMaps:
    """Return the maps of every layer.

    Args:
        moments: one per layer, of entries of ``entry_tokens``.
        num_directions: even, at most head_dim.
        num_positions: tokens of the shortest text that was measured.

    Raises:
        ConfigError: ``num_directions`` is out of range.
    """
    head_dim = moments[0].key_mean.shape[-1]
    if num_directions % 2 or not 0 < num_directions <= head_dim:
        raise ConfigError(
            f"num_directions={num_directions}: must be even and at most the head dimension {head_dim}"
        )
    layers = [_solve_layer(layer, num_directions) for layer in moments]
    arrays = {name: torch.stack([layer[name] for layer in layers]) for name in ARRAYS}
    return SketchMaps(**arrays, entry_tokens=entry_tokens, num_positions=num_positions)


def _solve_layer(layer: Moments, num_directions: int) -> dict[str, torch.Tensor]:
    values, vectors = torch.linalg.eigh(layer.query)
    root = values.clamp(min=1e-6 * float(values.max())).sqrt()
    weight = vectors * root[:, None] @ vectors.mT
    variance, directions = torch.linalg.eigh(weight @ layer.key @ weight)
    variance = variance.flip(-1)[:, :num_directions]
    step = STEP * variance.clamp(min=1e-12 * float(variance.max())).sqrt()
    key_codes, key_scales = _packed(weight @ directions.flip(-1)[:, :, :num_directions] / step[:, None])
    key_map = _unpacked(key_codes[None], key_scales[None])[0].double()
    spread = layer.key @ key_map
    read = key_map.mT @ spread + ROUNDING_VARIANCE * torch.eye(num_directions, dtype=torch.float64)
    query_codes, query_scales = _packed(torch.linalg.solve(read, spread, left=False))
    offset = CODE_CENTRE - (layer.key_mean[:, None] @ key_map)[:, 0]
    arrays = (key_codes, key_scales, query_codes, query_scales, offset.float())
    return dict(zip(ARRAYS, arrays, strict=True))


def save_maps(maps: SketchMaps, weights: str, path: Path) -> None:
    """Write the constants.

    Args:
        weights: identity of the weights they were computed from.

    Raises:
        ConfigError: the file cannot be written.
    """
    arrays = {name: getattr(maps, name).numpy() for name in ARRAYS}
    scalars: dict[str, Any] = {"version": VERSION, "weights": weights}
    scalars |= {"entry_tokens": maps.entry_tokens, "num_positions": maps.num_positions}
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **scalars, **arrays)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: name another file") from error


def load_maps(path: Path, weights: str) -> SketchMaps:
    """Read constants that belong to ``weights``.

    Raises:
        ConfigError: no such file, another version, damaged, or computed from other weights.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            version, found = file["version"].item(), file["weights"].item()
            sizes: dict[str, Any] = {name: file[name].item() for name in ("entry_tokens", "num_positions")}
            arrays: dict[str, Any] = {name: torch.from_numpy(file[name]) for name in ARRAYS}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"cannot read sketch constants from {path}: {error}; run kvdrive calibrate"
        ) from error
    if version != VERSION:
        raise ConfigError(
            f"{path} holds sketch constants of version {version}, expected {VERSION}: calibrate again"
        )
    if found != weights:
        raise ConfigError(
            f"{path} holds sketch constants of weights {found[:16]}, the model has {weights[:16]}: calibrate again"
        )
    return SketchMaps(**arrays, **sizes)
