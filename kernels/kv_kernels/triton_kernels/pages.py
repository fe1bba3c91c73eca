"""Triton twins of `ref.fetch_pages` and `ref.append_tokens`; the sources may lie in pinned host memory."""

import torch
import triton
import triton.language as tl

from kv_kernels.triton_kernels.common import as_bits

WIDTH_TILE = 1024


@triton.jit
def _fetch_kernel(k_source, v_source, k_pool, v_pool, source, target, width, TILE: tl.constexpr):
    """Copy one tile of one page's keys and values."""
    page = tl.program_id(0)
    begin = tl.load(source + page).to(tl.int64)
    if begin >= 0:
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        into = tl.load(target + page).to(tl.int64) * width + at
        begin = begin * width
        keys = tl.load(k_source + begin + at, mask=at < width)
        values = tl.load(v_source + begin + at, mask=at < width)
        tl.store(k_pool + into, keys, mask=at < width)
        tl.store(v_pool + into, values, mask=at < width)


@triton.jit
def _append_kernel(
    k_pool,
    v_pool,
    k,
    v,
    last,
    offsets,
    num_heads,
    page_size,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):
    """Write one token of one KV head."""
    row = tl.program_id(0).to(tl.int64)  # request * num_heads + kv_head
    slot = tl.load(last + row).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PAD)
    mask = (dim < HEAD_DIM) & (slot >= 0)
    into = (slot * page_size + tl.load(offsets + row // num_heads)) * HEAD_DIM + dim
    tl.store(k_pool + into, tl.load(k + row * HEAD_DIM + dim, mask=mask), mask=mask)
    tl.store(v_pool + into, tl.load(v + row * HEAD_DIM + dim, mask=mask), mask=mask)


def fetch_pages(
    k_source: torch.Tensor,
    v_source: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Copy pages from frames to slots as `ref.fetch_pages` does, without rounding; all contiguous."""
    width = k_pool.shape[1] * k_pool.shape[2]
    tile = min(WIDTH_TILE, triton.next_power_of_2(width))
    pools = (k_source, v_source, k_pool, v_pool)
    assert all(pool.is_contiguous() for pool in pools), [pool.stride() for pool in pools]
    if source.numel() == 0:
        return
    _fetch_kernel[(source.numel(), triton.cdiv(width, tile))](
        *map(as_bits, pools), source.contiguous(), target.contiguous(), width, TILE=tile
    )


def append_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write new tokens into the pages they extend as `ref.append_tokens` does; the pools contiguous."""
    page_size, head_dim = k_pool.shape[1:]
    assert k_pool.is_contiguous() and v_pool.is_contiguous(), (k_pool.stride(), v_pool.stride())
    _append_kernel[(last.numel(),)](
        as_bits(k_pool), as_bits(v_pool), as_bits(k.contiguous()), as_bits(v.contiguous()),
        last.contiguous(), offsets.contiguous(), last.shape[1], page_size,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
