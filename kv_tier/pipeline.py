"""The elastic pipeline (paper, chapter 6): in which order the stages of one layer's micro-batches run.

    select   score pages, pick the budget's, look them up, begin to read what neither window nor DRAM has
    fetch    choose victims, copy what DRAM has, wait for what was begun, check it, put it into the window caches
    attend   append the new token, gather, attend

    ahead 0      S0 F0 A0 S1 F1 A1 S2 F2 A2      every stage waits for the former
    ahead 1      S0 S1 F0 A0 S2 F1 A1 F2 A2
    ahead None   S0 S1 S2 F0 A0 F1 A1 F2 A2      all reads are under way before anybody waits for one

A plan is a value; ``within_budget.SparseBatch`` runs it. It decides when, never what: no number depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Stage = Literal["select", "fetch", "attend"]

AUTO = 0
AUTO_PARTS = 4  # most micro-batches that a batch is cut into by itself
READS_PER_PART = 64  # a micro-batch costs about as much bookkeeping as so many reads take


@dataclass(frozen=True)
class LayerPlan:
    """What runs when in one layer.

    Attributes:
        parts: half-open ranges of requests, the micro-batches; together the batch.
        order: (stage, number of the part), each once; of one part select before fetch before attend, and attend in the
            order of the parts.
    """

    parts: tuple[tuple[int, int], ...]
    order: tuple[tuple[Stage, int], ...]


@lru_cache(maxsize=256)
def plan_layer(num_requests: int, micro_batch: int, ahead: int | None = None) -> LayerPlan:
    """Cut a batch and order its stages.

    Args:
        micro_batch: requests per micro-batch, at least 1; the last one may have fewer.
        ahead: micro-batches that are selected beyond the one that is fetched next; None for all.
    """
    assert num_requests >= 0 and micro_batch >= 1 and (ahead is None or ahead >= 0), (micro_batch, ahead)
    begins = range(0, num_requests, micro_batch)
    parts = tuple((begin, min(begin + micro_batch, num_requests)) for begin in begins)
    order: list[tuple[Stage, int]] = []
    selected = 0
    for number in range(len(parts)):
        last = len(parts) if ahead is None else min(number + ahead + 1, len(parts))
        order += [("select", later) for later in range(selected, last)]
        selected = last
        order += [("fetch", number), ("attend", number)]
    return LayerPlan(parts, tuple(order))


@dataclass(frozen=True)
class Pipeline:
    """How decode batches are cut into micro-batches.

    Args:
        micro_batch: requests per micro-batch; with ``AUTO`` each has at least ``READS_PER_PART`` pages to read, and there are
            at most ``AUTO_PARTS``: where DRAM has everything, the batch stays whole.
        ahead: as in ``plan_layer``.
    """

    micro_batch: int = AUTO
    ahead: int | None = None

    def plan(self, num_requests: int, expected_reads: float) -> LayerPlan:
        """Return the plan of a batch that will read about ``expected_reads`` pages from SSD in this layer."""
        size = self.micro_batch
        if size == AUTO:
            size = -(-num_requests // max(1, min(AUTO_PARTS, int(expected_reads) // READS_PER_PART)))
        return plan_layer(num_requests, max(1, size), self.ahead)
