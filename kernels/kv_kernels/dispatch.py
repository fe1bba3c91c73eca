"""Choose who computes: the definition (or its CPU formulation) for CPU tensors, Triton for CUDA tensors.

Signatures, shapes and meaning are those of `kv_kernels.ref`. Triton and FlashInfer are imported on first use, so
that the store works where neither is installed.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import torch

from kv_kernels import cpu, ref

FLASHINFER_HEAD_DIMS = (64, 128, 256)
SKETCH_BLOCK_PAGES = cpu.BLOCK_PAGES
MEAN_BLOCK_PAGES = cpu.MEAN_BLOCK_PAGES


def page_score(
    query: torch.Tensor, means: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every page; see `ref.page_score`."""
    return _of(query).page_score(query, means, scale, lengths)  # type: ignore[no-any-return]


def mean_blocks(num_heads: int, num_pages: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return room for page means in the CPU's layout; see `cpu.mean_blocks`."""
    return cpu.mean_blocks(num_heads, num_pages, head_dim, dtype)


def mean_put(blocks: torch.Tensor, first: int, means: torch.Tensor) -> None:
    """Write page means into blocks; see `cpu.mean_put`."""
    cpu.mean_put(blocks, first, means)


def mean_block_score(query: torch.Tensor, blocks: torch.Tensor, scale: float, num_pages: int) -> torch.Tensor:
    """Score pages by blocks of their means; see `cpu.mean_block_score`."""
    return cpu.mean_block_score(query, blocks, scale, num_pages)


def sketch_build(keys: torch.Tensor, key_map: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the packed sketch of keys; see `ref.sketch_build`."""
    if keys.is_cuda:
        return _triton().sketch_build(keys, key_map, offset)  # type: ignore[no-any-return]
    build = cpu.sketch_build if keys.ndim == 3 else ref.sketch_build
    return build(keys, key_map, offset)


def sketch_score(
    query: torch.Tensor,
    sketch: torch.Tensor,
    query_map: torch.Tensor,
    scale: float,
    page_entries: int,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every page by its keys' sketch; see `ref.sketch_score`."""
    return _of(query).sketch_score(  # type: ignore[no-any-return]
        query, sketch, query_map, scale, page_entries, lengths
    )


def sketch_blocks(num_heads: int, num_pages: int, page_entries: int, entry_bytes: int) -> torch.Tensor:
    """Return room for the sketches of pages in the CPU's layout; see `cpu.sketch_blocks`."""
    return cpu.sketch_blocks(num_heads, num_pages, page_entries, entry_bytes)


def sketch_put(blocks: torch.Tensor, first: int, pages: torch.Tensor) -> None:
    """Write sketches of pages into blocks; see `cpu.sketch_put`."""
    cpu.sketch_put(blocks, first, pages)


def sketch_block_score(
    query: torch.Tensor, blocks: torch.Tensor, query_map: torch.Tensor, scale: float, num_pages: int
) -> torch.Tensor:
    """Score pages by blocks of their sketches; see `cpu.sketch_block_score`."""
    return cpu.sketch_block_score(query, blocks, query_map, scale, num_pages)


def cluster_score(
    query: torch.Tensor, centroids: torch.Tensor, cluster_of: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score every page by its cluster; see `ref.cluster_score`."""
    if query.is_cuda:
        return _triton().cluster_score(query, centroids, cluster_of, scale)  # type: ignore[no-any-return]
    score = cpu.cluster_score if query.ndim == 3 else ref.cluster_score
    return score(query, centroids, cluster_of, scale)


def two_level_score(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_of: torch.Tensor,
    means: torch.Tensor,
    scale: float,
    num_candidates: int,
) -> torch.Tensor:
    """Score the pages that their clusters promise most of; see `ref.two_level_score`."""
    return _of(query).two_level_score(  # type: ignore[no-any-return]
        query, centroids, cluster_of, means, scale, num_candidates
    )


def topk_pages(scores: torch.Tensor, num_pages: int, budgets: torch.Tensor | None = None) -> torch.Tensor:
    """Return the best pages, ascending; see `ref.topk_pages`."""
    if scores.is_cuda:
        return _triton().topk_pages(scores, num_pages, budgets)  # type: ignore[no-any-return]
    return (
        cpu.topk_pages(scores, num_pages) if budgets is None else ref.topk_pages(scores, num_pages, budgets)
    )


def window_admit(
    rows: torch.Tensor,
    selected: torch.Tensor,
    priority: torch.Tensor,
    slot_of: torch.Tensor,
    page_of: torch.Tensor,
    first_slot: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look selected pages up and give absent ones a slot; see `ref.window_admit`."""
    return _of(selected).window_admit(  # type: ignore[no-any-return]
        rows, selected, priority, slot_of, page_of, first_slot
    )


def fetch_pages(
    k_source: torch.Tensor,
    v_source: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Copy pages from frames to slots, for a pool on CUDA from pinned host memory; see `ref.fetch_pages`."""
    move = _triton().fetch_pages if k_pool.is_cuda else cpu.fetch_pages
    move(k_source, v_source, k_pool, v_pool, source, target)


def append_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write new tokens into the pages they extend; see `ref.append_tokens`."""
    _of(k_pool).append_tokens(k_pool, v_pool, k, v, last, offsets)


def sparse_decode_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over the pages of a table; see `ref.sparse_decode_attention`."""
    return _of(query).sparse_decode_attention(  # type: ignore[no-any-return]
        query, k_pool, v_pool, table, lengths, scale
    )


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of positions; see `ref.merge_states`."""
    return _of(out_a).merge_states(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


def cluster_assign(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the nearest centroid of every row; see `ref.cluster_assign`."""
    return _of(rows).cluster_assign(rows, centroids)  # type: ignore[no-any-return]


def cluster_sums(
    rows: torch.Tensor, assignment: torch.Tensor, num_clusters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows of every cluster; see `ref.cluster_sums`."""
    return _of(rows).cluster_sums(rows, assignment, num_clusters)  # type: ignore[no-any-return]


class DecodeAttention(Protocol):
    """Attention of the decode steps of one engine: planned once per step, run in every layer."""

    def plan(self, lengths: torch.Tensor) -> None:
        """Take the lengths of a step, [request, kv_head] int32 on the host, each at least 1."""

    def run(
        self, query: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `ref.sparse_decode_attention` does, over the lengths of the last plan."""


class _Direct:
    """Attention that keeps nothing of a plan but the lengths."""

    def __init__(self, device: torch.device, scale: float) -> None:
        self._device, self._scale = device, scale

    def plan(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths.to(self._device)

    def run(
        self, query: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_decode_attention(query, k_pool, v_pool, table, self._lengths, self._scale)


def decode_attention(
    page_size: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device, scale: float
) -> DecodeAttention:
    """Return who attends over tables of pages: FlashInfer where it is installed and serves, else as all of dispatch."""
    serves = head_dim in FLASHINFER_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and serves and find_spec("flashinfer") is not None:
        from kv_kernels.flashinfer_decode import FlashInferDecode

        return FlashInferDecode(page_size, group, head_dim, dtype, device, scale)
    return _Direct(device, scale)


def _of(tensor: torch.Tensor) -> ModuleType:
    """Return who computes on the device of `tensor`."""
    return _triton() if tensor.is_cuda else ref


def _triton() -> ModuleType:
    from kv_kernels import triton_kernels

    return triton_kernels
