"""Triton twins of `ref.sketch_build` and `ref.sketch_score`: four-bit codes are unpacked in registers.

A code's nibble half tells which half of the directions it belongs to, so that unpacking needs no shuffle: the low
nibbles meet the first half of the projected query, the high nibbles the second.
"""

import torch
import triton
import triton.language as tl

from kv_kernels.triton_kernels.common import padded

BUILD_TILE = 32  # entries per program: keys in float32, three parts each, fill the registers
ENTRY_TILE = 128  # entries per program of the score
PAGE_TILE = 128


@triton.jit
def _half_codes(
    keys, key_map, offset, head, half, dim, first, HALF, HALF_PAD: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Return the codes int32 [entry, HALF_PAD] of the directions first .. first + HALF."""
    column = first + half
    map_at = key_map + (head * HEAD_DIM + dim[:, None]) * (2 * HALF) + column[None, :]
    weights = tl.load(map_at, mask=half[None, :] < HALF, other=0.0)
    shift = tl.load(offset + head * (2 * HALF) + column, mask=half < HALF, other=0.0)
    coordinate = tl.dot(keys, weights, input_precision="tf32x3") + shift[None, :]
    return tl.minimum(tl.maximum(tl.floor(coordinate), 0.0), 15.0).to(tl.int32)


@triton.jit
def _build_kernel(
    keys, key_map, offset, sketch, num_heads, num_entries,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the codes of one tile of entries."""
    row = tl.program_id(1)  # request * num_heads + kv_head
    head = row % num_heads
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    half = tl.arange(0, HALF_PAD)
    dim = tl.arange(0, HEAD_DIM)
    valid = entry < num_entries
    at = (row.to(tl.int64) * num_entries + entry)[:, None]
    k = tl.load(keys + at * HEAD_DIM + dim[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    low = _half_codes(k, key_map, offset, head, half, dim, 0, HALF, HALF_PAD, HEAD_DIM)
    high = _half_codes(k, key_map, offset, head, half, dim, HALF, HALF, HALF_PAD, HEAD_DIM)
    mask = valid[:, None] & (half[None, :] < HALF)
    tl.store(sketch + at * HALF + half[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)


@triton.jit
def _tile_kernel(
    projected, sketch, lengths, sums, tile_max, tile_sum, num_rows_per_length, num_entries, num_pages, num_tiles,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    PAGE_ENTRIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the exponentials of one tile's logits, over the tile's maximum, summed to pages."""
    tile = tl.program_id(0)
    row = tl.program_id(1)  # request * num_heads + kv_head
    length = tl.load(lengths + row // num_rows_per_length)
    entry = tile * TILE + tl.arange(0, TILE)
    member = tl.arange(0, GROUP_PAD)
    half = tl.arange(0, HALF_PAD)
    valid = (entry < length) & (entry < num_entries)
    q_at = projected + (row * GROUP + member[:, None]) * (2 * HALF) + half[None, :]
    q_mask = (member[:, None] < GROUP) & (half[None, :] < HALF)
    q_low = tl.load(q_at, mask=q_mask, other=0.0)
    q_high = tl.load(q_at + HALF, mask=q_mask, other=0.0)
    at = sketch + (row.to(tl.int64) * num_entries + entry)[:, None] * HALF + half[None, :]
    packed = tl.load(at, mask=valid[:, None] & (half[None, :] < HALF), other=0).to(tl.int32)
    low = (packed & 15).to(tl.float32)
    high = (packed >> 4).to(tl.float32)
    # a code is exact in tf32, a projected query needs three of them
    logit = tl.dot(q_low, tl.trans(low), input_precision="tf32x3")
    logit += tl.dot(q_high, tl.trans(high), input_precision="tf32x3")
    logit = tl.where(valid[None, :], logit, float("-inf"))
    top = tl.max(logit, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(logit - shift[:, None])
    per_page = tl.sum(tl.reshape(weight, [GROUP_PAD, TILE // PAGE_ENTRIES, PAGE_ENTRIES]), axis=2)
    page = tile * (TILE // PAGE_ENTRIES) + tl.arange(0, TILE // PAGE_ENTRIES)
    sums_at = (row * GROUP + member[:, None]).to(tl.int64) * num_pages + page[None, :]
    tl.store(sums + sums_at, per_page, mask=(member[:, None] < GROUP) & (page[None, :] < num_pages))
    part = (row * GROUP + member) * num_tiles + tile
    tl.store(tile_max + part, top, mask=member < GROUP)
    tl.store(tile_sum + part, tl.sum(weight, axis=1), mask=member < GROUP)


@triton.jit
def _page_kernel(
    sums, tile_max, tile_sum, lengths, scores, num_rows_per_length, num_pages, num_tiles,
    GROUP: tl.constexpr, PAGE_ENTRIES: tl.constexpr, TILE: tl.constexpr, TILES_PAD: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Normalise the pages' sums by the whole row and add up the group."""
    row = tl.program_id(1)
    length = tl.load(lengths + row // num_rows_per_length)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    own_tile = page // (TILE // PAGE_ENTRIES)
    part = tl.arange(0, TILES_PAD)
    score = tl.zeros([PAGES], dtype=tl.float32)
    for member in range(GROUP):
        first = (row * GROUP + member) * num_tiles
        tops = tl.load(tile_max + first + part, mask=part < num_tiles, other=float("-inf"))
        totals = tl.load(tile_sum + first + part, mask=part < num_tiles, other=0.0)
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp(tops - top), axis=0)
        own_top = tl.load(tile_max + first + own_tile, mask=page < num_pages, other=float("-inf"))
        at = sums + (row * GROUP + member).to(tl.int64) * num_pages + page
        score += tl.load(at, mask=page < num_pages, other=0.0) * tl.exp(own_top - top) / total
    score = tl.where(page * PAGE_ENTRIES < length, score, float("-inf"))
    tl.store(scores + row.to(tl.int64) * num_pages + page, score, mask=page < num_pages)


def sketch_build(keys: torch.Tensor, key_map: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the packed sketch of keys as `ref.sketch_build` does, but for coordinates a rounding error off an integer.

    The product is in float32; a code does not depend on how many keys share a call here either.
    """
    heads, entries, head_dim = keys.shape[-3:]
    half = key_map.shape[-1] // 2
    sketch = torch.empty(*keys.shape[:-1], half, dtype=torch.uint8, device=keys.device)
    _build_kernel[(triton.cdiv(entries, BUILD_TILE), keys.numel() // (entries * head_dim))](
        keys.contiguous(), key_map.contiguous(), offset.contiguous(), sketch, heads, entries,
        HALF=half, HALF_PAD=padded(half), HEAD_DIM=head_dim, TILE=BUILD_TILE,
    )  # fmt: skip
    return sketch


def sketch_score(
    query: torch.Tensor,
    sketch: torch.Tensor,
    query_map: torch.Tensor,
    scale: float,
    page_entries: int,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every page as `ref.sketch_score` does; at most one leading request axis, page_entries a power of two."""
    *lead, group, _ = query.shape
    num_entries, half = sketch.shape[-2:]
    num_pages, num_tiles = triton.cdiv(num_entries, page_entries), triton.cdiv(num_entries, ENTRY_TILE)
    projected = query.float() @ query_map * scale
    rows, device = projected.numel() // (group * 2 * half), query.device
    per_length = lead[-1]
    if lengths is None:
        lengths, per_length = torch.full((1,), num_entries, dtype=torch.int32, device=device), rows
    sums = torch.empty(rows, group, num_pages, dtype=torch.float32, device=device)
    tile_max = torch.empty(rows, group, num_tiles, dtype=torch.float32, device=device)
    tile_sum = torch.empty_like(tile_max)
    scores = torch.empty(*lead, num_pages, dtype=torch.float32, device=device)
    _tile_kernel[(num_tiles, rows)](
        projected.contiguous(), sketch.contiguous(), lengths, sums, tile_max, tile_sum,
        per_length, num_entries, num_pages, num_tiles,
        GROUP=group, GROUP_PAD=padded(group), HALF=half, HALF_PAD=padded(half),
        PAGE_ENTRIES=page_entries, TILE=ENTRY_TILE,
    )  # fmt: skip
    _page_kernel[(triton.cdiv(num_pages, PAGE_TILE), rows)](
        sums, tile_max, tile_sum, lengths, scores, per_length, num_pages, num_tiles,
        GROUP=group, PAGE_ENTRIES=page_entries, TILE=ENTRY_TILE, TILES_PAD=triton.next_power_of_2(num_tiles),
        PAGES=PAGE_TILE,
    )  # fmt: skip
    return scores
