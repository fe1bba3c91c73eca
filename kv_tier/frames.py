"""Frames: page-sized places in DRAM, one arena per layer, keys and values apart."""

from __future__ import annotations

import torch

from kv_tier.geometry import Geometry

DUMMY_FRAME = 0  # absorbs the writes of padded tokens and of pages that found no room


class FrameArena:
    """Hold ``num_frames`` frames; a frame is one page over all layers and KV heads.

    ``k[layer]`` and ``v[layer]`` are [kv_head, frame, page_size, head_dim] in the KV dtype: a page of one head
    is contiguous, so that one row of ``rows(...)`` moves with one copy. Frame 0 is never handed out. ``k_all`` and
    ``v_all`` number the rows through all layers: ``(layer * kv_heads + head) * num_frames + frame``.
    """

    def __init__(self, geometry: Geometry, num_frames: int, *, pin_memory: bool = False) -> None:
        self.geometry = geometry
        self.num_frames = num_frames
        shape = (geometry.num_kv_heads, num_frames, geometry.page_size, geometry.head_dim)
        whole = (geometry.num_layers, *shape)
        # written once, so that the memory is there: a session that is restored would pay for every page fault
        k, v = (torch.empty(whole, dtype=geometry.dtype, pin_memory=pin_memory).zero_() for _ in range(2))
        self.k, self.v = list(k), list(v)
        self.k_all, self.v_all = k.view(-1, geometry.page_elements), v.view(-1, geometry.page_elements)
        self.k_rows = [k.view(-1, geometry.page_elements) for k in self.k]
        self.v_rows = [v.view(-1, geometry.page_elements) for v in self.v]
        self.k_tokens = [k.view(-1, geometry.head_dim) for k in self.k]
        self.v_tokens = [v.view(-1, geometry.head_dim) for v in self.v]
        self.head_base = torch.arange(geometry.num_kv_heads) * num_frames
        self._free = list(range(num_frames - 1, DUMMY_FRAME, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_frames - 1

    def alloc(self, count: int) -> list[int]:
        """Hand out ``count`` frames; the caller has checked ``num_free``."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def free(self, frames: list[int]) -> None:
        self._free.extend(frames)

    def token_rows(self, frames: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``k_tokens`` for tokens at ``offsets`` inside ``frames``.

        Args:
            frames, offsets: [token] int64.

        Returns:
            [token * kv_head] int64, token-major: the order of ``k.view(-1, head_dim)``.
        """
        local = frames * self.geometry.page_size + offsets
        return (local[:, None] + (self.head_base * self.geometry.page_size)[None, :]).reshape(-1)

    def check_integrity(self, held: list[int]) -> None:
        """Assert that free and held frames are all frames but the dummy, each once."""
        every = sorted(self._free + held)
        assert every == list(range(1, self.num_frames)), (len(self._free), len(held), self.num_frames)
