"""What every benchmark returns, and how it is shown and stored."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from kv_tier.meta.errors import ConfigError

PACKAGES: Final = ("kvdrive-sglang", "sglang", "torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class BenchResult:
    """Hold what a benchmark measured.

    Attributes:
        bench: the benchmark's name.
        rows: one flat dict per measured case; the keys, in order of first appearance, are the columns.
        summary: the figures that are compared between runs, with the unit last in each name.
        details: what the rows were made from, one flat dict each, for the file alone.
        trace: content of a file for Chrome's or Perfetto's viewer; None where there is none.
    """

    bench: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    details: list[dict[str, Any]] = field(default_factory=list)
    trace: str | None = None


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that a figure depends on, without loading any of them."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """Return the processor's name from /proc/cpuinfo, else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, None without it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the keys of all rows in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def show(value: Any) -> str:
    """Print a value for people: four significant digits, thousands apart, blank for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def show_bytes(num_bytes: float) -> str:
    """Print a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def rows_tables(result: BenchResult) -> list[Table]:
    """Lay out the rows: those of one ``figure`` (where rows have one) with the same columns are a table."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result.rows:
        rest = {column: value for column, value in row.items() if column != "figure"}
        groups.setdefault((str(row.get("figure", "")), *rest), []).append(rest)
    return [
        _table(f"kvdrive bench {result.bench}" + (f", {figure}" if figure else ""), rows)
        for (figure, *_), rows in groups.items()
    ]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Lay out rows; columns of numbers are set right."""
    table = Table(title=title)
    columns = columns_of(rows)
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(show(row.get(column))) for column in columns))
    return table


def summary_table(result: BenchResult) -> Table:
    """Lay out the summary, one figure a line."""
    table = Table(title="summary", show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in result.summary.items():
        table.add_row(Text(name), Text(show(value)))
    return table


def as_json(result: BenchResult) -> dict[str, Any]:
    """Return the object that `kvdrive bench --json` writes."""
    return {
        "bench": result.bench,
        "environment": {"measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **environment()},
        "rows": result.rows,
        "summary": result.summary,
        **({"details": result.details} if result.details else {}),
    }


def json_text(result: BenchResult) -> str:
    """Return what ``--json`` writes."""
    return json.dumps(as_json(result), indent=2) + "\n"


def write_whole(path: Path, text: str, option: str) -> None:
    """Write ``text`` to ``path``, which ``option`` named, or nothing: a reader never sees half a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: pass another {option}") from error
    finally:
        partial.unlink(missing_ok=True)
