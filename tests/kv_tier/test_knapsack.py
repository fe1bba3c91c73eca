"""The knapsack against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.knapsack import solve, solve_exact, solve_greedy
from kv_tier.meta.errors import CapacityError


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw (costs, benefits, capacity) that has a solution; costs and benefits rise or not, and tie."""
    classes, options = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    unit = draw(st.sampled_from([1, 3]))
    cells = st.lists(st.integers(0, 6), min_size=classes * options, max_size=classes * options)
    costs = unit * np.array(draw(cells)).reshape(classes, options)
    benefits = np.array(draw(cells), dtype=float).reshape(classes, options)
    least = int(costs.min(axis=1).sum())
    return costs, benefits, least + draw(st.integers(0, 10))


def totals(costs: np.ndarray, benefits: np.ndarray, options: np.ndarray) -> tuple[int, float]:
    rows = np.arange(len(costs))
    return int(costs[rows, options].sum()), float(benefits[rows, options].sum())


def best_of_all(costs: np.ndarray, benefits: np.ndarray, capacity: int) -> float:
    best = -1.0
    for options in product(range(costs.shape[1]), repeat=len(costs)):
        cost, benefit = totals(costs, benefits, np.array(options))
        if cost <= capacity:
            best = max(best, benefit)
    return best


@settings(max_examples=200, deadline=None)
@given(problems())
def test_dynamic_programming_finds_the_optimum(problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    costs, benefits, capacity = problem
    for options in (solve_exact(*problem), solve(*problem)):
        cost, benefit = totals(costs, benefits, options)
        assert cost <= capacity
        assert benefit == best_of_all(costs, benefits, capacity)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_greedy_is_at_most_one_step_below_the_optimum(problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    costs, benefits, capacity = problem
    cost, benefit = totals(costs, benefits, solve_greedy(*problem))
    assert cost <= capacity
    optimum = best_of_all(costs, benefits, capacity)
    cheapest = benefits[np.arange(len(costs)), costs.argmin(axis=1)]
    step = float((benefits.max(axis=1) - cheapest).max())
    assert optimum - step <= benefit <= optimum


def test_greedy_skips_a_size_that_only_pays_together_with_the_next() -> None:
    costs = np.array([[0, 1, 2], [0, 1, 2]])
    benefits = np.array([[0.0, 1.0, 10.0], [0.0, 4.0, 5.0]])
    assert solve_greedy(costs, benefits, 2).tolist() == [2, 0]
    assert solve_greedy(costs, benefits, 3).tolist() == [2, 1]


def test_many_windows_are_solved_greedily_and_close_to_the_optimum() -> None:
    chance = np.random.default_rng(0)
    sizes = np.arange(1, 9)
    costs = np.tile(sizes * 131_072 + 7, (200, 1))
    benefits = chance.random((200, 1)) * (1 - chance.random((200, 1)) ** sizes)
    capacity = int(costs[:, 2].sum())
    cost, benefit = totals(costs, benefits, solve(costs, benefits, capacity))
    assert cost <= capacity
    by_page = np.tile(sizes, (200, 1))
    _, optimum = totals(by_page, benefits, solve_exact(by_page, benefits, 600))
    assert 0.999 * optimum < benefit <= optimum + 1e-9


def test_what_cannot_hold_the_cheapest_is_refused() -> None:
    costs = np.array([[2, 3], [4, 4]])
    for solver in (solve, solve_exact, solve_greedy):
        with pytest.raises(CapacityError, match="raise it to 6"):
            solver(costs, costs.astype(float), 5)
