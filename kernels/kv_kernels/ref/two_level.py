"""Definition of the two-level score: centroids pick candidate pages, page means rank inside (paper 4)."""

import torch

from kv_kernels.ref.page_score import page_score
from kv_kernels.ref.topk_pages import topk_pages


def cluster_score(
    query: torch.Tensor, centroids: torch.Tensor, cluster_of: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score every page by its cluster: `page_score` with every page's mean replaced by its cluster's centroid.

    Args:
        query: [..., kv_head, group, head_dim] float; several query tokens count as a larger group.
        centroids: [..., kv_head, cluster, head_dim] float. A page outside of closed stretches is a cluster by itself.
        cluster_of: [..., kv_head, page] integer: each page's cluster, -1 for pages that do not count.
        scale: the model's attention scale, usually head_dim ** -0.5.

    Returns:
        [..., kv_head, page] float32; -inf for pages that do not count. At least one page must count.
    """
    logits = query.float() @ centroids.float().mT * scale  # [..., kv_head, group, cluster]
    index = cluster_of.long().clamp(min=0)[..., None, :].expand(*logits.shape[:-1], -1)
    absent = cluster_of < 0
    of_page = logits.gather(-1, index).masked_fill(absent[..., None, :], float("-inf"))
    return of_page.softmax(-1).sum(-2).masked_fill(absent, float("-inf"))


def candidate_score(
    query: torch.Tensor, means: torch.Tensor, candidates: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score candidate pages among each other: `page_score` over the candidates' means alone.

    Args:
        query: [request, kv_head, group, head_dim] float.
        means: [request, kv_head, page, head_dim] float; of these only the candidates' are read.
        candidates: [request, kv_head, candidate] integer page ordinals, -1 after the last one; at least one.
        scale: the model's attention scale.

    Returns:
        [request, kv_head, page] float32; -inf for pages that are no candidates.
    """
    requests, heads, num_pages, dim = means.shape
    index = candidates.long().clamp(min=0)[..., None].expand(-1, -1, -1, dim)
    lengths = (candidates >= 0).sum(-1).flatten()
    scores = page_score(
        query.flatten(0, 1)[:, None], means.gather(2, index).flatten(0, 1)[:, None], scale, lengths
    )
    return spread(scores.view(requests, heads, -1), candidates, num_pages)


def spread(scores: torch.Tensor, pages: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Put scores [..., candidate] to the places `pages` [..., candidate] of [..., num_pages], -inf elsewhere; -1 pads."""
    whole = scores.new_full((*scores.shape[:-1], num_pages + 1), float("-inf"))
    return whole.scatter_(-1, pages.long().masked_fill(pages < 0, num_pages), scores)[
        ..., :num_pages
    ].contiguous()


def two_level_score(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_of: torch.Tensor,
    means: torch.Tensor,
    scale: float,
    num_candidates: int,
) -> torch.Tensor:
    """Score the pages that their clusters promise most of; means may lie in host memory that the device can read.

    Args: as for `cluster_score` and `candidate_score`, with a request axis.
        num_candidates: pages whose means are read per (request, KV head), usually twice the budget.

    Returns:
        [request, kv_head, page] float32; -inf for pages that are no candidates.
    """
    candidates = topk_pages(cluster_score(query, centroids, cluster_of, scale), num_candidates)
    return candidate_score(query, means, candidates, scale)
