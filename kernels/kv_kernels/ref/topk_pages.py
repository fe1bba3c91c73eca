"""Definition of page selection: the best pages, in ascending order."""

import torch


def topk_pages(scores: torch.Tensor, num_pages: int, budgets: torch.Tensor | None = None) -> torch.Tensor:
    """Return the pages of the highest score, within the budget; ties go to the lower page.

    Args:
        scores: [..., page] float32; a page that scores -inf is never chosen.
        num_pages: pages to choose, at most scores.shape[-1].
        budgets: [...] integer, pages to choose in every row, at most num_pages; None: num_pages in all.

    Returns:
        [..., num_pages] int64, ascending page ordinals, then -1 where fewer pages were chosen.
    """
    best = scores.sort(dim=-1, descending=True, stable=True)  # stable: the lower page first among equals
    last = scores.shape[-1]
    indices = best.indices.masked_fill(best.values == float("-inf"), last)[..., :num_pages]
    if budgets is not None:
        over = torch.arange(num_pages, device=scores.device) >= budgets[..., None]
        indices = indices.masked_fill(over, last)
    chosen = indices.sort(dim=-1).values
    return chosen.masked_fill(chosen == last, -1)
