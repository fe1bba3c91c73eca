"""Selections of many queries at once equal what a decode step selects for each of them alone."""

from __future__ import annotations

import pytest
import torch

from kv_kernels import ref
from kv_tier.geometry import Geometry
from kv_tier.index import page_means, rank_by_means
from kv_tier.selection import Budget, Scope, select_pages
from kv_tier.sketch import SketchMaps, moments_of, solve_maps
from kvdrive_sglang.bench.selectors import (
    Chance,
    Clusters,
    KeySketch,
    Level,
    Means,
    Oracle,
    QuestBounds,
    Recent,
    Scorer,
    Selection,
    paged,
)

HEADS, GROUP, DIM, SIZE = 2, 3, 16, 4
PROMPT, NEW = 141, 7
SCALE = DIM**-0.5
BUDGET = Budget(9, num_sink_tokens=4, local_window_tokens=10, page_size=SIZE)
GEOMETRY = Geometry(1, HEADS, DIM, page_size=SIZE, stretch_tokens=32)


@pytest.fixture
def queries() -> torch.Tensor:
    return 3 * torch.randn(NEW, HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def keys() -> torch.Tensor:
    return torch.randn(HEADS, PROMPT + NEW, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def maps(queries: torch.Tensor, keys: torch.Tensor) -> SketchMaps:
    return solve_maps([moments_of(queries.permute(1, 0, 2, 3).flatten(1, 2), keys)], 8, num_positions=PROMPT)


def positions(pages: torch.Tensor, num_tokens: int) -> set[int]:
    return {p for page in pages.tolist() for p in range(page * SIZE, page * SIZE + SIZE) if p < num_tokens}


def test_page_means_select_what_a_step_selects(queries: torch.Tensor, keys: torch.Tensor) -> None:
    chosen = Selection([Level(Means(SIZE, SCALE))], BUDGET)(0, queries, keys)
    for t in range(NEW):
        num_tokens = PROMPT + t + 1
        num_pages = -(-num_tokens // SIZE)
        means = page_means(paged(keys[:, : (num_pages - 1) * SIZE], SIZE)).float()
        scope = Scope(num_pages - 1, num_pages, BUDGET.first_local_page(num_tokens), BUDGET)
        scores = rank_by_means(queries[t], means, scope, SCALE)
        for head, pages in enumerate(select_pages(scores, BUDGET)):
            got = {p for p in chosen[head, t].nonzero()[:, 0].tolist() if p < num_tokens}
            assert got == positions(pages, num_tokens)


def test_the_sketch_scores_as_its_definition_does(
    queries: torch.Tensor, keys: torch.Tensor, maps: SketchMaps
) -> None:
    scorer = KeySketch(maps, SIZE, SCALE)
    counts = torch.arange(37) < (torch.arange(PROMPT, PROMPT + NEW) // SIZE)[:, None]
    found = scorer.scores(0, queries, keys, counts[None])
    assert torch.equal(found, scorer.scores(0, queries, keys, counts[None]))  # also from what was kept
    for t in range(NEW):
        full = (PROMPT + t) // SIZE
        sketch = ref.sketch_build(keys[:, : full * SIZE], maps.key_map[0], maps.offset[0])
        wanted = ref.sketch_score(queries[t], sketch, maps.query_map[0], SCALE, SIZE)
        torch.testing.assert_close(found[:, t, :full], wanted)
        assert (found[:, t, full:] == float("-inf")).all()


def test_clusters_of_single_pages_are_page_means(queries: torch.Tensor, keys: torch.Tensor) -> None:
    by_means = Selection([Level(Means(SIZE, SCALE))], BUDGET)(0, queries, keys)
    assert torch.equal(Selection([Level(Clusters(GEOMETRY, 1, SCALE))], BUDGET)(0, queries, keys), by_means)


def test_a_first_level_that_keeps_everything_changes_nothing(
    queries: torch.Tensor, keys: torch.Tensor
) -> None:
    by_means = Selection([Level(Means(SIZE, SCALE))], BUDGET)(0, queries, keys)
    levels = [Level(Clusters(GEOMETRY, 4, SCALE), 5), Level(Means(SIZE, SCALE))]
    assert torch.equal(Selection(levels, BUDGET)(0, queries, keys), by_means)
    narrow = [Level(Clusters(GEOMETRY, 4, SCALE), 2), Level(Means(SIZE, SCALE))]
    assert not torch.equal(Selection(narrow, BUDGET)(0, queries, keys), by_means)


def test_every_selection_holds_the_ends_and_keeps_the_budget(
    queries: torch.Tensor, keys: torch.Tensor, maps: SketchMaps
) -> None:
    scorers: list[Scorer] = [
        Means(SIZE, SCALE),
        Clusters(GEOMETRY, 2, SCALE),
        KeySketch(maps, SIZE, SCALE),
        QuestBounds(SIZE, SCALE),
        Oracle(SIZE, SCALE),
        Recent(SIZE),
        Chance(SIZE),
    ]
    for scorer in scorers:
        chosen = Selection([Level(scorer)], BUDGET)(0, queries, keys)
        for t in range(NEW):
            num_tokens = PROMPT + t + 1
            pages = chosen[:, t, ::SIZE]
            local = pages[:, BUDGET.first_local_page(num_tokens) : -(-num_tokens // SIZE)]
            assert pages.sum(-1).tolist() == [BUDGET.pages] * HEADS
            assert bool(pages[:, 0].all())
            assert bool(local.all())


def test_the_oracle_takes_the_pages_of_most_mass_and_quest_bounds_the_logits(
    queries: torch.Tensor, keys: torch.Tensor
) -> None:
    counts = torch.ones(1, NEW, 37, dtype=torch.bool)
    mass = Oracle(SIZE, SCALE).scores(0, queries, keys, counts)
    weights = (queries[2, 1].float() @ keys[1].float().T * SCALE).softmax(-1).sum(0)
    torch.testing.assert_close(mass[1, 2], weights.view(37, SIZE).sum(-1))
    far = keys.clone()
    far[:, 17] += 40 * queries[0, :, 0].sign().bfloat16()
    assert int(QuestBounds(SIZE, SCALE).scores(0, queries, far, counts)[0, 0].argmax()) == 17 // SIZE
