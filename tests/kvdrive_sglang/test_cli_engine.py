"""`kvdrive engine`: what it checks and what it hands to SGLang; SGLang itself is never started here."""

import json
import os
import shlex
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kv_tier.meta.data_dir import DataDir
from kvdrive_sglang.cli.main import build_app
from kvdrive_sglang.engine_process import FIRST_PORT, LOCAL_PORT_RANGE, free_port
from kvdrive_sglang.launch import ENVIRONMENT

Executed = list[tuple[str, list[str], dict[str, str]]]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """Record what the process would have become."""
    calls: Executed = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.delenv("KVDRIVE_CONFIG", raising=False)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def kvdrive(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(build_app(), ["engine", *map(str, arguments)], env=environment)


def flags_of(command: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in pairwise(command) if flag.startswith("--")}


def linker_config(flags: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(flags["--unified-cache-external-linker-config"])[
        "linker_extra_config"
    ]
    return config


def test_print_flags_starts_and_creates_nothing(tmp_path: Path, model: Path, executed: Executed) -> None:
    data = tmp_path / "data"
    arguments = ("--model-path", model, "--data-dir", data, "--port", 1, "--budget-tokens", "all")
    shown = kvdrive(*arguments, "--print-flags", "--", "--context-length", "4096")
    assert shown.exit_code == 0, shown.output
    flags = shlex.split(shown.stdout)
    assert flags[-2:] == ["--context-length", "4096"]
    assert flags_of(flags)["--attention-backend"] == "kvdrive"
    assert flags_of(flags)["--port"] == "1"
    assert linker_config(flags_of(flags))["budget_tokens"] == "all"
    assert not data.exists() and executed == []


def test_print_flags_fetches_no_model(tmp_path: Path, executed: Executed) -> None:
    shown = kvdrive("--data-dir", tmp_path / "data", "--print-flags", KVDRIVE_CACHE=str(tmp_path / "cache"))
    assert shown.exit_code == 0, shown.output
    assert flags_of(shlex.split(shown.stdout))["--model-path"].startswith(str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_becomes_the_server_with_checked_values(tmp_path: Path, model: Path, executed: Executed) -> None:
    data, port = tmp_path / "data", free_port()
    settings = tmp_path / "kvdrive.json"
    settings.write_text(json.dumps({"budget_tokens": 512, "append": "exact", "ssd_bytes": 1 << 20}))
    overrides = ("--append", "sparse", "--window-multiple", 3, "--persist", "all", "--dram-bytes", 1 << 30)
    started = kvdrive(
        "--config", f"@{settings}", "--model-path", model, "--data-dir", data, "--port", port, *overrides
    )
    assert started.exit_code == 0, started.output
    [(program, command, environment)] = executed
    assert program == command[0] and command[1:3] == ["-m", "sglang.launch_server"]
    assert {**environment, **ENVIRONMENT} == environment
    flags = flags_of(command)
    assert (flags["--model-path"], flags["--host"], flags["--port"]) == (str(model), "127.0.0.1", str(port))
    config = linker_config(flags)
    assert (config["budget_tokens"], config["append"], config["ssd_bytes"]) == (512, "sparse", 1 << 20)
    assert (config["window_multiple"], config["persist"], config["dram_bytes"]) == (3, "all", 1 << 30)
    assert (config["data_dir"], config["http_host"], config["http_port"]) == (str(data), "127.0.0.1", port)
    DataDir.open(data, role="engine").close()  # the check has let go of it


def test_listening_everywhere_tells_the_service_the_loopback_and_warns(
    tmp_path: Path, model: Path, executed: Executed
) -> None:
    port = free_port()
    started = kvdrive(
        "--model-path", model, "--data-dir", tmp_path / "data", "--host", "0.0.0.0", "--port", port
    )
    assert started.exit_code == 0, started.output
    flags = flags_of(executed[0][1])
    assert flags["--host"] == "0.0.0.0"
    assert linker_config(flags)["http_host"] == "127.0.0.1"
    assert "listens on 0.0.0.0" in started.stderr


def test_a_quota_beyond_the_disk_is_a_warning(tmp_path: Path, model: Path, executed: Executed) -> None:
    started = kvdrive(
        "--model-path", model, "--data-dir", tmp_path / "data", "--port", free_port(), "--ssd-bytes", 1 << 60
    )
    assert started.exit_code == 0 and len(executed) == 1
    assert f"ssd_bytes={1 << 60:,}" in started.stderr


def test_configuration_from_the_environment(tmp_path: Path, model: Path, executed: Executed) -> None:
    text = json.dumps({"data_dir": str(tmp_path / "data"), "http_port": free_port()})
    started = kvdrive("--model-path", model, KVDRIVE_CONFIG=text)
    assert started.exit_code == 0, started.output
    assert flags_of(executed[0][1])["--port"] == str(json.loads(text)["http_port"])


def test_port_in_use_is_named_before_anything_is_created(
    tmp_path: Path, model: Path, executed: Executed, taken_port: int
) -> None:
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "data", "--port", taken_port)
    assert ended.exit_code == 1
    assert f"port {taken_port} on 127.0.0.1 is in use" in ended.stderr
    assert not (tmp_path / "data").exists() and executed == []


def test_a_host_that_is_not_ours_is_refused(tmp_path: Path, model: Path, executed: Executed) -> None:
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "data", "--host", "192.0.2.1")
    assert ended.exit_code == 1 and "192.0.2.1" in ended.stderr
    assert executed == []


def test_a_directory_with_a_live_engine_is_refused(tmp_path: Path, model: Path, executed: Executed) -> None:
    with DataDir.open(tmp_path / "data", role="engine"):
        ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "data", "--port", free_port())
    assert ended.exit_code == 1
    assert f"the engine with pid {os.getpid()} owns it" in ended.stderr
    assert executed == []


