"""Definition of decode attention over the pages of a table, and of the merge of partial results."""

import torch


def sparse_decode_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token per head over the pages its table names, in the table's order, wherever they lie.

    Args:
        query: [request, kv_head, group, head_dim] float.
        k_pool, v_pool: [place, page_size, head_dim] float: frames, or the slots of window caches.
        table: [request, kv_head, selected] integer places, -1 after the last one.
        lengths: [request, kv_head] integer, positions that count: those of the pages named, less what the last page
            has not written yet.
        scale: the model's attention scale.

    Returns:
        (out like query in its dtype, lse [request, kv_head, group] float32, the log-sum-exp of the scaled logits).
        Without a position out is 0 and lse is -inf.
    """
    k, v = (pool[table.clamp(min=0)].flatten(2, 3).float() for pool in (k_pool, v_pool))
    logits = query.float() @ k.mT * scale  # [request, kv_head, group, position]
    beyond = torch.arange(k.shape[2], device=k.device) >= lengths[:, :, None, None]
    lse = logits.masked_fill(beyond, float("-inf")).logsumexp(-1)
    weights = (logits - lse[..., None]).exp().masked_fill(beyond, 0)
    return (weights @ v.masked_fill(beyond.mT, 0)).to(query.dtype), lse


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of positions into attention over both.

    Args:
        out_a, out_b: [..., head_dim] float, attention over either set.
        lse_a, lse_b: [...] float32, their log-sum-exp; -inf for an empty set, whose out does not count.

    Returns:
        (out [..., head_dim] in out_a's dtype, lse [...] float32).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (
        (part - lse).exp().masked_fill(part == float("-inf"), 0)[..., None] for part in (lse_a, lse_b)
    )
    return (out_a.float() * weight_a + out_b.float() * weight_b).to(out_a.dtype), lse
