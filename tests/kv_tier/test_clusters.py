from __future__ import annotations

import pytest
import torch

from kv_tier.clusters import cluster_pages


@pytest.mark.parametrize(("num_pages", "num_clusters"), [(1, 1), (5, 1), (7, 3), (16, 16), (63, 7)])
def test_every_page_is_in_one_cluster_whose_centroid_is_the_mean(num_pages: int, num_clusters: int) -> None:
    torch.manual_seed(num_pages)
    means = torch.randn(3, num_pages, 16)
    assignment, centroids = cluster_pages(means, num_clusters)
    assert assignment.shape == (3, num_pages) and centroids.shape == (3, num_clusters, 16)
    assert int(assignment.min()) >= 0 and int(assignment.max()) < num_clusters
    for pair in range(3):
        for cluster in range(num_clusters):
            members = means[pair][assignment[pair] == cluster]
            expected = members.mean(0) if len(members) else torch.zeros(16)
            torch.testing.assert_close(centroids[pair, cluster], expected)


def test_pages_of_two_directions_are_told_apart() -> None:
    torch.manual_seed(0)
    axes = torch.eye(16)[:2]
    kind = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    means = (4 * axes[kind] + 0.1 * torch.randn(8, 16))[None]
    assignment, _ = cluster_pages(means, 2)
    assert len(set(zip(kind.tolist(), assignment[0].tolist(), strict=True))) == 2


def test_clusters_depend_on_the_means_alone() -> None:
    torch.manual_seed(1)
    means = torch.randn(4, 12, 16).to(torch.bfloat16)
    alone = [cluster_pages(means[i : i + 1], 3) for i in range(4)]
    assignment, centroids = cluster_pages(means, 3)
    assert torch.equal(assignment, torch.cat([a for a, _ in alone]))
    assert torch.equal(centroids, torch.cat([c for _, c in alone]))


def test_identical_pages_go_to_the_lowest_cluster() -> None:
    assignment, centroids = cluster_pages(torch.ones(1, 6, 16), 3)
    assert assignment.tolist() == [[0] * 6]
    assert torch.equal(centroids[0, 1:], torch.zeros(2, 16))  # a cluster without pages
