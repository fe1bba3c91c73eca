"""The GPU check script runs, through the interpreter on the CPU, and its report is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_gpu_check_tiny(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--json", str(report_path)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    assert {check["kernel"] for check in report["checks"]} >= {"page_score", "gather_pages", "attention out"}
    assert report["summary"] == {"num_wrong": 0}
    assert report["rows"][0]["microseconds"]["sparse"] > 0
    assert "full / sparse" in done.stdout
