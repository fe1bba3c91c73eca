"""Hooks into SGLang's scheduler and tree: sealing, admission, lost pages, figures in the answer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kv_tier.meta.errors import ConfigError
from kv_tier.quality import divergence
from kv_tier.steps import DecodeStep
from kvdrive_sglang.linker import KVDriveLinker
from kvdrive_sglang.metrics import observe_kl
from kvdrive_sglang.plugin import is_requested
from kvdrive_sglang.sealing import Sealer

TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
REQUEST_ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def linker_of(cache: Any) -> KVDriveLinker | None:
    """Return our linker if the tree runs on it."""
    wrapper = getattr(cache, "linker", None)
    linker = None if wrapper is None else wrapper.cache_linker
    return linker if isinstance(linker, KVDriveLinker) else None


def targets() -> dict[str, Callable[..., Any]]:
    """Return what is hooked: dotted SGLang method -> our function around it."""
    return {
        f"{TREE}.checkpoint_into_tree": checkpoint_into_tree,
        f"{TREE}.match_prefix": match_prefix,
        f"{TREE}.finish_external_linker_loads": finish_loads,
        f"{SCHEDULER}.get_new_batch_prefill": get_new_batch_prefill,
        f"{SCHEDULER}.get_num_allocatable_reqs": get_num_allocatable_reqs,
        f"{STREAMER}.build_additional_customized_info": build_customized_info,
        f"{CONFIGURATOR}._profile_available_bytes": profile_available_bytes,
        f"{REQUEST_ROWS}.free_rows": free_rows,
        f"{RUNNER}.forward": forward,
        f"{BEAMS}.validate_and_init": refuse_beam_search,
        **{f"{WEIGHTS}.{method}": refuse_weight_update for method in WEIGHT_UPDATES},
    }


def check_hooks() -> None:
    """Refuse to serve when SGLang did not apply a hook: it only logs such a failure.

    Raises:
        ConfigError: names the method that is not hooked.
    """
    for target in targets():
        module, _, rest = target.rpartition(".")
        module, _, owner = module.rpartition(".")
        method = getattr(getattr(importlib.import_module(module), owner), rest)
        if not hasattr(method, "__wrapped__"):
            raise ConfigError(
                f"SGLang did not apply the hook on {target}: this version of sglang is not the supported 0.5.23, or "
                f"SGLANG_PLUGINS excludes kvdrive"
            )


def register_hooks() -> None:
    """Register every hook; called once per process by the plugin."""
    for target, hook in targets().items():
        HookRegistry.register(target, hook, HookType.AROUND)
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    SchedulerOutputStreamer.has_additional_customized_info = True


# ---- sealing ------------------------------------------------------------------------------------------------


def checkpoint_into_tree(original: Any, self: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    """Adopt recomputed bytes into lost pages before the tree frees them; seal what the checkpoint completes."""
    linker = linker_of(self)
    if linker is None:
        original(self, req, up_to=up_to, **kwargs)
        return
    sound = req.discard_output_reason is None and not req.skip_radix_cache_insert
    if sound:
        adopt_recomputed(self, linker, req, up_to)
    original(self, req, up_to=up_to, **kwargs)
    if sound:
        sealer = getattr(linker, "sealer", None)
        if sealer is None:
            sealer = linker.sealer = Sealer(linker.pool, self.req_to_token_pool)
        sealer.checkpoint(req, up_to)


def adopt_recomputed(cache: Any, linker: KVDriveLinker, req: Any, up_to: int) -> None:
    """Give the recomputed KV of a request to the lost pages the tree still holds for the same tokens."""
    table = linker.store.table
    if not table.lost.any():
        return
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    size = linker.page_size
    key = RadixKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt)
    held = cache.tree_core.match_prefix(MatchPrefixParams(key=key.page_aligned(size)))  # lost pages included
    cache._apply_cache_actions(held.cache_actions)
    tree_pages = matched_pages(cache, held, size)
    row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(tree_pages) * size : size] // size
    for ours, theirs in zip(row.tolist(), tree_pages.tolist(), strict=True):
        if ours != theirs and table.lost[theirs] and not table.lost[ours] and table.frames[ours] > 0:
            linker.store.adopt(ours, theirs)


# ---- lost pages ---------------------------------------------------------------------------------------------


def matched_pages(cache: Any, result: Any, page_size: int) -> np.ndarray:
    """Return the logical pages that a match found on the device, [n] int64."""
    indices = cache.path_device_indices(result.last_device_node)[: result.device_prefix_len : page_size]
    pages: np.ndarray = (indices // page_size).cpu().numpy()
    return pages


def match_prefix(original: Any, self: Any, params: Any) -> Any:
    """End a match before the first lost page, so that it is recomputed."""
    result = original(self, params)
    linker = linker_of(self)
    if linker is None or not linker.store.table.lost.any() or result.device_prefix_len == 0:
        return result
    size = linker.page_size
    lost = linker.store.table.lost[matched_pages(self, result, size)]
    if not lost.any():
        return result
    if params.req is not None:
        self.linker.hit_markers.pop(params.req.rid, None)
    return original(self, dataclasses.replace(params, key=params.key[: int(lost.argmax()) * size]))


def finish_loads(original: Any, self: Any, reqs: list[Any]) -> list[Any]:
    """End the requests that used a lost page in this batch, and only those; remember everyone's figures."""
    failed = original(self, reqs)
    linker = linker_of(self)
    if linker is None:
        return failed
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    generations = self.req_to_token_pool.req_generation
    for req in reqs:
        row = req.kv.req_pool_idx if req.kv is not None else None
        state = None if row is None else linker.store.find_request(row, int(generations[row]))
        if state is None:
            continue
        linker.take_choice(req.rid, state.figures)
        req.kvdrive_figures = state.figures
        if state.failure is not None and req not in failed:
            req.skip_radix_cache_insert = True
            reason = FINISH_ABORT(state.failure, HTTPStatus.SERVICE_UNAVAILABLE)
            if isinstance(linker.pool.step, DecodeStep):
                req.to_finish = (
                    reason  # a decoding request ends with the token of this step, which does not count
                )
            else:
                req.discard_output_reason = reason
                failed.append(req)
    return failed


