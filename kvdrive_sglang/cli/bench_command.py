"""`kvdrive bench NAME`: run one benchmark, show its table, write its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.report import BenchResult, rows_tables, summary_table, write_json

BENCHES: Final = {
    "exactness": "kvdrive_sglang.bench.exactness",
    "decode": "kvdrive_sglang.bench.decode",
    "resume": "kvdrive_sglang.bench.resume",
    "tiers": "kvdrive_sglang.bench.tiers",
    "fidelity": "kvdrive_sglang.bench.fidelity",
    "cache": "kvdrive_sglang.bench.cache",
}


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="bench")(bench)


def bench(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(BENCHES)}", show_default=False)],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the result to this file")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="more cases; takes longer")] = False,
) -> None:
    """Check the outputs, measure, and show a table; what is compared is timed in one run, alternating."""
    if name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(BENCHES)}", param_hint="NAME")
    if json_path is not None:
        check_writable(json_path)
    console = Console()
    with progress_on(Console(stderr=True)) as step:
        result = run(name, full, step)
    for table in rows_tables(result):
        console.print(table)
    console.print(summary_table(result))
    if json_path is not None:
        write_json(result, json_path)
        console.print(f"written to {json_path}", soft_wrap=True, highlight=False)


def run(name: str, full: bool, progress: Callable[[str], None]) -> BenchResult:
    """Run a benchmark of the registry.

    Args:
        progress: told what is under way.

    Raises:
        KVDriveError: an engine failed, or an output is wrong, so that its time means nothing.
    """
    module = import_module(BENCHES[name])
    result: BenchResult = module.run(full, progress)
    missing = [key for key in module.SUMMARY_KEYS if key not in result.summary]
    assert not missing, f"{name}: the summary lacks {missing}"
    return result


def check_writable(path: Path) -> None:
    """Refuse a result file before minutes are spent on its content.

    Raises:
        ConfigError: the file cannot be created.
    """
    probe = path.with_name(f".{path.name}.probe")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: pass another --json") from error


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is under way: a spinner with seconds on a terminal, else a line each."""
    if not console.is_terminal:
        yield lambda step: console.print(step, markup=False, highlight=False, soft_wrap=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda step: progress.update(task, description=step)
