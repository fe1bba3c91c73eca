"""`kvdrive demo`: a session on a real model that outlives its engine. Starts what it needs and leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kv_tier.meta.errors import KVDriveError
from kvdrive_sglang.bench.report import show, show_bytes
from kvdrive_sglang.cli.engine_command import cache_dir, require_sglang
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.demo_text import DemoText, demo_text
from kvdrive_sglang.engine_process import EngineProcess, free_port
from kvdrive_sglang.launch import server_arguments
from kvdrive_sglang.packaged_model import ensure_model

if TYPE_CHECKING:
    from kv_services.client import Answer, Client

TEXT_TOKENS: Final = 7000
QUESTIONS: Final = (
    "What kind of document is this? Answer in one sentence.",
    "What must somebody who redistributes the work keep?",
)
FORK_QUESTION: Final = "Who is liable when the software causes damage?"
LAST_QUESTION: Final = "May I use the work commercially?"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 20.0


class DemoFailed(KVDriveError):
    """The demonstration did not show what it should; the message says what was seen."""


@dataclass(frozen=True)
class Row:
    """One request and what its prompt cost (a `Usage` message of the service)."""

    name: str
    usage: Any


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="demo")(demo)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="keep the data directory and the logs")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=128, help="longest answer")] = 48,
) -> None:
    """Ingest a real text, ask, fork, suspend, kill the engine with SIGKILL, start it again, resume, ask again.

    Status 1 when the resumed turn computed most of its prompt again.
    """
    require_sglang()
    screen = Screen(Console(highlight=False, soft_wrap=True), max_new_tokens)
    signals = Signals()
    with signals.installed(), directory(keep, screen) as root, Stack(root, signals) as stack:
        rows = play(stack, screen)
    screen.console.print(costs(rows))
    screen.console.print(verdict(rows))


# ---- the story ----------------------------------------------------------------------------------------------


def play(stack: Stack, screen: Screen) -> list[Row]:
    """Play the whole demonstration on a stack that is not started yet.

    Raises:
        KVDriveError: something could not be started.
        DemoFailed: the service answered with an error.
    """
    from kv_services.errors import ServiceError

    model = ensure_model(cache_dir())
    text = _text(model)
    screen.say(f"text: {text.num_tokens:,} tokens from the licences of {', '.join(text.names)}")
    with screen.during("starting the engine"):
        stack.start_engine(model)
    with screen.during("starting the session service"):
        stack.start_service()
    try:
        with stack.client() as client, stack.client(tenant="somebody-else") as other:
            return _scenes(stack, screen, client, other, text)
    except ServiceError as error:
        raise DemoFailed(f"{error.message} [{error.reason}]") from error


def _scenes(stack: Stack, screen: Screen, client: Client, other: Client, text: DemoText) -> list[Row]:
    with screen.during(f"ingesting {text.num_tokens:,} tokens"):
        document = client.create_document(text.text, title="licences")
    rows = [Row("prefill", document.usage)]
    session = client.create_session(document_id=document.document.session_id, title="demo").session_id
    for name, question in zip(("first turn", "warm turn"), QUESTIONS, strict=True):
        rows.append(screen.ask(name, question, lambda asked: client.chat(session, asked, **screen.sampling)))

    fork = client.fork(session, title="fork").session_id
    screen.say(f"forked {session} into {fork}")
    rows.append(
        screen.ask("fork's turn", FORK_QUESTION, lambda asked: client.chat(fork, asked, **screen.sampling))
    )

    with screen.during("suspending: waiting for the SSD"):
        suspended = client.suspend(session)
    screen.say(f"suspended, {suspended.num_sealed_pages} of {suspended.num_pages} pages are in files")
    screen.say(
        f"killing the engine (pid {stack.kill_engine()}) with SIGKILL, dropping its files from the page cache"
    )
    drop_page_cache(stack.data_dir / "spans")
    with screen.during("starting the engine again"):
        stack.restart_engine()
    screen.say(f"resuming {session}: {client.resume(session).num_tokens:,} tokens")
    rows.append(
        screen.ask(
            "resumed turn", LAST_QUESTION, lambda asked: client.chat(session, asked, **screen.sampling)
        )
    )

    prompt = last_prompt(stack.data_dir, session)
    stranger = other.create_session().session_id
    screen.say("for comparison, another tenant sends the same prompt and shares nothing")
    rows.append(
        screen.ask(
            "re-prefill",
            LAST_QUESTION,
            lambda _: other.generate(stranger, token_ids=prompt, **screen.sampling),
        )
    )
    return rows


def _text(model: Path) -> DemoText:
    from tokenizers import Tokenizer

    return demo_text(Tokenizer.from_file(str(model / "tokenizer.json")), TEXT_TOKENS)


def last_prompt(data_dir: Path, session_id: str) -> list[int]:
    """Read from a session's token log what its last turn sent to the engine: all tokens before the last answer."""
    from kv_services.conversation import fold, tokens_of
    from kv_services.token_log import load

    conversation = fold(*load(data_dir / "sessions" / f"{session_id}.log"))
    *earlier, last = conversation.turns
    return [*tokens_of(conversation.base, earlier), *last.prompt]


