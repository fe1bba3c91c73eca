"""From our configuration to SGLang's flags."""

from __future__ import annotations

from typing import Any

from kvdrive_sglang.config import KVDriveConfig

# Threads of a matrix product wait awake for the next one, about 0.1 ms, then sleep: waking them for each of a token's 120
# products costs more than half of what the products take; an idle engine, or one that plans, leaves its cores to others.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def server_arguments(config: KVDriveConfig, model_path: str, **extra: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``sglang.Engine`` (or, dashed, the flags of ``sglang serve``).

    Args:
        extra: SGLang arguments that win over ours.
    """
    import torch

    arguments: dict[str, Any] = {
        "model_path": model_path,
        "attention_backend": "kvdrive",
        "page_size": 8,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "sleep_on_idle": True,
        "max_running_requests": 16,
        "chunked_prefill_size": 2048,
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config.linker_config(),
    }
    if not torch.cuda.is_available():
        arguments["device"] = "cpu"
    return arguments | extra
