"""Triton twins of `ref.page_score`, `ref.cluster_score`, `ref.candidate_score` and `ref.two_level_score`.

A summary is read once; the softmax over all pages is put together from the maxima and sums of page tiles.
"""

import torch
import triton
import triton.language as tl

from kv_kernels import ref
from kv_kernels.triton_kernels.common import dot_precision, padded, warps_for
from kv_kernels.triton_kernels.topk_pages import topk_pages

PAGE_TILE = 128


@triton.jit
def _tile_softmax(
    logit, inside, logits, tile_max, tile_sum, row, member, page, tile, num_pages, num_tiles, GROUP
):
    """Write one tile's logits [group, page], their maximum and their sum of exponentials."""
    top = tl.max(logit, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logit - shift[:, None]), axis=1)
    at = (row * GROUP + member[:, None]).to(tl.int64) * num_pages + page[None, :]
    tl.store(logits + at, logit, mask=inside)
    part = (row * GROUP + member) * num_tiles + tile
    tl.store(tile_max + part, top, mask=member < GROUP)
    tl.store(tile_sum + part, total, mask=member < GROUP)


@triton.jit
def _logits_kernel(
    query, means, index, lengths, logits, tile_max, tile_sum, scale, num_rows_per_length, num_means, num_pages, num_tiles,
    INDEXED: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of means, or of means named by an index, with the group's queries."""
    tile = tl.program_id(0)
    row = tl.program_id(1)  # request * num_heads + kv_head
    length = tl.load(lengths + row // num_rows_per_length)
    page = tile * TILE + tl.arange(0, TILE)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_DIM)
    q_at = query + (row * GROUP + member[:, None]) * HEAD_DIM + dim[None, :]
    q = tl.load(q_at, mask=member[:, None] < GROUP, other=0.0).to(tl.float32)
    valid = (page < length) & (page < num_pages)
    mean = page
    if INDEXED:
        mean = tl.load(index + row * num_pages + page, mask=valid, other=0)
    means_at = means + (row.to(tl.int64) * num_means + mean[:, None]) * HEAD_DIM + dim[None, :]
    m = tl.load(means_at, mask=valid[:, None], other=0.0).to(tl.float32)
    logit = tl.dot(q, tl.trans(m), input_precision=PRECISION) * scale
    logit = tl.where(valid[None, :], logit, float("-inf"))
    inside = (member[:, None] < GROUP) & (page[None, :] < num_pages)
    _tile_softmax(
        logit, inside, logits, tile_max, tile_sum, row, member, page, tile, num_pages, num_tiles, GROUP
    )


@triton.jit
def _spread_kernel(
    cluster_logits, cluster_of, logits, tile_max, tile_sum, num_clusters, num_pages, num_tiles,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Give every page of a tile the logits of its cluster."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    page = tile * TILE + tl.arange(0, TILE)
    member = tl.arange(0, GROUP_PAD)
    cluster = tl.load(cluster_of + row.to(tl.int64) * num_pages + page, mask=page < num_pages, other=-1)
    inside = (member[:, None] < GROUP) & (page[None, :] < num_pages)
    at = (row * GROUP + member[:, None]).to(tl.int64) * num_clusters + cluster[None, :]
    logit = tl.load(cluster_logits + at, mask=inside & (cluster[None, :] >= 0), other=float("-inf"))
    _tile_softmax(
        logit, inside, logits, tile_max, tile_sum, row, member, page, tile, num_pages, num_tiles, GROUP
    )


@triton.jit
def _score_kernel(
    logits, tile_max, tile_sum, scores, num_pages, num_tiles,
    GROUP: tl.constexpr, TILE: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Normalise one tile's logits by the whole row and add up the group."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    page = tile * TILE + tl.arange(0, TILE)
    part = tl.arange(0, TILES_PAD)
    score = tl.zeros([TILE], dtype=tl.float32)
    counts = page < num_pages
    for member in range(GROUP):
        first = (row * GROUP + member) * num_tiles
        tops = tl.load(tile_max + first + part, mask=part < num_tiles, other=float("-inf"))
        totals = tl.load(tile_sum + first + part, mask=part < num_tiles, other=0.0)
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp(tops - top), axis=0)
        at = logits + (row * GROUP + member).to(tl.int64) * num_pages + page
        logit = tl.load(at, mask=page < num_pages, other=float("-inf"))
        counts = counts & (logit > float("-inf"))
        score += tl.exp(logit - top) / total
    score = tl.where(counts, score, float("-inf"))
    tl.store(scores + row.to(tl.int64) * num_pages + page, score, mask=page < num_pages)


class _Scratch:
    """The logits of a row of pages, and what its softmax is put together from."""

    def __init__(self, rows: int, group: int, num_pages: int, device: torch.device) -> None:
        self.group, self.num_pages = group, num_pages
        self.num_tiles = triton.cdiv(num_pages, PAGE_TILE)
        self.grid = (self.num_tiles, rows)
        self.logits = torch.empty(rows, group, num_pages, dtype=torch.float32, device=device)
        self.tile_max = torch.empty(rows, group, self.num_tiles, dtype=torch.float32, device=device)
        self.tile_sum = torch.empty_like(self.tile_max)

    def fill(
        self,
        query: torch.Tensor,
        means: torch.Tensor,
        index: torch.Tensor | None,
        lengths: torch.Tensor,
        rows_per_length: int,
        scale: float,
    ) -> None:
        """Multiply query [.., group, head_dim] with means [.., mean, head_dim], or those that index [.., page] names."""
        precision = dot_precision(query, means)
        _logits_kernel[self.grid](
            query.contiguous(), means.contiguous(), lengths if index is None else index.contiguous(), lengths,
            self.logits, self.tile_max, self.tile_sum,
            scale, rows_per_length, means.shape[-2], self.num_pages, self.num_tiles,
            INDEXED=index is not None, GROUP=self.group, GROUP_PAD=padded(self.group), HEAD_DIM=query.shape[-1],
            TILE=PAGE_TILE, PRECISION=precision, num_warps=warps_for(precision),
        )  # fmt: skip

    def scores(self, *lead: int) -> torch.Tensor:
        """Return [*lead, page] float32."""
        scores = torch.empty(*lead, self.num_pages, dtype=torch.float32, device=self.logits.device)
        _score_kernel[self.grid](
            self.logits, self.tile_max, self.tile_sum, scores, self.num_pages, self.num_tiles,
            GROUP=self.group, TILE=PAGE_TILE, TILES_PAD=triton.next_power_of_2(self.num_tiles),
        )  # fmt: skip
        return scores


def page_score(
    query: torch.Tensor, means: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every page as `ref.page_score` does; query and means with at most one leading request axis."""
    *lead, group, head_dim = query.shape
    rows = query.numel() // (group * head_dim)
    scratch = _Scratch(rows, group, means.shape[-2], query.device)
    per_length = lead[-1]
    if lengths is None:
        lengths = torch.full((1,), means.shape[-2], dtype=torch.int32, device=query.device)
        per_length = rows
    scratch.fill(query, means, None, lengths, per_length, scale)
    return scratch.scores(*lead)


def cluster_score(
    query: torch.Tensor, centroids: torch.Tensor, cluster_of: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score every page by its cluster as `ref.cluster_score` does; at most one leading request axis."""
    *lead, group, head_dim = query.shape
    rows, num_clusters = query.numel() // (group * head_dim), centroids.shape[-2]
    clusters = _Scratch(rows, group, num_clusters, query.device)
    every = torch.full((1,), num_clusters, dtype=torch.int32, device=query.device)
    clusters.fill(query, centroids, None, every, rows, scale)
    pages = _Scratch(rows, group, cluster_of.shape[-1], query.device)
    _spread_kernel[pages.grid](
        clusters.logits, cluster_of.contiguous(), pages.logits, pages.tile_max, pages.tile_sum,
        num_clusters, pages.num_pages, pages.num_tiles,
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), TILE=PAGE_TILE,
    )  # fmt: skip
    return pages.scores(*lead)


def candidate_score(
    query: torch.Tensor, means: torch.Tensor, candidates: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score candidate pages among each other as `ref.candidate_score` does; means may be in pinned host memory."""
    requests, heads, group, _ = query.shape
    scratch = _Scratch(requests * heads, group, candidates.shape[-1], query.device)
    lengths = (candidates >= 0).sum(-1, dtype=torch.int32)
    scratch.fill(query, means, candidates, lengths, 1, scale)
    return ref.spread(scratch.scores(requests, heads), candidates, means.shape[-2])


def two_level_score(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_of: torch.Tensor,
    means: torch.Tensor,
    scale: float,
    num_candidates: int,
) -> torch.Tensor:
    """Score the pages that their clusters promise most of, as `ref.two_level_score` does."""
    candidates = topk_pages(cluster_score(query, centroids, cluster_of, scale), num_candidates)
    return candidate_score(query, means, candidates, scale)
