"""The window cache against a list that is searched."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.geometry import Geometry
from kv_tier.window import ABSENT, WindowCache
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


def resident(window: WindowCache, layer: int, head: int) -> set[int]:
    return set(window.page_of[layer, head].tolist()) - {ABSENT}


def admit_and_compare(
    window: WindowCache, models: list[WindowModel], layer: int, step: list[tuple[list[float], list[int]]]
) -> None:
    scores = torch.tensor([row for row, _ in step])
    selected = torch.tensor([pages for _, pages in step])
    before = [resident(window, layer, head) for head in range(HEADS)]
    slots = window.lookup(layer, selected)
    heads, ordinals, rows = window.admit(layer, selected, slots, scores)
    window.check_integrity()
    assert slots.min() >= 0, "a selected page without a slot"
    for head, (model, (row, pages)) in enumerate(zip(models, step, strict=True)):
        fetched = ordinals[heads == head].tolist()
        assert fetched == model.missing(pages)
        left = sorted(before[head] - resident(window, layer, head))
        assert not set(left) & set(pages), "a page selected now was evicted"
        assert sorted(row[page] for page in left) == model.victim_scores(pages, row)
        model.admit(pages, left)
        assert resident(window, layer, head) == set(model.resident)
        own = rows[heads == head] - head * window.num_slots
        assert window.page_of[layer, head, own].tolist() == fetched
        assert window.page_of[layer, head, slots[head]].tolist() == pages


@settings(max_examples=100, deadline=None)
@given(histories())
def test_the_cache_follows_the_model(history: tuple[int, int, list[object]]) -> None:
    _, num_slots, steps = history
    window = WindowCache(GEOMETRY, num_slots, MAX_PAGES)
    models = [WindowModel(num_slots) for _ in range(HEADS)]
    for step in steps:
        if isinstance(step, set):
            window.drop(torch.tensor(sorted(step)))
            window.check_integrity()
            for model in models:
                model.drop(sorted(step))
        else:
            assert isinstance(step, list)
            admit_and_compare(window, models, 1, step)
    assert int((window.page_of[0] != ABSENT).sum()) == 0  # the other layer is its own cache


def test_hits_and_misses_are_counted() -> None:
    window = WindowCache(GEOMETRY, 4, MAX_PAGES)
    for pages, counts in (([0, 1], (0, 4)), ([1, 2], (2, 6)), ([1, 2], (6, 6))):
        selected = torch.tensor([pages, pages])
        window.admit(0, selected, window.lookup(0, selected), torch.zeros(HEADS, MAX_PAGES))
        assert (window.num_hits, window.num_misses) == counts


def test_without_scores_everything_selected_finds_a_slot() -> None:
    window = WindowCache(GEOMETRY, 5, MAX_PAGES)
    for count in range(1, 6):
        selected = torch.arange(count).expand(HEADS, -1)
        slots = window.lookup(0, selected)
        heads, ordinals, _ = window.admit(0, selected, slots, None)
        assert ordinals.tolist() == [count - 1] * HEADS and heads.tolist() == [0, 1]
        window.check_integrity()


def test_a_cache_of_exactly_the_budget_serves_any_sequence_of_selections() -> None:
    chance = random.Random(0)
    window = WindowCache(GEOMETRY, 4, MAX_PAGES)
    for _ in range(60):
        pages = [sorted(chance.sample(range(MAX_PAGES), 4)) for _ in range(HEADS)]
        selected = torch.tensor(pages)
        slots = window.lookup(0, selected)
        window.admit(0, selected, slots, torch.rand(HEADS, MAX_PAGES))
        assert [sorted(resident(window, 0, head)) for head in range(HEADS)] == pages


def test_a_page_beyond_the_scores_is_the_first_to_leave() -> None:
    """The scores of an append end before its pages; what is resident there is not near any query."""
    window = WindowCache(GEOMETRY, 2, MAX_PAGES)
    selected = torch.tensor([[3, 8]] * HEADS)
    window.admit(0, selected, window.lookup(0, selected), None)
    selected = torch.tensor([[5]] * HEADS)
    window.admit(0, selected, window.lookup(0, selected), torch.zeros(HEADS, 7))
    assert resident(window, 0, 0) == {3, 5}


def test_reset_forgets_everything() -> None:
    window = WindowCache(GEOMETRY, 2, MAX_PAGES)
    selected = torch.tensor([[3, 8]] * HEADS)
    window.admit(0, selected, window.lookup(0, selected), None)
    window.reset()
    assert (window.lookup(0, selected) == ABSENT).all()
    assert (window.num_hits, window.num_misses) == (0, 0)


@pytest.mark.parametrize(("num_slots", "max_pages"), [(2, 12), (7, 3)])
def test_bytes_are_those_of_the_tensors(num_slots: int, max_pages: int) -> None:
    window = WindowCache(GEOMETRY, num_slots, max_pages)
    tensors = (window.k, window.v, window.slot_of, window.page_of)
    assert WindowCache.bytes_for(GEOMETRY, num_slots, max_pages) == sum(t.nbytes for t in tensors)
