"""The kernels compile for CUDA: the interpreter accepts more than the compiler does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_cuda.py"


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "90", "bfloat16"],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    package = SCRIPT.parents[2] / "kernels/kv_kernels/triton_kernels"
    sources = "".join(path.read_text() for path in package.glob("*.py"))
    launched = {name for name in compiled if f"{name}[" in sources}
    assert launched == compiled
    assert sources.count("_kernel(") == len(compiled)
