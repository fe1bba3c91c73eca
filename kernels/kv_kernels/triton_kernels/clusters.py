"""Triton twins of `ref.cluster_assign` and `ref.cluster_sums`; no atomics, so that sums do not depend on timing."""

import torch
import triton
import triton.language as tl

ROW_TILE = 32
CLUSTER_TILE = 32


@triton.jit
def _assign_kernel(
    rows, centroids, assignment, num_rows, num_clusters,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
):  # fmt: skip
    """Find the nearest centroid of one tile of rows."""
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    rows_at = rows + (pair * num_rows + row[:, None]) * HEAD_DIM + dim[None, :]
    x = tl.load(rows_at, mask=row[:, None] < num_rows, other=0.0).to(tl.float32)
    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    nearest = tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, num_clusters, CLUSTERS):
        cluster = begin + tl.arange(0, CLUSTERS)
        at = centroids + (pair * num_clusters + cluster[:, None]) * HEAD_DIM + dim[None, :]
        c = tl.load(at, mask=cluster[:, None] < num_clusters, other=0.0).to(tl.float32)
        product = tl.dot(x, tl.trans(c), input_precision="tf32x3")
        product = tl.where(cluster[None, :] < num_clusters, product, float("-inf"))
        top = tl.max(product, axis=1)
        here = begin + tl.argmax(product, 1, tie_break_left=True)
        nearest = tl.where(top > best, here, nearest)
        best = tl.maximum(best, top)
    tl.store(assignment + pair * num_rows + row, nearest.to(tl.int64), mask=row < num_rows)


@triton.jit
def _sums_kernel(
    rows, assignment, sums, counts, num_rows, num_clusters,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
):  # fmt: skip
    """Add up the members of one tile of clusters, in ascending order of rows."""
    pair = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    dim = tl.arange(0, HEAD_DIM)
    total = tl.zeros([CLUSTERS, HEAD_DIM], dtype=tl.float32)
    count = tl.zeros([CLUSTERS], dtype=tl.float32)
    for begin in range(0, num_rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        owner = tl.load(assignment + pair * num_rows + row, mask=row < num_rows, other=-1)
        at = rows + (pair * num_rows + row[:, None]) * HEAD_DIM + dim[None, :]
        x = tl.load(at, mask=row[:, None] < num_rows, other=0.0).to(tl.float32)
        member = (owner[None, :] == cluster[:, None]).to(tl.float32)
        total += tl.dot(member, x, input_precision="tf32x3")
        count += tl.sum(member, axis=1)
    inside = cluster < num_clusters
    at = pair * num_clusters + cluster
    tl.store(sums + at[:, None] * HEAD_DIM + dim[None, :], total, mask=inside[:, None])
    tl.store(counts + at, count, mask=inside)


def cluster_assign(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Assign rows to centroids as `ref.cluster_assign` does."""
    pairs, num_rows, head_dim = rows.shape
    assignment = torch.empty(pairs, num_rows, dtype=torch.int64, device=rows.device)
    _assign_kernel[(triton.cdiv(num_rows, ROW_TILE), pairs)](
        rows.contiguous(), centroids.contiguous(), assignment, num_rows, centroids.shape[1],
        HEAD_DIM=head_dim, ROWS=ROW_TILE, CLUSTERS=CLUSTER_TILE, num_warps=8,
    )  # fmt: skip
    return assignment


def cluster_sums(
    rows: torch.Tensor, assignment: torch.Tensor, num_clusters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows of every cluster as `ref.cluster_sums` does."""
    pairs, num_rows, head_dim = rows.shape
    sums = torch.empty(pairs, num_clusters, head_dim, dtype=torch.float32, device=rows.device)
    counts = torch.empty(pairs, num_clusters, dtype=torch.float32, device=rows.device)
    _sums_kernel[(triton.cdiv(num_clusters, CLUSTER_TILE), pairs)](
        rows.contiguous(), assignment.contiguous(), sums, counts, num_rows, num_clusters,
        HEAD_DIM=head_dim, ROWS=ROW_TILE, CLUSTERS=CLUSTER_TILE,
    )  # fmt: skip
    return sums, counts
