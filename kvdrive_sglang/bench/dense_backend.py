"""The best dense attention we found in plain torch: what sparse attention has to beat, for ``kvdrive bench decode``.

The KV of a request lies contiguously and head-major, a group of query heads is folded into the query length (so that
each key is read once per group, not once per query head), and a long sequence is split in two so that two cores share
three KV heads evenly. ``benchmarks/NOTES.md`` has the formulations it was chosen from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kv_tier.attention import attend_masked, causal_mask

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

SPLIT_FROM_TOKENS = 4096
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class ContiguousKV:
    """Hold the KV of one row of ``req_to_token``: ``k[layer]``, ``v[layer]`` [kv_head, position, head_dim]."""

    def __init__(
        self, num_layers: int, num_heads: int, num_positions: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.k = torch.zeros(num_layers, num_heads, num_positions, head_dim, dtype=dtype)
        self.v = torch.zeros_like(self.k)


class DenseAttnBackend(AttentionBackend):
    """Attend to everything from contiguous copies; SGLang's pool stays the home of the KV."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.max_positions = model_runner.model_config.context_len + self.pool.page_size
        self.forward_metadata: list[tuple[ContiguousKV, torch.Tensor, int, int]] = []
        self._contiguous: dict[int, ContiguousKV] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Note per request its contiguous KV, its slots, and the positions [prefix, length) that are new."""
        if forward_batch.forward_mode.is_idle():
            return
        lengths = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            prefixes = [n - 1 for n in lengths]
        else:
            prefixes = [int(n) for n in forward_batch.extend_prefix_lens]
        self.forward_metadata = []
        for index, prefix, length in zip(
            forward_batch.req_pool_indices.tolist(), prefixes, lengths, strict=True
        ):
            slots = self.req_to_token_pool.req_to_token[index, :prefix]
            self.forward_metadata.append((self._row(index), slots, prefix, length))

    def _row(self, index: int) -> ContiguousKV:
        if index not in self._contiguous:
            pool = self.pool
            self._contiguous[index] = ContiguousKV(
                pool.layer_num, pool.head_num, self.max_positions, pool.head_dim, pool.dtype
            )
        return self._contiguous[index]

    def _write(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write the new KV ([token, kv_head, head_dim]) to the pool and to the contiguous copies."""
        self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        begin = 0
        for row, _, prefix, length in self.forward_metadata:
            end = begin + length - prefix
            row.k[layer.layer_id, :, prefix:length] = k[begin:end].transpose(0, 1)
            row.v[layer.layer_id, :, prefix:length] = v[begin:end].transpose(0, 1)
            begin = end

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        query, k, v = self._shaped(q, k, v, layer)
        self._write(layer, forward_batch, k, v)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        out, begin = torch.empty_like(query), 0
        for row, slots, prefix, length in self.forward_metadata:
            end = begin + length - prefix
            here_k, here_v = row.k[layer.layer_id], row.v[layer.layer_id]
            here_k[:, :prefix] = keys.index_select(0, slots).transpose(0, 1)
            here_v[:, :prefix] = values.index_select(0, slots).transpose(0, 1)
            mask = causal_mask(length - prefix, length, prefix, q.dtype) if prefix else None
            out[begin:end] = attend_masked(
                query[begin:end],
                here_k[:, :length],
                here_v[:, :length],
                mask,
                layer.scaling,
                causal=not prefix,
            )[0]
            begin = end
        return out.reshape(q.shape[0], -1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        query, k, v = self._shaped(q, k, v, layer)
        self._write(layer, forward_batch, k, v)
        out = torch.empty_like(query)
        for i, (row, _, _, length) in enumerate(self.forward_metadata):
            out[i] = attend_dense(
                query[i], row.k[layer.layer_id], row.v[layer.layer_id], length, layer.scaling
            )
        return out.view(q.shape[0], -1)

    @staticmethod
    def _shaped(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, dim = layer.tp_k_head_num, layer.head_dim
        return (
            q.view(-1, heads, layer.tp_q_head_num // heads, dim),
            k.view(-1, heads, dim),
            v.view(-1, heads, dim),
        )

    def support_triton(self) -> bool:
        return False


def attend_dense(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """Attend one query token per head over the first ``length`` positions.

    Args:
        query: [kv_head, group, head_dim].
        k, v: [kv_head, position, head_dim], contiguous.

    Returns:
        [kv_head, group, head_dim] in the query's dtype.
    """
    if length < SPLIT_FROM_TOKENS:
        return FLASH(
            query[None], k[None, :, :length], v[None, :, :length], 0.0, False, attn_mask=None, scale=scale
        )[0][0]
    half = length // 2
    out, lse = FLASH(
        query.expand(2, -1, -1, -1),
        _halves(k, half),
        _halves(v, half),
        0.0,
        False,
        attn_mask=None,
        scale=scale,
    )
    if length % 2 == 0:
        return (out * torch.softmax(lse, 0)[..., None]).sum(0).to(query.dtype)
    last = (query.float() * k[:, None, length - 1].float()).sum(
        -1
    ) * scale  # an odd length leaves one position over
    weight = torch.softmax(torch.cat([lse, last[None]]), 0)[..., None]
    merged = (out * weight[:2]).sum(0) + v[:, None, length - 1] * weight[2]
    return merged.to(query.dtype)


def _halves(kv: torch.Tensor, half: int) -> torch.Tensor:
    """View the first 2 * half positions of [kv_head, position, head_dim] as [2, kv_head, half, head_dim]."""
    return kv[:, : 2 * half].unflatten(1, (2, half)).transpose(0, 1)
