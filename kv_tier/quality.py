"""The quality monitor: how far a decode step is from the same step at twice its budget.

KL(2B against B) of a step follows KL(full against B) closely, where scores and recalled mass do not. A shadow pass runs
the same token once more at twice the budget; it reads, but writes and caches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kv_tier.attention import attend_selected
from kv_tier.request import RequestState, Row
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.store import TieredStore
from kv_tier.window import Absent

SPAN_STEPS = 32  # decode steps over which a request's KL is averaged


class QualityMonitor:
    """Average the KL of every request and raise budgets; a function of each request alone.

    Args:
        every: probe the decode steps whose sequence length is a multiple of it.
        max_kl: a request whose mean over ``SPAN_STEPS`` decode steps is above it, in nats, has twice the budget for
            the rest of its turn; None never raises one.
        largest_factor: the window caches hold the budget so many times.
    """

    def __init__(self, every: int, max_kl: float | None, largest_factor: int) -> None:
        self.every = every
        self.max_kl = max_kl
        self.largest_factor = largest_factor

    def is_due(self, row: Row, budget: Budget) -> bool:
        """Whether this decode step is probed: by its length and budget alone."""
        return row.num_tokens % self.every == 0 and not budget.scaled(row.state.budget_factor).covers(
            len(row.pages)
        )

    def record(self, row: Row, kl: float) -> None:
        """Add the KL of a probed step, in nats, to its request."""
        state = row.state
        state.figures.num_probes += 1
        state.figures.kl_sum += kl
        state.span_kl.append(kl)

    def end_step(self, rows: Sequence[Row]) -> None:
        """Count a decode step; where a span of steps ends, judge it."""
        for row in rows:
            state = row.state
            state.num_decoded += 1
            if state.num_decoded % SPAN_STEPS:
                continue
            probes, state.span_kl = state.span_kl, []
            above = self.max_kl is not None and probes and float(np.mean(probes)) > self.max_kl
            if above and 2 * state.budget_factor <= self.largest_factor:
                state.budget_factor *= 2
                state.figures.budget_raises += 1


def divergence(wider: torch.Tensor, narrower: torch.Tensor) -> torch.Tensor:
    """Return KL(wider || narrower) in nats of two [row, vocabulary] logits, [row] float32."""
    log_p, log_q = wider.float().log_softmax(-1), narrower.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class ShadowStep:
    """A decode step at twice the budget of each request, for comparison only."""

    def __init__(self, store: TieredStore, rows: Sequence[Row]) -> None:
        self.store = store
        self.rows = rows
        self.writer = self  # stands where a step's writer stands

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep nothing: the new token's KV of the real step is in its frame."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        written: bool = True,
    ) -> torch.Tensor:
        """Attend; arguments and result as for ``DecodeStep.attend``."""
        parts = [
            self._attend_row(layer, row, query[i : i + 1], k[i], v[i], scale)
            for i, row in enumerate(self.rows)
        ]
        return torch.cat(parts)

    def _attend_row(
        self, layer: int, row: Row, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        geometry, state = self.store.geometry, row.state
        budget = self.store.budget.scaled(2 * state.budget_factor)
        heads, size, num_pages = geometry.num_kv_heads, geometry.page_size, len(row.pages)
        if budget.covers(num_pages):
            selected = torch.arange(num_pages).expand(heads, -1)
        else:
            _, index = self.store.device_memory(state)
            scope = Scope(num_pages - 1, num_pages, budget.first_local_page(row.num_tokens), budget)
            selected = select_pages(index.rank(layer, query[0], state.pages, scope, scale), budget)
        keys, values = self._read(layer, state, selected)
        offset = row.prefix_tokens % size
        last = keys.shape[1] - size + offset
        keys[:, last], values[:, last] = k, v  # of this pass: layers above saw another input
        mask = torch.zeros(1, 1, 1, keys.shape[1], dtype=geometry.dtype)
        mask[..., last + 1 :] = float("-inf")
        return attend_selected(query, keys[None], values[None], mask, scale)

    def _read(
        self, layer: int, state: RequestState, selected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read pages past the window caches: [kv_head, n] ordinals -> each [kv_head, n * page_size, head_dim]."""
        geometry = self.store.geometry
        heads, count = selected.shape
        pages = Absent(
            request=np.zeros(selected.numel(), dtype=np.int64),
            head=np.repeat(np.arange(heads), count),
            ordinal=selected.reshape(-1).numpy(),
        )
        k = torch.empty(len(pages), geometry.page_elements, dtype=geometry.dtype)
        v = torch.empty(len(pages), geometry.page_elements, dtype=geometry.dtype)
        fetcher = self.store.fetcher
        fetcher.finish(fetcher.start(layer, pages, [state]), k, v, np.arange(len(pages)))
        shape = (heads, -1, geometry.head_dim)
        return k.view(shape), v.view(shape)
