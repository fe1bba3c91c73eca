"""The window caches: device memory for the pages the running requests attend, per (request, layer, KV head)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kv_kernels import compiled
from kv_tier.eviction import Shape, bytes_per_page, new_eviction
from kv_tier.geometry import Geometry
from kv_tier.modes import DEFAULT_EVICTION, EvictionName

ABSENT = compiled.ABSENT
_NO_PRIORITY = np.zeros((1, 1, 0), dtype=np.float32)


@dataclass(frozen=True)
class Absent:
    """Pages that are not resident, in ascending order of (request, KV head, page): [miss] int64 place in the batch, KV
    head and page ordinal."""

    request: np.ndarray
    head: np.ndarray
    ordinal: np.ndarray

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class Misses(Absent):
    """The pages that a step must fetch: [miss] int64 each.

    Attributes:
        at: row of ``WindowCaches.k[layer]`` that receives the page.
        gone: ordinal of the page whose bytes are still there, ABSENT if nothing is.
    """

    at: np.ndarray
    gone: np.ndarray


class WindowCaches:
    """Hold pages of every running request for every (layer, KV head), and decide who leaves.

    ``k[layer]``, ``v[layer]``: [request row * slot, page_size * head_dim] in the KV dtype; the slots of a request lie
    together, those of one KV head after those of another.
    ``slot_of[layer]``: [request row, kv_head, max_pages] int32, page ordinal -> slot of the request, or ABSENT.
    ``page_of[layer]``: [request row, slot] int32, the other way round.

    Contents never reach a number except as the bytes of a page: what is resident decides only what must be fetched.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_slots: np.ndarray,
        max_pages: int,
        max_requests: int,
        eviction: EvictionName = DEFAULT_EVICTION,
    ) -> None:
        """Plan the memory; it is touched when a request first needs it.

        Args:
            num_slots: [layer, kv_head] pages each window cache of a request holds.
        """
        layers, heads = geometry.num_layers, geometry.num_kv_heads
        assert num_slots.shape == (layers, heads), num_slots.shape
        self.num_slots = num_slots.astype(np.int64)
        self._least_slots = self.num_slots.min(axis=1).tolist()
        self.first_slot = np.zeros((layers, heads + 1), dtype=np.int64)
        np.cumsum(self.num_slots, axis=1, out=self.first_slot[:, 1:])
        totals = self.first_slot[:, -1].tolist()
        # not zeroed, which would touch it: a slot is written whole before it is read
        self.k = [torch.empty(max_requests * n, geometry.page_elements, dtype=geometry.dtype) for n in totals]
        self.v = [torch.empty(max_requests * n, geometry.page_elements, dtype=geometry.dtype) for n in totals]
        self.k_tokens = [k.view(-1, geometry.head_dim) for k in self.k]
        self.v_tokens = [v.view(-1, geometry.head_dim) for v in self.v]
        self.slot_of = [np.full((max_requests, heads, max_pages), ABSENT, dtype=np.int32) for _ in totals]
        self.page_of = [np.full((max_requests, n), ABSENT, dtype=np.int32) for n in totals]
        self.eviction = new_eviction(eviction, Shape(layers, max_requests, heads, max_pages))
        self._priority = _NO_PRIORITY, np.zeros(1, dtype=np.int64)  # of the last call of admit
        self.hits = np.zeros((layers, max_requests, heads), dtype=np.int64)
        self.misses = np.zeros((layers, max_requests, heads), dtype=np.int64)
        self.total_hits = np.zeros((layers, heads), dtype=np.int64)
        self.total_misses = np.zeros((layers, heads), dtype=np.int64)
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._gathered = torch.empty(2, 0, geometry.page_elements, dtype=geometry.dtype)

    @staticmethod
    def bytes_for(
        geometry: Geometry,
        num_slots: np.ndarray,
        max_pages: int,
        eviction: EvictionName = DEFAULT_EVICTION,
    ) -> int:
        """Return the bytes the window caches of one request take, with directories and what the policy remembers."""
        pairs = geometry.num_layers * geometry.num_kv_heads
        per_page = 4 + bytes_per_page(eviction)
        return int(num_slots.sum()) * (geometry.page_head_bytes + 4) + per_page * pairs * max_pages

    def lend(self) -> Window:
        """Return the empty window caches of one request; ``give_back`` ends the loan."""
        window = Window(self, self._free_rows.pop())
        for slot_of, page_of in zip(self.slot_of, self.page_of, strict=True):
            slot_of[window.row] = ABSENT
            page_of[window.row] = ABSENT
        self.hits[:, window.row] = self.misses[:, window.row] = 0
        self.eviction.forget(window.row)
        return window

    def give_back(self, window: Window) -> None:
        self._free_rows.append(window.row)

    @property
    def num_lent(self) -> int:
        return self.hits.shape[1] - len(self._free_rows)

    def absent(self, layer: int, rows: np.ndarray, selected: np.ndarray) -> Absent:
        """List what ``admit`` of the same pages will give a slot; changes nothing.

        Args:
            rows: [request] int64 rows of ``Window``.
            selected: [request, kv_head, n] int64 ordinals.
        """
        missing = np.empty((3, selected.size), dtype=np.int64)
        count = compiled.absent(rows, selected, self.slot_of[layer], missing)
        return Absent(*missing[:, :count])

    def admit(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray | None
    ) -> tuple[np.ndarray, Misses]:
        """Find the selected pages; give every absent one a slot.

        The resident page that ``eviction`` gives the lowest priority leaves first, empty slots and pages that have none
        before all; a page selected now never leaves.

        Args:
            rows: [request] int64 rows of ``Window``.
            selected: [request, kv_head, n] int64 ordinals.
            scores: [request, kv_head, page] float32 of this step; None when everything is selected.

        Returns:
            (rows of ``k[layer]`` that hold the selected pages [request, kv_head, n] int64, what to fetch into them).
        """
        if scores is None:
            self._priority = _NO_PRIORITY, np.zeros_like(rows)
        else:
            self._priority = self.eviction.priority(layer, rows, selected, scores)
        return self._admit(layer, rows, selected, -np.inf, self.hits[layer], self.misses[layer])

    def admit_ahead(self, layer: int, rows: np.ndarray, near: np.ndarray) -> Misses:
        """Give slots to pages that were nearly selected, after ``admit`` of the same layer and step.

        Only a page that ``eviction`` ranks well above the one that leaves for it gets one.

        Args:
            rows: [request] int64 rows of ``Window``, as given to ``admit``.
            near: [request, kv_head, m] int64 ordinals, everything selected now among them.

        Returns:
            What to fetch before the next step; nothing of it is counted.
        """
        unseen = np.zeros_like(self.hits[layer])
        return self._admit(layer, rows, near, self.eviction.margin, unseen, unseen)[1]

    def _admit(
        self,
        layer: int,
        rows: np.ndarray,
        selected: np.ndarray,
        margin: float,
        hits: np.ndarray,
        misses: np.ndarray,
    ) -> tuple[np.ndarray, Misses]:
        assert selected.shape[2] <= self._least_slots[layer], "more pages than a window cache holds"
        at = np.empty(selected.shape, dtype=np.int64)
        missing = np.empty((5, selected.size), dtype=np.int64)
        count = compiled.admit(
            rows,
            selected,
            *self._priority,
            margin,
            self.slot_of[layer],
            self.page_of[layer],
            self.first_slot[layer],
            hits,
            misses,
            at,
            missing,
        )
        return at, Misses(*missing[:, :count])

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows ([n] int64) of ``k[layer]`` and ``v[layer]`` together; the next call overwrites what is returned."""
        k, v, count = self.k[layer], self.v[layer], len(rows)
        if count > self._gathered.shape[1]:
            self._gathered = self._gathered.new_empty(2, count, k.shape[1])
        k_out, v_out = self._gathered[:, :count]
        torch.index_select(k, 0, rows, out=k_out)
        torch.index_select(v, 0, rows, out=v_out)
        return k_out, v_out

    def check_integrity(self) -> None:
        """Assert that both directories agree."""
        for layer, (slot_of, page_of) in enumerate(zip(self.slot_of, self.page_of, strict=True)):
            row, head, ordinal = (slot_of != ABSENT).nonzero()
            slot = slot_of[row, head, ordinal]
            first = self.first_slot[layer]
            assert ((first[head] <= slot) & (slot < first[head + 1])).all()
            assert (page_of[row, slot] == ordinal).all()
            assert (page_of != ABSENT).sum() == len(row)


@dataclass(frozen=True)
class Window:
    """The window caches of one request: row ``row`` of ``caches``."""

    caches: WindowCaches
    row: int

    def drop(self, ordinals: np.ndarray) -> None:
        """Forget the pages at ``ordinals`` ([n] int64): their bytes are no longer the sequence's."""
        for slot_of, page_of in zip(self.caches.slot_of, self.caches.page_of, strict=True):
            slots = slot_of[self.row][:, ordinals]
            page_of[self.row, slots[slots != ABSENT]] = ABSENT
            slot_of[self.row][:, ordinals] = ABSENT

    def retain(self, layer: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep of a layer only ``wanted``, as many of each head's leading ones as it has slots.

        Args:
            wanted: [kv_head, n] int64 ordinals, best first.

        Returns:
            (heads, ordinals) [n] int64 of those that are absent, head after head.
        """
        caches = self.caches
        slot_of, page_of = caches.slot_of[layer][self.row], caches.page_of[layer][self.row]
        keep = np.arange(wanted.shape[1]) < caches.num_slots[layer][:, None]
        heads = np.broadcast_to(np.arange(len(wanted))[:, None], wanted.shape)[keep]
        ordinals = wanted[keep]
        others = slot_of != ABSENT
        others[heads, ordinals] = False
        page_of[slot_of[others]] = ABSENT
        slot_of[others] = ABSENT
        absent = slot_of[heads, ordinals] == ABSENT
        return heads[absent], ordinals[absent]

    def place(self, layer: int, heads: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
        """Give empty slots to absent pages ([n] head, ascending, and ordinal); return the rows of ``k[layer]``."""
        caches = self.caches
        slot_of, page_of = caches.slot_of[layer][self.row], caches.page_of[layer][self.row]
        first = caches.first_slot[layer]
        counts = np.bincount(heads, minlength=len(first) - 1)
        empty = [
            first[h] + np.flatnonzero(page_of[first[h] : first[h + 1]] == ABSENT)[:n]
            for h, n in enumerate(counts.tolist())
        ]
        slots = np.concatenate(empty)
        assert len(slots) == len(heads), (len(slots), len(heads))
        slot_of[heads, ordinals] = slots
        page_of[slots] = ordinals
        rows: np.ndarray = self.row * int(first[-1]) + slots
        return rows

    def take_counts(self) -> tuple[int, int]:
        """Return (hits, misses) since the last call and add them to the totals per (layer, KV head)."""
        caches = self.caches
        hits, misses = caches.hits[:, self.row], caches.misses[:, self.row]
        counts = int(hits.sum()), int(misses.sum())
        caches.total_hits += hits
        caches.total_misses += misses
        hits[:] = 0
        misses[:] = 0
        return counts

    def pages(self, layer: int, head: int) -> list[int]:
        """Return the resident pages of one (layer, KV head), ascending."""
        first = self.caches.first_slot[layer]
        held = self.caches.page_of[layer][self.row, first[head] : first[head + 1]]
        return sorted(held[held != ABSENT].tolist())
