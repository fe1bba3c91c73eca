"""SGLang's platform on machines without CUDA: plain torch on the CPU, with our KV pool and allocator."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform


class KVDriveCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Run SGLang on the CPU through torch-native code; no compiler and no CUDA needed."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        from kvdrive_sglang.plugin import is_requested

        if kind != "mha" or not is_requested():
            return None
        from kvdrive_sglang.pool import KVDrivePool

        return KVDrivePool

    def get_paged_allocator_cls(self) -> type | None:
        from kvdrive_sglang.plugin import is_requested

        if not is_requested():
            return None
        from kvdrive_sglang.pool import KVDriveAllocator

        return KVDriveAllocator


def platform_class() -> str | None:
    """Entry point of SGLang's platform group: our CPU platform, or None where CUDA is there."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"{KVDriveCpuPlatform.__module__}.{KVDriveCpuPlatform.__qualname__}"
