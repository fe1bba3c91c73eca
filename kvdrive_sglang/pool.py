"""SGLang's KV pool and page allocator, over the tiered store."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule, get_server_args

from kv_tier.geometry import Geometry
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.errors import ConfigError, DataDirForeign
from kv_tier.meta.fingerprint import engine_fingerprint, tokenizer_identity, weights_identity
from kv_tier.pipeline import Pipeline
from kv_tier.selection import Budget
from kv_tier.spans import Identity, SpaceLimits, SpanStore, raise_descriptor_limit
from kv_tier.store import StoreLimits, TieredStore, require_capacity
from kv_tier.trace import Trace
from kv_tier.window_profile import load_profile
from kvdrive_sglang.config import KVDriveConfig, config_of_linker
from kvdrive_sglang.index_choice import choose_index
from kvdrive_sglang.sizing import device_requests_for, frames_for

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

logger = logging.getLogger(__name__)

LOADING = (
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "model_impl",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "modelopt_quant",
    "rl_quant_profile",
)
"""SGLang's arguments that make other numbers of the same weight files."""


class _Writer(Protocol):
    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None: ...


class _Step(Protocol):
    @property
    def writer(self) -> _Writer: ...


class KVDrivePool(MHATokenToKVPool):
    """Stand where RadixAttention's KV pool stands; slots are logical, KV lives in the tiered store.

    The class holds no KV itself: ``set_kv_buffer`` writes to frames, attention reads through ``store``.
    """

    store: TieredStore
    step: _Step | None

    def _create_buffers(self) -> None:
        """Build the store instead of the big tensors; called by the base class once sizes are known."""
        self.k_scale_buffer = self.v_scale_buffer = None
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        self._kv_buffer_descs: list[Any] = []
        self.step = None
        self.config = config_of_linker(get_memory().unified_cache_external_linker_config)
        self.geometry = Geometry(
            num_layers=self.layer_num,
            num_kv_heads=self.head_num,
            head_dim=self.head_dim,
            page_size=self.page_size,
            stretch_tokens=self.config.stretch_tokens,
            dtype=self.dtype,
        )
        if self.v_head_dim != self.head_dim:
            raise ConfigError(
                f"v_head_dim={self.v_head_dim} differs from head_dim={self.head_dim}: not supported"
            )
        raise_descriptor_limit()
        self.store = build_store(self.config, self.geometry, num_pages=self.size // self.page_size + 1)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.store.frames.num_frames * self.geometry.page_bytes // 2
        return half, half

    def set_kv_buffer(
        self,
        layer: RadixAttention | None,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Write one layer's new keys and values ([token, kv_head, head_dim]) at the slots the step was planned for."""
        assert self.step is not None, "set_kv_buffer outside a forward pass of the kvdrive backend"
        assert unwrap_write_loc(loc_info)[0].shape[0] == cache_k.shape[0]
        layer_id = layer_id_override if layer_id_override is not None else layer.layer_id  # type: ignore[union-attr]
        shape = (-1, self.head_num, self.head_dim)
        self.step.writer.write(
            layer_id - self.start_layer,
            cache_k.view(shape).to(self.dtype),
            cache_v.view(shape).to(self.dtype),
        )

    def _no_buffer(self) -> RuntimeError:
        return RuntimeError(
            "the KV of this engine lives in KVDrive's tiers and has no flat buffer: the feature that asked for one is "
            "not supported together with --attention-backend kvdrive"
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._no_buffer()

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise self._no_buffer()

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise self._no_buffer()

    def get_cpu_copy(self, indices: Any, mamba_indices: Any = None, req_pool_index: Any = None) -> Any:
        raise self._no_buffer()

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise self._no_buffer()


class KVDriveAllocator(PagedTokenToKVPoolAllocator):
    """Tell the store when logical pages are free again."""

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        super()._release_page_ids(*page_ids)
        pool = self._kvcache
        if isinstance(pool, KVDrivePool):
            for pages in page_ids:
                pool.store.release_pages(pages.cpu().numpy())

    def clear(self) -> None:
        super().clear()
        pool = self._kvcache
        if isinstance(pool, KVDrivePool):
            pool.store.clear()


def build_store(config: KVDriveConfig, geometry: Geometry, *, num_pages: int) -> TieredStore:
    """Open the data directory and build the tiered store of this scheduler process.

    Args:
        num_pages: logical pages, the padding page included.

    Raises:
        ConfigError, CapacityError: a budget that cannot hold what must run; names the flag.
        DataDirError: the directory is owned by a live engine, unwritable, or foreign under strict_data_dir.
    """
    max_requests = get_schedule().max_running_requests or 16
    context_tokens = _context_length()
    max_pages = geometry.num_pages(context_tokens) + 2
    index = choose_index(config.index, get_server_args().model_path, context_tokens)
    page_size = geometry.page_size
    budget_pages = None if config.budget_tokens == "all" else config.budget_tokens // page_size
    budget = Budget(budget_pages, config.num_sink_tokens, config.local_window_tokens, page_size)
    limits = StoreLimits(
        num_pages=num_pages,
        num_frames=frames_for(config, geometry, num_pages, index),
        max_pages_per_request=max_pages,
        window_multiple=config.window_multiple,
        max_requests=max_requests,
        eviction=config.eviction,
        index=index,
        window_profile=None
        if config.window_profile is None or config.budget_tokens == "all"
        else load_profile(Path(config.window_profile), geometry, config.budget_tokens),
    )
    if budget.pages is not None:
        num_sets = device_requests_for(config, limits.device_bytes_per_request(geometry, budget.pages))
        limits = replace(limits, num_device_requests=num_sets)
        if num_sets < max_requests:
            logger.warning(
                "device_bytes=%d holds window caches and indexes of %d requests, others wait: %d may run",
                config.device_bytes,
                num_sets,
                max_requests,
            )
    require_capacity(limits, geometry, get_schedule().chunked_prefill_size or 0)
    keyring = None if config.encryption_key_file is None else Keyring.from_file(config.encryption_key_file)
    data_dir = DataDir.open(config.data_dir, role="engine")
    identity = Identity(
        fingerprint=fingerprint_of(config, geometry),
        selection=config.selection_digest(index.identity),
        sketch=index.sketch_digest,
    )
    space = SpaceLimits(config.ssd_bytes, config.ssd_high_watermark, config.ssd_low_watermark)
    spans = SpanStore(data_dir, geometry, identity, ssd_bytes=space, keyring=keyring)
    if config.strict_data_dir and spans.num_foreign:
        raise DataDirForeign(
            f"{config.data_dir} holds {spans.num_foreign} spans of another model, layout or format; name another "
            f"data_dir, delete them, or drop strict_data_dir"
        )
    store = TieredStore(
        geometry,
        limits,
        budget,
        spans,
        fetch_mode=config.fetch_mode,
        pipeline=Pipeline(config.micro_batch),
        pages_per_cluster=config.pages_per_cluster,
        trace=None if config.trace_path is None else Trace(Path(config.trace_path)),
        cold_encoding=config.cold_encoding,
    )
    logger.info(
        "kvdrive store: %d frames (%.0f MiB), %d logical pages, budget %s, index %s, data directory %s with %d spans",
        limits.num_frames,
        limits.num_frames * geometry.page_bytes / 2**20,
        num_pages,
        config.budget_tokens,
        index.name,
        config.data_dir,
        len(spans.spans),
    )
    return store


def _context_length() -> int:
    from sglang.srt.configs.model_config import ModelConfig

    return int(ModelConfig.from_server_args(get_server_args()).context_len)


def fingerprint_of(config: KVDriveConfig, geometry: Geometry) -> bytes:
    """Return the engine fingerprint of the server that this process runs."""
    model = get_server_args()
    parallel = get_parallel()
    return engine_fingerprint(
        {
            "weights": weights_identity(model.model_path, config.model_revision),
            "tokenizer": tokenizer_identity(model.tokenizer_path or model.model_path),
            "overrides": str(model.json_model_override_args),
            **{name: str(getattr(model, name)) for name in LOADING},
            "dtype": str(geometry.dtype),
            "layers": geometry.num_layers,
            "kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "page_size": geometry.page_size,
            "stretch_tokens": geometry.stretch_tokens,
            "tp": f"{parallel.tp_rank}/{parallel.tp_size}",
            "format": 1,
            "index": "page_means/1",
        }
    )
