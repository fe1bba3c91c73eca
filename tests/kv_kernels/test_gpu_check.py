"""The GPU check script runs, through the interpreter on the CPU, and its report is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_kernels import triton_kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_gpu_check_through_the_interpreter(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    done = run("--interpret", "--json", str(report_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    checked = " ".join(check["kernel"] for check in report["checks"])
    unchecked = {"two_level_score", "sparse_decode_attention"}  # their parts are, or their name is shorter
    assert all(name in checked for name in set(triton_kernels.__all__) - unchecked)
    assert report["summary"]["num_wrong"] == 0
    assert len(report["summary"]) == 3 + 3  # full attention over each kind of step
    (row,) = report["rows"]
    assert row["microseconds"].keys() == row["floor_microseconds"].keys() == row["over_floor"].keys()
    assert all(us > 0 for us in row["microseconds"].values())
    assert "full attention over a step" in done.stdout


def test_gpu_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = run("--json", str(tmp_path / "report.json"))
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout
    assert not list(tmp_path.iterdir())
