"""`kvdrive tune`: which window size, centroid count and micro-batch size make a decode step fastest on this machine.

The search is pure: it asks for the cost of settings, one field after another, and stops in time. What a setting costs is
measured on the store itself, over a made-up batch in the model's shape (paper 6.2: a short run before serving).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

LEAST_GAIN = 0.03  # of the time: less is noise, and the setting that is known stays
ROUNDS = 3


@dataclass(frozen=True)
class Settings:
    """What is tuned; fields of ``KVDriveConfig``.

    Args:
        window_multiple: window caches, in budgets.
        pages_per_cluster: pages of a stretch for each of its centroids.
        micro_batch: requests.
    """

    window_multiple: int = 2
    pages_per_cluster: int = 8
    micro_batch: int = 0


FIELDS: Final = ("window_multiple", "micro_batch", "pages_per_cluster")


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        best: the settings that cost least.
        tried: cost of everything that was asked for, in order.
        complete: whether time sufficed to try all that the search wanted to.
    """

    best: Settings
    tried: Mapping[Settings, float]
    complete: bool


def search(
    values: Mapping[str, Sequence[int]],
    start: Settings,
    cost: Callable[[Settings], float],
    clock: Callable[[], float],
    limit_s: float,
) -> Search:
    """Improve one field after another until no field can be, or time is up.

    A field takes the value that costs least with the others as they are, if that is ``LEAST_GAIN`` better than what it
    has. Nothing is begun that would not end in time if it took as long as the longest so far; the start is always tried.

    Args:
        values: what each of ``FIELDS`` may be.
        cost: seconds of a step, or anything else to be small; asked once for each settings.
        clock: seconds.
        limit_s: how long all calls of ``cost`` may take.
    """
    began = last = clock()
    longest = 0.0
    tried = {start: cost(start)}
    best, settled = start, 0
    fields = [name for name in FIELDS if len(values.get(name, ())) > 0]
    complete = True
    while settled < len(fields) and complete:
        for name in fields:
            found = best
            for value in values[name]:
                candidate = replace(best, **{name: value})
                if candidate not in tried:
                    now = clock()
                    longest, last = max(longest, now - last), now
                    if now - began + longest > limit_s:
                        complete = False
                        break
                    tried[candidate] = cost(candidate)
                if tried[candidate] < tried[found]:
                    found = candidate
            if tried[found] < (1 - LEAST_GAIN) * tried[best]:
                best, settled = found, 1
            else:
                settled += 1
            if settled >= len(fields) or not complete:
                break
    return Search(best, tried, complete)


@dataclass(frozen=True)
class Tuned:
    """What tuning ends with.

    Attributes:
        best: the settings to use: those of the search, or the start if they did not prove better.
        start_cost, best_cost: medians of measurements that alternated.
    """

    best: Settings
    start_cost: float
    best_cost: float


def confirm(
    found: Search,
    start: Settings,
    cost: Callable[[Settings], float],
    clock: Callable[[], float],
    limit_s: float,
) -> Tuned:
    """Measure start and best again, in turn, as often as time allows (at most ``ROUNDS`` times), and keep the better."""
    if found.best == start:
        return Tuned(start, found.tried[start], found.tried[start])
    began = clock()
    costs: dict[Settings, list[float]] = {start: [found.tried[start]], found.best: [found.tried[found.best]]}
    for number in range(ROUNDS):
        if number and clock() - began > limit_s * number / (number + 1):
            break
        for settings, several in costs.items():
            several.append(cost(settings))
    before, after = (median(several[1:]) for several in costs.values())
    best = found.best if after < (1 - LEAST_GAIN) * before else start
    return Tuned(best, before, after if best == found.best else before)
