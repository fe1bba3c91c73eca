"""Every SGLang name and signature the plugin stands on, on the installed version."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import entry_points, version
from typing import Any

import pytest

from kvdrive_sglang.pool import LOADING


def resolve(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path} is not importable")


SIGNATURES = {
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree": [
        "self",
        "req",
        "up_to",
        "kwargs",
    ],
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix": ["self", "params"],
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices": ["self", "node"],
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._apply_cache_actions": ["self", "actions"],
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.finish_external_linker_loads": [
        "self",
        "reqs",
    ],
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill": ["self", "running_batch"],
    "sglang.srt.managers.scheduler.Scheduler.get_num_allocatable_reqs": [
        "self",
        "running_bs",
        "beam_width",
        "running_batch",
        "num_held_rows",
    ],
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": [
        "self",
        "pre_model_load_memory",
    ],
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows": ["self", "indices"],
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids": [
        "self",
        "page_ids",
    ],
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear": ["self"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers": ["self"],
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker.lookup": [
        "self",
        "rid",
        "transfers",
    ],
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker.load": [
        "self",
        "rid",
        "transfers",
    ],
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata": [
        "self",
        "forward_batch",
    ],
    "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls": ["self", "kind"],
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info": [
        "self",
        "reqs",
    ],
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    function = inspect.unwrap(resolve(path))
    assert list(inspect.signature(function).parameters) == SIGNATURES[path]


FIELDS = {
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": [
        "req_pool_indices",
        "seq_lens",
        "extend_prefix_lens",
        "out_cache_loc",
        "forward_mode",
    ],
    "sglang.srt.server_args.ServerArgs": [
        "model_path",
        "tokenizer_path",
        "json_model_override_args",
        "attention_backend",
        *LOADING,
    ],
    "sglang.srt.mem_cache.hicache_storage.PoolTransfer": ["keys", "device_indices"],
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams": ["key", "req"],
    "sglang.srt.mem_cache.base_prefix_cache.MatchResult": [
        "device_prefix_len",
        "last_device_node",
        "cache_actions",
    ],
}


@pytest.mark.parametrize("path", FIELDS)
def test_fields(path: str) -> None:
    cls = resolve(path)
    names = (
        set(inspect.signature(cls).parameters)
        | set(getattr(cls, "__struct_fields__", ()))
        | set(getattr(cls, "__annotations__", ()))
    )
    for base in cls.__mro__:
        names |= set(getattr(base, "__annotations__", ()))
    assert set(FIELDS[path]) <= names


def test_the_pinned_version_is_installed() -> None:
    assert version("sglang") == "0.5.23"


def test_entry_points_are_installed() -> None:
    assert [e.value for e in entry_points(group="sglang.srt.plugins", name="kvdrive")] == [
        "kvdrive_sglang.plugin:register"
    ]
    assert [e.value for e in entry_points(group="sglang.srt.platforms", name="kvdrive")] == [
        "kvdrive_sglang.platform:platform_class"
    ]


def test_loading_plugins_applies_every_hook_and_registers_the_backend() -> None:
    from sglang.srt.plugins import load_plugins

    from kvdrive_sglang.hooks import check_hooks

    load_plugins()
    check_hooks()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache import utils

    from kv_tier.meta.page_keys import hash_str

    assert "kvdrive" in ATTENTION_BACKENDS
    assert utils.get_hash_str is hash_str


def test_a_hook_that_was_not_applied_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins import load_plugins

    from kv_tier.meta.errors import ConfigError
    from kvdrive_sglang import hooks

    load_plugins()
    bare = {"sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert_nothing": hooks.free_rows}
    cache = resolve("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache")
    monkeypatch.setattr(cache, "insert_nothing", lambda self: None, raising=False)
    monkeypatch.setattr(hooks, "targets", lambda: bare)
    with pytest.raises(ConfigError, match="insert_nothing"):
        hooks.check_hooks()


def test_linker_implements_every_method() -> None:
    from kvdrive_sglang.linker import KVDriveLinker

    assert not KVDriveLinker.__abstractmethods__


def test_platform_is_ours_without_cuda() -> None:
    import torch

    from kvdrive_sglang.platform import platform_class

    assert (platform_class() is None) == torch.cuda.is_available()
