"""Definition of one step of spherical k-means: assign rows to centroids, then add up the members."""

import torch


def cluster_assign(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the centroid of the largest product for every row; ties go to the lower centroid.

    Args:
        rows: [pair, row, head_dim] float, page means, usually of length 1.
        centroids: [pair, cluster, head_dim] float, of length 1 for the spherical distance.

    Returns:
        [pair, row] int64.
    """
    return torch.bmm(rows.float(), centroids.float().mT).argmax(-1)


def cluster_sums(
    rows: torch.Tensor, assignment: torch.Tensor, num_clusters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows of every cluster.

    Args:
        rows: [pair, row, head_dim] float.
        assignment: [pair, row] int64, 0 .. num_clusters.

    Returns:
        (sums [pair, num_clusters, head_dim] float32, counts [pair, num_clusters] float32).
    """
    rows = rows.float()
    num_pairs, _, dim = rows.shape
    sums = rows.new_zeros(num_pairs, num_clusters, dim)
    sums.scatter_add_(1, assignment[:, :, None].expand_as(rows), rows)
    counts = rows.new_zeros(num_pairs, num_clusters)
    return sums, counts.scatter_add_(1, assignment, torch.ones_like(assignment, dtype=torch.float32))
