"""Staging: DRAM copies of single pages of single (layer, KV head) pairs, in rows of borrowed frames.

A whole-page frame is one row in every pair, so that ``n`` borrowed frames are ``n * pairs`` rows; any row may hold a
page of any pair. Rows are numbered through the frame arena: ``(layer * kv_heads + head) * num_frames + frame``.
"""

from __future__ import annotations

import numpy as np

from kv_tier.geometry import Geometry
from kv_tier.meta.read_engine import Ints

ABSENT = -1
IN_FLIGHT = -2
NEVER = np.iinfo(np.int64).max
DEMOTED = 0
EVICT_SHARE = 32  # at least one row in so many leaves when room is needed


class Staging:
    """Keep the directory of staged pages and decide which leave.

    ``row_of``: [pair, logical page] int32, the row that holds the page, ABSENT, or IN_FLIGHT while it is read.
    Demoted rows leave first, then the least recently used ones; a pair that holds no more than its ``quota`` ([pair] rows,
    zeros at first) is passed over, so that pairs that stall most keep their pages (paper 7.3 d). Rows used since ``hold``
    stay until ``release``.
    """

    def __init__(self, geometry: Geometry, num_pages: int, num_frames: int) -> None:
        self.num_pairs = geometry.num_layers * geometry.num_kv_heads
        self.num_pages = num_pages
        self.num_frames = num_frames
        self.row_of = np.full((self.num_pairs, num_pages), ABSENT, np.int32)
        self.frames: list[int] = []
        self.quota = np.zeros(self.num_pairs, np.int64)
        self.held = np.zeros(self.num_pairs, np.int64)
        self._owner = np.full(self.num_pairs * num_frames, ABSENT, np.int32)  # pair * num_pages + page
        self._stamp = np.zeros(self.num_pairs * num_frames, np.int64)
        self._guessed = np.zeros(self.num_pairs * num_frames, bool)
        self._clock = 0
        self._held_since = NEVER
        self._free = np.zeros(0, np.int64)

    @staticmethod
    def bytes_for(geometry: Geometry, num_pages: int, num_frames: int) -> int:
        """Return the bytes of such a directory, rows apart."""
        return geometry.num_layers * geometry.num_kv_heads * (4 * num_pages + 13 * num_frames)

    @property
    def num_rows(self) -> int:
        return len(self.frames) * self.num_pairs

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, frame: int) -> None:
        """Take a frame over: one free row per pair."""
        self.frames.append(frame)
        self._free = np.concatenate([self._free, self._rows_of(frame)])

    def give_back(self) -> int:
        """Return the frame lent last; what its rows hold is forgotten."""
        frame = self.frames.pop()
        rows = self._rows_of(frame)
        self._forget_rows(rows[self._owner[rows] != ABSENT])
        self._free = self._free[self._free % self.num_frames != frame]
        return frame

    def _rows_of(self, frame: int) -> Ints:
        return np.arange(self.num_pairs, dtype=np.int64) * self.num_frames + frame

    def hold(self) -> None:
        """Keep every row that is found or filled from now on until ``release``: somebody is about to copy from it."""
        self._held_since = min(self._held_since, self._clock + 1)

    def release(self) -> None:
        """End what ``hold`` began."""
        self._held_since = NEVER

    def touch(self, rows: np.ndarray) -> None:
        """Note that rows are used now."""
        self._clock += 1
        self._stamp[rows] = self._clock

    def demote(self, rows: Ints) -> None:
        """Let rows leave before all others: their pages are in a window cache now."""
        self._stamp[rows] = DEMOTED

    def find(self, pairs: Ints, pages: Ints) -> Ints:
        """Return the rows of pages ([n] each), ABSENT or IN_FLIGHT where there is none; what is found was used now."""
        rows = self.row_of[pairs, pages].astype(np.int64)
        self._clock += 1
        self._stamp[rows[rows >= 0]] = self._clock
        return rows

    def took_guesses(self, rows: Ints) -> int:
        """Return how many of these rows were filled by a guess that nobody had asked for until now."""
        count = int(self._guessed[rows].sum())
        self._guessed[rows] = False
        return count

    def insert(self, pairs: Ints, pages: Ints, *, guessed: bool = False) -> Ints:
        """Give rows to the first of these absent pages, as many as there is room for ([m] rows, m <= n)."""
        if len(pairs) > self.num_free:
            self._evict(len(pairs) - self.num_free)
        count = min(len(pairs), self.num_free)
        rows, self._free = self._free[:count], self._free[count:]
        pairs, pages = pairs[:count], pages[:count]
        self._owner[rows] = pairs * self.num_pages + pages
        self.row_of[pairs, pages] = rows
        self._clock += 1
        self._stamp[rows] = self._clock
        self._guessed[rows] = guessed
        self.held += np.bincount(pairs, minlength=self.num_pairs)
        return rows

    def _evict(self, count: int) -> None:
        used = np.flatnonzero(self._owner != ABSENT)
        pairs = self._owner[used] // self.num_pages
        stamps = self._stamp[used]
        used = used[
            ((self.held[pairs] > self.quota[pairs]) | (stamps == DEMOTED)) & (stamps < self._held_since)
        ]
        count = max(count, self.num_rows // EVICT_SHARE)
        if len(used) > count:
            used = used[np.argpartition(self._stamp[used], count - 1)[:count]]
        self._forget_rows(used)
        self._free = np.concatenate([self._free, used])

    def _forget_rows(self, rows: Ints) -> None:
        pairs, pages = np.divmod(self._owner[rows].astype(np.int64), self.num_pages)
        self.row_of[pairs, pages] = ABSENT
        self.held -= np.bincount(pairs, minlength=self.num_pairs)
        self._owner[rows] = ABSENT

    def forget(self, pages: Ints) -> None:
        """Drop every copy of logical pages: their life ends, or their bytes change."""
        found = self.row_of[:, pages]
        rows = found[found >= 0].astype(np.int64)
        self._forget_rows(rows)
        self._free = np.concatenate([self._free, rows])
        self.row_of[:, pages] = ABSENT  # what is in flight is thrown away when it arrives

    def check_integrity(self) -> None:
        """Assert that directory, owners, counts and free rows agree."""
        pairs, pages = (self.row_of >= 0).nonzero()
        rows = self.row_of[pairs, pages]
        assert np.array_equal(self._owner[rows], pairs * self.num_pages + pages)
        assert np.array_equal(self.held, np.bincount(pairs, minlength=self.num_pairs))
        every = np.sort(np.concatenate([rows, self._free]))
        lent = np.sort(np.concatenate([self._rows_of(f) for f in self.frames] or [self._free]))
        assert np.array_equal(every, lent), (len(rows), len(self._free), len(self.frames))
