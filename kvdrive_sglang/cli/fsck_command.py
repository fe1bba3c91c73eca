"""`kvdrive fsck`: verify every byte of a data directory, and compare spans, token logs and catalog.

Exit status: 0 clean, 1 something was found (and, with --repair, is left), 2 it could not run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kv_tier.meta.errors import DataDirBusy, KVDriveError
from kvdrive_sglang.bench.report import show_bytes

if TYPE_CHECKING:
    from kv_services.fsck import Rebuilt, SessionReport
    from kv_tier.meta.data_dir import DataDir
    from kv_tier.meta.fsck import Finding, SpanReport

CLEAN, FOUND, CANNOT_RUN = 0, 1, 2
MAX_ROWS = 200


@dataclass(frozen=True)
class Outcome:
    """What one pass over a data directory found. ``live``: the roles that others held meanwhile."""

    spans: SpanReport
    sessions: SessionReport
    live: frozenset[str]

    @property
    def findings(self) -> list[Finding]:
        return [*self.spans.findings, *self.sessions.findings]


def register(app: typer.Typer) -> None:
    """Add the command to the program's."""
    app.command(name="fsck")(fsck)


def fsck(
    data_dir: Annotated[Path, typer.Option(help="data directory to check", show_default=False)],
    repair: Annotated[
        bool, typer.Option("--repair", help="repair what can be; engine and service must be stopped")
    ] = False,
    rebuild_catalog: Annotated[
        bool,
        typer.Option(
            "--rebuild-catalog", help="write the catalog anew from the files; stop the service first"
        ),
    ] = False,
    unreferenced: Annotated[
        bool,
        typer.Option(
            "--unreferenced", help="count spans of no session as findings, so that --repair removes them"
        ),
    ] = False,
    redis_url: Annotated[
        str,
        typer.Option(envvar="KVDRIVE_REDIS_URL", help="Redis of the service; the embedded one without it"),
    ] = "",
) -> None:
    """Verify every byte of spans and token logs and compare them with the catalog; changes nothing unless asked to."""
    console = Console()
    errors = Console(stderr=True, soft_wrap=True)
    try:
        status = _run(console, data_dir, repair, rebuild_catalog, unreferenced, redis_url)
    except ModuleNotFoundError as error:
        errors.print(Text(f"error: {error.name} is missing: install the extra `service`", style="red"))
        raise typer.Exit(CANNOT_RUN) from error
    except (KVDriveError, OSError) as error:
        errors.print(Text(f"error: {error}", style="red"))
        raise typer.Exit(CANNOT_RUN) from error
    raise typer.Exit(status)


def _run(
    console: Console, path: Path, repair: bool, rebuild: bool, unreferenced: bool, redis_url: str
) -> int:
    import_module("kv_services.fsck")  # says what is missing before anything is locked
    ours = {"engine", "service"} if repair else {"service"} if rebuild else set()
    with _opened(path, ours) as data_dir:

        def check() -> Outcome:
            live = _live(data_dir, ours)
            return asyncio.run(_check(console, data_dir, redis_url, unreferenced, live))

        outcome = check()
        if repair and outcome.findings:
            _print(console, outcome, "found")
            asyncio.run(_repair(data_dir, outcome, redis_url))
            outcome = check()
        if rebuild:
            _print_rebuilt(console, asyncio.run(_rebuild(data_dir, outcome, redis_url)))
            outcome = check()
    _print(console, outcome, "left" if repair else "found")
    return FOUND if outcome.findings else CLEAN


@contextlib.contextmanager
def _opened(path: Path, roles: set[str]) -> Iterator[DataDir]:
    """Open the directory, with the locks of the roles whose files are to be changed.

    Raises:
        DataDirBusy: a live engine or service would be changed under.
    """
    from kv_tier.meta.data_dir import DataDir

    with contextlib.ExitStack() as opened:
        reader = opened.enter_context(DataDir.inspect(path))
        try:
            if "engine" in roles:
                opened.enter_context(DataDir.open(path, role="engine"))
            if "service" in roles:
                opened.enter_context(DataDir.open(path, role="service"))
        except DataDirBusy as error:
            raise DataDirBusy(f"{error}; without --repair and --rebuild-catalog fsck only reads") from error
        yield reader


