"""Triton twin of `ref.topk_pages`: find the score of the last place bit by bit, then pass once over the pages."""

import torch
import triton
import triton.language as tl

MAX_TILE = 16384


@triton.jit
def _keys(scores, page, num_pages):
    """Return int32 keys in the order of the scores; -inf, and what lies beyond, get the lowest."""
    score = tl.load(scores + page, mask=page < num_pages, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score == float("-inf"), -2147483648, key)


@triton.jit
def _count_above(scores, bound, num_pages, TILE: tl.constexpr):
    """Return how many keys are larger than `bound`."""
    count = 0
    for begin in range(0, num_pages, TILE):
        key = _keys(scores, begin + tl.arange(0, TILE), num_pages)
        count += tl.sum((key > bound).to(tl.int32), axis=0)
    return count


@triton.jit
def _topk_kernel(scores, budgets, chosen, num_pages, num_chosen, TILE: tl.constexpr):
    """Choose the pages of one row."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * num_pages
    lowest = -2147483648
    budget = tl.minimum(tl.load(budgets + row).to(tl.int32), _count_above(scores, lowest, num_pages, TILE))
    # border: the largest key that at least `budget` pages reach; first its sign, then bit by bit
    border = tl.where(_count_above(scores, -1, num_pages, TILE) >= budget, 0, lowest)
    for step in range(31):
        higher = border + (1 << (30 - step))
        border = tl.where(_count_above(scores, higher - 1, num_pages, TILE) >= budget, higher, border)
    ties = budget - _count_above(scores, border, num_pages, TILE)  # how many of the last score are taken
    place = 0
    for begin in range(0, num_pages, TILE):
        page = begin + tl.arange(0, TILE)
        key = _keys(scores, page, num_pages)
        tied = (key == border).to(tl.int32)
        taken_tie = (tied > 0) & (tl.cumsum(tied, axis=0) <= ties)
        taken = ((key > border) | taken_tie).to(tl.int32)
        at = place + tl.cumsum(taken, axis=0) - 1
        tl.store(chosen + row.to(tl.int64) * num_chosen + at, page.to(tl.int64), mask=taken > 0)
        place += tl.sum(taken, axis=0)
        ties -= tl.sum(taken_tie.to(tl.int32), axis=0)


def topk_pages(
    scores: torch.Tensor, num_pages: int, budgets: torch.Tensor | None = None, *, max_tile: int = MAX_TILE
) -> torch.Tensor:
    """Choose pages as `ref.topk_pages` does; `max_tile` scores at a time, a power of two."""
    total = scores.shape[-1]
    rows = scores.numel() // total
    chosen = torch.full((*scores.shape[:-1], num_pages), -1, dtype=torch.int64, device=scores.device)
    if budgets is None:
        budgets = torch.full((rows,), num_pages, dtype=torch.int32, device=scores.device)
    tile = min(max_tile, max(128, triton.next_power_of_2(total)))
    _topk_kernel[(rows,)](
        scores.contiguous(), budgets.contiguous(), chosen, total, num_pages,
        TILE=tile, num_warps=16 if tile >= 4096 else 4,
    )  # fmt: skip
    return chosen
