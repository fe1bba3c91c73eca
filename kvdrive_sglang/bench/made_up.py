"""Made-up sequences with the locality of real ones: keys that have topics, queries that drift.

A window cache hits as often as a query stays what it was: ``stays_for`` finds the drift that gives a hit rate.
"""

from __future__ import annotations

import numpy as np
import torch

from kv_tier.geometry import Geometry
from kv_tier.window import WindowCaches

BUDGET_TOKENS, PAGE, HEAD_DIM = 1024, 8, 128  # what hit rates were recorded with, and a usual head
TOPIC_PAGES = 8  # pages of a topic lie anywhere in their stretch


def page_topics(
    num_pages: int, heads: int, generator: torch.Generator, head_dim: int = HEAD_DIM
) -> torch.Tensor:
    """Draw page means [page, head, head_dim]: half a topic of the stretch, half the page's own."""
    per_stretch = 1024 // PAGE
    topics = torch.randn(-(-num_pages // TOPIC_PAGES), heads, head_dim, generator=generator)
    stretch = torch.arange(num_pages) // per_stretch * (per_stretch // TOPIC_PAGES)
    chosen = stretch + torch.randint(per_stretch // TOPIC_PAGES, (num_pages,), generator=generator)
    own = torch.randn(num_pages, heads, head_dim, generator=generator)
    return (topics[chosen % len(topics)] + own) / 2**0.5


def drifting(
    steps: int, stay: torch.Tensor, generator: torch.Generator, head_dim: int = HEAD_DIM
) -> torch.Tensor:
    """Draw queries [step, head, head_dim] that keep ``stay`` ([head]) of themselves from step to step."""
    now = torch.randn(len(stay), head_dim, generator=generator)
    out = []
    for _ in range(steps):
        out.append(now)
        fresh = torch.randn(now.shape, generator=generator)
        now = stay[:, None] * now + (1 - stay[:, None] ** 2).sqrt() * fresh
    return torch.stack(out)


def stays_for(rates: np.ndarray, steps: int, num_pages: int, head_dim: int = HEAD_DIM) -> np.ndarray:
    """Find the drift whose window cache, of twice a budget of ``BUDGET_TOKENS``, hits as often as each of ``rates``, by
    trying many drifts once."""
    generator = torch.Generator().manual_seed(1)
    stays = 1 - np.logspace(-4, -0.3, 24)
    budget = BUDGET_TOKENS // PAGE
    means = page_topics(num_pages, 1, generator, head_dim)[:, 0]
    queries = drifting(steps, torch.tensor(stays, dtype=torch.float32), generator, head_dim)
    geometry = Geometry(num_layers=1, num_kv_heads=len(stays), head_dim=1, page_size=1)
    windows = WindowCaches(geometry, np.full((1, len(stays)), 2 * budget), num_pages, 1)
    row = np.array([windows.lend().row])
    for query in queries:
        scores = query @ means.T
        chosen = scores.topk(budget, dim=1).indices.sort(dim=1).values
        windows.admit(0, row, chosen[None].numpy(), scores[None].numpy())
    hits = windows.hits[0, 0] / (windows.hits[0, 0] + windows.misses[0, 0])
    order = np.argsort(hits)
    found: np.ndarray = np.interp(rates, hits[order], stays[order])
    return found


class Inputs:
    """What a model would compute for a batch of prompts: the same keys and values for each, and queries of its own.

    Args:
        num_prompt: tokens of the prompt, whole stretches.
        num_steps: decode steps.
        batch: requests.
        hit_rate: of a window cache of twice a budget of 1,024 tokens, about.

    ``k[layer]``, ``v[layer]``: [token, kv_head, head_dim]; ``queries[layer]``: [step, request, kv_head, group, head_dim];
    all in the KV dtype.
    """

    def __init__(
        self, geometry: Geometry, group: int, num_prompt: int, num_steps: int, batch: int, hit_rate: float
    ) -> None:
        self.geometry = geometry
        self.num_prompt, self.num_steps, self.batch = num_prompt, num_steps, batch
        self.hit_rate = hit_rate
        generator = torch.Generator().manual_seed(2)
        heads, dim = geometry.num_kv_heads, geometry.head_dim
        num_tokens = num_prompt + num_steps
        num_pages = geometry.num_pages(num_tokens)
        self.tokens = torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist()
        stay = float(stays_for(np.array([hit_rate]), num_steps, num_pages, dim)[0])
        self.k, self.v, self.queries = [], [], []
        for _ in range(geometry.num_layers):
            k = torch.randn(num_tokens, heads, dim, generator=generator).mul_(0.3)
            means = page_topics(num_pages, heads, generator, dim)
            k += means.repeat_interleave(geometry.page_size, 0)[:num_tokens]
            self.k.append(k.to(geometry.dtype))
            self.v.append(torch.randn(num_tokens, heads, dim, generator=generator).to(geometry.dtype))
            drift = drifting(num_steps, torch.full((batch * heads,), stay), generator, dim)
            spread = 0.1 * torch.randn(num_steps, batch * heads, group, dim, generator=generator)
            queries = (drift[:, :, None] + spread).to(geometry.dtype)
            self.queries.append(queries.view(num_steps, batch, heads, group, dim))
