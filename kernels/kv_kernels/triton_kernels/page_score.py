"""Triton twin of `ref.page_score`: the means are read once, the softmax is put together from page tiles."""

import torch
import triton
import triton.language as tl

from kv_kernels.triton_kernels.common import dot_precision, padded_group

PAGE_TILE = 128


@triton.jit
def _logits_kernel(
    query, means, lengths, logits, tile_max, tile_sum, scale, num_heads, num_pages, num_tiles,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one tile's logits [group, TILE], their maximum and their sum of exponentials."""
    tile = tl.program_id(0)
    row = tl.program_id(1)  # request * num_heads + kv_head
    length = tl.load(lengths + row // num_heads)
    page = tile * TILE + tl.arange(0, TILE)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_DIM)
    q_at = query + (row * GROUP + member[:, None]) * HEAD_DIM + dim[None, :]
    q = tl.load(q_at, mask=member[:, None] < GROUP, other=0.0).to(tl.float32)
    means_at = means + (row.to(tl.int64) * num_pages + page[:, None]) * HEAD_DIM + dim[None, :]
    m = tl.load(means_at, mask=page[:, None] < length, other=0.0).to(tl.float32)
    logit = tl.dot(q, tl.trans(m), input_precision=PRECISION) * scale
    logit = tl.where(page[None, :] < length, logit, float("-inf"))
    top = tl.max(logit, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logit - shift[:, None]), axis=1)
    inside = (member[:, None] < GROUP) & (page[None, :] < num_pages)
    tl.store(
        logits + (row * GROUP + member[:, None]).to(tl.int64) * num_pages + page[None, :], logit, mask=inside
    )
    part = (row * GROUP + member) * num_tiles + tile
    tl.store(tile_max + part, top, mask=member < GROUP)
    tl.store(tile_sum + part, total, mask=member < GROUP)


@triton.jit
def _score_kernel(
    logits, tile_max, tile_sum, lengths, scores, num_heads, num_pages, num_tiles,
    GROUP: tl.constexpr, TILE: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Normalise one tile's logits by the whole row and add up the group."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(lengths + row // num_heads)
    page = tile * TILE + tl.arange(0, TILE)
    part = tl.arange(0, TILES_PAD)
    score = tl.zeros([TILE], dtype=tl.float32)
    for member in tl.static_range(GROUP):
        first = (row * GROUP + member) * num_tiles
        tops = tl.load(tile_max + first + part, mask=part < num_tiles, other=float("-inf"))
        totals = tl.load(tile_sum + first + part, mask=part < num_tiles, other=0.0)
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp(tops - top), axis=0)
        at = logits + (row * GROUP + member).to(tl.int64) * num_pages + page
        score += tl.exp(tl.load(at, mask=page < length, other=float("-inf")) - top) / total
    score = tl.where(page < length, score, float("-inf"))
    tl.store(scores + row.to(tl.int64) * num_pages + page, score, mask=page < num_pages)


def page_score(
    query: torch.Tensor, means: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every page as `ref.page_score` does; query and means with at most one leading request axis."""
    *lead, num_heads, group, head_dim = query.shape
    num_pages = means.shape[-2]
    rows = query.numel() // (group * head_dim)
    if lengths is None:
        lengths = torch.full((rows // num_heads,), num_pages, dtype=torch.int32, device=query.device)
    num_tiles = triton.cdiv(num_pages, PAGE_TILE)
    logits = torch.empty(rows, group, num_pages, dtype=torch.float32, device=query.device)
    tile_max = torch.empty(rows, group, num_tiles, dtype=torch.float32, device=query.device)
    tile_sum = torch.empty_like(tile_max)
    scores = torch.empty(*lead, num_heads, num_pages, dtype=torch.float32, device=query.device)
    grid = (num_tiles, rows)
    _logits_kernel[grid](
        query.contiguous(), means.contiguous(), lengths, logits, tile_max, tile_sum,
        scale, num_heads, num_pages, num_tiles,
        GROUP=group, GROUP_PAD=padded_group(group), HEAD_DIM=head_dim, TILE=PAGE_TILE,
        PRECISION=dot_precision(query, means),
    )  # fmt: skip
    _score_kernel[grid](
        logits, tile_max, tile_sum, lengths, scores, num_heads, num_pages, num_tiles,
        GROUP=group, TILE=PAGE_TILE, TILES_PAD=triton.next_power_of_2(num_tiles),
    )  # fmt: skip
    return scores
