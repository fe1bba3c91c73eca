"""Device memory is lent, kept between turns, and never more than planned."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kv_tier.device_memory import DeviceMemory
from kv_tier.geometry import Geometry
from kv_tier.index import MEANS
from kv_tier.page_table import PageTable
from kv_tier.request import RequestState

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=2, page_size=2, stretch_tokens=8)
MAX_PAGES, NUM_SLOTS = 12, 4


def new_memory(num_requests: int) -> DeviceMemory:
    index = MEANS.build(GEOMETRY, PageTable(GEOMETRY, 1))
    return DeviceMemory(GEOMETRY, np.full((2, 2), NUM_SLOTS), MAX_PAGES, num_requests, "smoothed", index)


@pytest.fixture
def table() -> PageTable:
    return PageTable(GEOMETRY, 100)


def request_of(table: PageTable, pages: list[int]) -> RequestState:
    """Return a request with these logical pages, whose last one is being written."""
    state = RequestState(0, 0, MAX_PAGES)
    state.sync(torch.tensor(pages), table)
    return state


def attend(memory: DeviceMemory, state: RequestState, ordinals: list[int]) -> int:
    """Select pages in every (layer, KV head); return how many were missing."""
    assert state.window is not None
    rows, selected = np.array([state.window.row]), np.tile(np.array(ordinals), (1, 2, 1))
    scores = np.linspace(1, 2, 2 * MAX_PAGES, dtype=np.float32).reshape(1, 2, MAX_PAGES)
    missing = sum(len(memory.windows.admit(layer, rows, selected, scores)[1]) for layer in range(2))
    memory.windows.check_integrity()
    return missing


def test_the_next_turn_finds_its_windows(table: PageTable) -> None:
    memory = new_memory(2)
    first, other = request_of(table, [5, 6, 7, 8]), request_of(table, [20, 21, 22])
    for state in (first, other):
        memory.lend(state)
        attend(memory, state, [0, 1, 2])
    window = first.window
    memory.end(first)
    memory.end(other)
    assert memory.num_kept == 2 and first.window is None
    again = request_of(table, [5, 6, 7, 9, 10])
    memory.lend(again)
    assert again.window is window and memory.num_kept == 1 and memory.num_reused == 1
    assert attend(memory, again, [0, 1, 2]) == 0
    assert attend(memory, again, [0, 3]) == 4


def test_the_page_that_was_written_on_is_not_taken_over(table: PageTable) -> None:
    memory = new_memory(1)
    state = request_of(table, [5, 6, 7])
    memory.lend(state)
    attend(memory, state, [0, 1, 2])
    memory.end(state)
    again = request_of(table, [5, 6, 7])
    memory.lend(again)
    assert attend(memory, again, [0, 1]) == 0
    assert attend(memory, again, [0, 1, 2]) == 4


def test_pages_in_another_life_are_not_taken_over(table: PageTable) -> None:
    memory = new_memory(1)
    state = request_of(table, [5, 6, 7])
    memory.lend(state)
    assert state.index is not None
    state.index.num_indexed = [2, 2]
    attend(memory, state, [0, 1])
    memory.end(state)
    table.reset(np.array([6]))
    again = request_of(table, [5, 6, 8])
    memory.lend(again)
    assert again.index is not None and again.index.num_indexed == [1, 1]
    assert attend(memory, again, [0]) == 0 and attend(memory, again, [1]) == 4


def test_the_one_kept_longest_makes_room(table: PageTable) -> None:
    memory = new_memory(3)
    for first_page in (10, 20, 30):
        state = request_of(table, [first_page, first_page + 1])
        memory.lend(state)
        attend(memory, state, [0])
        memory.end(state)
    newcomer = request_of(table, [40, 41])
    memory.lend(newcomer)
    assert attend(memory, newcomer, [0]) == 4  # nothing of the former owner is there
    for first_page, reused in ((20, 1), (30, 2)):
        memory.lend(request_of(table, [first_page, first_page + 1]))
        assert memory.num_reused == reused
    assert memory.num_kept == 0


def test_a_failed_request_leaves_nothing_behind(table: PageTable) -> None:
    memory = new_memory(2)
    state = request_of(table, [5, 6, 7])
    memory.lend(state)
    state.failure = "LOST_PAGE"
    memory.end(state)
    assert memory.num_kept == 0 and memory.windows.num_lent == 0


def test_a_request_without_device_memory_ends_quietly(table: PageTable) -> None:
    memory = new_memory(1)
    memory.end(request_of(table, [5, 6]))
    assert memory.num_kept == memory.num_held == 0


def test_there_is_never_more_than_planned(table: PageTable) -> None:
    chance, memory = random.Random(3), new_memory(3)
    running: list[RequestState] = []
    for _ in range(300):
        if len(running) < 3 and chance.random() < 0.6:
            begin = chance.randrange(1, 80)
            running.append(request_of(table, list(range(begin, begin + chance.randrange(1, 9)))))
            memory.lend(running[-1])
            attend(memory, running[-1], [0])
        elif running:
            memory.end(running.pop(chance.randrange(len(running))))
        assert memory.num_held <= 3 and len(running) + memory.num_kept <= 3
        rows = [state.window.row for state in running if state.window is not None]
        assert len(rows) == len(set(rows)) == len(running)
    assert memory.num_reused > 0
    memory.clear()
    assert memory.num_kept == 0


def test_more_requests_than_admitted_is_a_mistake(table: PageTable) -> None:
    memory = new_memory(1)
    memory.lend(request_of(table, [1, 2]))
    with pytest.raises(AssertionError, match="admitted"):
        memory.lend(request_of(table, [3, 4]))
