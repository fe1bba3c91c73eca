"""How much each (layer, KV head) gains from a larger window cache, and the sizes that follow (paper 5.2).

The file is JSON: ``format``, ``version``, the shape it was measured for (``num_layers``, ``num_kv_heads``, ``head_dim``,
``page_size``, ``budget_tokens``), ``eviction`` and ``texts`` for whoever reads it, ``window_multiples`` ([option], rising
from 1), and ``misses_per_step`` ([layer][kv_head][option], pages that a decode step fetches). Sizes are computed when it is
loaded, for the memory that is given then; they decide what must be fetched, never a number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_tier.geometry import Geometry
from kv_tier.knapsack import solve
from kv_tier.meta.errors import ConfigError

FORMAT = "kvdrive-window-profile"
VERSION = 1
MULTIPLES = (*np.arange(1, 3, 1 / 8).tolist(), *np.arange(3, 4, 1 / 4).tolist(), 4.0, 4.5, 5.0, 5.5, 6.0)
_SHAPE = ("num_layers", "num_kv_heads", "head_dim", "page_size")


@dataclass(frozen=True)
class WindowProfile:
    """Misses per step of every (layer, KV head) at every window size.

    Attributes:
        geometry: whose layers and heads; only the fields that the file names count.
        budget_tokens: what a step attended.
        multiples: [option] float64 window sizes as multiples of the budget, rising, the first 1.
        misses: [layer, kv_head, option] float64 pages per step.
        eviction: policy of the window caches.
        texts: names of the texts.
    """

    geometry: Geometry
    budget_tokens: int
    multiples: np.ndarray
    misses: np.ndarray
    eviction: str
    texts: tuple[str, ...]

    def slots(self, window_multiple: float) -> np.ndarray:
        """Return the pages each window cache gets, together those of uniform windows of ``window_multiple``.

        Returns:
            [layer, kv_head] int64, none below the budget.
        """
        layers, heads, options = self.misses.shape
        budget_pages = self.budget_tokens // self.geometry.page_size
        sizes = np.floor(self.multiples * budget_pages).astype(np.int64)
        saved = (self.misses[:, :, :1] - self.misses).reshape(-1, options)
        costs = np.tile(sizes, (layers * heads, 1))
        chosen = solve(costs, saved, int(window_multiple * budget_pages) * layers * heads)
        slots: np.ndarray = sizes[chosen].reshape(layers, heads)
        return slots

    def fetched(self, slots: np.ndarray) -> float:
        """Return the pages that windows of ``slots`` ([layer, kv_head]) fetch per step, of the measured sizes."""
        budget_pages = self.budget_tokens // self.geometry.page_size
        sizes = np.floor(self.multiples * budget_pages).astype(np.int64)
        option = np.searchsorted(sizes, slots, side="right") - 1  # a size between two is the smaller one
        return float(np.take_along_axis(self.misses, option[:, :, None], axis=2).sum())

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written.
        """
        fields = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self.geometry, name) for name in _SHAPE},
            "budget_tokens": self.budget_tokens,
            "eviction": self.eviction,
            "texts": list(self.texts),
            "window_multiples": self.multiples.tolist(),
            "misses_per_step": np.round(self.misses, 4).tolist(),
        }
        try:
            path.write_text(json.dumps(fields) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the window profile {path}: {error.strerror}") from error


def load_profile(path: Path, geometry: Geometry, budget_tokens: int) -> WindowProfile:
    """Read the profile of this model and budget.

    Raises:
        ConfigError: the file is unreadable, of another version, or of another model, page size or budget.
    """
    again = "make one with `kvdrive profile`, or drop window_profile for uniform windows"
    try:
        fields = json.loads(path.read_text())
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise ConfigError(
                f"window_profile={path} is {fields['format']} version {fields['version']}, expected {FORMAT} version "
                f"{VERSION}: {again}"
            )
        for name, ours in [
            *((name, getattr(geometry, name)) for name in _SHAPE),
            ("budget_tokens", budget_tokens),
        ]:
            if fields[name] != ours:
                raise ConfigError(
                    f"window_profile={path} was measured for {name}={fields[name]}, this engine has {ours}: {again}"
                )
        return _parse(fields, geometry)
    except OSError as error:
        raise ConfigError(f"window_profile={path} cannot be read: {error.strerror}: {again}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"window_profile={path} is no window profile ({error!r}): {again}") from error


def _parse(fields: dict[str, Any], geometry: Geometry) -> WindowProfile:
    multiples = np.array(fields["window_multiples"], dtype=np.float64)
    misses = np.array(fields["misses_per_step"], dtype=np.float64)
    if misses.shape != (geometry.num_layers, geometry.num_kv_heads, len(multiples)):
        raise ValueError(f"misses_per_step has the shape {misses.shape}")
    if multiples[0] != 1 or (np.diff(multiples) <= 0).any() or not np.isfinite(misses).all():
        raise ValueError("window_multiples must rise from 1 and misses_per_step be numbers")
    return WindowProfile(
        geometry, fields["budget_tokens"], multiples, misses, str(fields["eviction"]), tuple(fields["texts"])
    )
