"""Definition of decode attention over gathered positions and of the merge of partial results."""

import torch


def sparse_decode_attention(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int | torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token per head over the first `length` gathered positions.

    Args:
        query: [kv_head, group, head_dim] float, or [request, kv_head, group, head_dim].
        k, v: [kv_head, position, head_dim] float, or with the leading request axis.
        length: valid positions; an int without, [request] integer with the request axis.
        scale: the model's attention scale.

    Returns:
        (out like query in its dtype, lse [..., kv_head, group] float32, the log-sum-exp of the scaled logits).
        Without a valid position out is 0 and lse is -inf.
    """
    logits = query.float() @ k.float().transpose(-1, -2) * scale  # [..., kv_head, group, position]
    limit = length if isinstance(length, int) else length[:, None, None, None]
    beyond = torch.arange(k.shape[-2], device=k.device) >= limit
    lse = logits.masked_fill(beyond, float("-inf")).logsumexp(-1)
    weights = (logits - lse[..., None]).exp().masked_fill(beyond, 0)
    return (weights @ v.float()).to(query.dtype), lse


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
