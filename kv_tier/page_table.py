"""The page table: logical page -> where its KV is, and what is known of it."""

from __future__ import annotations

import numpy as np
import torch

from kv_tier.geometry import Geometry

NOWHERE = -1


class PageTable:
    """Hold the state of every logical page; page 0 is SGLang's padding page.

    A page's KV is in a frame (``frame_of`` >= 0), in a span (``span_of`` >= 0), in both, or, when ``lost``, gone.
    ``life`` counts the uses of a logical page: whatever was planned for an earlier life no longer applies.
    ``means[layer]`` is [page, kv_head, head_dim] in the KV dtype: the mean of the page's post-RoPE keys, valid when
    ``filled == page_size``.
    """

    def __init__(self, geometry: Geometry, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self.frame_of = torch.full((num_pages,), NOWHERE, dtype=torch.int64)
        self.frames = self.frame_of.numpy()
        self.span_of = np.full(num_pages, NOWHERE, dtype=np.int64)
        self.ordinal_of = np.full(num_pages, NOWHERE, dtype=np.int64)
        self.filled = np.zeros(num_pages, dtype=np.int64)
        self.exact = np.zeros(num_pages, dtype=bool)
        self.lost = np.zeros(num_pages, dtype=bool)
        self.stamp = np.zeros(num_pages, dtype=np.int64)
        self.life = np.zeros(num_pages, dtype=np.int64)
        shape = (num_pages, geometry.num_kv_heads, geometry.head_dim)
        self.means = [torch.zeros(shape, dtype=geometry.dtype) for _ in range(geometry.num_layers)]

    def reset(self, pages: np.ndarray) -> None:
        """Forget everything about ``pages`` and end their life; frames were taken back by the caller."""
        self.frames[pages] = NOWHERE
        self.span_of[pages] = NOWHERE
        self.ordinal_of[pages] = NOWHERE
        self.filled[pages] = 0
        self.exact[pages] = False
        self.lost[pages] = False
        self.life[pages] += 1

    def move(self, source: int, target: int) -> None:
        """Let ``target`` take over the KV of ``source``, which keeps none (a lost page adopts recomputed bytes)."""
        for column in (self.frames, self.span_of, self.ordinal_of, self.filled, self.exact, self.stamp):
            column[target] = column[source]
        for means in self.means:
            means[target] = means[source]
        self.lost[target] = False
        self.frames[source] = NOWHERE
        self.span_of[source] = NOWHERE
        self.life[target] += 1

    @property
    def num_bytes(self) -> int:
        columns = (self.frames, self.span_of, self.ordinal_of, self.filled, self.stamp, self.life)
        return sum(c.nbytes for c in columns) + sum(m.nbytes for m in self.means)
