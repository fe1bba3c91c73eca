"""One decode token per request through the window caches: select, fetch, attend.

``SparseBatch`` takes all requests longer than the budget at once, ``CoveredRow`` one request that fits into it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_tier.attention import attend_all, attend_selected
from kv_tier.fetch import Fetch
from kv_tier.pipeline import Stage
from kv_tier.request import RequestState, Row
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.store import TieredStore
from kv_tier.trace import STAGES, Trace
from kv_tier.window import WindowCaches


def begin_fetch(
    store: TieredStore, layer: int, states: Sequence[RequestState], selected: torch.Tensor
) -> Fetch:
    """Look the selected pages up and begin to read what is missing; arguments as for ``fetch_selected``."""
    return store.fetcher.start(layer, _windows(store).absent(layer, _rows(states), selected.numpy()), states)


def end_fetch(
    store: TieredStore, fetch: Fetch, selected: torch.Tensor, scores: torch.Tensor | None
) -> torch.Tensor:
    """Give the missing pages slots while they are on their way, then bring them there.

    Arguments and result as for ``fetch_selected``, after ``begin_fetch`` of the same pages.
    """
    windows, layer = _windows(store), fetch.layer
    priorities = None if scores is None else scores.numpy()
    at, misses = windows.admit(layer, _rows(fetch.states), selected.numpy(), priorities)
    assert len(misses) == len(fetch.absent), (len(misses), len(fetch.absent))
    store.fetcher.finish(fetch, windows.k[layer], windows.v[layer], misses.at, misses.gone)
    if scores is not None:
        store.fetcher.look_ahead(layer, fetch.states, selected, scores)
    return torch.from_numpy(at)


def fetch_selected(
    store: TieredStore,
    layer: int,
    states: Sequence[RequestState],
    selected: torch.Tensor,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """Bring the selected pages into the window caches.

    Args:
        states: the requests, each with device memory.
        selected: [request, kv_head, n] int64 page ordinals.
        scores: [request, kv_head, page] float32 of this step, for eviction; None when everything is selected.

    Returns:
        [request, kv_head, n] int64, the rows of ``store.windows.k[layer]`` that hold them.
    """
    return end_fetch(store, begin_fetch(store, layer, states, selected), selected, scores)


def _windows(store: TieredStore) -> WindowCaches:
    assert store.windows is not None
    return store.windows


def _rows(states: Sequence[RequestState]) -> np.ndarray:
    return np.array([state.window.row for state in states if state.window is not None])


def warm_up(
    store: TieredStore, layer: int, row: Row, query: torch.Tensor, scale: float, *, from_ssd: bool
) -> None:
    """Place a prompt's pages by the attention of its last queries (paper 7.1); decides no number.

    Args:
        query: [token, kv_head, group, head_dim] of the new tokens.
        from_ssd: also read what DRAM lacks; False after a sparse append, which reads only what it attends.
    """
    state, budget = row.state, store.budget
    num_pages = row.num_tokens // store.geometry.page_size
    if not store.fetcher.warm_up or budget.covers(num_pages):
        return
    _, index = store.device_memory(state)
    local = min(budget.first_local_page(row.num_tokens), num_pages)
    last = query[-index.num_warm_up_queries :].permute(1, 0, 2, 3).flatten(1, 2)
    scores = index.rank(layer, last, state.pages, Scope(num_pages, num_pages, local, budget), scale)
    store.fetcher.warm(layer, state, scores, from_ssd=from_ssd)


def gather(store: TieredStore, layer: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy pages out of the window caches: rows ``at`` ([request, kv_head, n]) -> each [request, kv_head, position,
    head_dim], until the next call."""
    shape = (*at.shape[:2], -1, store.geometry.head_dim)
    return tuple(part.view(shape) for part in _windows(store).gather(layer, at.view(-1)))  # type: ignore[return-value]


