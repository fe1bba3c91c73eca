"""Every policy's priorities against their definition in plain numbers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from kv_tier.eviction import Shape, Smoothed, bytes_per_page, new_eviction
from kv_tier.modes import EVICTIONS, EvictionName

LAYER, ROW, HEADS, PAGES, BUDGET = 1, 2, 2, 7, 3
SHAPE = Shape(num_layers=2, num_rows=3, num_heads=HEADS, max_pages=9)


def make_steps(seed: int, count: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw (selected [1, kv_head, BUDGET], scores [1, kv_head, PAGES]) per step; page 0 is always attended."""
    chance = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        scores = np.exp(3 * chance.standard_normal((1, HEADS, PAGES))).astype(np.float32)
        scores[:, :, 0] = np.inf
        scores[:, :, 1] = 0.0
        selected = np.sort(np.argsort(-scores, axis=2, kind="stable")[:, :, :BUDGET], axis=2)
        steps.append((selected, scores))
    return steps


def priorities_of(name: EvictionName, steps: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the priorities after all steps, [kv_head, page]."""
    policy = new_eviction(name, SHAPE)
    rows = np.array([ROW])
    for selected, scores in steps:
        priority, places = policy.priority(LAYER, rows, selected, scores)
    return priority[places[0], :, :PAGES].copy()


def used(steps: list[tuple[np.ndarray, np.ndarray]], head: int) -> list[list[int]]:
    return [selected[0, head].tolist() for selected, _ in steps]


def test_lookahead_is_the_score_of_the_current_step() -> None:
    steps = make_steps(1)
    assert (priorities_of("lookahead", steps) == steps[-1][1][0]).all()


def test_lru_orders_by_the_last_step_of_use() -> None:
    steps = make_steps(2)
    got = priorities_of("lru", steps)
    for head in range(HEADS):
        last = {page: number for number, pages in enumerate(used(steps, head), 1) for page in pages}
        assert got[head].tolist() == [last.get(page, 0) for page in range(PAGES)]


def test_lfu_orders_by_the_number_of_uses() -> None:
    steps = make_steps(3)
    got = priorities_of("lfu", steps)
    for head in range(HEADS):
        uses = Counter(page for pages in used(steps, head) for page in pages)
        assert got[head].tolist() == [uses[page] for page in range(PAGES)]


def test_smoothed_averages_log_scores_and_adds_neighbour_and_use() -> None:
    steps = make_steps(4)
    decay, lowest, highest, neighbour, use_decay, use_weight = Smoothed.weights.tolist()
    got = priorities_of("smoothed", steps)
    for head in range(HEADS):
        average, uses = [0.0] * PAGES, [0.0] * PAGES
        for selected, scores in steps:
            border = min(float(scores[0, head, page]) for page in selected[0, head])
            for page, score in enumerate(scores[0, head].tolist()):
                log = -math.inf if score == 0 else math.log(score) - math.log(border)
                average[page] += (1 - decay) * (min(max(log, lowest), highest) - average[page])
                uses[page] = use_decay * uses[page] + (page in selected[0, head])
        left = [0.0, *average[:-1]]
        wanted = [a + neighbour * n + use_weight * u for a, n, u in zip(average, left, uses, strict=True)]
        assert got[head].tolist() == pytest.approx(wanted, abs=0.08)  # bits stand for logarithms


def test_a_short_request_in_a_batch_is_padded_with_the_worst_score() -> None:
    policy = new_eviction("smoothed", SHAPE)
    scores = np.full((1, HEADS, PAGES), -np.inf, dtype=np.float32)
    scores[:, :, :4] = np.array([np.inf, 0.5, 0.25, np.inf])
    selected = np.tile(np.array([0, 1, 3]), (1, HEADS, 1))
    priority, _ = policy.priority(LAYER, np.array([ROW]), selected, scores)
    assert np.isfinite(priority).all()
    assert priority[0, 0, 5:].max() < priority[0, 0, 2] < priority[0, 0, 1] < priority[0, 0, 3]


@pytest.mark.parametrize("name", EVICTIONS)
def test_another_request_in_a_row_begins_afresh(name: EvictionName) -> None:
    policy, rows = new_eviction(name, SHAPE), np.array([ROW])
    for selected, scores in make_steps(5):
        policy.priority(LAYER, rows, selected, scores)
    policy.forget(ROW)
    for selected, scores in make_steps(6):
        priority, places = policy.priority(LAYER, rows, selected, scores)
    assert (priority[places[0], :, :PAGES] == priorities_of(name, make_steps(6))).all()


@pytest.mark.parametrize("name", EVICTIONS)
def test_what_a_policy_remembers_is_counted(name: EvictionName) -> None:
    arrays = [
        part
        for value in vars(new_eviction(name, SHAPE)).values()
        if isinstance(value, list)
        for part in value
    ]
    pages = SHAPE.num_layers * SHAPE.num_rows * SHAPE.num_heads * SHAPE.max_pages
    assert sum(array.nbytes for array in arrays) == pages * bytes_per_page(name)
