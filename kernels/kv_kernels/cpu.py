"""CPU formulations that are faster than the definition and equal to it, bit for bit."""

import torch

from kv_kernels import compiled


def topk_pages(scores: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Select pages as `ref.topk_pages` does: find the score of the last place, then pass once over the pages."""
    flat = scores.reshape(-1, scores.shape[-1])
    chosen = torch.empty(flat.shape[0], num_pages, dtype=torch.int64)
    compiled.topk(flat.contiguous().numpy(), chosen.numpy())
    return chosen.view(*scores.shape[:-1], num_pages)
