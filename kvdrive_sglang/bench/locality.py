"""Which pages every decode step of a real text selects, and what window caches of any size make of it.

A trace holds the scores of all steps, taken from the plain-torch model under full attention; the window caches and their
policies are the engine's own, without KV in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.geometry import Geometry
from kv_tier.index import page_means, rank_by_means
from kv_tier.modes import EVICTIONS, EvictionName
from kv_tier.selection import Budget, Scope
from kv_tier.window import WindowCaches
from kv_tier.window_profile import MULTIPLES, WindowProfile
from kvdrive_sglang.bench.lab import LabModel, Recorder
from kvdrive_sglang.bench.texts import StudiedText

NUM_SINK_TOKENS = 4
LOCAL_WINDOW_TOKENS = 64
ORACLE = "belady"
POLICIES: tuple[str, ...] = (*EVICTIONS, ORACLE)


@dataclass(frozen=True)
class Trace:
    """The scores of a text's decode steps.

    ``scores``: [layer, step, kv_head, page] float32 as ``rank_by_means`` gives them, -inf where a page does not exist yet.
    """

    geometry: Geometry
    scores: np.ndarray

    @property
    def num_steps(self) -> int:
        return int(self.scores.shape[1])

    @property
    def num_pages(self) -> int:
        return int(self.scores.shape[3])

    def select(self, num_pages: int) -> np.ndarray:
        """Return the pages attended at each step, [layer, step, kv_head, num_pages] int64 ascending."""
        return dispatch.topk_pages(torch.from_numpy(self.scores), num_pages).numpy()


@dataclass(frozen=True)
class Traffic:
    """What window caches had to fetch, per step, after the first step filled them.

    ``demand``: [layer, kv_head] float64 pages that a step waited for; ``ahead``: the same, fetched before they were asked
    for.
    """

    demand: np.ndarray
    ahead: np.ndarray

    @property
    def pages(self) -> float:
        return float(self.demand.sum() + self.ahead.sum())


@dataclass(frozen=True)
class Decoded:
    """What the layers of a teacher-forced decode under full attention saw.

    ``queries``: per layer [step, kv_head, group, head_dim]; ``keys``: per layer [kv_head, position, head_dim], of the prompt
    and the steps, after RoPE; ``prompt``: positions before the first step.
    """

    prompt: int
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]


def decode(model: LabModel, text: StudiedText) -> Decoded:
    """Prefill a text's prompt and decode its continuation: some seconds for 7,000 tokens."""
    recorder = Recorder()
    model.forced(model.prefill(text.prompt), text.forced, recorder)
    layers = range(model.num_layers)
    return Decoded(
        len(text.prompt), [recorder.queries[i] for i in layers], [recorder.keys[i] for i in layers]
    )


@torch.inference_mode()
def score_steps(model: LabModel, decoded: Decoded, page_size: int, num_steps: int | None = None) -> Trace:
    """Score pages at every step, or at the first ``num_steps``, as the engine does."""
    geometry = Geometry(model.num_layers, model.num_kv_heads, model.head_dim, page_size)
    budget = Budget(None, NUM_SINK_TOKENS, LOCAL_WINDOW_TOKENS, page_size)
    num_steps = num_steps or len(decoded.queries[0])
    num_pages = geometry.num_pages(decoded.prompt + num_steps)
    shape = (model.num_layers, num_steps, model.num_kv_heads, num_pages)
    scores = np.full(shape, -np.inf, dtype=np.float32)
    for layer, keys in enumerate(decoded.keys):
        full = keys.shape[1] // page_size
        means = page_means(keys[:, : full * page_size].view(keys.shape[0], full, page_size, -1)).float()
        for step, query in enumerate(decoded.queries[layer][:num_steps]):
            length = decoded.prompt + step + 1
            pages = geometry.num_pages(length)
            local = budget.first_local_page(length)
            scope = Scope(pages - 1, pages, local, budget)
            scored = rank_by_means(query, means[:, : pages - 1], scope, model.scale)
            scores[layer, step, :, :pages] = scored.numpy()
    return Trace(geometry, scores)


