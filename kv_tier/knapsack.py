"""The multiple-choice knapsack (paper 5.2): one window size for every (layer, KV head), together within a capacity."""

from __future__ import annotations

import heapq

import numpy as np

from kv_tier.meta.errors import CapacityError

EXACT_CELLS = 20_000_000  # classes * options * capacity units that dynamic programming may visit


def solve(costs: np.ndarray, benefits: np.ndarray, capacity: int) -> np.ndarray:
    """Choose one option per class: exactly where that is cheap, else greedily.

    Args:
        costs: [class, option] int64, not negative.
        benefits: [class, option] float64.
        capacity: what the chosen costs may add up to.

    Returns:
        [class] int64, the chosen options.

    Raises:
        CapacityError: the cheapest options together exceed the capacity.
    """
    num_units = capacity // _unit(costs) + 1
    exact = costs.size * num_units <= EXACT_CELLS
    return solve_exact(costs, benefits, capacity) if exact else solve_greedy(costs, benefits, capacity)


def solve_exact(costs: np.ndarray, benefits: np.ndarray, capacity: int) -> np.ndarray:
    """Choose the options of the greatest total benefit, by dynamic programming over the capacity.

    Arguments, result and errors as for ``solve``; time and memory grow with classes * options * capacity / (greatest
    common divisor of the costs).
    """
    _require_room(costs, capacity)
    unit = _unit(costs)
    weights, limit = costs // unit, capacity // unit
    best = np.zeros(limit + 1)  # greatest benefit of the classes so far within each capacity
    chosen = np.zeros((len(costs), limit + 1), dtype=np.int16)
    for row, (weight, benefit) in enumerate(zip(weights.tolist(), benefits.tolist(), strict=True)):
        with_option = np.full((len(weight), limit + 1), -np.inf)
        for option, (w, b) in enumerate(zip(weight, benefit, strict=True)):
            if w <= limit:
                with_option[option, w:] = best[: limit + 1 - w] + b
        chosen[row] = with_option.argmax(axis=0)
        best = with_option.max(axis=0)
    options, left = np.zeros(len(costs), dtype=np.int64), limit
    for row in range(len(costs) - 1, -1, -1):
        options[row] = chosen[row, left]
        left -= int(weights[row, options[row]])
    return options


def solve_greedy(costs: np.ndarray, benefits: np.ndarray, capacity: int) -> np.ndarray:
    """Grow the window whose next size saves the most per byte, until nothing fits.

    Only sizes on the upper convex hull of a class are steps, so that efficiencies fall within it; what is left of the
    capacity then goes to any option that still fits. At most the benefit of one step below the optimum.

    Arguments, result and errors as for ``solve``.
    """
    _require_room(costs, capacity)
    hulls = [_upper_hull(cost, benefit) for cost, benefit in zip(costs, benefits, strict=True)]
    options = np.array([hull[0] for hull in hulls])
    left = capacity - int(costs[np.arange(len(costs)), options].sum())
    steps = [_step(costs[i], benefits[i], hull, 0, i) for i, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, row, place = heapq.heappop(steps)
        hull = hulls[row]
        extra = int(costs[row, hull[place + 1]] - costs[row, hull[place]])
        if extra > left:
            continue  # nor do later steps of this class: they come on top of this one
        left -= extra
        options[row] = hull[place + 1]
        if place + 2 < len(hull):
            heapq.heappush(steps, _step(costs[row], benefits[row], hull, place + 1, row))
    return _fill(costs, benefits, options, left)


def _fill(costs: np.ndarray, benefits: np.ndarray, options: np.ndarray, left: int) -> np.ndarray:
    """Spend what is left: the single change of the greatest gain that fits, as long as there is one."""
    rows = np.arange(len(costs))
    while True:
        extra = costs - costs[rows, options][:, None]
        gain = np.where(extra <= left, benefits - benefits[rows, options][:, None], 0.0)
        row, option = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[row, option] <= 0:
            return options
        left -= int(extra[row, option])
        options[row] = option


def _step(
    cost: np.ndarray, benefit: np.ndarray, hull: list[int], place: int, row: int
) -> tuple[float, int, int]:
    here, there = hull[place], hull[place + 1]
    return -float((benefit[there] - benefit[here]) / (cost[there] - cost[here])), row, place


def _upper_hull(cost: np.ndarray, benefit: np.ndarray) -> list[int]:
    """Return the options on the upper convex hull of (cost, benefit), from the cheapest, efficiencies falling."""
    hull: list[int] = []
    for option in np.lexsort((-benefit, cost)).tolist():
        if hull and (cost[option] == cost[hull[-1]] or benefit[option] <= benefit[hull[-1]]):
            continue  # dominated
        while len(hull) > 1 and _rise(cost, benefit, hull[-1], option) >= _rise(
            cost, benefit, hull[-2], hull[-1]
        ):
            hull.pop()
        hull.append(option)
    return hull


def _rise(cost: np.ndarray, benefit: np.ndarray, a: int, b: int) -> float:
    return float((benefit[b] - benefit[a]) / (cost[b] - cost[a]))


def _unit(costs: np.ndarray) -> int:
    return max(1, int(np.gcd.reduce(costs, axis=None)))


def _require_room(costs: np.ndarray, capacity: int) -> None:
    least = int(costs.min(axis=1).sum())
    if least > capacity:
        raise CapacityError(
            f"a capacity of {capacity} does not hold the cheapest options, which take {least}: raise it to {least}"
        )
