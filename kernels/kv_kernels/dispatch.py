"""Choose who computes: the definition (or its CPU formulation) for CPU tensors, Triton for CUDA tensors.

Signatures, shapes and meaning are those of `kv_kernels.ref`. Triton and FlashInfer are imported on first use, so
that the store works where neither is installed.
"""

import math
from types import ModuleType

import torch

from kv_kernels import cpu, ref


def page_score(
    query: torch.Tensor, means: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every page; see `ref.page_score`."""
    if query.is_cuda:
        return _triton().page_score(query, means, scale, lengths)  # type: ignore[no-any-return]
    return ref.page_score(query, means, scale, lengths)


def topk_pages(scores: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return the best pages, ascending; see `ref.topk_pages`."""
    return ref.topk_pages(scores, num_pages) if scores.is_cuda else cpu.topk_pages(scores, num_pages)


def gather_pages(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy the named pages out of every head's pool; see `ref.gather_pages`."""
    if pool.is_cuda:
        return _triton().gather_pages(pool, index)  # type: ignore[no-any-return]
    return cpu.gather_pages(pool, index)


def sparse_decode_attention(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int | torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over the first `length` gathered positions; see `ref.sparse_decode_attention`."""
    if query.is_cuda:
        return _triton().sparse_decode_attention(query, k, v, length, scale)  # type: ignore[no-any-return]
    return ref.sparse_decode_attention(query, k, v, length, scale)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of positions; see `ref.merge_states`."""
    if out_a.is_cuda:
        return _triton().merge_states(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]
    return ref.merge_states(out_a, lse_a, out_b, lse_b)


def flashinfer_decode_attention(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `ref.sparse_decode_attention` does, by FlashInfer, for one request on CUDA in half precision.

    Not the default: its splits depend on the device's occupancy, not on positions alone.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    from flashinfer import single_decode_with_kv_cache

    out, lse2 = single_decode_with_kv_cache(
        query.flatten(0, 1), k[:, :length], v[:, :length], kv_layout="HND", sm_scale=scale, return_lse=True
    )
    return out.view_as(query), lse2.view(query.shape[:2]) * math.log(2)  # its log-sum-exp has base 2


def _triton() -> ModuleType:
    from kv_kernels import triton_kernels

    return triton_kernels
