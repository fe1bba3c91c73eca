"""Selections to compare in the lab: an index scores pages, a budget chooses among them, T queries at a time.

A ``Scorer`` serves one prompt: what it derives from the prompt's closed stretches is kept between calls. All scores are
[kv_head, token, page] float32, -inf for pages that do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_kernels import dispatch
from kv_kernels.ref.sketch import sketch_build, unpack_codes
from kv_tier.clusters import cluster_pages
from kv_tier.geometry import Geometry
from kv_tier.index import page_means
from kv_tier.selection import Budget
from kv_tier.sketch import SketchMaps
from kvdrive_sglang.bench.lab import positions_of


class Scorer(Protocol):
    """Score pages by what an index knows of them.

    Attributes:
        page_size: positions per page.
    """

    page_size: int

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Score the pages that count.

        Args:
            queries: [token, kv_head, group, head_dim].
            keys: [kv_head, position, head_dim].
            counts: [1 or kv_head, token, page] bool, full pages that each query may select; page is the number of
                pages of all positions.
        """


@dataclass(frozen=True)
class Level:
    """One step of a selection: ``scorer`` keeps ``factor`` times the budget."""

    scorer: Scorer
    factor: int = 1


class Selection:
    """Choose pages within a budget as a decode step does; a ``lab.Select``."""

    def __init__(self, levels: Sequence[Level], budget: Budget) -> None:
        """Choose by ``levels``, coarse ones first, all of the budget's page size; the last has factor 1."""
        self.levels = levels
        self.budget = budget

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        budget, size = self.budget, self.budget.page_size
        assert budget.pages is not None
        count, positions = queries.shape[0], keys.shape[1]
        lengths = torch.arange(positions - count, positions) + 1  # of the sequence at each step
        page = torch.arange(-(-positions // size))
        here = (lengths[:, None] - 1) // size  # the page of the query itself
        local = (lengths[:, None] - budget.local_window_tokens).clamp(min=0) // size
        forced = ((page < budget.num_sink_pages) | (page >= local)) & (page <= here)
        counts = (page < here)[None]
        chosen = counts
        for level in self.levels:
            assert level.scorer.page_size == size, (level.scorer.page_size, size)
            scores = level.scorer.scores(layer, queries, keys, counts)
            scores = scores.masked_fill(forced, float("inf"))
            chosen = _top(scores, min(level.factor * budget.pages, len(page)))
            counts = chosen & (page < here)
        return positions_of(chosen, size, positions)


def _top(scores: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return the best pages as [..., page] bool."""
    pages = dispatch.topk_pages(scores, num_pages)
    chosen = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool)
    chosen.scatter_(-1, pages.masked_fill(pages < 0, scores.shape[-1]), True)
    return chosen[..., :-1]


def logits_of(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return queries . rows: [token, kv_head, group, width], [kv_head, row, width] -> [kv_head, token, group, row]."""
    count, heads, group, width = queries.shape
    folded = queries.float().permute(1, 0, 2, 3).reshape(heads, count * group, width)
    return torch.bmm(folded, rows.float().mT).view(heads, count, group, -1)


def softmax_sum(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sum the softmax over those that count over the group: [kv_head, token, group, n] -> [kv_head, token, n]."""
    hidden = ~counts
    scores = logits.masked_fill_(hidden[:, :, None], float("-inf")).softmax(-1).sum(2)
    return scores.masked_fill_(hidden, float("-inf"))


def paged(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """Cut [kv_head, position, width] into its full pages, [kv_head, page, page_size, width]."""
    full = rows.shape[1] // page_size
    return rows[:, : full * page_size].view(rows.shape[0], full, page_size, -1)


def stored_means(keys: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the means of the full pages as an index stores them, bfloat16 [kv_head, page, head_dim]."""
    return page_means(paged(keys.bfloat16(), page_size))


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append rows of zeros to [kv_head, row, width]."""
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - rows.shape[1]))


class Means:
    """Rank pages by their mean keys."""

    def __init__(self, page_size: int, scale: float) -> None:
        self.page_size, self.scale = page_size, scale

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        means = padded(stored_means(keys, self.page_size), counts.shape[-1])
        return softmax_sum(logits_of(queries * self.scale, means), counts)


class Clusters:
    """Rank the pages of closed stretches by the mean of their cluster, the others by their own."""

    def __init__(self, geometry: Geometry, pages_per_cluster: int, scale: float) -> None:
        self.page_size, self.scale = geometry.page_size, scale
        self.per_stretch = geometry.pages_per_stretch
        self.num_clusters = self.per_stretch // pages_per_cluster
        self._summaries: dict[int, torch.Tensor] = {}

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        means = stored_means(keys, self.page_size)
        if layer not in self._summaries:
            prompt_pages = (keys.shape[1] - len(queries)) // self.page_size
            closed = prompt_pages // self.per_stretch * self.per_stretch
            self._summaries[layer] = self._centroids(means[:, :closed])
        closed_summaries = self._summaries[layer]
        summaries = torch.cat([closed_summaries, means[:, closed_summaries.shape[1] :].float()], dim=1)
        return softmax_sum(logits_of(queries * self.scale, padded(summaries, counts.shape[-1])), counts)

    def _centroids(self, means: torch.Tensor) -> torch.Tensor:
        """Give every page of closed stretches ([kv_head, page, head_dim]) its cluster's centroid."""
        heads, pages, width = means.shape
        stretches = means.reshape(-1, self.per_stretch, width)
        assignment, centroids = cluster_pages(stretches, self.num_clusters)
        centroids = centroids.to(means.dtype).float()  # stored in the KV dtype
        return centroids.gather(1, assignment[:, :, None].expand(-1, -1, width)).view(heads, pages, width)


class KeySketch:
    """Rank pages by the summed weights that a key sketch gives their tokens."""

    def __init__(self, maps: SketchMaps, page_size: int, scale: float) -> None:
        self.maps, self.page_size, self.scale = maps, page_size, scale
        self._entries: dict[int, torch.Tensor] = {}

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        per_page = self.page_size // self.maps.entry_tokens
        kept = self._entries.get(layer)
        if kept is None:
            full = (keys.shape[1] - len(queries)) // self.page_size * self.page_size
            kept = self._entries[layer] = self._build(layer, keys[:, :full])
        fresh = self._build(layer, keys[:, kept.shape[1] * self.maps.entry_tokens :])
        entries = padded(torch.cat([kept, fresh], dim=1), counts.shape[-1] * per_page)
        weights = torch.einsum("thgd,hde->thge", queries.float() * self.scale, self.maps.query_map[layer])
        masses = softmax_sum(logits_of(weights, entries), counts.repeat_interleave(per_page, -1))
        return masses.unflatten(-1, (-1, per_page)).sum(-1)

    def _build(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        return unpack_codes(
            sketch_build(
                stored_means(keys, self.maps.entry_tokens), self.maps.key_map[layer], self.maps.offset[layer]
            )
        )


class QuestBounds:
    """Rank pages by an upper bound of their logits: the extremes of every channel (Quest)."""

    def __init__(self, page_size: int, scale: float) -> None:
        self.page_size, self.scale = page_size, scale

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        pages = paged(keys, self.page_size)
        high, low = (padded(rows, counts.shape[-1]) for rows in (pages.amax(2), pages.amin(2)))
        q = queries * self.scale
        bounds = logits_of(q.clamp(min=0), high) + logits_of(q.clamp(max=0), low)
        return softmax_sum(bounds, counts)


class Recent:
    """Rank pages by position: sinks and a local window as large as the budget."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        order = torch.arange(counts.shape[-1], dtype=torch.float32)
        return order.masked_fill(~counts, float("-inf")).expand(queries.shape[1], -1, -1)


class Chance:
    """Rank pages at random, differently for every layer, head and query."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(layer)
        order = torch.rand(queries.shape[1], *counts.shape[1:], generator=generator)
        return order.masked_fill(~counts, float("-inf"))


class Oracle:
    """Rank pages by the attention mass that they truly get."""

    def __init__(self, page_size: int, scale: float) -> None:
        self.page_size, self.scale = page_size, scale

    def scores(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        rows = padded(keys, counts.shape[-1] * self.page_size)
        masses = softmax_sum(
            logits_of(queries * self.scale, rows), counts.repeat_interleave(self.page_size, -1)
        )
        return masses.unflatten(-1, (-1, self.page_size)).sum(-1)
