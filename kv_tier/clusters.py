"""Clusters of a stretch's pages: which pages lie side by side in a segment (paper 7.2)."""

from __future__ import annotations

import torch

from kv_kernels import dispatch


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
    num_pairs, num_pages, _ = pages.shape
    assert 1 <= num_clusters <= num_pages, (num_clusters, num_pages)
    unit = torch.nn.functional.normalize(pages, dim=-1)
    first = torch.arange(num_clusters) * num_pages // num_clusters
    centroids = unit[:, first]
    assignment = torch.zeros(num_pairs, num_pages, dtype=torch.int64)
    for _ in range(num_iterations):
        assignment = dispatch.cluster_assign(unit, centroids)
        sums, _ = dispatch.cluster_sums(unit, assignment, num_clusters)
        length = sums.norm(dim=-1, keepdim=True)
        centroids = torch.where(length > 0, sums / length.clamp(min=1e-20), centroids)
    sums, counts = dispatch.cluster_sums(pages, assignment, num_clusters)
    return assignment, sums / counts.clamp(min=1)[:, :, None]
