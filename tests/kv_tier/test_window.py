"""The window cache against a list that is searched."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.eviction import Eviction
from kv_tier.geometry import Geometry
from kv_tier.modes import EVICTIONS, EvictionName
from kv_tier.window import Misses, Window, WindowCaches
from tests.models.window_model import WindowModel

HEADS, MAX_PAGES = 2, 9
GEOMETRY = Geometry(num_layers=2, num_kv_heads=HEADS, head_dim=2, page_size=2, stretch_tokens=8)
SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75])  # few values, many ties


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[object]]:
    """Draw (pages selected at a step, slots, steps); a step is (scores, selection) per head, or pages to drop."""
    budget = draw(st.integers(1, 4))
    slots = budget * draw(st.sampled_from([1, 2, 3]))
    pages = st.lists(st.integers(0, MAX_PAGES - 1), min_size=budget, max_size=budget, unique=True).map(sorted)
    row = st.lists(SCORES, min_size=MAX_PAGES, max_size=MAX_PAGES)
    step = st.lists(st.tuples(row, pages), min_size=HEADS, max_size=HEADS)
    drop = st.sets(st.integers(0, MAX_PAGES - 1), min_size=1, max_size=3)
    return budget, slots, draw(st.lists(st.one_of(step, step, drop), max_size=8))


class Watched:
    """Pass a policy's priorities on and remember the last ones, [kv_head, page] of the last request."""

    def __init__(self, policy: Eviction) -> None:
        self._policy = policy
        self.margin = policy.margin
        self.last = np.zeros((HEADS, MAX_PAGES), dtype=np.float32)

    def priority(
        self, layer: int, rows: np.ndarray, selected: np.ndarray, scores: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        priority, places = self._policy.priority(layer, rows, selected, scores)
        self.last = priority[places[-1]].copy()
        return priority, places

    def forget(self, row: int) -> None:
        self._policy.forget(row)


def new_window(num_slots: int, requests: int = 1, eviction: EvictionName = "lookahead") -> Window:
    """Return the caches of one request, in the last of ``requests`` rows."""
    slots = np.full((GEOMETRY.num_layers, HEADS), num_slots)
    caches = WindowCaches(GEOMETRY, slots, MAX_PAGES, requests, eviction)
    return [caches.lend() for _ in range(requests)][-1]


def admit(
    window: Window, layer: int, pages: list[list[int]], scores: list[list[float]] | None = None
) -> tuple[np.ndarray, Misses]:
    """Admit the pages of one request; [kv_head, n] rows and what to fetch."""
    values = None if scores is None else np.array([scores], dtype=np.float32)
    at, misses = window.caches.admit(layer, np.array([window.row]), np.array([pages]), values)
    window.caches.check_integrity()
    return at[0], misses


def admit_and_compare(
    window: Window,
    watched: Watched,
    models: list[WindowModel],
    layer: int,
    step: list[tuple[list[float], list[int]]],
) -> None:
    before = [window.pages(layer, head) for head in range(HEADS)]
    at, misses = admit(window, layer, [pages for _, pages in step], [row for row, _ in step])
    page_of = window.caches.page_of[layer].reshape(-1)
    for head, (model, (_, pages)) in enumerate(zip(models, step, strict=True)):
        row = watched.last[head].tolist()
        fetched = misses.ordinal[misses.head == head].tolist()
        assert fetched == model.missing(pages)
        left = sorted(set(before[head]) - set(window.pages(layer, head)))
        assert not set(left) & set(pages), "a page selected now was evicted"
        assert sorted(row[page] for page in left) == model.victim_scores(pages, row)
        model.admit(pages, left)
        assert window.pages(layer, head) == sorted(model.resident)
        assert page_of[misses.at[misses.head == head]].tolist() == fetched
        assert page_of[at[head]].tolist() == pages


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_the_cache_follows_the_model(eviction: EvictionName, history: tuple[int, int, list[object]]) -> None:
    _, num_slots, steps = history
    window = new_window(num_slots, requests=2, eviction=eviction)
    watched = window.caches.eviction = Watched(window.caches.eviction)
    models = [WindowModel(num_slots) for _ in range(HEADS)]
    for step in steps:
        if isinstance(step, set):
            window.drop(np.array(sorted(step)))
            window.caches.check_integrity()
            for model in models:
                model.drop(sorted(step))
        else:
            assert isinstance(step, list)
            admit_and_compare(window, watched, models, 1, step)
    assert window.pages(0, 0) == []  # the other layer is its own cache


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_batch_is_admitted_as_its_requests_alone(eviction: EvictionName) -> None:
    chance = random.Random(1)
    caches = WindowCaches(GEOMETRY, np.array([[3, 5], [4, 6]]), MAX_PAGES, 3, eviction)
    together = [caches.lend() for _ in range(3)]
    alone = [WindowCaches(GEOMETRY, caches.num_slots, MAX_PAGES, 1, eviction).lend() for _ in range(3)]
    for _ in range(30):
        pages = np.array(
            [[sorted(chance.sample(range(MAX_PAGES), 3)) for _ in range(HEADS)] for _ in range(3)]
        )
        scores = np.random.default_rng(chance.randrange(99)).random((3, HEADS, MAX_PAGES), dtype=np.float32)
        rows = np.array([window.row for window in together])
        _, misses = caches.admit(1, rows, pages, scores)
        for i, window in enumerate(alone):
            _, own = window.caches.admit(1, np.array([0]), pages[i : i + 1], scores[i : i + 1])
            mine = misses.request == i
            assert misses.head[mine].tolist() == own.head.tolist()
            assert misses.ordinal[mine].tolist() == own.ordinal.tolist()
            for head in range(HEADS):
                assert together[i].pages(1, head) == window.pages(1, head)
    assert [w.take_counts() for w in together] == [w.take_counts() for w in alone]


def test_near_pages_get_a_slot_only_well_above_who_leaves() -> None:
    window = new_window(4)
    caches, rows = window.caches, np.array([window.row])
    watched = caches.eviction = Watched(caches.eviction)
    watched.margin = 0.3
    scores = [[0.9, 0.8, 0.7, 0.1, 0.5, 0.35, 0.0, 0.0, 0.0]] * HEADS
    admit(window, 0, [[3, 6]] * HEADS, scores)
    admit(window, 0, [[0, 1]] * HEADS, scores)  # 3 and 6 stay, of priorities .1 and 0
    ahead = caches.admit_ahead(0, rows, np.array([[[0, 1, 4, 5]] * HEADS]))
    assert ahead.ordinal.tolist() == [4] * HEADS and ahead.head.tolist() == [
        0,
        1,
    ]  # 4 for 6; 5 is too near to 3
    assert window.pages(0, 0) == [0, 1, 3, 4]
    assert caches.page_of[0].reshape(-1)[ahead.at].tolist() == [4, 4]
    caches.check_integrity()
    assert window.take_counts() == (0, 8)


def test_hits_and_misses_are_counted() -> None:
    window = new_window(4)
    for pages, counts in (([0, 1], (0, 4)), ([1, 2], (2, 2)), ([1, 2], (4, 0))):
        admit(window, 0, [pages, pages], [[0.0] * MAX_PAGES] * HEADS)
        assert window.take_counts() == counts
    assert window.caches.total_hits.tolist() == [[3, 3], [0, 0]]
    assert window.caches.total_misses.tolist() == [[3, 3], [0, 0]]


def test_without_scores_everything_selected_finds_a_slot() -> None:
    window = new_window(5)
    for count in range(1, 6):
        _, misses = admit(window, 0, [list(range(count))] * HEADS)
        assert misses.ordinal.tolist() == [count - 1] * HEADS and misses.head.tolist() == [0, 1]


def test_a_cache_of_exactly_the_budget_serves_any_sequence_of_selections() -> None:
    chance = random.Random(0)
    window = new_window(4)
    for _ in range(60):
        pages = [sorted(chance.sample(range(MAX_PAGES), 4)) for _ in range(HEADS)]
        admit(window, 0, pages, [[chance.random() for _ in range(MAX_PAGES)] for _ in range(HEADS)])
        assert [window.pages(0, head) for head in range(HEADS)] == pages


def test_a_page_beyond_the_scores_is_the_first_to_leave() -> None:
    """The scores of an append end before its pages; what is resident there is not near any query."""
    window = new_window(2)
    admit(window, 0, [[3, 8]] * HEADS)
    admit(window, 0, [[5]] * HEADS, [[0.0] * 7] * HEADS)
    assert window.pages(0, 0) == [3, 5]


def test_a_loan_begins_empty() -> None:
    window = new_window(2)
    admit(window, 0, [[3, 8]] * HEADS)
    window.caches.give_back(window)
    window = window.caches.lend()
    assert window.pages(0, 0) == [] and window.caches.num_lent == 1
    assert window.take_counts() == (0, 0)
    window.caches.check_integrity()


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize(("num_slots", "max_pages"), [(2, 12), (7, 3)])
def test_bytes_are_those_of_the_arrays(num_slots: int, max_pages: int, eviction: EvictionName) -> None:
    slots = np.array([[num_slots, 1], [2, 3]])
    caches = WindowCaches(GEOMETRY, slots, max_pages, 1, eviction)
    tensors, arrays = [*caches.k, *caches.v], [*caches.slot_of, *caches.page_of]
    for value in vars(caches.eviction).values():
        arrays.extend(value if isinstance(value, list) else [])
    assert WindowCaches.bytes_for(GEOMETRY, slots, max_pages, eviction) == (
        sum(t.nbytes for t in tensors) + sum(a.nbytes for a in arrays)
    )
