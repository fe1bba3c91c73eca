"""Indexes: what ranks pages without reading their KV, and the paper's simplest one, page means.

    plan (constants, bytes) ──build──> index (per logical page, DRAM) ──device──> one per request, by page ordinal
         config, sizing                     │          ▲                                    │
                                  seal ─────┘          └───── attach                        └──score──> pages
                                       sections of a span

Every index keeps page means in the page table: spans are packed by clusters of them. What an index adds is a function of a
page's keys (or of a closed stretch's means) and of constants of the model alone, so that a resumed session selects as one
that never stopped. A page that is not indexed yet is local, and always attended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.clusters import cluster_pages
from kv_tier.geometry import Geometry
from kv_tier.meta.span_file import SpanFile
from kv_tier.meta.span_format import NO_SKETCH
from kv_tier.modes import IndexName
from kv_tier.page_table import PageTable
from kv_tier.selection import Scope

WARM_UP_QUERIES = 32


def page_means(keys: torch.Tensor) -> torch.Tensor:
    """Return the mean key of each page: [kv_head, page, page_size, head_dim] -> [kv_head, page, head_dim].

    Halves are added pairwise in float32, an order that no batch shape can change.
    """
    part = keys.float()
    size = part.shape[2]
    while part.shape[2] > 1:
        half = part.shape[2] // 2
        summed = part[:, :, :half] + part[:, :, half : 2 * half]
        part = summed if part.shape[2] % 2 == 0 else torch.cat([summed, part[:, :, -1:]], dim=2)
    return (part[:, :, 0] / size).to(keys.dtype)


def rank_by_means(query: torch.Tensor, means: torch.Tensor, scope: Scope, scale: float) -> torch.Tensor:
    """Score pages by the means of the indexed ones, [kv_head, scope.num_indexed, head_dim]; see ``DeviceIndex.rank``."""
    return scope.complete(dispatch.page_score(query, means, scale))


class IndexPlan(Protocol):
    """Say which index a store keeps, before there is one."""

    @property
    def name(self) -> IndexName: ...

    @property
    def identity(self) -> str:
        """What selects, constants included: part of what approximate pages are filed under."""

    @property
    def sketch_digest(self) -> bytes:
        """What a span's sketch must have been made with; zeros: it needs none."""

    def table_bytes(self, geometry: Geometry) -> int:
        """Return DRAM bytes per logical page, beside the page's means."""

    def device_bytes(self, geometry: Geometry, max_pages: int) -> int:
        """Return device bytes per request."""

    def build(self, geometry: Geometry, table: PageTable) -> MeansIndex: ...


