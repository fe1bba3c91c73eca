"""The key sketch as an index: every key in a few calibrated directions, four bits each, exp-summed to pages.

A page's sketch is [kv_head, entry, byte] uint8, an entry per key (or mean of ``entry_tokens`` keys). It lies in three places
with the same bytes: by logical page in DRAM, by page ordinal in a span's SKETCH section, and in blocks on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.geometry import Geometry
from kv_tier.index import DeviceIndex, MeansIndex, page_means
from kv_tier.meta.errors import ConfigError
from kv_tier.meta.span_file import SpanFile
from kv_tier.modes import IndexName
from kv_tier.page_table import PageTable
from kv_tier.selection import Scope
from kv_tier.sketch import SketchMaps


@dataclass(frozen=True)
class SketchPlan:
    """Rank pages by the attention that a sketch of their keys promises.

    Args:
        maps: the model's constants.
    """

    maps: SketchMaps
    name: IndexName = "sketch"

    @property
    def identity(self) -> str:
        return f"key_sketch/1/{self.maps.digest()}"

    @property
    def sketch_digest(self) -> bytes:
        return bytes.fromhex(self.maps.digest())

    def check(self, geometry: Geometry) -> None:
        """Refuse constants of other sizes.

        Raises:
            ConfigError: names both.
        """
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        if self.maps.key_codes.shape[:3] != shape or geometry.page_size % self.maps.entry_tokens:
            raise ConfigError(
                f"the sketch's constants are for (layers, KV heads, head_dim) {tuple(self.maps.key_codes.shape[:3])} and "
                f"entries of {self.maps.entry_tokens} tokens, the model has {shape} and pages of {geometry.page_size}: run "
                "kvdrive calibrate on this model, or serve with index=means"
            )

    def page_bytes(self, geometry: Geometry) -> int:
        """Return the bytes of one page's sketch of one (layer, KV head)."""
        return geometry.page_size // self.maps.entry_tokens * self.maps.entry_bytes

    def table_bytes(self, geometry: Geometry) -> int:
        return geometry.num_layers * geometry.num_kv_heads * self.page_bytes(geometry)

    def device_bytes(self, geometry: Geometry, max_pages: int) -> int:
        blocks = -(-max_pages // dispatch.SKETCH_BLOCK_PAGES)
        return blocks * dispatch.SKETCH_BLOCK_PAGES * self.table_bytes(geometry)

    def build(self, geometry: Geometry, table: PageTable) -> MeansIndex:
        self.check(geometry)
        return SketchIndex(self, geometry, table)


class SketchIndex(MeansIndex):
    """Keep the sketches of logical pages: ``codes[layer]`` is [page, kv_head, entry, byte] uint8."""

    def __init__(self, plan: SketchPlan, geometry: Geometry, table: PageTable) -> None:
        super().__init__(plan, geometry, table)
        self.maps = maps = plan.maps
        self.page_entries = geometry.page_size // maps.entry_tokens
        shape = (table.num_pages, geometry.num_kv_heads, self.page_entries, maps.entry_bytes)
        self.codes = [torch.zeros(shape, dtype=torch.uint8) for _ in range(geometry.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(codes.nbytes for codes in self.codes)

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        super().write(layer, pages, keys)
        heads, count, _, dim = keys.shape
        entries = page_means(keys.reshape(heads, count * self.page_entries, self.maps.entry_tokens, dim))
        codes = dispatch.sketch_build(entries, self.maps.key_map[layer], self.maps.offset[layer])
        by_page = codes.view(heads, count, self.page_entries, -1).transpose(0, 1)
        self.codes[layer].index_copy_(0, pages, by_page)

    def move(self, source: int, target: int) -> None:
        for codes in self.codes:
            codes[target] = codes[source]

    def sketch_of(self, pages: torch.Tensor) -> np.ndarray | None:
        found = torch.stack([codes.index_select(0, pages).transpose(0, 1) for codes in self.codes])
        return found.flatten(3).numpy()

    def read(self, span: SpanFile) -> tuple[np.ndarray, ...]:
        return (span.read_sketch(),)

    def attach(self, pages: torch.Tensor, ordinals: Sequence[int], parts: tuple[np.ndarray, ...]) -> None:
        found = torch.from_numpy(parts[0])
        if list(ordinals) != list(range(found.shape[2])):
            found = found[:, :, list(ordinals)]
        for codes, layer in zip(self.codes, found, strict=True):
            codes.index_copy_(0, pages, layer.transpose(0, 1).reshape(len(pages), *codes.shape[1:]))

    def device(self, max_pages: int) -> DeviceIndex:
        return DeviceSketch(self, max_pages)


class DeviceSketch(DeviceIndex):
    """Rank by sketches: ``blocks`` holds, for every layer, those of ``dispatch.sketch_blocks``."""

    num_warm_up_queries = 8  # each costs as much as 6 do with page means

    def __init__(self, index: SketchIndex, max_pages: int) -> None:
        geometry, maps = index.geometry, index.maps
        super().__init__(geometry.num_layers)
        self.index = index
        shape = (geometry.num_kv_heads, max_pages, index.page_entries, maps.entry_bytes)
        self.blocks = [dispatch.sketch_blocks(*shape) for _ in range(geometry.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(blocks.nbytes for blocks in self.blocks)

    def _fill(self, layer: int, first: int, num_pages: int, pages: torch.Tensor) -> None:
        codes = self.index.codes[layer].index_select(0, pages[first:num_pages])
        dispatch.sketch_put(self.blocks[layer], first, codes)

    def _score(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, scope: Scope, scale: float
    ) -> torch.Tensor:
        query_map = self.index.maps.query_map[layer]
        return dispatch.sketch_block_score(query, self.blocks[layer], query_map, scale, scope.num_indexed)