# ---- quality ------------------------------------------------------------------------------------------------


def forward(original: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat a decode step at twice the budget when the quality monitor asks for it; the answer is the first one's."""
    output = original(self, forward_batch, *args, **kwargs)
    backend: Any = getattr(self, "attn_backend", None)
    monitor = getattr(backend, "monitor", None)
    if monitor is None or not forward_batch.forward_mode.is_decode():
        return output
    step = backend.forward_metadata
    due = [i for i, row in enumerate(step.rows) if monitor.is_due(row, step.store.budget)]
    if due:
        logits = output.logits_output.next_token_logits[due].clone()
        with backend.shadow():
            shadow = original(self, forward_batch, *args, **kwargs)
        kl = divergence(shadow.logits_output.next_token_logits[due], logits).tolist()
        for i, value in zip(due, kl, strict=True):
            monitor.record(step.rows[i], value)
            observe_kl(value)
    monitor.end_step(step.rows)
    return output


# ---- admission and sizes ------------------------------------------------------------------------------------


def get_new_batch_prefill(original: Any, self: Any, running_batch: Any) -> Any:
    """Let new prefills wait while DRAM has no frames for them; decodes go on. Called between two steps, and when idle."""
    linker = linker_of(self.tree_cache)
    if linker is not None:
        linker.store.transcoder.swap_in()
    if linker is not None and (self.waiting_queue or self.chunked_req is not None):
        chunk = self.chunked_prefill_size or linker.store.limits.num_frames * linker.page_size
        if not linker.store.can_admit(chunk):
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self.tree_cache.evict(EvictParams(num_tokens=chunk))
            if not linker.store.can_admit(chunk) and not running_batch.is_empty():
                from sglang.srt.managers.scheduler import NextBatchPlan

                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(self, running_batch)


def get_num_allocatable_reqs(original: Any, self: Any, running_bs: int, *args: Any, **kwargs: Any) -> int:
    """Let new requests wait while the window caches that ``device_bytes`` holds are all lent to running ones."""
    count = int(original(self, running_bs, *args, **kwargs))
    linker = linker_of(self.tree_cache)
    if linker is None or linker.store.device is None:
        return count
    return min(count, linker.store.device.num_requests - running_bs)


def profile_available_bytes(original: Any, self: Any, pre_model_load_memory: int) -> int:
    """Size the logical capacity by our tiers instead of the device's free memory."""
    if not is_requested():
        return int(original(self, pre_model_load_memory))
    from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule, get_server_args

    from kv_tier.geometry import Geometry
    from kvdrive_sglang.config import config_of_linker
    from kvdrive_sglang.index_choice import choose_index
    from kvdrive_sglang.sizing import logical_pages_for

    config = config_of_linker(get_memory().unified_cache_external_linker_config)
    model = self.model_config
    geometry = Geometry(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=model.head_dim,
        page_size=get_schedule().page_size,
        stretch_tokens=config.stretch_tokens,
        dtype=self.kv_cache_dtype if isinstance(self.kv_cache_dtype, torch.dtype) else torch.bfloat16,
    )
    index = choose_index(config.index, get_server_args().model_path, model.context_len)
    return logical_pages_for(config, geometry, model.context_len, index) * geometry.page_bytes


def free_rows(original: Any, self: Any, indices: list[int]) -> None:
    """Take back the device memory of requests that ended, however they ended."""
    store = getattr(self, "kvdrive_store", None)
    if store is not None:
        for index in indices:
            store.end_request(int(index))
    original(self, indices)


# ---- figures ------------------------------------------------------------------------------------------------


def build_customized_info(original: Any, self: Any, reqs: list[Any]) -> dict[str, list[Any]]:
    """Put what a request's prefix cost into ``meta_info["kvdrive"]`` of its last chunk."""
    info: dict[str, list[Any]] = original(self, reqs)
    if linker_of(self.tree_cache) is None:
        return info
    info["kvdrive"] = [
        [{"tokens_device": 0, **dataclasses.asdict(req.kvdrive_figures)}]
        if req.finished() and hasattr(req, "kvdrive_figures")
        else []
        for req in reqs
    ]
    return info


# ---- refused while serving ----------------------------------------------------------------------------------


def refuse_weight_update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to change the weights under the KV that they computed."""
    if not is_requested():
        return original(self, *args, **kwargs)
    return False, (
        "the weights are part of the fingerprint of every page the kvdrive backend keeps: restart the engine on the "
        "new weights instead of updating them online"
    )


def refuse_beam_search(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer a beam-search request with an error; its rows have no request of their own."""
    if not is_requested():
        return original(self, *args, **kwargs)
    return "beam search is not served by the kvdrive backend: send the request without a beam width"
