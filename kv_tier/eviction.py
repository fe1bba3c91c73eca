"""Which resident page a window cache gives up.

A policy turns what a step saw into a priority per page; the page of the lowest priority leaves first. Priorities decide
what must be fetched later, never a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kv_kernels import compiled
from kv_tier.modes import EvictionName


@dataclass(frozen=True)
class Shape:
    """Sizes of the window caches a policy remembers pages of."""

    num_layers: int
    num_rows: int
    num_heads: int
    max_pages: int

    def per_page(self, value: float) -> list[np.ndarray]:
        """Return one [row, kv_head, page] float32 array per layer, filled with ``value``."""
        shape = (self.num_rows, self.num_heads, self.max_pages)
        return [np.full(shape, value, dtype=np.float32) for _ in range(self.num_layers)]


class Eviction(Protocol):
    """Give every page a priority.

    ``margin``: by how much the priority of a page that is fetched ahead must exceed that of the page that leaves.
    """

    margin: float

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take a step of one layer into account; called once per step, before victims are chosen.

        Args:
            rows: [request] int64 rows of the window caches.
            selected: [request, kv_head, n] int64 pages attended at this step.
            scores: [request, kv_head, page] float32 of this step; +inf is always attended, -inf pads short requests.

        Returns:
            (priority [place, kv_head, page] float32, valid until the next call; places [request] int64 into it).
        """
        ...

    def forget(self, row: int) -> None:
        """Begin another request in ``row``."""
        ...


class Lookahead:
    """Keep what scores high at the current step (paper 5.1): it is the likeliest to be selected at the next."""

    arrays_per_page = 0
    margin = 0.0

    def __init__(self, shape: Shape) -> None:
        self._places = np.arange(shape.num_rows)

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return scores, self._places[: len(rows)]

    def forget(self, row: int) -> None:
        """There is nothing to forget."""


class Smoothed:
    """Keep what scored high lately: ``compiled.smooth_scores`` says how the score, its neighbour and use add up."""

    arrays_per_page = 2
    margin = 2.0  # nats: fetches ahead replace as many later ones
    weights = np.array([0.7, -8.0, 3.0, 0.25, 0.97, 0.1], dtype=np.float32)

    def __init__(self, shape: Shape) -> None:
        self._average, self._uses = shape.per_page(0), shape.per_page(0)
        self._places = np.arange(shape.num_rows)

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        result = np.empty_like(scores)
        bits, average, uses = scores.view(np.int32), self._average[layer], self._uses[layer]
        compiled.smooth_scores(rows, selected, bits, average, uses, result, self.weights)
        return result, self._places[: len(rows)]

    def forget(self, row: int) -> None:
        for part in (*self._average, *self._uses):
            part[row] = 0


class LeastRecentlyUsed:
    """Keep what was selected last."""

    arrays_per_page = 1
    margin = 0.0

    def __init__(self, shape: Shape) -> None:
        self._last = shape.per_page(0)
        self._clock = np.zeros((shape.num_layers, shape.num_rows), dtype=np.int64)

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        compiled.mark_used(rows, selected, self._last[layer], self._clock[layer])
        return self._last[layer], rows

    def forget(self, row: int) -> None:
        self._clock[:, row] = 0
        for part in self._last:
            part[row] = 0


class LeastFrequentlyUsed:
    """Keep what was selected most often."""

    arrays_per_page = 1
    margin = 0.0

    def __init__(self, shape: Shape) -> None:
        self._uses = shape.per_page(0)

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        compiled.count_used(rows, selected, self._uses[layer])
        return self._uses[layer], rows

    def forget(self, row: int) -> None:
        for part in self._uses:
            part[row] = 0


_CLASSES: dict[EvictionName, type[Lookahead | Smoothed | LeastRecentlyUsed | LeastFrequentlyUsed]] = {
    "smoothed": Smoothed,
    "lookahead": Lookahead,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
}


def new_eviction(name: EvictionName, shape: Shape) -> Eviction:
    """Return a policy that has seen nothing."""
    return _CLASSES[name](shape)


def bytes_per_page(name: EvictionName) -> int:
    """Return the bytes a policy remembers per page and (request, layer, KV head)."""
    return 4 * _CLASSES[name].arrays_per_page
