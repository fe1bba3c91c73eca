"""`kvdrive bench NAME`: run one benchmark, show its table, write its JSON; `kvdrive bench all`: all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.report import BenchResult, json_text, rows_tables, summary_table, write_whole
from kvdrive_sglang.cli import bench_all

BENCHES: Final = {
    "exactness": "kvdrive_sglang.bench.exactness",
    "decode": "kvdrive_sglang.bench.decode",
    "resume": "kvdrive_sglang.bench.resume",
    "prefill": "kvdrive_sglang.bench.prefill",
    "tiers": "kvdrive_sglang.bench.tiers",
    "fidelity": "kvdrive_sglang.bench.fidelity",
    "cache": "kvdrive_sglang.bench.cache",
    "pipeline": "kvdrive_sglang.bench.pipeline",
    "cold": "kvdrive_sglang.bench.cold",
}
ALL: Final = "all"
TRACED: Final = "pipeline"
RESULTS: Final = Path("bench-results")
STDOUT: Final = Path("-")


class BenchCommand(TyperCommand):
    """The command's arguments, where ``--json`` may stand without a file: "-", standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, with_json_file(args))
        return list(rest)


def with_json_file(args: Sequence[str]) -> list[str]:
    """Return the arguments with "-" after a ``--json`` that no file follows."""
    complete: list[str] = []
    for arg, following in zip(args, [*args[1:], "--"], strict=True):
        complete.append(arg)
        if arg == "--json" and (following in BENCHES or (following.startswith("-") and following != "-")):
            complete.append(str(STDOUT))
    return complete


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="bench", cls=BenchCommand)(bench)


def bench(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(BENCHES)}, or {ALL}", show_default=False)],
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="write the result as JSON: to this file, or alone to standard output",
        ),
    ] = None,
    trace_path: Annotated[
        Path | None,
        typer.Option("--trace", help="pipeline: also write a trace, for chrome://tracing or ui.perfetto.dev"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="more cases; takes longer")] = False,
    json_dir: Annotated[
        Path | None, typer.Option(help=f"all: write one JSON per benchmark here  [default: {RESULTS}]")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="all: write a page of figures and plots")] = None,
    from_dir: Annotated[
        Path | None, typer.Option("--from", help="all: measure nothing, make the page from JSON files here")
    ] = None,
) -> None:
    """Check the outputs, measure, and show a table; what is compared is timed in one run, alternating."""
    if name == ALL:
        if json_path is not None:
            raise typer.BadParameter(
                "`bench all` writes a file per benchmark: pass --json-dir", param_hint="--json"
            )
        if trace_path is not None:
            raise typer.BadParameter(f"pass it to `bench {TRACED}`", param_hint="--trace")
        if from_dir is not None and (html is None or json_dir is not None or full):
            raise typer.BadParameter("goes with --html alone: it measures nothing", param_hint="--from")
        bench_every(json_dir or RESULTS, full, html, from_dir)
        return
    if name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(BENCHES)}, {ALL}", param_hint="NAME")
    if json_dir or html or from_dir:
        raise typer.BadParameter(f"--json-dir, --html and --from belong to `bench {ALL}`", param_hint="NAME")
    if trace_path is not None:
        if name != TRACED:
            raise typer.BadParameter(
                f"`bench {name}` has no trace, `bench {TRACED}` has", param_hint="--trace"
            )
        check_writable(trace_path, "--trace")
    if json_path not in (None, STDOUT):
        check_writable(json_path, "--json")
    console = Console(stderr=json_path == STDOUT)
    with progress_on(Console(stderr=True)) as step:
        result = run(name, full, step)
    for table in rows_tables(result):
        console.print(table)
    console.print(summary_table(result))
    if trace_path is not None and result.trace is not None:
        write_whole(trace_path, result.trace, "--trace")
        tell_written(console, trace_path)
    if json_path == STDOUT:
        typer.echo(json_text(result), nl=False)
    elif json_path is not None:
        write_whole(json_path, json_text(result), "--json")
        tell_written(console, json_path)


def bench_every(json_dir: Path, full: bool, html: Path | None, from_dir: Path | None) -> None:
    """Measure everything, or with ``from_dir`` nothing; write the page; end with status 1 if a benchmark failed."""
    console = Console()
    if html is not None:
        check_writable(html, "--html")
    failures: dict[str, str] = {}
    if from_dir is None:
        make_directory(json_dir)
        failures = bench_all.run_all(BENCHES, json_dir, full=full, console=console)
    if html is not None:
        bench_all.write_page(BENCHES, from_dir or json_dir, failures, html)
        tell_written(console, html)
    for name, reason in failures.items():
        console.print(f"{name} failed: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def tell_written(console: Console, path: Path) -> None:
    console.print(f"written to {path}", soft_wrap=True, markup=False, highlight=False)


def make_directory(path: Path) -> None:
    """Make the directory of the results unless it is there.

    Raises:
        ConfigError: it cannot be made, or no file can be written in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}: pass another --json-dir") from error
    check_writable(path / "probe", "--json-dir")


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


def check_writable(path: Path, option: str) -> None:
    """Refuse a file, named by ``option``, before minutes are spent on its content.

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
        raise ConfigError(f"cannot write {path}: {error.strerror}: pass another {option}") from error


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
