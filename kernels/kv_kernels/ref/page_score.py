"""Definition of the page score: how much of a step's attention a page's mean promises."""

import torch


def page_score(
    query: torch.Tensor, means: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every page: sum over the group of the softmax over pages of query . mean * scale.

    Args:
        query: [..., kv_head, group, head_dim] float; several query tokens count as a larger group.
        means: [..., kv_head, page, head_dim] float, mean keys after RoPE.
        scale: the model's attention scale, usually head_dim ** -0.5.
        lengths: [request] integer, pages that count per request, at least 1; the leading axis must then be the
            only one. None: all pages count.

    Returns:
        [..., kv_head, page] float32; -inf for pages that do not count.
    """
    logits = query.float() @ means.float().transpose(-1, -2) * scale  # [..., kv_head, group, page]
    if lengths is None:
        return logits.softmax(-1).sum(-2)
    beyond = (
        torch.arange(means.shape[-2], device=means.device) >= lengths[:, None, None]
    )  # [request, 1, page]
    scores = logits.masked_fill(beyond[:, :, None], float("-inf")).softmax(-1).sum(-2)
    return scores.masked_fill(beyond, float("-inf"))