@dataclass(frozen=True)
class MeansPlan:
    """Rank pages by their means."""

    name: IndexName = "means"
    identity: str = "page_means/1"
    sketch_digest: bytes = NO_SKETCH

    def table_bytes(self, geometry: Geometry) -> int:
        return 0

    def device_bytes(self, geometry: Geometry, max_pages: int) -> int:
        size = dispatch.MEAN_BLOCK_PAGES
        itemsize = 2 if geometry.dtype == torch.bfloat16 else 4
        rows = geometry.num_layers * geometry.num_kv_heads * -(-max_pages // size) * size
        return itemsize * rows * geometry.head_dim

    def build(self, geometry: Geometry, table: PageTable) -> MeansIndex:
        return MeansIndex(self, geometry, table)


MEANS = MeansPlan()


class MeansIndex:
    """Keep what ranks pages, by logical page: here nothing beside the means of the page table."""

    def __init__(self, plan: IndexPlan, geometry: Geometry, table: PageTable) -> None:
        self.plan = plan
        self.geometry = geometry
        self.table = table

    @property
    def num_bytes(self) -> int:
        """DRAM bytes beside the page table's."""
        return 0

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Index pages whose last position was written.

        Args:
            pages: [n] int64 logical pages; keys: [kv_head, n, page_size, head_dim].
        """
        self.table.means[layer].index_copy_(0, pages, page_means(keys).transpose(0, 1))

    def move(self, source: int, target: int) -> None:
        """Let ``target`` have what is kept of ``source``, the means apart."""

    def clusters(
        self, pages: torch.Tensor, means: torch.Tensor, num_clusters: int, *, closed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Group the pages of a span that is about to be written.

        Args:
            pages: [n] int64; means: [layer, kv_head, n, head_dim].
            num_clusters: how many, where clusters only say which pages lie side by side.
            closed: the pages are all of a closed stretch.

        Returns:
            (assignment [layer, kv_head, n] int64, centroids [layer, kv_head, cluster, head_dim] float).
        """
        layers, heads, count, dim = means.shape
        assignment, centroids = cluster_pages(means.reshape(layers * heads, count, dim), num_clusters)
        return assignment.view(layers, heads, count), centroids.view(layers, heads, num_clusters, dim)

    def sketch_of(self, pages: torch.Tensor) -> np.ndarray | None:
        """Return what a span keeps of pages in its sketch, [layer, kv_head, n, bytes] uint8."""
        return None

    def read(self, span: SpanFile) -> tuple[np.ndarray, ...]:
        """Read what a span keeps, the means apart.

        Raises:
            CorruptExtentError, ExtentIoError: as ``SpanFile.read_means``.
        """
        return ()

    def attach(self, pages: torch.Tensor, ordinals: Sequence[int], parts: tuple[np.ndarray, ...]) -> None:
        """Take over what ``read`` gave for logical pages that are bound to these ordinals of the span."""

    def device(self, max_pages: int) -> DeviceIndex:
        """Return the index of one request, empty."""
        return DeviceMeans(self, max_pages)


class DeviceIndex(ABC):
    """Hold what ranks the pages of one request on the device, contiguous by page ordinal.

    ``num_indexed[layer]``: how many leading pages are filled in. ``num_warm_up_queries``: of a prompt's end, how many tell
    which pages the window caches begin with; it decides no number.
    """

    num_warm_up_queries: ClassVar[int] = WARM_UP_QUERIES

    def __init__(self, num_layers: int) -> None:
        self.num_indexed = [0] * num_layers

    def truncate(self, num_pages: int) -> None:
        """Forget the pages from ``num_pages`` on."""
        self.num_indexed = [self._kept(n, num_pages) for n in self.num_indexed]

    def rank(
        self,
        layer: int,
        query: torch.Tensor,
        pages: torch.Tensor,
        scope: Scope,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Score the pages of a sequence for selection; those that are always attended score +inf.

        Args:
            query: [kv_head, group, head_dim]; several query tokens count as a larger group.
            pages: [n] int64 logical pages by ordinal, at least ``scope.num_indexed``.
            out: receives the scores.

        Returns:
            [kv_head, scope.num_pages] float32.
        """
        self.extend_to(layer, scope.num_indexed, pages)
        return scope.complete(self._score(layer, query, pages, scope, scale), out)

    def extend_to(self, layer: int, num_pages: int, pages: torch.Tensor) -> None:
        """Fill in the first ``num_pages`` of ``pages``."""
        have = self.num_indexed[layer]
        if not self._holds(have, num_pages):
            self._fill(layer, self._kept(have, num_pages), num_pages, pages)
            self.num_indexed[layer] = num_pages

    def _kept(self, have: int, num_pages: int) -> int:
        """Return how many of ``have`` pages stay filled in when those from ``num_pages`` on go."""
        return min(have, num_pages)

    def _holds(self, have: int, num_pages: int) -> bool:
        """Whether ``num_pages`` are ranked right when ``have`` are filled in."""
        return have >= num_pages

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def _fill(self, layer: int, first: int, num_pages: int, pages: torch.Tensor) -> None:
        """Fill in the ordinals from ``first`` to ``num_pages`` of ``pages``."""

    @abstractmethod
    def _score(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, scope: Scope, scale: float
    ) -> torch.Tensor:
        """Return the scores of the indexed pages, [kv_head, scope.num_indexed] float32; -inf is never selected."""


class DeviceMeans(DeviceIndex):
    """Rank by page means: ``blocks`` holds, for every layer, those of ``dispatch.mean_blocks``."""

    def __init__(self, index: MeansIndex, max_pages: int) -> None:
        geometry = index.geometry
        super().__init__(geometry.num_layers)
        self.table = index.table
        shape = (geometry.num_kv_heads, max_pages, geometry.head_dim)
        self.blocks = [dispatch.mean_blocks(*shape, geometry.dtype) for _ in range(geometry.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(blocks.nbytes for blocks in self.blocks)

    def _fill(self, layer: int, first: int, num_pages: int, pages: torch.Tensor) -> None:
        rows = self.table.means[layer].index_select(0, pages[first:num_pages])
        dispatch.mean_put(self.blocks[layer], first, rows)

    def _score(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, scope: Scope, scale: float
    ) -> torch.Tensor:
        return dispatch.mean_block_score(query, self.blocks[layer], scale, scope.num_indexed)