def _live(data_dir: DataDir, ours: set[str]) -> frozenset[str]:
    """Return the roles that somebody else holds."""
    from kv_tier.meta.data_dir import lock_owner

    roles = {"engine", "service"} - ours
    return frozenset(role for role in roles if lock_owner(data_dir.path / f"{role}.lock") is not None)


async def _check(
    console: Console, data_dir: DataDir, redis_url: str, unreferenced: bool, live: frozenset[str]
) -> Outcome:
    from kv_services.fsck import check_sessions, check_unreferenced, open_catalog
    from kv_tier.meta.fsck import check_spans

    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading spans", total=None)
        spans = check_spans(
            data_dir,
            live="engine" in live,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        bar.update(task, description="reading token logs")
        async with open_catalog(data_dir, redis_url, change=False) as catalog:
            sessions = await check_sessions(data_dir, catalog, spans, live="service" in live)
    if unreferenced:
        sessions.notes = [note for note in sessions.notes if note.kind != "unreferenced"]
        spans.findings += check_unreferenced(sessions, spans)
    return Outcome(spans, sessions, live)


async def _repair(data_dir: DataDir, outcome: Outcome, redis_url: str) -> None:
    from kv_services.fsck import open_catalog, repair_sessions
    from kv_tier.meta.fsck import repair_spans

    repair_spans(data_dir, outcome.spans.findings)
    async with open_catalog(data_dir, redis_url, change=outcome.sessions.compared) as catalog:
        await repair_sessions(data_dir, catalog, outcome.sessions, spans=outcome.spans)


async def _rebuild(data_dir: DataDir, outcome: Outcome, redis_url: str) -> Rebuilt:
    from kv_services.fsck import open_catalog, rebuild_catalog

    async with open_catalog(data_dir, redis_url, change=True) as catalog:
        assert catalog is not None
        return await rebuild_catalog(data_dir, catalog, outcome.spans)


def _print(console: Console, outcome: Outcome, verb: str) -> None:
    spans, sessions = outcome.spans, outcome.sessions
    notes = [*spans.notes, *sessions.notes]
    if outcome.findings or notes:
        console.print(report(outcome.findings, notes))
    num_pages = sum(found.num_pages for found in sessions.sessions.values())
    compared = "compared with the catalog" if sessions.compared else "not compared with a catalog"
    if outcome.live:
        compared += f"; a live {' and '.join(sorted(outcome.live))} may change files meanwhile"
    console.print(
        f"{len(outcome.findings)} {verb}; {len(spans.spans)} intact spans, {show_bytes(spans.num_bytes)} read; "
        f"{len(sessions.sessions)} intact token logs, {sum(sessions.num_durable.values())} of {num_pages} pages durable; "
        f"{compared}",
        highlight=False,
        soft_wrap=True,
    )


def report(findings: list[Finding], notes: list[Finding]) -> Table:
    """Lay out what was found; notes come after findings, in grey."""
    table = Table("what", "where", "found", "--repair would")
    for style, rows in (("red", findings), ("dim", notes)):
        for finding in rows[:MAX_ROWS]:
            cells = (finding.kind, finding.where, finding.detail, finding.repair.value)
            table.add_row(*(Text(cell, style=style, overflow="fold") for cell in cells))
        if len(rows) > MAX_ROWS:
            table.add_row(Text(f"and {len(rows) - MAX_ROWS} more", style=style))
    return table


def _print_rebuilt(console: Console, rebuilt: Rebuilt) -> None:
    console.print(
        f"catalog rebuilt: {rebuilt.indexed} sessions and documents indexed, {rebuilt.deleted} deletions ended, "
        f"{rebuilt.forgotten} entries without a log forgotten"
    )
    for session_id in rebuilt.corrupt:
        console.print(
            Text(f"the token log of {session_id} is damaged; restore it from a backup", style="red")
        )
