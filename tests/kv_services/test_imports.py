"""What may not be loaded, looked at in fresh processes."""

import subprocess
import sys

import pytest


def loaded(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["kv_services.server", "kv_tier.meta.catalog"])
def test_service_loads_no_torch_and_no_sglang(module: str) -> None:
    assert not loaded(module) & {"torch", "sglang", "triton", "transformers", "kvdrive_sglang", "kv_kernels"}


def test_client_needs_grpc_and_protobuf_only() -> None:
    ours = loaded("kv_services.client") - set(sys.stdlib_module_names) - loaded("site")
    assert not ours & {"torch", "sglang", "redis", "numpy", "httpx", "tokenizers", "google_crc32c", "kv_tier"}
    assert {"grpc", "google", "kv_services"} <= ours