class Belady:
    """Keep what is selected again soonest: the optimum, for who knows the future."""

    margin = 0.0

    def __init__(self, selected: np.ndarray, num_pages: int) -> None:
        """Look at all steps: ``selected`` [layer, step, kv_head, n] int64."""
        layers, steps, heads, _ = selected.shape
        self._next_use = np.empty((layers, steps, heads, num_pages), dtype=np.float32)
        coming = np.full((layers, heads, num_pages), steps, dtype=np.float32)
        for step in range(steps - 1, -1, -1):
            self._next_use[:, step] = coming
            np.put_along_axis(coming, selected[:, step], step, axis=2)
        self._step = [0] * layers

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        step = self._step[layer]
        self._step[layer] += 1
        return -self._next_use[layer, step][None], np.zeros_like(rows)

    def forget(self, row: int) -> None:
        self._step = [0] * len(self._step)


def simulate(
    trace: Trace, selected: np.ndarray, num_slots: np.ndarray, policy: str, *, near: np.ndarray | None = None
) -> Traffic:
    """Run every step through window caches of the engine.

    Args:
        selected: as ``trace.select`` gives them.
        num_slots: [layer, kv_head] pages each window cache holds.
        policy: one of ``POLICIES``.
        near: as ``selected``, of more pages: what is fetched ahead after each step.
    """
    name: EvictionName = next((known for known in EVICTIONS if known == policy), EVICTIONS[0])
    caches = WindowCaches(trace.geometry, num_slots, trace.num_pages, 1, name)
    if policy == ORACLE:
        caches.eviction = Belady(selected, trace.num_pages)
    rows = np.array([caches.lend().row])
    ahead = np.zeros(num_slots.shape)
    for step in range(trace.num_steps):
        for layer in range(trace.geometry.num_layers):
            caches.admit(layer, rows, selected[layer, step][None], trace.scores[layer, step][None])
            if near is not None:
                fetched = caches.admit_ahead(layer, rows, near[layer, step][None])
                ahead[layer] += np.bincount(fetched.head, minlength=num_slots.shape[1]) * (step > 0)
        if step == 0:
            caches.misses[:] = 0
    counted = trace.num_steps - 1
    return Traffic(caches.misses[:, 0] / counted, ahead / counted)


def uniform(geometry: Geometry, num_slots: int) -> np.ndarray:
    """Return the same number of slots for every (layer, KV head)."""
    return np.full((geometry.num_layers, geometry.num_kv_heads), num_slots)


def overlap(trace: Trace, budget_pages: int, pool_pages: int) -> float:
    """Return which part of a step's selection stands among the best ``pool_pages`` of the step before (figure 7)."""
    selected, pool = trace.select(budget_pages), trace.select(pool_pages)
    inside = np.zeros((*trace.scores.shape[:1], trace.num_steps, *trace.scores.shape[2:]), dtype=bool)
    np.put_along_axis(inside, pool, True, axis=3)
    return float(np.take_along_axis(inside[:, :-1], selected[:, 1:], axis=3).mean())


def profile_windows(
    traces: Sequence[Trace], budget_tokens: int, eviction: EvictionName, texts: Sequence[str]
) -> WindowProfile:
    """Measure the misses of every (layer, KV head) at every window size, mean over ``traces``."""
    geometry = traces[0].geometry
    budget_pages = budget_tokens // geometry.page_size
    misses = np.zeros((geometry.num_layers, geometry.num_kv_heads, len(MULTIPLES)))
    for trace in traces:
        selected = trace.select(budget_pages)
        for option, multiple in enumerate(MULTIPLES):
            slots = uniform(geometry, int(multiple * budget_pages))
            misses[:, :, option] += simulate(trace, selected, slots, eviction).demand / len(traces)
    return WindowProfile(geometry, budget_tokens, np.array(MULTIPLES), misses, eviction, tuple(texts))