def test_somebody_elses_directory_is_refused_and_left_alone(
    tmp_path: Path, model: Path, executed: Executed
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "home", "--port", free_port())
    assert ended.exit_code == 1 and "thesis.txt" in ended.stderr
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.txt"] and executed == []


def test_a_directory_that_cannot_be_created_is_refused(
    tmp_path: Path, model: Path, executed: Executed
) -> None:
    (tmp_path / "file").touch()
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "file" / "data", "--port", free_port())
    assert ended.exit_code == 1 and "Not a directory" in ended.stderr
    assert executed == []


def test_a_path_too_long_for_the_control_socket_is_refused(
    tmp_path: Path, model: Path, executed: Executed
) -> None:
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / ("d" * 120), "--port", free_port())
    assert ended.exit_code == 1 and "use a shorter data directory path" in ended.stderr
    assert executed == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--budget-tokens", "many"], 2, "'many'"),
        (["--budget-tokens", "0"], 1, "budget_tokens"),
        (["--dram-bytes", "-1"], 1, "dram_bytes"),
        (["--window-multiple", "0"], 1, "window_multiple"),
        (["--append", "never"], 1, "append"),
        (["--persist", "some"], 1, "persist"),
        (["--port", "70000"], 1, "http_port"),
        (["--config", "{"], 1, "no JSON"),
        (["--config", "@missing.json"], 1, "missing.json"),
        (["--config", '{"budget": 1}'], 1, "budget"),
        (["--model-path", "./missing"], 1, "./missing"),
        (["--", "--port", "1"], 2, "--port"),
        (["--", "--attention-backend=triton"], 2, "--attention-backend"),
        (["--", "--unified-cache-external-linker-backend", "x"], 2, "linker"),
        (["stray"], 2, "'stray'"),
        (["--bugdet-tokens", "1"], 2, "bugdet"),
    ],
)
def test_bad_values_are_refused(
    arguments: list[str], status: int, words: str, tmp_path: Path, model: Path, executed: Executed
) -> None:
    options = ["--data-dir", str(tmp_path / "data"), "--port", str(free_port())]
    if "--model-path" not in arguments:
        options += ["--model-path", str(model)]
    ended = kvdrive(*options, *arguments, COLUMNS="200")
    assert (ended.exit_code, words in ended.stderr) == (status, True), ended.output
    assert executed == []


def test_no_data_directory_is_refused(model: Path, executed: Executed) -> None:
    ended = kvdrive("--model-path", model)
    assert ended.exit_code == 1 and "data_dir" in ended.stderr
    assert executed == []


def test_a_name_of_a_model_hub_is_left_to_sglang(tmp_path: Path, executed: Executed) -> None:
    shown = kvdrive(
        "--model-path", "someone/some-model-1.5B", "--data-dir", tmp_path / "data", "--print-flags"
    )
    assert flags_of(shlex.split(shown.stdout))["--model-path"] == "someone/some-model-1.5B"


def test_without_sglang_the_extra_is_named(
    tmp_path: Path, model: Path, executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrive_sglang.cli.engine_command.find_spec", lambda name: None)
    ended = kvdrive("--model-path", model, "--data-dir", tmp_path / "data")
    assert ended.exit_code == 1 and "kvdrive-sglang[engine]" in ended.stderr


def test_free_ports_are_none_that_the_kernel_hands_out() -> None:
    first_of_kernel = int(LOCAL_PORT_RANGE.read_text().split()[0])
    assert all(FIRST_PORT <= free_port() < first_of_kernel for _ in range(20))
