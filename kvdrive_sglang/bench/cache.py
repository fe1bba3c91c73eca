"""kvdrive bench cache: what window caches of every size and policy have to fetch on real texts.

The plain-torch model prefills 7,040 tokens of each text and decodes 128 more, teacher-forced under full attention; the
scores of every step drive the engine's own window caches, which hold no KV here. The first step fills them and does not
count. Prose and source code continue as they do, copies repeat a passage from 6,000 tokens back. The texts that window
profiles are made from are others.

Rows by ``figure`` of the paper:

- ``table 3``: hit rates and bytes per step of every policy; belady knows the future.
- ``figure 7``: which part of a step's selection stood among the best M pages of the step before.
- ``ahead``: what fetching ranks up to 1.5 budgets ahead saves, where they rank well above who leaves.
- ``figure 15``: windows sized per (layer, KV head) against uniform ones of the same memory.
- ``figure 16``, ``17``, ``18``: microseconds of the stages of one layer by window size, page size and number of centroids;
  ``cost``: by policy. One request, all pages in frames.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kv_kernels import dispatch
from kv_tier.attention import attend_selected
from kv_tier.clusters import cluster_pages
from kv_tier.geometry import Geometry
from kv_tier.index import page_means, rank_by_means
from kv_tier.modes import DEFAULT_EVICTION, EVICTIONS, EvictionName
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.window import WindowCaches
from kvdrive_sglang.bench.engines import BenchFailed, Progress, model_path
from kvdrive_sglang.bench.lab import LabModel
from kvdrive_sglang.bench.locality import (
    LOCAL_WINDOW_TOKENS,
    NUM_SINK_TOKENS,
    ORACLE,
    POLICIES,
    Decoded,
    Trace,
    decode,
    overlap,
    profile_windows,
    score_steps,
    simulate,
    uniform,
)
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, StudiedText, calibration_texts, studied_texts

NAME = "cache"
SUMMARY_KEYS = (
    "lookahead_minus_lru_points",
    "own_share_of_belady_gap",
    "lookahead_share_of_belady_gap",
    "uniform_over_2d_bytes",
    "ahead_saved_demand",
    "ahead_bytes_ratio",
    "next_selection_in_top_2k",
    "window_us_per_layer",
)

PROMPT_TOKENS = 7040
NUM_STEPS = 128
PAGE_SIZE = 8
BUDGETS = (256, 512, 1024)
WINDOWS = (1, 2, 3, 4)
COMPARED_WINDOW = 2
PROFILED = ((512, 1.5), (512, 2), (1024, 1.5), (1024, 2), (1024, 3))  # (budget, uniform window)
POOLS = (1.0, 1.1, 1.25, 1.5, 2.0)
AHEAD = 1.5
CHECKED_STEPS = 24


def run(full: bool, progress: Progress) -> BenchResult:
    """Simulate every policy on every text: two of prose, of source code, and of copying; with ``full`` three."""
    path = model_path()
    model, tokenizer = LabModel(path), ModelTokenizer(path)
    traces = []
    for number, tokens in enumerate(calibration_texts(tokenizer, PROMPT_TOKENS + NUM_STEPS), 1):
        progress(f"profile text {number}: prefill and decode")
        text = StudiedText("profile", str(number), tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:])
        traces.append(score_steps(model, decode(model, text), PAGE_SIZE))
    progress("window profiles")
    profiles = {
        budget: profile_windows(traces, budget, DEFAULT_EVICTION, ()) for budget in {b for b, _ in PROFILED}
    }
    del traces
    rows: list[dict[str, Any]] = []
    stages: list[dict[str, Any]] = []
    for text in studied_texts(tokenizer, PROMPT_TOKENS, NUM_STEPS, 3 if full else 2):
        name = text.name
        progress(f"{name}: prefill and decode")
        decoded = decode(model, text)
        trace = score_steps(model, decoded, PAGE_SIZE)
        check(trace)
        progress(f"{name}: window caches")
        rows += policy_rows(name, trace)
        rows += pool_rows(name, trace)
        for budget, window in PROFILED:
            rows.append(sized_row(name, trace, budget, window, profiles[budget].slots(window)))
        if not stages:
            progress(f"{name}: stages of a layer")
            stages = stage_rows(model, decoded)
    return BenchResult(NAME, rows + stages, summarise(rows + stages))


def check(trace: Trace) -> None:
    """Compare a few steps of one layer with a list that is searched.

    Raises:
        BenchFailed: the window caches fetched something else.
    """
    pages = BUDGETS[0] // PAGE_SIZE
    selected = trace.select(pages)[0, :CHECKED_STEPS]
    caches = WindowCaches(trace.geometry, uniform(trace.geometry, 2 * pages), trace.num_pages, 1, "lookahead")
    rows = np.array([caches.lend().row])
    resident: list[list[int]] = [[] for _ in range(trace.geometry.num_kv_heads)]
    for step, chosen in enumerate(selected):
        scores = trace.scores[0, step]
        _, misses = caches.admit(0, rows, chosen[None], scores[None])
        for head, held in enumerate(resident):
            wanted = chosen[head].tolist()
            missing = [page for page in wanted if page not in held]
            if misses.ordinal[misses.head == head].tolist() != missing:
                raise BenchFailed(f"step {step}, head {head}: the window cache did not fetch {missing}")
            leaving = sorted((p for p in held if p not in wanted), key=lambda page: scores[head, page])
            gone = leaving[: max(0, len(held) + len(missing) - 2 * pages)]
            resident[head] = [page for page in held if page not in gone] + missing


def policy_rows(text: str, trace: Trace) -> list[dict[str, Any]]:
    """Simulate every policy at every budget and window size."""
    rows = []
    for budget in BUDGETS:
        selected = trace.select(budget // PAGE_SIZE)
        for window in WINDOWS:
            slots = uniform(trace.geometry, window * budget // PAGE_SIZE)
            row: dict[str, Any] = {
                "figure": "table 3",
                "text": text,
                "budget_tokens": budget,
                "window": float(window),
            }
            fetched = {
                policy: simulate(trace, selected, slots, policy).pages
                for policy in (POLICIES if window > 1 else POLICIES[:1])
            }
            for policy in POLICIES:
                pages = fetched.get(policy, fetched[POLICIES[0]])  # without room to choose all are the same
                row[f"hit_{policy}"] = 1 - pages / selected[:, 0].size
                row[f"bytes_{policy}"] = pages * trace.geometry.page_head_bytes
            rows.append(row)
    return rows


def pool_rows(text: str, trace: Trace) -> list[dict[str, Any]]:
    """Measure what the ranks just past the budget are worth."""
    budget = BUDGETS[-1]
    pages = budget // PAGE_SIZE
    common = {"text": text, "budget_tokens": budget}
    rows: list[dict[str, Any]] = [
        {"figure": "figure 7", **common, "pool": pool, "overlap": overlap(trace, pages, int(pool * pages))}
        for pool in POOLS
    ]
    selected, slots = trace.select(pages), uniform(trace.geometry, COMPARED_WINDOW * pages)
    without = simulate(trace, selected, slots, DEFAULT_EVICTION)
    ahead = simulate(trace, selected, slots, DEFAULT_EVICTION, near=trace.select(int(AHEAD * pages)))
    rows.append(
        {
            "figure": "ahead",
            **common,
            "window": float(COMPARED_WINDOW),
            "pool": AHEAD,
            "saved_demand": 1 - float(ahead.demand.sum() / without.demand.sum()),
            "bytes_ratio": ahead.pages / without.pages,
        }
    )
    return rows


def sized_row(text: str, trace: Trace, budget: int, window: float, slots: np.ndarray) -> dict[str, Any]:
    """Compare windows sized by a profile of other texts with uniform ones of the same memory."""
    pages = budget // PAGE_SIZE
    selected = trace.select(pages)
    even = uniform(trace.geometry, int(window * pages))
    assert slots.sum() <= even.sum()
    fetched = [simulate(trace, selected, each, DEFAULT_EVICTION).pages for each in (even, slots)]
    return {
        "figure": "figure 15",
        "text": text,
        "budget_tokens": budget,
        "window": float(window),
        "bytes_uniform": fetched[0] * trace.geometry.page_head_bytes,
        "bytes_2d": fetched[1] * trace.geometry.page_head_bytes,
        "smallest_slots": int(slots.min()),
        "largest_slots": int(slots.max()),
    }


def stage_rows(model: LabModel, decoded: Decoded) -> list[dict[str, Any]]:
    """Time the stages of one layer by window size, page size, number of centroids, and policy."""
    usual = Case()
    cases = [
        *(("figure 16", replace(usual, window=window)) for window in WINDOWS),
        *(("figure 17", replace(usual, page_size=size)) for size in (4, 8, 16)),
        *(("figure 18", replace(usual, pages_per_centroid=count)) for count in (1, 2, 4, 8)),
        *(("cost", replace(usual, eviction=name)) for name in EVICTIONS),
    ]
    return [
        {
            "figure": figure,
            "budget_tokens": BUDGETS[-1],
            "window": float(case.window),
            "page_size": case.page_size,
            "pages_per_centroid": case.pages_per_centroid,
            "policy": case.eviction,
            **stage_times(model, decoded, case),
        }
        for figure, case in cases
    ]


@dataclass(frozen=True)
class Case:
    """What one layer's stages depend on; ``pages_per_centroid`` of 1 scores the mean of every page."""

    window: int = COMPARED_WINDOW
    page_size: int = PAGE_SIZE
    pages_per_centroid: int = 1
    eviction: EvictionName = DEFAULT_EVICTION


