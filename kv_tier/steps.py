"""One forward pass over a batch: plan once per step, then per layer write, index, select, fetch, attend.

``ExtendStep`` is prefill and append, ``DecodeStep`` one new token per request. Both are made after SGLang assigned
slots and before the first layer; ``attend`` is called once per layer, in order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_tier.attention import ExactAttention, attend_masked, causal_mask
from kv_tier.layer_stream import LayerStream
from kv_tier.page_table import PageTable
from kv_tier.request import Row
from kv_tier.selection import Scope, select_pages
from kv_tier.store import TieredStore
from kv_tier.within_budget import CoveredRow, SparseBatch, fetch_selected, gather, warm_up


@dataclass(frozen=True)
class AppendRule:
    """Decide whether new tokens attend exactly or sparsely: by token counts and config alone.

    Args:
        mode: "exact", "sparse" or "auto".
        sparse_max_tokens: "sparse" and "auto" use sparse attention for at most so many new tokens.
        exact_max_prefix_tokens: "auto" stays exact up to this prefix.
    """

    mode: str = "auto"
    sparse_max_tokens: int = 512
    exact_max_prefix_tokens: int = 32768

    def is_sparse(self, prefix_tokens: int, new_tokens: int) -> bool:
        if self.mode == "exact" or new_tokens > self.sparse_max_tokens:
            return False
        return self.mode == "sparse" or prefix_tokens > self.exact_max_prefix_tokens


class Writer:
    """Write the new tokens' KV of a step into frames, and index the pages they complete."""

    def __init__(self, store: TieredStore, slots: torch.Tensor, rows: Sequence[Row]) -> None:
        """Plan the writes of ``slots`` ([token] int64, row after row); gives frames to new pages."""
        self.store = store
        size = store.geometry.page_size
        table = store.table
        new_pages, owners = [], {}
        for row in rows:
            fresh = row.pages[row.prefix_tokens // size :].numpy()
            new_pages.append(fresh)
            owners.update(dict.fromkeys(fresh.tolist(), row.state))
        fresh_pages = np.concatenate(new_pages) if new_pages else np.zeros(0, dtype=np.int64)
        store.prepare_pages(fresh_pages, owners)
        slot_pages = slots // size
        self.token_rows = store.frames.token_rows(table.frame_of[slot_pages], slots % size)
        completed = []
        for row in rows:
            first, full = row.prefix_tokens // size, row.num_tokens // size
            pages = row.pages.numpy()
            table.filled[pages[first:full]] = size
            if full < len(pages):
                table.filled[pages[full]] = row.num_tokens % size
            completed.append(pages[first:full])
        done = np.concatenate(completed) if completed else np.zeros(0, dtype=np.int64)
        self.completed = torch.from_numpy(done)
        self.completed_frames = table.frame_of[self.completed]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values ([token, kv_head, head_dim]) of one layer."""
        frames = self.store.frames
        head_dim = k.shape[-1]
        frames.k_tokens[layer].index_copy_(0, self.token_rows, k.reshape(-1, head_dim))
        frames.v_tokens[layer].index_copy_(0, self.token_rows, v.reshape(-1, head_dim))
        if self.completed.numel():
            keys = frames.k[layer].index_select(1, self.completed_frames)
            self.store.index.write(layer, self.completed, keys)


def tile_pages(row: Row, plan: ExactAttention, size: int) -> list[np.ndarray]:
    """Return the logical pages of each tile of an exact attention."""
    return [row.pages[begin // size : -(-end // size)].numpy() for begin, end in plan.tiles]


def mark_exactness(table: PageTable, row: Row, size: int, sparse: bool) -> None:
    """A page is exact if its KV, and all before it, came from exact attention."""
    pages = row.pages.numpy()
    first = row.prefix_tokens // size
    before = bool(table.exact[pages[:first]].all())  # an earlier one may have been transcoded, later ones not
    begun = row.prefix_tokens % size != 0
    table.exact[pages[first]] = before and not sparse and (not begun or bool(table.exact[pages[first]]))
    table.exact[pages[first + 1 :]] = table.exact[pages[first]]


class ExtendStep:
    """Prefill or append: several new tokens per request."""

    def __init__(
        self, store: TieredStore, rows: Sequence[Row], slots: torch.Tensor, append: AppendRule
    ) -> None:
        self.store = store
        self.rows = rows
        self.started_s = time.perf_counter()
        geometry, budget = store.geometry, store.budget
        size = geometry.page_size
        for row in rows:
            row.state.sync(row.pages, store.table)
            if row.state.window is not None and row.prefix_tokens % size:
                # the page that is written on has a copy without the new tokens
                row.state.window.drop(np.array([row.prefix_tokens // size]))
        self.writer = Writer(store, slots, rows)
        self.sparse = [
            append.is_sparse(row.prefix_tokens, row.num_tokens - row.prefix_tokens)
            and not budget.covers(row.prefix_tokens // size)
            for row in rows
        ]
        self._count_prefixes()
        self.plans: list[ExactAttention | torch.Tensor] = []  # a mask where sparse
        streamed: list[np.ndarray] = []
        for row, sparse in zip(rows, self.sparse, strict=True):
            mark_exactness(store.table, row, size, sparse)
            count = row.num_tokens - row.prefix_tokens
            if sparse:
                first = row.prefix_tokens // size
                own = row.num_tokens - first * size
                mask = causal_mask(count, own, row.prefix_tokens - first * size, geometry.dtype)
                selected = torch.zeros(count, (budget.pages or 0) * size, dtype=geometry.dtype)
                self.plans.append(torch.cat([selected, mask], dim=1))
                streamed.append(row.pages[first:].numpy())
            else:
                plan = ExactAttention(row.prefix_tokens, count, geometry.dtype)
                self.plans.append(plan)
                streamed += tile_pages(row, plan, size)
        self.stream = LayerStream(store, streamed, keep=True)

    def _count_prefixes(self) -> None:
        """Count once per request where its prefix was found."""
        table, size = self.store.table, self.store.geometry.page_size
        for row in self.rows:
            figures = row.state.figures
            if figures.tokens_computed == 0:
                prefix = row.pages[: row.prefix_tokens // size].numpy()
                resident = int((table.frames[prefix] >= 0).sum())
                figures.tokens_dram = resident * size
                figures.tokens_ssd = (len(prefix) - resident) * size
            figures.tokens_computed += row.num_tokens - row.prefix_tokens

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        written: bool = False,
    ) -> torch.Tensor:
        """Write the layer's new KV, then attend.

        Args:
            query: [token, kv_head, group, head_dim], rows one after another.
            k, v: [token, kv_head, head_dim].
            written: the KV is already in its frames.

        Returns:
            [token, kv_head, group, head_dim].
        """
        if not written:
            self.writer.write(layer, k, v)
        out = torch.empty_like(query)
        begin = 0
        for row, plan in zip(self.rows, self.plans, strict=True):
            end = begin + row.num_tokens - row.prefix_tokens
            if isinstance(plan, torch.Tensor):
                out[begin:end] = self._attend_sparse(layer, row, query[begin:end], plan, scale)
            else:
                out[begin:end] = self._attend_exact(layer, row, query[begin:end], plan, scale)
            exact = not isinstance(plan, torch.Tensor)
            warm_up(self.store, layer, row, query[begin:end], scale, from_ssd=exact)
            begin = end
        if layer == self.store.geometry.num_layers - 1:
            self._finish()
        return out

    def _attend_exact(
        self, layer: int, row: Row, query: torch.Tensor, plan: ExactAttention, scale: float
    ) -> torch.Tensor:
        size = self.store.geometry.page_size
        result = query
        for number, pages in enumerate(tile_pages(row, plan, size)):
            begin, end = plan.tiles[number]
            k, v = (t.flatten(1, 2)[:, : end - begin] for t in self.stream.gather(layer, pages))
            result = plan.attend(query, number, k, v, scale)
        return result

    def _attend_sparse(
        self, layer: int, row: Row, query: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """All new tokens of a head share one selection; their own positions come on top of the budget."""
        store, state = self.store, row.state
        _, index = store.device_memory(state)
        first = row.prefix_tokens // store.geometry.page_size
        local = store.budget.first_local_page(first * store.geometry.page_size)
        grouped = query.permute(1, 0, 2, 3).flatten(1, 2)
        scores = index.rank(layer, grouped, state.pages, Scope(first, first, local, store.budget), scale)
        selected = select_pages(scores[None], store.budget)
        at = fetch_selected(store, layer, [state], selected, scores[None])
        k, v = (part[0] for part in gather(store, layer, at))
        own_k, own_v = self.stream.gather(layer, row.pages[first:].numpy())
        count = mask.shape[1] - k.shape[1]
        k = torch.cat([k, own_k.flatten(1, 2)[:, :count]], dim=1)
        v = torch.cat([v, own_v.flatten(1, 2)[:, :count]], dim=1)
        return attend_masked(query, k, v, mask, scale)[0]

    def _finish(self) -> None:
        lost = self.stream.lost_pages
        for row, sparse in zip(self.rows, self.sparse, strict=True):
            if lost and not sparse and lost.intersection(row.pages.tolist()):
                self.store.fail(
                    [row.state], "LOST_PAGE: a page of this prefix failed its checksum; retry recomputes it"
                )
        if self.rows:
            self.rows[0].state.figures.bytes_read += self.stream.bytes_read
        self.stream.finish()
        self._observe_costs()

    def _observe_costs(self) -> None:
        """Learn what prefill and reading cost, from a step that was exact attention alone."""
        costs, stream = self.store.costs, self.stream
        costs.observe_read(stream.bytes_read, stream.wait_s)
        if not any(self.sparse):
            spans = [(row.prefix_tokens, row.num_tokens - row.prefix_tokens) for row in self.rows]
            costs.observe_prefill(spans, time.perf_counter() - self.started_s - stream.wait_s)


class DecodeStep:
    """One new token per request, attended within the budget."""

    def __init__(self, store: TieredStore, rows: Sequence[Row], slots: torch.Tensor) -> None:
        self.store = store
        self.rows = rows
        for row in rows:
            row.state.sync(row.pages, store.table)
        self.writer = Writer(store, slots, rows)
        self.everything: dict[int, ExactAttention] = {}  # by place in the batch
        self.covered: dict[int, CoveredRow] = {}
        sparse: dict[int, list[int]] = {}  # by the factor of the budget
        for i, row in enumerate(rows):
            factor = row.state.budget_factor
            covered = store.budget.scaled(factor).covers(len(row.pages))
            mark_exactness(store.table, row, store.geometry.page_size, sparse=not covered)
            if store.budget.pages is None:
                self.everything[i] = ExactAttention(row.prefix_tokens, 1, store.geometry.dtype, decode=True)
            elif covered:
                self.covered[i] = CoveredRow(store, row)
            else:
                sparse.setdefault(factor, []).append(i)
        self.batches = [
            (torch.tensor(chosen), SparseBatch(store, [rows[i] for i in chosen], store.budget.scaled(factor)))
            for factor, chosen in sparse.items()
        ]
        size = store.geometry.page_size
        streamed = [pages for i, plan in self.everything.items() for pages in tile_pages(rows[i], plan, size)]
        self.stream = LayerStream(store, streamed, keep=True)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        written: bool = False,
    ) -> torch.Tensor:
        """Write the layer's new KV, then attend; arguments and result as for ``ExtendStep.attend`` with one token
        per request."""
        if not written:
            self.writer.write(layer, k, v)
        if self.batches and len(self.batches[0][0]) == len(self.rows):
            out = self.batches[0][1].attend(layer, query, k, v, scale)
        else:
            out = torch.empty_like(query)
            for chosen, batch in self.batches:
                out[chosen] = batch.attend(layer, query[chosen], k[chosen], v[chosen], scale)
            for i, plan in self.everything.items():
                out[i] = self._attend_all(layer, self.rows[i], query[i : i + 1], plan, scale)
            for i, covered in self.covered.items():
                here = slice(i, i + 1)
                out[here] = covered.attend(layer, query[here], k[here], v[here], scale)
        if layer == self.store.geometry.num_layers - 1:
            self._finish()
        return out

    def _attend_all(
        self, layer: int, row: Row, query: torch.Tensor, plan: ExactAttention, scale: float
    ) -> torch.Tensor:
        size = self.store.geometry.page_size
        result = query
        for number, pages in enumerate(tile_pages(row, plan, size)):
            begin, end = plan.tiles[number]
            k, v = (t.flatten(1, 2)[:, : end - begin] for t in self.stream.gather(layer, pages))
            result = plan.attend(query, number, k, v, scale)
        return result[0]

    def _finish(self) -> None:
        store = self.store
        lost = self.stream.lost_pages
        for i in self.everything:
            row = self.rows[i]
            if lost and lost.intersection(row.pages.tolist()):
                store.fail(
                    [row.state], "LOST_PAGE: a page of this sequence failed its checksum; retry recomputes it"
                )
        for row in self.rows:
            if row.state.window is not None:
                hits, misses = row.state.window.take_counts()
                store.counters.window_hits += hits
                store.counters.window_misses += misses
                row.state.figures.window_hits += hits
                row.state.figures.window_misses += misses
        if self.rows:
            self.rows[0].state.figures.bytes_read += self.stream.bytes_read
        self.stream.finish()
        if store.trace is not None:
            store.trace.flush()
