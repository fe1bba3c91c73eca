from __future__ import annotations

import pytest
import torch

from kv_tier.index import rank_by_means
from kv_tier.meta.errors import ConfigError
from kv_tier.selection import Budget, Scope, select_pages
from tests.models.attention_model import selected_pages

SIZE, DIM, SCALE = 4, 16, 0.25


def budget_of(pages: int | None, sinks: int = 4, local: int = 8) -> Budget:
    return Budget(pages, num_sink_tokens=sinks, local_window_tokens=local, page_size=SIZE)


@pytest.mark.parametrize(("sinks", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_sinks_are_rounded_outward(sinks: int, pages: int) -> None:
    assert budget_of(32, sinks=sinks).num_sink_pages == pages


@pytest.mark.parametrize(("num_tokens", "page"), [(3, 0), (8, 0), (9, 0), (11, 0), (12, 1), (13, 1), (40, 8)])
def test_the_local_window_is_rounded_outward(num_tokens: int, page: int) -> None:
    budget = budget_of(32)
    assert budget.first_local_page(num_tokens) == page
    assert page * SIZE <= max(0, num_tokens - 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            (4, 4, 8),
            "budget_tokens=16 leaves nothing to select: num_sink_tokens=4 and local_window_tokens=8 "
            "alone take 16; raise budget_tokens to at least 20",
        ),
        ((0, 4, 8), "budget_tokens=0"),
        ((9, 4, 0), "local_window_tokens=0: must be at least 1"),
        ((9, -1, 8), "num_sink_tokens=-1: must not be negative"),
    ],
)
def test_refusals_name_the_values(settings: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        budget_of(*settings)
    assert message in str(refusal.value)


def test_the_least_budget_is_accepted() -> None:
    assert budget_of(5).pages == 5


def test_a_budget_of_all_pages_covers_the_sequence() -> None:
    assert budget_of(5).covers(5) and not budget_of(5).covers(6)
    assert budget_of(None).covers(10**9)


@pytest.mark.parametrize("num_tokens", [29, 31, 32, 33, 63, 64, 100])
@pytest.mark.parametrize("pages", [5, 6, 7])
@pytest.mark.parametrize("group", [1, 3])
def test_selection_equals_the_slow_definition(num_tokens: int, pages: int, group: int) -> None:
    torch.manual_seed(num_tokens + pages)
    budget = budget_of(pages)
    num_pages = -(-num_tokens // SIZE)
    keys = torch.randn(2, num_tokens, DIM).to(torch.bfloat16)
    query = torch.randn(2, group, DIM).to(torch.bfloat16)
    full = keys[:, : (num_pages - 1) * SIZE].float().unflatten(1, (-1, SIZE))
    means = full.mean(2).to(torch.bfloat16).float()
    scope = Scope(num_pages - 1, num_pages, budget.first_local_page(num_tokens), budget)
    scores = rank_by_means(query, means, scope, SCALE)
    selected = select_pages(scores, budget)
    assert selected.shape == (2, pages)
    for head in range(2):
        expected = selected_pages(
            query[head],
            keys[head],
            num_tokens,
            budget_pages=pages,
            num_sink_tokens=4,
            local_window_tokens=8,
            page_size=SIZE,
            scale=SCALE,
        )
        assert selected[head].tolist() == expected


def test_equal_scores_go_to_the_lower_pages() -> None:
    budget = budget_of(7)
    scores = Scope(19, 20, 17, budget).complete(torch.ones(1, 19))
    assert select_pages(scores, budget).tolist() == [[0, 1, 2, 3, 17, 18, 19]]
