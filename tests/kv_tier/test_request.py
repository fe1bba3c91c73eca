from __future__ import annotations

import numpy as np
import torch

from kv_tier.index import MEANS, DeviceMeans
from kv_tier.page_table import PageTable
from kv_tier.request import RequestState
from kv_tier.window import WindowCaches
from tests.models.synthetic_engine import GEOMETRY

MAX_PAGES = 8


def filled_state() -> tuple[RequestState, PageTable]:
    """Return a request of six pages, 10..15, all in its window cache and all but the last in its index."""
    table = PageTable(GEOMETRY, 40)
    for layer, means in enumerate(table.means):
        means.add_(torch.arange(40, dtype=means.dtype)[:, None, None] + layer)
    state = RequestState(0, 1, MAX_PAGES)
    state.sync(torch.arange(10, 16), table)
    slots = np.full((GEOMETRY.num_layers, GEOMETRY.num_kv_heads), MAX_PAGES)
    caches = WindowCaches(GEOMETRY, slots, MAX_PAGES, 1)
    state.window = caches.lend()
    state.index = MEANS.build(GEOMETRY, table).device(MAX_PAGES)
    for layer in range(GEOMETRY.num_layers):
        selected = np.tile(np.arange(6), (1, GEOMETRY.num_kv_heads, 1))
        caches.admit(layer, np.array([state.window.row]), selected, None)
        state.index.extend_to(layer, 5, state.pages)
    return state, table


def resident(state: RequestState) -> list[int]:
    assert state.window is not None
    state.window.caches.check_integrity()
    held = {tuple(state.window.pages(layer, head)) for layer in range(2) for head in range(2)}
    assert len(held) == 1
    return list(held.pop())


def test_the_index_holds_the_means_of_the_pages_in_order() -> None:
    state, _ = filled_state()
    assert isinstance(state.index, DeviceMeans)
    for layer in range(GEOMETRY.num_layers):
        state.index.extend_to(layer, 5, state.pages)
        assert state.index.blocks[layer][0, 0, 0, :5].tolist() == [
            10 + layer,
            11 + layer,
            12 + layer,
            13 + layer,
            14 + layer,
        ]


def test_growing_keeps_what_is_cached() -> None:
    state, table = filled_state()
    state.sync(torch.arange(10, 18), table)
    assert resident(state) == [0, 1, 2, 3, 4, 5]
    assert state.index is not None and state.index.num_indexed == [5, 5]
    assert state.num_pages == 8


def test_a_rewritten_row_drops_the_pages_that_changed() -> None:
    state, table = filled_state()
    state.sync(torch.tensor([10, 11, 30, 13, 31, 15]), table)
    assert resident(state) == [0, 1, 3, 5]
    assert state.index is not None and state.index.num_indexed == [2, 2]


def test_a_page_in_another_life_is_another_page() -> None:
    state, table = filled_state()
    table.reset(np.array([12]))
    state.sync(torch.arange(10, 16), table)
    assert resident(state) == [0, 1, 3, 4, 5]


def test_a_shorter_row_drops_the_pages_beyond_its_end() -> None:
    state, table = filled_state()
    state.sync(torch.arange(10, 13), table)
    assert resident(state) == [0, 1, 2]
    assert state.index is not None and state.index.num_indexed == [3, 3]
    state.sync(torch.tensor([10, 11, 12, 33]), table)
    assert resident(state) == [0, 1, 2]
