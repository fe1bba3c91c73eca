"""Selection: which pages one (layer, KV head) attends at a step, inside its budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.meta.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """How much one (layer, KV head) attends at a step.

    Args:
        pages: pages attended, sinks and local window included; None attends everything.
        num_sink_tokens, local_window_tokens: positions at both ends that are always attended, rounded outward to pages.
        page_size: positions per page.

    Raises:
        ConfigError: a size is out of range, or the pages do not hold the sinks, the local window and one page more.
    """

    pages: int | None
    num_sink_tokens: int
    local_window_tokens: int
    page_size: int

    def __post_init__(self) -> None:
        if self.num_sink_tokens < 0:
            raise ConfigError(f"num_sink_tokens={self.num_sink_tokens}: must not be negative")
        if self.local_window_tokens < 1:
            raise ConfigError(
                f"local_window_tokens={self.local_window_tokens}: must be at least 1, a token attends itself"
            )
        if self.pages is None:
            return
        # the local window can straddle one page more than its tokens fill
        forced = self.num_sink_pages + -(-self.local_window_tokens // self.page_size) + 1
        if self.pages <= forced:
            raise ConfigError(
                f"budget_tokens={self.pages * self.page_size} leaves nothing to select: num_sink_tokens="
                f"{self.num_sink_tokens} and local_window_tokens={self.local_window_tokens} alone take "
                f"{forced * self.page_size}; raise budget_tokens to at least {(forced + 1) * self.page_size}"
            )

    @property
    def num_sink_pages(self) -> int:
        return -(-self.num_sink_tokens // self.page_size)

    def first_local_page(self, num_tokens: int) -> int:
        """Return the page where the local window of a sequence of ``num_tokens`` begins."""
        return max(0, num_tokens - self.local_window_tokens) // self.page_size

    def scaled(self, factor: int) -> Budget:
        """Return the budget times ``factor``."""
        return self if self.pages is None or factor == 1 else replace(self, pages=factor * self.pages)

    def covers(self, num_pages: int) -> bool:
        """Whether everything is attended, so that sparse attention is full attention."""
        return self.pages is None or num_pages <= self.pages


@dataclass(frozen=True)
class Scope:
    """Say among which pages of a sequence a step selects.

    Args:
        num_indexed: leading pages that the index ranks; those from there to ``num_pages`` must be local.
        first_local: first page of the local window.
    """

    num_indexed: int
    num_pages: int
    first_local: int
    budget: Budget

    def __post_init__(self) -> None:
        assert self.first_local <= self.num_indexed <= self.num_pages, self

    def force(self, scores: torch.Tensor) -> torch.Tensor:
        """Let pages that are always attended score +inf, in place; scores: [..., num_indexed or num_pages] float32."""
        array = scores.numpy()
        array[..., : self.budget.num_sink_pages] = np.inf
        array[..., self.first_local :] = np.inf
        return scores

    def complete(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scores of all pages, [kv_head, num_pages], from those of the indexed ones; ``out`` receives them."""
        whole = torch.empty(scores.shape[0], self.num_pages) if out is None else out
        whole.numpy()[:, : self.num_indexed] = scores.numpy()  # slices of arrays cost a tenth of a tensor's
        return self.force(whole)


def select_pages(scores: torch.Tensor, budget: Budget) -> torch.Tensor:
    """Return the pages to attend, [..., kv_head, budget.pages] int64 ascending; ties go to the lower page."""
    assert budget.pages is not None and scores.shape[-1] > budget.pages
    return dispatch.topk_pages(scores, budget.pages)
