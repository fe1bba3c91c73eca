"""The data directory: its tree and modes, its locks across processes, its secret, its file names."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kv_tier.meta.data_dir import (
    MAX_SOCKET_PATH_BYTES,
    DataDir,
    parse_span_name,
    span_name,
    temporary_name,
)
from kv_tier.meta.errors import DataDirBusy, DataDirError, DataDirForeign

OWNER = (
    "import sys, time\n"
    "from kv_tier.meta.data_dir import DataDir\n"
    "owner = DataDir.open(sys.argv[1], role=sys.argv[2])\n"
    "print('open', flush=True)\n"
    "sys.stdin.read()\n"
)


def start_owner(path: Path, role: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path), role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until_open(owner: "subprocess.Popen[str]") -> None:
    assert owner.stdout is not None
    assert owner.stdout.readline() == "open\n"


def end(owner: "subprocess.Popen[str]") -> None:
    owner.communicate()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_creates_a_private_tree(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with DataDir.open(tmp_path / "a" / "b", role="engine") as opened:
            assert opened.path == tmp_path / "a" / "b"
    finally:
        os.umask(old)
    root = tmp_path / "a" / "b"
    assert {p.name for p in root.iterdir()} == {
        "spans",
        "keys",
        "quarantine",
        "sessions",
        "catalog",
        "engine.lock",
        "secret",
    }
    for path in (root, *root.iterdir()):
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
    assert not list((root / "spans").iterdir())


def test_opening_again_tightens_the_mode_and_keeps_the_secret(tmp_path: Path) -> None:
    with DataDir.open(tmp_path, role="engine") as opened:
        secret = opened.secret()
    tmp_path.chmod(0o755)
    with DataDir.open(tmp_path, role="service") as opened:
        assert opened.secret() == secret
        assert len(secret) == 32
    assert mode_of(tmp_path) == 0o700


def test_secrets_differ(tmp_path: Path) -> None:
    with DataDir.open(tmp_path / "a", role="engine") as a, DataDir.open(tmp_path / "b", role="engine") as b:
        assert a.secret() != b.secret()


def test_one_engine_and_one_service(tmp_path: Path) -> None:
    with DataDir.open(tmp_path, role="engine"), DataDir.open(tmp_path, role="service"):
        for role in ("engine", "service"):
            with pytest.raises(DataDirBusy, match=f"the {role} with pid {os.getpid()} owns it"):
                DataDir.open(tmp_path, role=role)
    DataDir.open(tmp_path, role="engine").close()


def test_a_refused_open_leaks_no_descriptor(tmp_path: Path) -> None:
    with DataDir.open(tmp_path, role="engine"):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(DataDirBusy):
            DataDir.open(tmp_path, role="engine")
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.crash
def test_another_process_is_refused_until_the_owner_dies(tmp_path: Path) -> None:
    owner = start_owner(tmp_path, "engine")
    wait_until_open(owner)
    with pytest.raises(DataDirBusy, match=f"pid {owner.pid} "):
        DataDir.open(tmp_path, role="engine")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with DataDir.open(tmp_path, role="engine"):
        assert (tmp_path / "engine.lock").read_text() == f"{os.getpid()}\n"
    end(owner)


@pytest.mark.crash
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from kv_tier.meta.data_dir import DataDir\n"
        "owner = DataDir.open(sys.argv[1], role='engine')\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    signal.pause()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.wait()
    try:
        DataDir.open(tmp_path, role="engine").close()
    finally:
        os.kill(child, signal.SIGKILL)
        owner.stdout.close()


def test_two_creators_agree_on_the_secret(tmp_path: Path) -> None:
    owners = [start_owner(tmp_path / "new", role) for role in ("engine", "service")]
    for owner in owners:
        wait_until_open(owner)
        end(owner)
    with DataDir.open(tmp_path / "new", role="engine") as opened:
        assert len(opened.secret()) == 32
    assert not [p for p in (tmp_path / "new").iterdir() if p.name.startswith(".tmp-")]


def test_refuses_somebody_elses_directory_untouched(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"")
    tmp_path.chmod(0o755)
    with pytest.raises(DataDirForeign, match=r"'holiday.jpg'.*use an empty or a new one"):
        DataDir.open(tmp_path, role="engine")
    assert mode_of(tmp_path) == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.jpg"]


def test_refuses_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(DataDirForeign, match="runs as uid 4242"):
        DataDir.open(tmp_path, role="engine")


def test_refuses_a_file_and_a_link_inside(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataDirError, match=r"cannot (create|open) .*file"):
        DataDir.open(tmp_path / "file", role="engine")
    DataDir.open(tmp_path / "data", role="engine").close()
    (tmp_path / "data" / "quarantine").rmdir()
    (tmp_path / "data" / "quarantine").symlink_to(tmp_path)
    with pytest.raises(DataDirError, match=r"cannot create .*quarantine"):
        DataDir.open(tmp_path / "data", role="engine")


def test_an_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DataDirError, match=rf"{tmp_path}.*No space left on device: check"):
        DataDir.open(tmp_path, role="engine")


def test_a_secret_must_be_whole_and_private(tmp_path: Path) -> None:
    with DataDir.open(tmp_path, role="engine") as opened:
        (tmp_path / "secret").chmod(0o640)
        with pytest.raises(DataDirError, match=r"mode 0640.*chmod 600"):
            opened.secret()
        (tmp_path / "secret").chmod(0o600)
        for size in (0, 31, 33):
            (tmp_path / "secret").write_bytes(bytes(size))
            with pytest.raises(DataDirError, match=f"{size} bytes, must be 32"):
                opened.secret()
        (tmp_path / "secret").unlink()
        with pytest.raises(DataDirError, match="No such file"):
            opened.secret()


def test_file_names(data_dir: DataDir) -> None:
    root = data_dir.path
    assert data_dir.span_path(255) == root / "spans" / "00000000000000ff.span"
    assert data_dir.quarantine_path("x.span") == root / "quarantine" / "x.span"
    assert data_dir.token_log_path("S_1-a") == root / "sessions" / "S_1-a.log"
    assert data_dir.catalog_path == root / "catalog"
    assert data_dir.engine_socket_path == root / "engine.sock"
    assert temporary_name(1) == ".tmp-0000000000000001"
    for span_id in (0, 1, 2**64 - 1):
        assert parse_span_name(span_name(span_id)) == span_id
    for name in ("x.span", ".tmp-0000000000000001", "00000000000000FF.span", "000000000000000ff.span"):
        assert parse_span_name(name) is None
    for span_id in (-1, 2**64):
        with pytest.raises(ValueError, match="span id"):
            span_name(span_id)


@pytest.mark.parametrize("session_id", ["", ".", "..", "a/b", "../x", "-a", "a" * 65, "a\n", "a\0", "ä"])
def test_session_ids_that_are_no_file_name(data_dir: DataDir, session_id: str) -> None:
    with pytest.raises(ValueError, match="session id"):
        data_dir.token_log_path(session_id)


def test_lists_sessions(data_dir: DataDir) -> None:
    for name in ("b.log", "a.log", "c.tmp", ".log", ".hidden.log"):
        (data_dir.path / "sessions" / name).write_bytes(b"")
    assert data_dir.session_ids() == ["a", "b"]


def test_a_socket_path_must_fit(tmp_path: Path) -> None:
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(tmp_path)) - len("//engine.sock")
    assert room > 0
    with DataDir.open(tmp_path / ("x" * room), role="engine") as opened:
        assert len(os.fsencode(opened.engine_socket_path)) == MAX_SOCKET_PATH_BYTES
    with DataDir.open(tmp_path / ("x" * (room + 1)), role="engine") as opened:
        too_long = pytest.raises(DataDirError, match="a Unix socket path holds 107")
        with too_long:
            _ = opened.engine_socket_path
