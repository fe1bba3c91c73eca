"""Definition of moving pages into the window cache and of writing a new token there."""

import torch


def fetch_pages(
    k_source: torch.Tensor,
    v_source: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Copy pages from frames to slots: row `source[i]` of the sources becomes row `target[i]` of the pools.

    Args:
        k_source, v_source: [frame, page_size, head_dim] any dtype; for a pool on CUDA in pinned host memory.
        k_pool, v_pool: [slot, page_size, head_dim] of the same dtype; changed in place.
        source: [...] int64 frames; -1 copies nothing.
        target: [...] int64 slots, distinct where source is not -1.
    """
    wanted = source >= 0
    for pages, pool in ((k_source, k_pool), (v_source, v_pool)):
        pool[target[wanted]] = pages[source[wanted].to(pages.device)].to(pool.device)


def append_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write new tokens into the pages they extend.

    Args:
        k_pool, v_pool: [slot, page_size, head_dim]; changed in place.
        k, v: [request, kv_head, head_dim] of the new tokens, in the pools' dtype.
        last: [request, kv_head] int64, slots of the sequences' last pages; -1 writes nothing.
        offsets: [request] int64, places of the tokens in their pages.
    """
    here = last >= 0
    places = offsets[:, None].expand_as(last)[here]
    k_pool[last[here], places] = k[here]
    v_pool[last[here], places] = v[here]
