"""`kvdrive bench all`: every benchmark in a process of its own, one JSON each, one page of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.report import write_whole


def run_all(benches: Mapping[str, str], directory: Path, *, full: bool, console: Console) -> dict[str, str]:
    """Run one benchmark after another, each writing ``directory/NAME.json``; earlier results are removed.

    Args:
        benches: name -> module.
        full: as for a single one.

    Returns:
        name -> why it failed, of those that did.
    """
    failures = {}
    for number, name in enumerate(benches, 1):
        console.rule(Text(f"{name} ({number} of {len(benches)})"))
        path = directory / f"{name}.json"
        path.unlink(missing_ok=True)
        status, last = run_one(command_of(name, path, full=full))
        if status != 0:
            failures[name] = last or f"it ended with status {status} and said nothing"
    return failures


def command_of(name: str, path: Path, *, full: bool) -> list[str]:
    """Return the command line of a single benchmark."""
    return [
        *(sys.executable, "-m", "kvdrive_sglang", "bench", name),
        *("--json", str(path)),
        *(["--full"] if full else []),
    ]


def run_one(command: list[str]) -> tuple[int, str]:
    """Run a command, passing on what it says; return its status and the last line of its standard error."""
    last = ""
    with (
        unwinding_on_sigterm(),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as child,
    ):
        assert child.stderr is not None
        try:
            for line in child.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                last = line.strip() or last
        except BaseException:
            child.terminate()
            raise
    return child.returncode, last


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind like an exit meanwhile, so that the running benchmark ends its engines."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_page(benches: Mapping[str, str], directory: Path, failures: Mapping[str, str], path: Path) -> None:
    """Make the page at ``path`` from the JSON files in ``directory``.

    Raises:
        ConfigError: it cannot be written, or jinja2 is not installed.
    """
    try:
        from kvdrive_sglang.bench import html
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise ConfigError("--html needs the extra `report` (jinja2 is missing): install it") from error
    results = {name: html.read_result(directory / f"{name}.json") for name in benches}
    results |= {name: f"Failed: {reason}" for name, reason in failures.items()}
    write_whole(path, html.page(benches, results), "--html")
