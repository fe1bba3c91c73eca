"""Definition of the gather: selected pages side by side."""

import torch


def gather_pages(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy the pages named by `index` out of every head's pool.

    Args:
        pool: [kv_head, place, width] any dtype; width is what one page holds, page_size * head_dim or twice that.
        index: [kv_head, selected] integer places; -1 pads, and its row holds place 0, to be hidden by a length.

    Returns:
        [kv_head, selected, width], contiguous, in the pool's dtype.
    """
    return torch.stack([pages[places.clamp(min=0)] for pages, places in zip(pool, index, strict=True)])
