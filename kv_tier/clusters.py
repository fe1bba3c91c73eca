"""Clusters of a stretch's pages: which pages lie side by side in a segment (paper 7.2)."""

from __future__ import annotations

import torch


def cluster_pages(
    means: torch.Tensor, num_clusters: int, num_iterations: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group pages by the direction of their means: spherical k-means, every (layer, KV head) on its own.

    A pure function of ``means``: the first centroids are evenly spaced pages, ties go to the lower cluster, and a
    cluster that lost all pages keeps its centroid.

    Args:
        means: [pair, page, head_dim] any float dtype; pair = layer * num_kv_heads + kv_head.
        num_clusters: 1 .. page.

    Returns:
        (assignment [pair, page] int64, centroids [pair, num_clusters, head_dim] float32: mean of the members' means).
    """
    pages = means.float()
    num_pairs, num_pages, head_dim = pages.shape
    assert 1 <= num_clusters <= num_pages, (num_clusters, num_pages)
    unit = torch.nn.functional.normalize(pages, dim=-1)
    first = torch.arange(num_clusters) * num_pages // num_clusters
    centroids = unit[:, first]
    assignment = torch.zeros(num_pairs, num_pages, dtype=torch.int64)
    for _ in range(num_iterations):
        assignment = torch.bmm(unit, centroids.transpose(1, 2)).argmax(-1)
        index = assignment[:, :, None].expand(-1, -1, head_dim)
        sums = torch.zeros_like(centroids).scatter_add_(1, index, unit)
        length = sums.norm(dim=-1, keepdim=True)
        centroids = torch.where(length > 0, sums / length.clamp(min=1e-20), centroids)
    index = assignment[:, :, None].expand(-1, -1, head_dim)
    sums = torch.zeros_like(centroids).scatter_add_(1, index, pages)
    counts = torch.zeros(num_pairs, num_clusters).scatter_add_(
        1, assignment, torch.ones_like(assignment, dtype=torch.float32)
    )
    return assignment, sums / counts.clamp(min=1)[:, :, None]
