"""Definitions of full and of sparse attention over a whole sequence, in float32 and by loops."""

from __future__ import annotations

import torch


def attend(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: list[int], scale: float
) -> torch.Tensor:
    """Attend one query token of one KV head over ``positions``.

    Args:
        query: [group, head_dim]; k, v: [token, head_dim].

    Returns:
        [group, head_dim] float32.
    """
    weights = (query.float() @ k[positions].float().T * scale).softmax(-1)
    return weights @ v[positions].float()


def full_attention(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally over everything.

    Args:
        query: [layer, token, kv_head, group, head_dim]; k, v: [layer, token, kv_head, head_dim].

    Returns:
        [layer, token, kv_head, group, head_dim] float32.
    """
    q, keys, values = (t.float().movedim(1, -2) for t in (query, k, v))
    logits = q @ keys[:, :, None].transpose(-1, -2) * scale
    count = logits.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    return (logits.masked_fill(later, float("-inf")).softmax(-1) @ values[:, :, None]).movedim(-2, 1)


def page_scores(
    query: torch.Tensor, k: torch.Tensor, num_pages: int, page_size: int, scale: float
) -> torch.Tensor:
    """Score the first ``num_pages`` full pages of one KV head for one token's group.

    Args:
        query: [group, head_dim]; k: [token, head_dim].

    Returns:
        [num_pages] float32: sum over the group of softmax over pages of query . page mean.
    """
    means = [k[p * page_size : (p + 1) * page_size].float().mean(0).to(k.dtype) for p in range(num_pages)]
    return (query.float() @ torch.stack(means).float().T * scale).softmax(-1).sum(0)


def selected_pages(
    query: torch.Tensor,
    k: torch.Tensor,
    num_tokens: int,
    *,
    budget_pages: int,
    num_sink_tokens: int,
    local_window_tokens: int,
    page_size: int,
    scale: float,
) -> list[int]:
    """Return the pages that one KV head attends when the sequence has ``num_tokens`` positions, ascending."""
    num_pages = -(-num_tokens // page_size)
    if num_pages <= budget_pages:
        return list(range(num_pages))
    sinks = -(-num_sink_tokens // page_size)
    local = max(0, num_tokens - local_window_tokens) // page_size
    forced = [page for page in range(num_pages) if page < sinks or page >= local]
    scores = page_scores(query, k, num_pages - 1, page_size, scale)
    best = sorted(range(sinks, local), key=lambda page: (-float(scores[page]), page))
    return sorted(forced + best[: budget_pages - len(forced)])


def sparse_decode(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    scale: float,
    *,
    budget_pages: int,
    num_sink_tokens: int,
    local_window_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Decode one position within the budget.

    Args:
        query: [layer, token, kv_head, group, head_dim]; k, v: [layer, token, kv_head, head_dim].

    Returns:
        [layer, kv_head, group, head_dim] float32.
    """
    layers, _, heads, group, head_dim = query.shape
    out = torch.empty(layers, heads, group, head_dim)
    for layer in range(layers):
        for head in range(heads):
            one = query[layer, position, head]
            pages = selected_pages(
                one,
                k[layer, :, head],
                position + 1,
                budget_pages=budget_pages,
                num_sink_tokens=num_sink_tokens,
                local_window_tokens=local_window_tokens,
                page_size=page_size,
                scale=scale,
            )
            positions = [
                p * page_size + i for p in pages for i in range(page_size) if p * page_size + i <= position
            ]
            out[layer, head] = attend(one, k[layer, :, head], v[layer, :, head], positions, scale)
    return out