def drop_page_cache(spans: Path) -> None:
    """Ask the kernel to forget the files of a directory, so that they are read from the disk again."""
    for path in spans.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def costs(rows: list[Row]) -> Table:
    """Lay out what each request's prompt cost."""
    table = Table(
        title="Where the KV of each prompt came from, in tokens, and time to first token",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("request", no_wrap=True)
    for column in ("prompt", "device", "DRAM", "SSD", "computed", "read", "TTFT"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        usage = row.usage
        counts = (
            usage.prompt_tokens,
            usage.restored_device_tokens,
            usage.restored_dram_tokens,
            usage.restored_ssd_tokens,
            usage.computed_tokens,
        )
        table.add_row(
            row.name, *map(show, counts), show_bytes(usage.read_bytes), f"{usage.ttft_ms / 1e3:.2f} s"
        )
    return table


def verdict(rows: list[Row]) -> Text:
    """Say what the resumed turn saved.

    Raises:
        DemoFailed: it computed most of its prompt again.
    """
    resumed, again = rows[-2].usage, rows[-1].usage
    if 2 * resumed.computed_tokens > resumed.prompt_tokens:
        raise DemoFailed(
            f"the resumed turn computed {resumed.computed_tokens} of {resumed.prompt_tokens} tokens again: "
            "its KV was not found in the files"
        )
    return Text(
        f"The killed engine's session went on after {resumed.ttft_ms / 1e3:.2f} s, computing {resumed.computed_tokens} "
        f"tokens; without its files it would have been {again.ttft_ms / 1e3:.2f} s and {again.computed_tokens:,} tokens "
        f"({again.ttft_ms / max(resumed.ttft_ms, 1e-3):.0f} times as long).",
        style="green",
    )


# ---- the screen ---------------------------------------------------------------------------------------------


@dataclass
class Screen:
    """Show what happens: a spinner while something takes time, answers as they come."""

    console: Console
    max_new_tokens: int

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "temperature": 0.0}

    def say(self, line: str) -> None:
        self.console.print(Text(line, style="dim"))

    @contextlib.contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Show a spinner with seconds, then how long it took."""
        begin = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as bar:
            bar.add_task(label, total=None)
            yield
        self.say(f"{label}: {time.monotonic() - begin:.1f} s")

    def ask(self, name: str, question: str, send: Callable[[str], Answer]) -> Row:
        """Ask, stream the answer, and return what it cost."""
        self.console.print(Text(f"\n{name}: {question}", style="bold"))
        with send(question) as answer, self.console.status("waiting for the first token") as status:
            for delta in answer:
                status.stop()
                self.console.print(Text(delta.text), end="")
        self.console.print("\n")
        return Row(name, answer.usage)


# ---- what is started and stopped ------------------------------------------------------------------------------


@dataclass
class Signals:
    """Turn the signals that end programs into KeyboardInterrupt, but never between a start and its bookkeeping."""

    held: bool = False
    pending: bool = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if not self.held:
            raise KeyboardInterrupt
        self.pending = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        earlier = {number: signal.signal(number, self._arrived) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Let a signal wait until the block has ended."""
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def directory(keep: bool, screen: Screen) -> Iterator[Path]:
    """Yield a new directory, removed afterwards unless it is kept."""
    root = Path(tempfile.mkdtemp(prefix="kvdrive-demo-"))
    try:
        yield root
    finally:
        if keep:
            screen.say(
                f"kept {root}: `kvdrive engine` and `kvdrive serve`, both with `--data-dir {root / 'data'}`, go on with it"
            )
        else:
            shutil.rmtree(root, ignore_errors=True)


@dataclass
class Stack:
    """One engine and one service on a data directory below ``root``; a context manager that ends both."""

    root: Path
    signals: Signals
    port: int = field(default_factory=free_port)
    engine: EngineProcess | None = None
    service: subprocess.Popen[bytes] | None = None
    service_port: int = 0
    model: Path = Path()

    @property
    def data_dir(self) -> Path:
        return self.root / "data"

    def start_engine(self, model: Path) -> None:
        """Start the engine and wait until it answers."""
        self.model = model
        self.restart_engine()

    def restart_engine(self) -> None:
        """Start an engine on the same data directory and port."""
        config = parse_config({"data_dir": str(self.data_dir), "http_port": self.port})
        arguments = server_arguments(config, str(self.model), log_level="warning")
        scratch = self.root / "tmp"  # a killed engine leaves temporary files behind
        scratch.mkdir(exist_ok=True)
        with self.signals.hold():
            self.engine = EngineProcess(
                arguments, port=self.port, log_path=self.root / "engine.log", env={"TMPDIR": str(scratch)}
            )
        self.engine.wait_ready(START_TIMEOUT_S)

    def kill_engine(self) -> int:
        """End the engine as a crash would; return its pid."""
        assert self.engine is not None
        self.engine.kill()
        return self.engine.process.pid

    def start_service(self) -> None:
        """Start the session service in a process of its own and learn its port.

        Raises:
            DemoFailed: it ended at once; the message quotes its log.
        """
        log_path = self.root / "service.log"
        command = [
            sys.executable,
            "-m",
            "kv_services.server",
            "--data-dir",
            str(self.data_dir),
            "--port",
            "0",
        ]
        with log_path.open("wb") as log, self.signals.hold():
            self.service = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.service.stdout is not None
        line = self.service.stdout.readline().decode().strip()
        if not line:
            raise DemoFailed(
                f"the session service ended at once:\n{log_path.read_text(errors='replace')[-2000:]}"
            )
        self.service_port = int(line.rpartition(" ")[2])

    def client(self, *, tenant: str = "") -> Client:
        """Connect to the service."""
        from kv_services.client import Client

        return Client(f"127.0.0.1:{self.service_port}", tenant=tenant, timeout_s=60.0)

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *error: object) -> None:
        with self.signals.hold():
            if self.service is not None:
                self._stop_service(self.service)
            if self.engine is not None:
                self.engine.stop()

    def _stop_service(self, service: subprocess.Popen[bytes]) -> None:
        """End the service; should it not end by itself, its embedded Valkey must not stay behind either."""
        service.terminate()
        try:
            service.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            from kv_tier.meta.embedded_valkey import EmbeddedValkey

            service.kill()
            service.wait()
            EmbeddedValkey(self.data_dir / "catalog").stop()
        assert service.stdout is not None
        service.stdout.close()
