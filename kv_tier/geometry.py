"""Sizes and offsets of a model's KV, in one place: nothing else rounds or multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kv_tier.meta.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Geometry:
    """Describe the KV of one shard of a model.

    Args:
        num_layers: layers whose KV this shard holds.
        num_kv_heads: KV heads of this shard.
        head_dim: elements of one key (and of one value).
        page_size: positions per page.
        stretch_tokens: positions per stretch, a multiple of page_size.
        dtype: element type of keys and values.

    Raises:
        ConfigError: a size is not positive, or stretch_tokens is no multiple of page_size.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 8
    stretch_tokens: int = 1024
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "stretch_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be positive")
        if self.stretch_tokens % self.page_size:
            raise ConfigError(
                f"stretch_tokens={self.stretch_tokens} is no multiple of page_size={self.page_size}: "
                f"use {self.stretch_tokens // self.page_size * self.page_size or self.page_size}"
            )
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}")

    @property
    def pages_per_stretch(self) -> int:
        return self.stretch_tokens // self.page_size

    @property
    def page_elements(self) -> int:
        """Elements of one page's keys in one (layer, KV head)."""
        return self.page_size * self.head_dim

    @property
    def page_head_bytes(self) -> int:
        """Bytes of one page's keys and values in one (layer, KV head)."""
        return 2 * self.page_elements * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values over all layers and KV heads."""
        return self.page_head_bytes * self.num_layers * self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    @property
    def mean_bytes(self) -> int:
        """Bytes of one page's means over all layers and KV heads, in the KV dtype."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens`` positions, the last one perhaps partly."""
        return -(-num_tokens // self.page_size)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the raw bits of a contiguous tensor as uint16 or uint32, sharing its memory."""
    if tensor.element_size() == 2:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().view(torch.int32).numpy().view(np.uint32)