@torch.inference_mode()
def stage_times(model: LabModel, decoded: Decoded, case: Case, num_steps: int = 32) -> dict[str, float]:
    """Return microseconds per layer of selection, window cache, fetch, gather and attention, after a warm-up half.

    All layers are visited in turn, so that none stays in the processor's cache, as in the engine.
    """
    size = case.page_size
    geometry = Geometry(model.num_layers, model.num_kv_heads, model.head_dim, size)
    heads, dim, num_pages = geometry.num_kv_heads, geometry.head_dim, decoded.keys[0].shape[1] // size
    budget = Budget(BUDGETS[-1] // size, NUM_SINK_TOKENS, LOCAL_WINDOW_TOKENS, size)
    assert budget.pages is not None
    caches = WindowCaches(
        geometry, uniform(geometry, case.window * budget.pages), num_pages, 1, case.eviction
    )
    rows = np.array([caches.lend().row])
    frames = [keys[:, : num_pages * size].reshape(heads * num_pages, -1) for keys in decoded.keys]
    means = [page_means(f.view(heads, num_pages, size, dim)).float() for f in frames]
    coarse = [Centroids(m, decoded.prompt // size, geometry, case.pages_per_centroid) for m in means]
    mask = torch.zeros(1, 1, 1, budget.pages * size, dtype=geometry.dtype)
    spent = np.zeros(5)
    num_steps = min(num_steps, num_pages * size - decoded.prompt)
    for step in range(num_steps):
        length = decoded.prompt + step + 1
        count = geometry.num_pages(length)
        local = budget.first_local_page(length)
        for layer in range(geometry.num_layers):
            query = decoded.queries[layer][step]
            clock = [time.perf_counter()]
            if case.pages_per_centroid == 1:
                scope = Scope(count - 1, count, local, budget)
                scores = rank_by_means(query, means[layer][:, : count - 1], scope, model.scale)
            else:
                scores = coarse[layer].score(query, count, local, budget, model.scale)
            selected = select_pages(scores[None], budget)
            clock.append(time.perf_counter())
            at, misses = caches.admit(layer, rows, selected.numpy(), scores[None].numpy())
            clock.append(time.perf_counter())
            if len(misses):
                source, into = misses.head * num_pages + misses.ordinal, torch.from_numpy(misses.at)
                for target in (caches.k[layer], caches.v[layer]):
                    target.index_copy_(0, into, frames[layer].index_select(0, torch.from_numpy(source)))
            clock.append(time.perf_counter())
            places, shape = torch.from_numpy(at).view(-1), (1, heads, -1, dim)
            k, v = (part[layer].index_select(0, places).view(shape) for part in (caches.k, caches.v))
            clock.append(time.perf_counter())
            attend_selected(query[None], k, v, mask, model.scale)
            clock.append(time.perf_counter())
            if step >= num_steps // 2:
                spent += np.diff(clock)
    microseconds = spent / (num_steps - num_steps // 2) / geometry.num_layers * 1e6
    names = ("select_us", "window_us", "fetch_us", "gather_us", "attend_us")
    return dict(zip(names, microseconds.round(1).tolist(), strict=True))


class Centroids:
    """The paper's two levels for one layer: clusters of the closed stretches pick twice the budget, page means rank."""

    def __init__(
        self, means: torch.Tensor, num_pages: int, geometry: Geometry, pages_per_centroid: int
    ) -> None:
        """Cluster ``means`` ([kv_head, page, head_dim] float32), the closed stretches of the first ``num_pages``."""
        heads, _, dim = means.shape
        per_stretch = geometry.pages_per_stretch
        self.means = means
        self.num_closed = num_pages // per_stretch * per_stretch
        stretches = means[:, : self.num_closed].reshape(-1, per_stretch, dim)
        assignment, centroids = cluster_pages(stretches, per_stretch // pages_per_centroid)
        first = torch.arange(self.num_closed // per_stretch) * centroids.shape[1]
        self.cluster_of = (assignment.view(heads, -1, per_stretch) + first[:, None]).view(heads, -1)
        self.centroids = centroids.view(heads, -1, dim).float()

    def score(
        self, query: torch.Tensor, num_pages: int, first_local: int, budget: Budget, scale: float
    ) -> torch.Tensor:
        """Return scores as ``DeviceIndex.rank`` does, -inf for pages that no chosen cluster holds."""
        assert budget.pages is not None
        heads = query.shape[0]
        by_page = torch.full((heads, num_pages), float("inf"))
        by_page[:, : self.num_closed] = dispatch.page_score(query, self.centroids, scale).gather(
            1, self.cluster_of
        )
        by_page[:, : budget.num_sink_pages] = float("inf")
        by_page[:, first_local:] = float("inf")
        chosen = dispatch.topk_pages(by_page, 2 * budget.pages)
        inside = chosen.clamp(max=self.means.shape[1] - 1)
        fine = self.means.gather(1, inside[:, :, None].expand(-1, -1, self.means.shape[2]))
        scores = torch.full((heads, num_pages), float("-inf"))
        scores.scatter_(1, chosen, dispatch.page_score(query, fine, scale))
        scores[:, : budget.num_sink_pages] = float("inf")
        scores[:, first_local:] = float("inf")
        return scores


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare policies at windows of two budgets: the worst text for lookahead, means over texts for the rest."""
    figures: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        figures.setdefault(row["figure"], []).append(row)
    compared = [row for row in figures["table 3"] if row["window"] == COMPARED_WINDOW]
    cost = [row for row in figures["cost"] if row["policy"] == DEFAULT_EVICTION]
    return {
        "lookahead_minus_lru_points": min(100 * (row["hit_lookahead"] - row["hit_lru"]) for row in compared),
        "own_share_of_belady_gap": mean(gap_share(row, DEFAULT_EVICTION) for row in compared),
        "lookahead_share_of_belady_gap": mean(gap_share(row, "lookahead") for row in compared),
        "uniform_over_2d_bytes": mean(row["bytes_uniform"] / row["bytes_2d"] for row in figures["figure 15"]),
        "ahead_saved_demand": mean(row["saved_demand"] for row in figures["ahead"]),
        "ahead_bytes_ratio": mean(row["bytes_ratio"] for row in figures["ahead"]),
        "next_selection_in_top_2k": mean(
            row["overlap"] for row in figures["figure 7"] if row["pool"] == POOLS[-1]
        ),
        "window_us_per_layer": mean(row["window_us"] for row in cost),
    }


def gap_share(row: dict[str, Any], policy: str) -> float:
    """Return which share of LRU's excess misses over the optimum a policy avoids."""
    lru, best = row["bytes_lru"], row[f"bytes_{ORACLE}"]
    return float((lru - row[f"bytes_{policy}"]) / (lru - best))


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
