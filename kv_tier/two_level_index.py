"""The paper's index: clusters of closed stretches pick candidates, page means rank inside (paper 4 and 7.2).

The device holds a row for every cluster of a closed stretch and for every page outside of one; means stay in DRAM and are
read for the candidates alone. A stretch is closed once all of its pages are indexed, a matter of length alone, and its
clusters are a function of its means: they are computed when first needed, or come from the span that holds the stretch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.clusters import cluster_pages
from kv_tier.geometry import Geometry
from kv_tier.index import DeviceIndex, MeansIndex
from kv_tier.meta.span_file import SpanFile
from kv_tier.modes import IndexName
from kv_tier.page_table import PageTable
from kv_tier.selection import Scope

PAGES_PER_CLUSTER = 2  # on average
CANDIDATES = 3  # times the budget; two lose 1.1 times as much by KL (benchmarks/NOTES.md)


def clusters_per_stretch(geometry: Geometry) -> int:
    return max(1, geometry.pages_per_stretch // PAGES_PER_CLUSTER)


@dataclass(frozen=True)
class TwoLevelPlan:
    """Rank clusters first, and the means of the best clusters' pages second."""

    name: IndexName = "two_level"
    identity: str = f"two_level/1/{PAGES_PER_CLUSTER}/{CANDIDATES}"
    sketch_digest: bytes = bytes(32)

    def table_bytes(self, geometry: Geometry) -> int:
        pairs = geometry.num_layers * geometry.num_kv_heads
        share = -(-geometry.mean_bytes * clusters_per_stretch(geometry) // geometry.pages_per_stretch)
        return share + 2 * pairs

    def device_bytes(self, geometry: Geometry, max_pages: int) -> int:
        rows = num_rows(geometry, max_pages)
        return geometry.num_layers * geometry.num_kv_heads * (4 * geometry.head_dim * rows + 8 * max_pages)

    def build(self, geometry: Geometry, table: PageTable) -> MeansIndex:
        return TwoLevelIndex(self, geometry, table)


def num_rows(geometry: Geometry, max_pages: int) -> int:
    """Return how many clusters and single pages a sequence of at most ``max_pages`` can have."""
    closed, left = divmod(max_pages, geometry.pages_per_stretch)
    single = geometry.pages_per_stretch - 1 if closed else left
    return closed * clusters_per_stretch(geometry) + single


class Stretch:
    """Hold the clusters of one closed stretch.

    ``assignment``: [layer, kv_head, page] int16; ``centroids``: [layer, kv_head, cluster, head_dim] in the KV dtype;
    ``done[layer]`` says where both are filled in.
    """

    def __init__(self, assignment: torch.Tensor, centroids: torch.Tensor, *, done: bool) -> None:
        self.assignment, self.centroids = assignment, centroids
        self.done = [done] * len(assignment)


class TwoLevelIndex(MeansIndex):
    """Keep the clusters of closed stretches, as many stretches as the logical pages can be at once; others are computed
    again when they are needed."""

    def __init__(self, plan: TwoLevelPlan, geometry: Geometry, table: PageTable) -> None:
        super().__init__(plan, geometry, table)
        self.num_clusters = clusters_per_stretch(geometry)
        self.max_stretches = max(1, table.num_pages // geometry.pages_per_stretch)
        self._stretches: OrderedDict[bytes, Stretch] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self.table.num_pages * self.plan.table_bytes(self.geometry)

    def stretch(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's clusters of a closed stretch.

        Args:
            pages: [n] int64, the logical pages of the stretch.

        Returns:
            (assignment [kv_head, n] int16, centroids [kv_head, cluster, head_dim] in the KV dtype), not to be changed.
        """
        found = self._find(pages)
        if not found.done[layer]:
            means = self.table.means[layer].index_select(0, pages).transpose(0, 1)
            assignment, centroids = cluster_pages(means, self.num_clusters)
            found.assignment[layer], found.centroids[layer] = assignment, centroids
            found.done[layer] = True
        return found.assignment[layer], found.centroids[layer]

    def clusters(
        self, pages: torch.Tensor, means: torch.Tensor, num_clusters: int, *, closed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not closed:
            return super().clusters(pages, means, num_clusters, closed=closed)
        parts = [self.stretch(layer, pages) for layer in range(self.geometry.num_layers)]
        return torch.stack([part[0] for part in parts]).long(), torch.stack([part[1] for part in parts])

    def read(self, span: SpanFile) -> tuple[np.ndarray, ...]:
        header = span.header
        if (header.num_pages, header.num_clusters) != (self.geometry.pages_per_stretch, self.num_clusters):
            return ()
        centroids = span.read_centroids()
        assert centroids is not None
        return np.take_along_axis(span.clusters, span.place_of, axis=2), centroids

    def attach(self, pages: torch.Tensor, ordinals: Sequence[int], parts: tuple[np.ndarray, ...]) -> None:
        if not parts or list(ordinals) != list(range(self.geometry.pages_per_stretch)):
            return
        assignment = torch.from_numpy(parts[0].astype(np.int16))
        raw = torch.from_numpy(parts[1].view(np.int16 if parts[1].itemsize == 2 else np.int32))
        self._keep(self._key(pages), Stretch(assignment, raw.view(self.geometry.dtype), done=True))

    def device(self, max_pages: int) -> DeviceIndex:
        return DeviceTwoLevel(self, max_pages)

    def _find(self, pages: torch.Tensor) -> Stretch:
        key = self._key(pages)
        found = self._stretches.get(key)
        if found is None:
            layers, heads = self.geometry.num_layers, self.geometry.num_kv_heads
            assignment = torch.zeros(layers, heads, len(pages), dtype=torch.int16)
            shape = (layers, heads, self.num_clusters, self.geometry.head_dim)
            found = Stretch(assignment, torch.zeros(shape, dtype=self.geometry.dtype), done=False)
        self._keep(key, found)
        return found

    def _key(self, pages: torch.Tensor) -> bytes:
        """Return what tells a stretch from others: its logical pages, each in this life."""
        logical = pages.numpy()
        return bytes(logical.tobytes() + self.table.life[logical].tobytes())

    def _keep(self, key: bytes, stretch: Stretch) -> None:
        self._stretches[key] = stretch
        self._stretches.move_to_end(key)
        if len(self._stretches) > self.max_stretches:
            self._stretches.popitem(last=False)


class DeviceTwoLevel(DeviceIndex):
    """Rank clusters and single pages, then candidates.

    ``rows``: [layer, kv_head, row, head_dim] float32, the centroids of closed stretches, then the means of later pages.
    ``row_of``: [layer, kv_head, page] int64, where a page is among them.
    """

    def __init__(self, index: TwoLevelIndex, max_pages: int) -> None:
        geometry = index.geometry
        super().__init__(geometry.num_layers)
        self.index = index
        self.per_stretch = geometry.pages_per_stretch
        pairs = (geometry.num_layers, geometry.num_kv_heads)
        self.rows = torch.zeros(*pairs, num_rows(geometry, max_pages), geometry.head_dim)
        self.row_of = torch.zeros(*pairs, max_pages, dtype=torch.int64)
        self._heads = torch.arange(geometry.num_kv_heads)[:, None]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.row_of.nbytes

    def _kept(self, have: int, num_pages: int) -> int:
        if have <= num_pages or have // self.per_stretch == num_pages // self.per_stretch:
            return min(have, num_pages)
        return num_pages // self.per_stretch * self.per_stretch  # a stretch that was cut is no longer closed

    def _holds(self, have: int, num_pages: int) -> bool:
        return have >= num_pages and have // self.per_stretch == num_pages // self.per_stretch

    def _fill(self, layer: int, first: int, num_pages: int, pages: torch.Tensor) -> None:
        closed = num_pages // self.per_stretch
        for number in range(first // self.per_stretch, closed):
            self._close(layer, number, pages)
        base, num_clusters = closed * self.per_stretch, closed * self.index.num_clusters
        first = max(first, base)
        means = self.index.table.means[layer].index_select(0, pages[first:num_pages])
        at = torch.arange(first - base, num_pages - base) + num_clusters
        self.rows[layer, :, at] = means.transpose(0, 1).float()
        self.row_of[layer, :, first:num_pages] = at

    def _close(self, layer: int, number: int, pages: torch.Tensor) -> None:
        """Replace the pages of a stretch by its clusters."""
        begin, first = number * self.per_stretch, number * self.index.num_clusters
        inside = slice(begin, begin + self.per_stretch)
        assignment, centroids = self.index.stretch(layer, pages[inside])
        self.rows[layer, :, first : first + self.index.num_clusters] = centroids.float()
        self.row_of[layer, :, inside] = assignment.long() + first

    def _score(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, scope: Scope, scale: float
    ) -> torch.Tensor:
        count, budget = scope.num_indexed, scope.budget
        assert budget.pages is not None
        closed, single = divmod(count, self.per_stretch)
        rows = self.rows[layer, :, : closed * self.index.num_clusters + single]
        by_cluster = dispatch.cluster_score(query, rows, self.row_of[layer, :, :count], scale)
        candidates = dispatch.topk_pages(scope.force(by_cluster), min(CANDIDATES * budget.pages, count))
        table = self.index.table.means[layer]
        heads, dim = table.shape[1:]
        at = pages[candidates] * heads + self._heads
        means = table.view(-1, dim).index_select(0, at.view(-1)).view(heads, -1, dim)
        scores = torch.full((heads, count), float("-inf"))
        return scores.scatter_(1, candidates, dispatch.page_score(query, means, scale))
