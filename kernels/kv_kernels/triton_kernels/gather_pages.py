"""Triton twin of `ref.gather_pages`."""

import torch
import triton
import triton.language as tl

WIDTH_TILE = 1024
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _gather_kernel(pool, index, out, num_places, num_selected, width, TILE: tl.constexpr):
    """Copy one tile of one page."""
    selected = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    place = tl.maximum(tl.load(index + head * num_selected + selected), 0).to(tl.int64)
    values = tl.load(pool + (head.to(tl.int64) * num_places + place) * width + at, mask=at < width)
    tl.store(out + (head.to(tl.int64) * num_selected + selected) * width + at, values, mask=at < width)


def gather_pages(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy the pages named by `index` out of every head's pool, as `ref.gather_pages` does, without rounding."""
    num_heads, num_places, width = pool.shape
    num_selected = index.shape[1]
    out = torch.empty(num_heads, num_selected, width, dtype=pool.dtype, device=pool.device)
    raw = _INTEGERS[pool.element_size()]
    tile = min(WIDTH_TILE, triton.next_power_of_2(width))
    _gather_kernel[(num_selected, num_heads, triton.cdiv(width, tile))](
        pool.contiguous().view(raw),
        index.contiguous(),
        out.view(raw),
        num_places,
        num_selected,
        width,
        TILE=tile,
    )
    return out
