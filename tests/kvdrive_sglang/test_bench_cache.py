"""The simulation of window caches: the oracle, what is fetched ahead, and what the summary makes of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kv_tier.geometry import Geometry
from kv_tier.index import page_means, rank_by_means
from kv_tier.modes import EVICTIONS
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.window import WindowCaches
from kvdrive_sglang.bench import cache
from kvdrive_sglang.bench.engines import BenchFailed
from kvdrive_sglang.bench.locality import (
    ORACLE,
    POLICIES,
    Decoded,
    Trace,
    overlap,
    profile_windows,
    score_steps,
    simulate,
    uniform,
)
from kvdrive_sglang.bench.texts import StudiedText

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=8)
STEPS, PAGES, BUDGET = 40, 90, 10


@pytest.fixture
def trace() -> Trace:
    """Scores that wander, so that selections change slowly; one head more slowly than the others."""
    chance = np.random.default_rng(0)
    pace = np.array([[0.02, 0.4], [0.4, 0.4]])[:, :, None]
    level = chance.standard_normal((2, 2, PAGES))
    scores = np.empty((2, STEPS, 2, PAGES), dtype=np.float32)
    for step in range(STEPS):
        level = np.sqrt(1 - pace**2) * level + pace * chance.standard_normal((2, 2, PAGES))
        scores[:, step] = np.exp(level)
    scores[..., 0] = scores[..., -1] = np.inf
    return Trace(GEOMETRY, scores)


def slow_belady(selected: list[list[int]], num_slots: int) -> int:
    """Return the misses after the first step of a list that gives up what is selected again last."""
    held: list[int] = []
    misses = 0
    for step, pages in enumerate(selected):
        missing = [page for page in pages if page not in held]
        misses += len(missing) * (step > 0)
        future = selected[step + 1 :]

        def next_use(page: int, future: list[list[int]] = future) -> int:
            return next((n for n, later in enumerate(future) if page in later), len(future))

        leaving = sorted((page for page in held if page not in pages), key=next_use, reverse=True)
        gone = leaving[: max(0, len(held) + len(missing) - num_slots)]
        held = [page for page in held if page not in gone] + missing
    return misses


def test_belady_is_the_optimum(trace: Trace) -> None:
    selected = trace.select(BUDGET)
    best = simulate(trace, selected, uniform(GEOMETRY, 15), ORACLE)
    for layer in range(2):
        for head in range(2):
            wanted = slow_belady(selected[layer, :, head].tolist(), 15)
            assert best.demand[layer, head] * (STEPS - 1) == wanted
    for policy in EVICTIONS:
        assert (simulate(trace, selected, uniform(GEOMETRY, 15), policy).demand >= best.demand).all()


def test_without_room_to_choose_every_policy_is_the_same(trace: Trace) -> None:
    selected = trace.select(BUDGET)
    fetched = {simulate(trace, selected, uniform(GEOMETRY, BUDGET), policy).pages for policy in POLICIES}
    assert len(fetched) == 1


def test_pages_fetched_ahead_are_not_waited_for(trace: Trace) -> None:
    selected, slots = trace.select(BUDGET), uniform(GEOMETRY, 2 * BUDGET)
    without = simulate(trace, selected, slots, "smoothed")
    ahead = simulate(trace, selected, slots, "smoothed", near=trace.select(BUDGET + 3))
    assert without.ahead.sum() == 0 < ahead.ahead.sum()
    assert ahead.demand.sum() < without.demand.sum()
    assert ahead.pages == ahead.demand.sum() + ahead.ahead.sum()


def test_overlap_counts_what_was_near_before(trace: Trace) -> None:
    selected, pool = trace.select(BUDGET), trace.select(BUDGET + 5)
    inside = [
        len(set(selected[layer, step, head]) & set(pool[layer, step - 1, head])) / BUDGET
        for layer in range(2)
        for step in range(1, STEPS)
        for head in range(2)
    ]
    assert overlap(trace, BUDGET, BUDGET + 5) == pytest.approx(np.mean(inside))


def test_the_profile_gives_the_restless_heads_the_memory(trace: Trace) -> None:
    made = profile_windows([trace, trace], BUDGET * 8, "smoothed", ["wandering"])
    assert (np.diff(made.misses, axis=2) <= 0).all()
    slots = made.slots(2)
    assert slots[0, 0] == slots.min() < 2 * BUDGET and slots.sum() <= 4 * 2 * BUDGET
    selected = trace.select(BUDGET)
    sized, even = (
        simulate(trace, selected, each, "smoothed") for each in (slots, uniform(GEOMETRY, 2 * BUDGET))
    )
    assert sized.pages < even.pages


class SmallModel:
    num_layers, num_kv_heads, head_dim, scale = 2, 2, 16, 0.25


@pytest.fixture
def decoded() -> Decoded:
    """Queries and keys of 12 steps after 1100 positions."""
    chance = torch.Generator().manual_seed(0)
    queries = [torch.randn(12, 2, 3, 16, generator=chance).bfloat16() for _ in range(2)]
    keys = [torch.randn(2, 1112, 16, generator=chance).bfloat16() for _ in range(2)]
    return Decoded(1100, queries, keys)


def test_scores_mark_sinks_local_window_and_the_future(decoded: Decoded) -> None:
    trace = score_steps(SmallModel(), decoded, 8)  # type: ignore[arg-type]
    assert trace.scores.shape == (2, 12, 2, 139)
    for step in range(12):
        length = 1101 + step
        forced = np.isposinf(trace.scores[1, step, 0])
        existing = -(-length // 8)
        wanted = [0, *range((length - 64) // 8, existing)]
        assert np.flatnonzero(forced).tolist() == wanted
        assert np.isneginf(trace.scores[1, step, 0, existing:]).all()
    short = score_steps(SmallModel(), decoded, 8, 3)  # type: ignore[arg-type]
    assert np.array_equal(short.scores, trace.scores[:, :3, :, :138])


@pytest.mark.parametrize("pages_per_centroid", [1, 4])
def test_stages_take_time(decoded: Decoded, monkeypatch: pytest.MonkeyPatch, pages_per_centroid: int) -> None:
    monkeypatch.setattr(cache, "BUDGETS", (256,))
    case = cache.Case(pages_per_centroid=pages_per_centroid)
    times = cache.stage_times(SmallModel(), decoded, case, num_steps=4)  # type: ignore[arg-type]
    assert set(times) == {"select_us", "window_us", "fetch_us", "gather_us", "attend_us"}
    assert all(value > 0 for value in times.values())


def test_rows_of_every_figure_make_the_summary(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BUDGETS", (64, 80))
    rows = [*cache.policy_rows("a", trace), *cache.pool_rows("a", trace)]
    slots = profile_windows([trace], 80, "smoothed", ()).slots(2)
    rows.append(cache.sized_row("a", trace, 80, 2, slots))
    rows += [{"figure": "cost", "policy": name, "window_us": 9.0} for name in EVICTIONS]
    summary = cache.summarise(rows)
    assert set(summary) == set(cache.SUMMARY_KEYS)
    row = next(row for row in rows if row["figure"] == "table 3" and row["window"] == 2)
    assert 0 < row["hit_lru"] < row["hit_belady"] < 1
    missed = (1 - row["hit_lru"]) * 2 * 2 * (row["budget_tokens"] // 8)
    assert row["bytes_lru"] == pytest.approx(missed * GEOMETRY.page_head_bytes)
    assert cache.gap_share(row, "lru") == 0 and cache.gap_share(row, ORACLE) == 1
    assert summary["uniform_over_2d_bytes"] > 1 and 0 < summary["ahead_saved_demand"] < 1


def test_a_window_cache_that_forgets_is_noticed(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BUDGETS", (80,))
    cache.check(trace)
    admit = WindowCaches.admit

    def forget(self: WindowCaches, layer: int, *arguments: np.ndarray) -> object:
        self.slot_of[layer][:, :, ::7] = -1
        return admit(self, layer, *arguments)

    monkeypatch.setattr(WindowCaches, "admit", forget)
    with pytest.raises(BenchFailed, match="did not fetch"):
        cache.check(trace)


def test_texts_for_a_profile_come_from_files(tmp_path: Path) -> None:
    from kv_tier.meta.errors import ConfigError
    from kvdrive_sglang.cli.profile_command import read_texts

    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    path = tmp_path / "text.md"
    path.write_text("0123456789")
    assert read_texts(Bytes(), [path], 3, 8) == [
        StudiedText("profile", "text.md", list(b"01234"), list(b"567"))
    ]
    assert [len(one.prompt) for one in read_texts(Bytes(), [], 3, 50)] == [47, 47]
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_texts(Bytes(), [tmp_path / "none"], 3, 8)


def test_every_page_its_own_centroid_selects_as_page_means(decoded: Decoded) -> None:
    geometry = Geometry(2, 2, 16, 8)
    budget = Budget(20, 4, 64, 8)
    keys = decoded.keys[0]
    means = page_means(keys.view(2, 139, 8, 16)).float()
    query = decoded.queries[0][11][
        :, :1
    ]  # of a group, each member's softmax has another sum over fewer pages
    local = budget.first_local_page(1112)
    wanted = rank_by_means(query, means[:, :138], Scope(138, 139, local, budget), 0.25)
    got = cache.Centroids(means, 137, geometry, 1).score(query, 139, local, budget, 0.25)
    assert torch.equal(select_pages(got, budget), select_pages(wanted, budget))