def append_new(
    store: TieredStore,
    layer: int,
    last: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write the new tokens into the resident copies of the pages they extend.

    Args:
        last: [request, kv_head] int64 rows of the sequences' last pages in ``store.windows.k[layer]``.
        offsets: [request, 1] int64 places of the tokens in their pages.
        k, v: [request, kv_head, head_dim].
    """
    at = (last * store.geometry.page_size + offsets).view(-1)
    dim = k.shape[-1]
    _windows(store).k_tokens[layer].index_copy_(0, at, k.reshape(-1, dim))
    _windows(store).v_tokens[layer].index_copy_(0, at, v.reshape(-1, dim))


@dataclass
class _MicroBatch:
    """What one micro-batch carries from stage to stage of a layer.

    Attributes:
        selected: [request, kv_head, n] int64 page ordinals.
        scores: [request, kv_head, page] float32.
        fetch: the missing pages, on their way.
        at: [request, kv_head, n] int64 rows of the window caches, once the pages are there.
    """

    selected: torch.Tensor
    scores: torch.Tensor
    fetch: Fetch
    at: torch.Tensor | None = None


class SparseBatch:
    """Requests longer than their budget: every one attends exactly ``budget.pages`` pages per KV head.

    A request's numbers do not depend on its batch-mates: its pages are scored alone, and attention treats each
    (request, KV head) by itself. So the batch may be cut anywhere: the store's pipeline plans every layer.
    """

    def __init__(self, store: TieredStore, rows: Sequence[Row], budget: Budget) -> None:
        self.store = store
        self.rows = rows
        self.budget = budget
        self.states = [row.state for row in rows]
        self.indexes = [store.device_memory(state)[1] for state in self.states]
        size = store.geometry.page_size
        counts = [len(row.pages) for row in rows]
        self.scopes = [
            Scope(count - 1, count, budget.first_local_page(row.num_tokens), budget)
            for row, count in zip(rows, counts, strict=True)
        ]
        num_pages = max(counts)
        self.scores = torch.full((len(rows), store.geometry.num_kv_heads, num_pages), float("-inf"))
        self.offsets = torch.tensor([[row.prefix_tokens % size] for row in rows])
        assert budget.pages is not None
        beyond = torch.arange(size) > self.offsets  # places of the last page that are not written yet
        self.mask = torch.zeros(len(rows), 1, 1, budget.pages * size, dtype=store.geometry.dtype)
        self.mask[:, 0, 0, -size:].masked_fill_(beyond, float("-inf"))

    def attend(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Select, fetch and attend, in the order of the plan.

        Args:
            query: [request, kv_head, group, head_dim].
            k, v: [request, kv_head, head_dim] of the new tokens.

        Returns:
            [request, kv_head, group, head_dim].
        """
        plan = self.store.pipeline.plan(len(self.rows), self.store.fetcher.expected_reads)
        parts = [slice(*part) for part in plan.parts]
        under_way: list[_MicroBatch] = []
        outs = []
        trace = self.store.trace
        for stage, number in plan.order:
            here, begin_ns = parts[number], 0 if trace is None else time.perf_counter_ns()
            if stage == "select":
                under_way.append(self._select(layer, here, query, scale))
            elif stage == "fetch":
                batch = under_way[number]
                batch.at = end_fetch(self.store, batch.fetch, batch.selected, batch.scores)
            else:
                outs.append(self._attend(layer, here, under_way[number], query, k, v, scale))
            if trace is not None:
                self._note(trace, stage, number, begin_ns, [batch.fetch for batch in under_way])
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _select(self, layer: int, here: slice, query: torch.Tensor, scale: float) -> _MicroBatch:
        """Score the pages of the requests in ``here``, select, and begin to read what is missing."""
        store = self.store
        for i in range(here.start, here.stop):
            scope = self.scopes[i]
            out = self.scores[i, :, : scope.num_pages]
            self.indexes[i].rank(layer, query[i], self.states[i].pages, scope, scale, out)
        selected = select_pages(self.scores[here], self.budget)
        fetch = begin_fetch(store, layer, self.states[here], selected)
        return _MicroBatch(selected, self.scores[here], fetch)

    def _attend(
        self,
        layer: int,
        here: slice,
        batch: _MicroBatch,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        assert batch.at is not None
        append_new(self.store, layer, batch.at[:, :, -1], self.offsets[here], k[here], v[here])
        kept = gather(self.store, layer, batch.at)
        return attend_selected(query[here], *kept, self.mask[here], scale)

    def _note(self, trace: Trace, stage: Stage, number: int, begin_ns: int, fetches: Sequence[Fetch]) -> None:
        """Trace a stage that just ended; with fetch, the reads of the micro-batch too."""
        fetch = fetches[number]
        about = {"layer": fetch.layer, "micro_batch": number}
        trace.span(stage, STAGES, begin_ns, time.perf_counter_ns(), **about, requests=len(fetch.states))
        if stage == "fetch":
            trace.span("wait", STAGES, *fetch.waited_ns, **about)
            if fetch.batches:
                reads = f"reads of micro-batch {number}"
                trace.span("io", reads, fetch.started_ns, fetch.done_ns, **about, pages=len(fetch.pages))
        for other in fetches:
            self.store.fetcher.look(other)


class CoveredRow:
    """A request that fits into its budget: all of it is attended, bit for bit full attention."""

    def __init__(self, store: TieredStore, row: Row) -> None:
        self.store = store
        self.row = row
        store.device_memory(row.state)
        self.selected = torch.arange(len(row.pages)).expand(1, store.geometry.num_kv_heads, -1).contiguous()
        self.offsets = torch.tensor([[row.prefix_tokens % store.geometry.page_size]])

    def attend(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Fetch and attend; arguments and result as for ``SparseBatch.attend`` with one request."""
        at = fetch_selected(self.store, layer, [self.row.state], self.selected, None)
        append_new(self.store, layer, at[:, :, -1], self.offsets, k, v)
        keys, values = (part[0, :, : self.row.num_tokens] for part in gather(self.store, layer, at))
        return attend_all(query[0], keys, values, scale)[0][None]
