"""SGLang's attention backend over the tiered store: plan a step per batch, attend per layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kv_tier.meta.errors import ConfigError
from kv_tier.quality import QualityMonitor, ShadowStep
from kv_tier.request import Row
from kv_tier.steps import AppendRule, DecodeStep, ExtendStep
from kvdrive_sglang.pool import KVDrivePool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class KVDriveAttnBackend(AttentionBackend):
    """Attend through frames, window caches and spans instead of a flat KV pool."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, KVDrivePool):
            raise ConfigError(
                f"--attention-backend kvdrive found a {type(pool).__name__} instead of its own KV pool: the model is "
                f"not served by plain multi-head attention, or another platform plugin is active"
            )
        self.pool = pool
        self.store = pool.store
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.device = model_runner.device
        config = pool.config
        self.append = AppendRule(
            config.append, config.append_sparse_max_tokens, config.append_exact_max_prefix_tokens
        )
        self.forward_metadata: ExtendStep | DecodeStep | ShadowStep | None = None
        self.monitor: QualityMonitor | None = None
        if config.monitor_every and self.store.budget.pages is not None:
            self.monitor = QualityMonitor(config.monitor_every, config.max_kl, config.window_multiple)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the step: which pages each request has, where its new tokens go."""
        if forward_batch.forward_mode.is_idle() or isinstance(self.forward_metadata, ShadowStep):
            return
        decode = forward_batch.forward_mode.is_decode()
        lengths = forward_batch.seq_lens.tolist()
        prefixes = [n - 1 for n in lengths] if decode else _tolist(forward_batch.extend_prefix_lens)
        rows = [
            self._row(index, prefix, length)
            for index, prefix, length in zip(
                forward_batch.req_pool_indices.tolist(), prefixes, lengths, strict=True
            )
        ]
        slots = forward_batch.out_cache_loc.to(torch.int64)
        if decode:
            self.forward_metadata = DecodeStep(self.store, rows, slots)
        else:
            self.forward_metadata = ExtendStep(self.store, rows, slots, self.append)
        self.pool.step = self.forward_metadata

    @contextmanager
    def shadow(self) -> Iterator[None]:
        """Let forward passes inside repeat the decode step at twice the budget, keeping nothing."""
        step = self.forward_metadata
        assert isinstance(step, DecodeStep)
        self.forward_metadata = self.pool.step = ShadowStep(self.store, step.rows)
        try:
            yield
        finally:
            self.forward_metadata = self.pool.step = step

    def _row(self, index: int, prefix: int, length: int) -> Row:
        size = self.pool.page_size
        generation = int(self.req_to_token_pool.req_generation[index])
        pages = self.req_to_token_pool.req_to_token[index, :length:size].to(torch.int64) // size
        return Row(self.store.request(index, generation), pages, prefix, length)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        assert save_kv_cache and self.forward_metadata is not None
        heads, dim = layer.tp_k_head_num, layer.head_dim
        k, v = k.view(-1, heads, dim), v.view(-1, heads, dim)
        self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        query = q.view(-1, heads, layer.tp_q_head_num // heads, dim)
        out = self.forward_metadata.attend(
            layer.layer_id - self.pool.start_layer, query, k, v, layer.scaling, written=True
        )
        return out.reshape(-1, layer.tp_q_head_num * dim)

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
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

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
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def support_triton(self) -> bool:
        return False


def _tolist(values: Any) -> list[int]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)
