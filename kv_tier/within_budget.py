"""One decode token per request through the window caches: select, fetch, attend.

``SparseBatch`` takes all requests longer than the budget at once, ``CoveredRow`` one request that fits into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kv_tier.attention import attend_all, attend_selected
from kv_tier.request import RequestState, Row
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.store import TieredStore


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
    windows = store.windows
    assert windows is not None
    rows = np.array([state.window.row for state in states if state.window is not None])
    at, misses = windows.admit(layer, rows, selected.numpy(), None if scores is None else scores.numpy())
    if len(misses) or store.fetcher.mode == "layerwise":
        shape = (len(misses), store.geometry.page_elements)
        k = torch.empty(shape, dtype=store.geometry.dtype)
        v = torch.empty(shape, dtype=store.geometry.dtype)
        store.fetcher.read_misses(layer, misses, states, k, v)
        into = torch.from_numpy(misses.at)
        windows.k[layer].index_copy_(0, into, k)
        windows.v[layer].index_copy_(0, into, v)
    if scores is not None:
        store.fetcher.look_ahead(layer, states, selected, scores)
    return torch.from_numpy(at)


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
    head_dim]."""
    assert store.windows is not None
    shape = (*at.shape[:2], -1, store.geometry.head_dim)
    rows = at.view(-1)
    k, v = store.windows.k[layer], store.windows.v[layer]
    return k.index_select(0, rows).view(shape), v.index_select(0, rows).view(shape)


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
    assert store.windows is not None
    at = (last * store.geometry.page_size + offsets).view(-1)
    dim = k.shape[-1]
    store.windows.k_tokens[layer].index_copy_(0, at, k.reshape(-1, dim))
    store.windows.v_tokens[layer].index_copy_(0, at, v.reshape(-1, dim))


class SparseBatch:
    """Requests longer than their budget: every one attends exactly ``budget.pages`` pages per KV head.

    A request's numbers do not depend on its batch-mates: its pages are scored alone, and attention treats each
    (request, KV head) by itself.
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
        """Select, fetch and attend.

        Args:
            query: [request, kv_head, group, head_dim].
            k, v: [request, kv_head, head_dim] of the new tokens.

        Returns:
            [request, kv_head, group, head_dim].
        """
        store = self.store
        for i, (state, index, scope) in enumerate(zip(self.states, self.indexes, self.scopes, strict=True)):
            scores = index.rank(layer, query[i], state.pages, scope, scale)
            self.scores[i, :, : scope.num_pages] = scores
        at = fetch_selected(store, layer, self.states, select_pages(self.scores, self.budget), self.scores)
        append_new(store, layer, at[:, :, -1], self.offsets, k, v)
        return attend_selected(query, *gather(store, layer, at), self.mask, scale)


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
