"""Device memory of the requests: window caches and indexes, lent to those that run and kept for those that pause."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kv_tier.geometry import Geometry
from kv_tier.index import DeviceIndex, IndexPlan, MeansIndex
from kv_tier.modes import EvictionName
from kv_tier.request import RequestState
from kv_tier.window import Window, WindowCaches


@dataclass(frozen=True)
class _Kept:
    """The device memory of a request that ended, and what it holds.

    ``pages``, ``lives``: [n] int64 logical pages by ordinal, only full ones.
    """

    window: Window
    index: DeviceIndex
    pages: np.ndarray
    lives: np.ndarray


class DeviceMemory:
    """Own ``num_requests`` sets of window caches and indexes; there is never more.

    The set of a request that ended is kept until somebody needs it: the next turn of the session has the same logical
    pages, alive, and takes its set over with all that is in it. The one kept longest is given up first. Contents never
    reach a number.

        free ──lend──> lent ──end──> kept ──lend (same pages)──> lent
          └──<────────────────────────┘ lend (other pages)
    """

    def __init__(
        self,
        geometry: Geometry,
        num_slots: np.ndarray,
        max_pages: int,
        num_requests: int,
        eviction: EvictionName,
        index: MeansIndex,
    ) -> None:
        """Plan the memory; it is touched when a request first needs it.

        Args:
            num_slots: [layer, kv_head] pages of each window cache.
            max_pages: pages of the longest sequence.
            index: gives every request its own.
        """
        self.windows = WindowCaches(geometry, num_slots, max_pages, num_requests, eviction)
        self.num_requests = num_requests
        self.request_bytes = self.bytes_per_request(geometry, num_slots, max_pages, eviction, index.plan)
        self.num_reused = 0
        self._index, self._max_pages = index, max_pages
        self._unused_indexes: list[DeviceIndex] = []
        self._kept: list[_Kept] = []

    @staticmethod
    def bytes_per_request(
        geometry: Geometry, num_slots: np.ndarray, max_pages: int, eviction: EvictionName, plan: IndexPlan
    ) -> int:
        """Return the bytes of one set."""
        windows = WindowCaches.bytes_for(geometry, num_slots, max_pages, eviction)
        return windows + plan.device_bytes(geometry, max_pages)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_held(self) -> int:
        """Sets that were touched: lent, kept or used before."""
        return self.windows.num_lent + len(self._unused_indexes)

    def lend(self, state: RequestState) -> None:
        """Give ``state`` a set: the one kept for its pages, a free one, or the one kept longest, emptied."""
        assert self.windows.num_lent - self.num_kept < self.num_requests, (
            "more requests run than were admitted"
        )
        best = max(range(self.num_kept), key=lambda i: _num_common(self._kept[i], state), default=None)
        if best is not None and _num_common(self._kept[best], state):
            self._take_over(state, self._kept.pop(best))
            return
        if self.windows.num_lent == self.num_requests:
            self._give_up(self._kept.pop(0))
        state.window = self.windows.lend()
        if self._unused_indexes:
            state.index = self._unused_indexes.pop()
            state.index.truncate(0)
        else:
            state.index = self._index.device(self._max_pages)

    def end(self, state: RequestState) -> None:
        """Keep the set of a request that ended, if it has one."""
        if state.window is None or state.index is None:
            return
        # the last page may be written on by somebody else; a lost page left zeros behind
        num_full = max(0, state.num_pages - 1) if state.failure is None else 0
        kept = _Kept(
            state.window, state.index, state.pages[:num_full].numpy().copy(), state.lives[:num_full].copy()
        )
        state.window = state.index = None
        if num_full:
            self._kept.append(kept)
        else:
            self._give_up(kept)

    def clear(self) -> None:
        """Give up every set that is kept."""
        while self._kept:
            self._give_up(self._kept.pop())

    def _give_up(self, kept: _Kept) -> None:
        self.windows.give_back(kept.window)
        self._unused_indexes.append(kept.index)

    def _take_over(self, state: RequestState, kept: _Kept) -> None:
        same = _is_same(kept, state)
        gone = np.flatnonzero(~same)
        kept.window.drop(np.concatenate([gone, np.arange(len(same), self._max_pages)]))
        kept.index.truncate(int(gone[0]) if len(gone) else len(same))
        state.window, state.index = kept.window, kept.index
        self.num_reused += 1


def _is_same(kept: _Kept, state: RequestState) -> np.ndarray:
    """Return where kept pages are the request's, [common ordinals] bool: same logical page in the same life."""
    count = min(len(kept.pages), state.num_pages)
    pages = state.pages[:count].numpy()
    same: np.ndarray = (kept.pages[:count] == pages) & (kept.lives[:count] == state.lives[:count])
    return same


def _num_common(kept: _Kept, state: RequestState) -> int:
    return int(_is_same(kept, state).sum())
