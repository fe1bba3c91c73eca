"""CPU formulations that are faster than the definition: the same bits, or within float32's rounding where they say so."""

import math

import numpy as np
import torch

from kv_kernels import compiled

LOG2_E = math.log2(math.e)
BLOCK_PAGES = compiled.SKETCH_LANES
MEAN_BLOCK_PAGES = (
    128  # pages that a block of means holds side by side: what is read at once stays in the nearest cache
)


def topk_pages(scores: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Select pages as `ref.topk_pages` does: find the score of the last place, then pass once over the pages."""
    flat = scores.reshape(-1, scores.shape[-1])
    chosen = torch.empty(flat.shape[0], num_pages, dtype=torch.int64)
    compiled.topk(flat.contiguous().numpy(), chosen.numpy())
    return chosen.view(*scores.shape[:-1], num_pages)


def fetch_pages(
    k_source: torch.Tensor,
    v_source: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Copy pages as `ref.fetch_pages` does, in one pass over both; a page is contiguous, and the pools are."""
    flat = [tensor.flatten(1) for tensor in (k_source, v_source, k_pool, v_pool)]
    unit = torch.uint8 if k_pool[0].nbytes % 8 else torch.int64
    arrays = [tensor.view(unit).numpy() for tensor in flat]
    compiled.move_pages(*arrays, source.reshape(-1).numpy(), target.reshape(-1).numpy())


def mean_blocks(num_heads: int, num_pages: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return room for page means, for `mean_put` and `mean_block_score`.

    Returns:
        [kv_head, ceil(num_pages / 128), head_dim, 128], bfloat16 for bfloat16 means and float32 for others: dimension d of the
        mean of page p is at [:, p // 128, d, p % 128]. The dimensions are filled up with zeros to a multiple of four.
    """
    blocks, dims = -(-num_pages // MEAN_BLOCK_PAGES), -(-head_dim // 4) * 4
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return torch.zeros(num_heads, blocks, dims, MEAN_BLOCK_PAGES, dtype=kept)


def mean_put(blocks: torch.Tensor, first: int, means: torch.Tensor) -> None:
    """Write means, [page, kv_head, head_dim], to the pages of ``blocks`` from ``first`` on."""
    at = torch.arange(first, first + len(means))
    blocks[:, at // MEAN_BLOCK_PAGES, : means.shape[2], at % MEAN_BLOCK_PAGES] = means.to(blocks.dtype)


def mean_block_score(query: torch.Tensor, blocks: torch.Tensor, scale: float, num_pages: int) -> torch.Tensor:
    """Score the first ``num_pages`` of ``blocks`` as `ref.page_score` scores means, but for float32's rounding.

    A page's score depends on the query and on these pages alone, bit for bit.

    Args:
        query: [kv_head, group, head_dim] float; several query tokens count as a larger group.

    Returns:
        [kv_head, num_pages] float32.
    """
    assert 0 < num_pages <= blocks.shape[1] * MEAN_BLOCK_PAGES, (num_pages, blocks.shape)
    bits = (
        blocks.view(torch.int16).numpy().view("uint16")
        if blocks.itemsize == 2
        else blocks.view(torch.int32).numpy()
    )
    scores = torch.empty(blocks.shape[0], num_pages)
    compiled.mean_score(_floats(query), scale * LOG2_E, bits, scores.numpy())
    return scores


def _floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().contiguous().numpy()


def sketch_build(keys: torch.Tensor, key_map: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return what `ref.sketch_build` does, without leading axes: the same codes where float64 adds the products of keys and
    map exactly, as it does for bfloat16 and float16 keys."""
    packed = torch.empty(*keys.shape[:2], key_map.shape[2] // 2, dtype=torch.uint8)
    compiled.sketch_build(_floats(keys), key_map.numpy(), offset.numpy(), packed.numpy())
    return packed


def sketch_blocks(num_heads: int, num_pages: int, page_entries: int, entry_bytes: int) -> torch.Tensor:
    """Return room for the sketches of pages, for `sketch_put` and `sketch_block_score`.

    Returns:
        [kv_head, ceil(num_pages / 32), entry_bytes, page_entries, 32] uint8: byte j of entry i of page p is at
        [:, p // 32, j, i, p % 32].
    """
    return torch.zeros(
        num_heads, -(-num_pages // BLOCK_PAGES), entry_bytes, page_entries, BLOCK_PAGES, dtype=torch.uint8
    )


def sketch_put(blocks: torch.Tensor, first: int, pages: torch.Tensor) -> None:
    """Write sketches, [page, kv_head, entry, byte] uint8, to the pages of ``blocks`` from ``first`` on."""
    at = torch.arange(first, first + len(pages))
    blocks[:, at // BLOCK_PAGES, :, :, at % BLOCK_PAGES] = pages.transpose(2, 3)


def sketch_block_score(
    query: torch.Tensor, blocks: torch.Tensor, query_map: torch.Tensor, scale: float, num_pages: int
) -> torch.Tensor:
    """Score the first ``num_pages`` of ``blocks`` as `ref.sketch_score` scores sketches, but for float32's rounding.

    A page's score depends on the query and on these pages alone, bit for bit.

    Args:
        query: [kv_head, group, head_dim] float; several query tokens count as a larger group.
        query_map: [kv_head, head_dim, direction] float32.

    Returns:
        [kv_head, num_pages] float32.
    """
    assert 0 < num_pages <= blocks.shape[1] * BLOCK_PAGES, (num_pages, blocks.shape)
    scores = torch.empty(blocks.shape[0], num_pages)
    codes = blocks.flatten(3).numpy()
    compiled.sketch_score(_floats(query), query_map.numpy(), scale * LOG2_E, codes, scores.numpy())
    return scores


def cluster_score(
    query: torch.Tensor, centroids: torch.Tensor, cluster_of: torch.Tensor, scale: float
) -> torch.Tensor:
    """Score every page by its cluster as `ref.cluster_score` does, but for float32's rounding; without a request axis.

    Args:
        query: [kv_head, group, head_dim] float; centroids: [kv_head, cluster, head_dim] float32.
        cluster_of: [kv_head, page] int64, -1 for pages that do not count.
    """
    logits = torch.bmm(query.float(), centroids.mT).mul_(scale)
    scores = torch.empty(cluster_of.shape)
    compiled.cluster_score(logits.numpy(), cluster_of.numpy(), scores.numpy())
    return scores
