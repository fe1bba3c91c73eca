"""What the store keeps for one running request: its pages, its index on the device, its window cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kv_tier.index import DeviceIndex
from kv_tier.page_table import PageTable
from kv_tier.window import Window


@dataclass
class Figures:
    """Count what a request's prefix and its steps cost; goes to the client with the usage.

    ``tokens_recomputed``: SSD had them, computing them again was the faster way. ``restore_s``, ``recompute_s``: what the two
    ways were expected to take; None where there was no choice, or nothing measured.
    """

    tokens_dram: int = 0
    tokens_ssd: int = 0
    tokens_computed: int = 0
    bytes_read: int = 0
    window_hits: int = 0
    window_misses: int = 0
    num_probes: int = 0
    kl_sum: float = 0.0
    budget_raises: int = 0
    tokens_recomputed: int = 0
    restore_s: float | None = None
    recompute_s: float | None = None


class RequestState:
    """Follow one row of ``req_to_token`` through one life of it.

    ``pages``: [max_pages] int64, the logical pages of the sequence by ordinal; the first ``num_pages`` are valid.
    ``window`` and ``index`` are device memory, borrowed from the store's pool at the first sparse step.
    """

    def __init__(self, row: int, generation: int, max_pages: int) -> None:
        self.row = row
        self.generation = generation
        self.pages = torch.full((max_pages,), -1, dtype=torch.int64)
        self.lives = np.full(max_pages, -1, dtype=np.int64)
        self.num_pages = 0
        self.window: Window | None = None
        self.index: DeviceIndex | None = None
        self.figures = Figures()
        self.failure: str | None = None
        self.num_decoded = 0
        self.budget_factor = 1  # raised by the quality monitor, for the rest of the turn
        self.span_kl: list[float] = []

    def sync(self, pages: torch.Tensor, table: PageTable) -> None:
        """Take over the current pages of the sequence, dropping what was cached of pages that changed.

        SGLang rewrites a running row when the tree already holds a page (the row then points to the tree's copy).

        Args:
            pages: [n] int64 logical pages by ordinal.
        """
        count = pages.numel()
        lives = table.life[pages.numpy()]
        common = min(count, self.num_pages)
        same = (self.pages[:common] == pages[:common]).numpy() & (self.lives[:common] == lives[:common])
        gone = np.arange(common, self.num_pages)  # a row that became shorter
        changed = np.concatenate([np.flatnonzero(~same), gone])
        if len(changed):
            if self.window is not None:
                self.window.drop(changed)
            if self.index is not None:
                self.index.truncate(int(changed[0]))
        self.pages[:count] = pages
        self.lives[:count] = lives
        self.num_pages = count
        if self.index is not None:
            self.index.truncate(count)


@dataclass(frozen=True)
class Row:
    """One request in a batch.

    Args:
        state: the request.
        pages: [n] int64 its logical pages, the new ones included.
        prefix_tokens: positions before the new tokens.
        num_tokens: positions with the new tokens.
    """

    state: RequestState
    pages: torch.Tensor
    prefix_tokens: int
    num_tokens: int
