"""Attention of one request over gathered KV; every shape here depends on the request alone."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kv_kernels import dispatch

FOLDED_QUERIES = 256  # up to so many queries per KV head, the group is folded into the query length
TILE_TOKENS = 8192  # positions per tile of exact prefill, at absolute multiples


def attend_selected(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend one query token per (request, head) over gathered positions; the group shares its keys, read once.

    Args:
        query: [request, kv_head, group, head_dim].
        k, v: [request, kv_head, position, head_dim], ascending positions.
        mask: [request, 1, 1, position] additive; always given, so that batch-mates cannot change the computation.

    Returns:
        [request, kv_head, group, head_dim] in the query's dtype.
    """
    return scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)


def attend_all(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token over everything, one query head at a time: bit for bit what SGLang's own CPU backend
    computes (``docs/decisions/002-exact-decode.md``).

    Args:
        query: [kv_head, group, head_dim].
        k, v: [kv_head, position, head_dim].

    Returns:
        (out [kv_head, group, head_dim], lse [kv_head, group] float32).
    """
    group = query.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(0, 1)[:, :, None].contiguous(),
        k.expand(group, *k.shape),
        v.expand(group, *v.shape),
        0.0,
        False,
        scale=scale,
    )
    return out[:, :, 0].transpose(0, 1), lse[:, :, 0].transpose(0, 1)


def causal_mask(num_queries: int, num_keys: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [num_queries, num_keys]: 0 where key j may be seen by query i (j <= i + offset), else -inf."""
    visible = torch.arange(num_keys)[None, :] <= torch.arange(num_queries)[:, None] + offset
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~visible, float("-inf"))


def attend_masked(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend several query tokens over one tile of positions.

    Args:
        query: [token, kv_head, group, head_dim].
        k, v: [kv_head, position, head_dim].
        mask: [token, position] additive, or None when everything is visible.
        causal: query i sees positions 0..i; then no mask.

    Returns:
        (out [token, kv_head, group, head_dim], lse [token, kv_head, group] float32).
    """
    count, heads, group, head_dim = query.shape
    if count * group <= FOLDED_QUERIES and not causal:
        # few queries: the group shares its keys, which are then read once
        folded = query.permute(1, 2, 0, 3).reshape(1, heads, group * count, head_dim)
        k, v = k[None], v[None]
        mask = None if mask is None else mask.repeat(group, 1)
    else:
        # many queries: flash runs fastest with one copy of the keys per query head
        folded = query.permute(1, 2, 0, 3).reshape(1, heads * group, count, head_dim)
        k, v = (t.repeat_interleave(group, 0)[None] for t in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    shape = (heads, group, count)
    return out.reshape(*shape, head_dim).permute(2, 0, 1, 3), lse.reshape(shape).permute(2, 0, 1)


class ExactAttention:
    """Exact attention of a run of new tokens over every position, tile after tile (paper: exact prefill).

    Tiles lie at absolute multiples of ``tile_tokens`` and are merged in ascending order, so that the result depends
    on positions alone, never on where a page lives.
    """

    def __init__(
        self,
        first: int,
        count: int,
        dtype: torch.dtype,
        tile_tokens: int = TILE_TOKENS,
        *,
        decode: bool = False,
    ) -> None:
        """Plan for queries at positions [first, first + count); ``decode``: the one token of a decode step."""
        assert count == 1 or not decode
        self.decode = decode
        self.first = first
        self.count = count
        self.end = first + count
        self.tiles = [(t, min(t + tile_tokens, self.end)) for t in range(0, self.end, tile_tokens)]
        self._masks = [self._mask(begin, end, dtype) for begin, end in self.tiles]

    def _mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor | None:
        if end <= self.first + 1 or self._is_causal(begin):
            return None
        skipped = max(0, begin - self.first)
        return causal_mask(self.count - skipped, end - begin, self.first + skipped - begin, dtype)

    def _is_causal(self, begin: int) -> bool:
        """Whether queries and keys of the tile start at the same position, so that no mask is needed."""
        return self.first == begin and len(self.tiles) == 1

    def attend(
        self, query: torch.Tensor, tile: int, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend over tile number ``tile`` and merge; call in ascending order, the last call returns the result.

        Args:
            query: [token, kv_head, group, head_dim], all ``count`` tokens.
            k, v: [kv_head, end - begin, head_dim] of ``tiles[tile]``.

        Returns:
            [token, kv_head, group, head_dim]; complete after the last tile.
        """
        begin, _ = self.tiles[tile]
        skipped = max(0, begin - self.first)
        if self.decode:
            out, lse = (part[None] for part in attend_all(query[0], k, v, scale))
        else:
            causal = self._is_causal(begin)
            out, lse = attend_masked(query[skipped:], k, v, self._masks[tile], scale, causal=causal)
        if len(self.tiles) == 1:
            return out
        if tile == 0:
            self._out, self._lse = out.float().contiguous(), lse.contiguous()
        else:
            self._out[skipped:], self._lse[skipped:] = dispatch.merge_states(
                self._out[skipped:], self._lse[skipped:], out.float(), lse
            )
        return self._out.to(query.dtype)
