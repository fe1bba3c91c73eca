"""What every thread beside the scheduler's does first."""

import torch


def compute_on_one_core() -> None:
    """Let torch's operations of this thread use this thread alone.

    A second team of OpenMP threads would make more of them than cores, whereupon libgomp no longer waits awake between
    two operations of anybody's: a token's matrix products take half as long again (benchmarks/NOTES.md). Threads that
    compute already keep what they have; those that begin later get one core too, so the scheduler's must have computed
    (loading the model does).
    """
    torch.set_num_threads(1)
