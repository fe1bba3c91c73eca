"""Definition of page selection: the best pages, in ascending order."""

import torch


def topk_pages(scores: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return the `num_pages` pages of the highest score; ties go to the lower page.

    Args:
        scores: [..., page] float32; a page that scores -inf is never chosen.
        num_pages: pages to choose, at most scores.shape[-1].

    Returns:
        [..., num_pages] int64, ascending page ordinals, then -1 where fewer pages could be chosen.
    """
    best = scores.sort(dim=-1, descending=True, stable=True)  # stable: the lower page first among equals
    last = scores.shape[-1]
    chosen = best.indices.masked_fill(best.values == float("-inf"), last)[..., :num_pages].sort(dim=-1).values
    return chosen.masked_fill(chosen == last, -1)
