"""One page of what the benchmarks measured: verdicts, plots and rows, self-contained, light and dark."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from kvdrive_sglang.bench.limits import LIMITS, Limit
from kvdrive_sglang.bench.report import show, show_bytes

TEMPLATE = "page.html.jinja"


class Result(msgspec.Struct, frozen=True):
    """What `kvdrive bench NAME --json` wrote."""

    bench: str
    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One line of a summary beside its limit.

    ``verdict``: "holds", "broken", "missing", or empty without a limit.
    """

    name: str
    value: str
    limit: str
    verdict: str


@dataclass(frozen=True)
class Table:
    """Rows with the same columns; ``title`` is their ``figure``, ``numeric`` says which columns are set right."""

    title: str
    columns: list[str]
    numeric: list[bool]
    cells: list[list[str]]


@dataclass(frozen=True)
class Section:
    """What the page says of one benchmark; ``note`` says why there are no figures."""

    name: str
    question: str
    note: str = ""
    measured: str = ""
    figures: list[Figure] = field(default_factory=list)
    plots: list[dict[str, Any]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    num_rows: int = 0

    @property
    def verdict(self) -> str:
        """Return "holds" if every limit does, "broken" if one does not, else "missing"."""
        verdicts = {figure.verdict for figure in self.figures}
        return "broken" if "broken" in verdicts else "holds" if verdicts - {"", "missing"} else "missing"

    @property
    def told(self) -> str:
        """Count the limits that hold."""
        held = [figure.verdict == "holds" for figure in self.figures if figure.verdict in ("holds", "broken")]
        missing = sum(figure.verdict == "missing" for figure in self.figures)
        return f"{sum(held)} of {len(held)} hold" + (f", {missing} not measured" if missing else "")


def read_result(path: Path) -> Result | str:
    """Return the result in a file, or a sentence that says why there is none."""
    try:
        return msgspec.convert(json.loads(path.read_text()), Result)
    except FileNotFoundError:
        return f"Not measured: there is no {path.name}."
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}."
    except (ValueError, msgspec.ValidationError) as error:
        return f"{path.name} is not what a benchmark writes: {error}."


def question_of(module: str) -> str:
    """Return the first sentence of a benchmark's docstring without its name; the module is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split()).partition(": ")[2]
    return line[:1].upper() + line[1:]


def page(benches: Mapping[str, str], results: Mapping[str, Result | str]) -> str:
    """Write the page.

    Args:
        benches: name -> module, in the order of the page.
        results: name -> result, or why there is none.
    """
    draw = plots_by_bench()
    sections = [section(name, question_of(module), results[name], draw) for name, module in benches.items()]
    found = [result for result in results.values() if isinstance(result, Result)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(TEMPLATE).render(
        sections=sections, machines=machines(found), drawable=draw is not None
    )
    return text + "\n"


def plots_by_bench() -> Any:
    """Return the table of plot functions, None without matplotlib."""
    try:
        from kvdrive_sglang.bench.plots import PLOTS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return None
    return PLOTS


def section(name: str, question: str, result: Result | str, draw: Any) -> Section:
    """Put one benchmark together."""
    if isinstance(result, str):
        return Section(name, question, note=result)
    plots = [
        {"title": plot.title, "svg": Markup(plot.svg)}
        for plot in (draw[name](result.rows) if draw and name in draw else ())
    ]
    return Section(
        name,
        question,
        measured=str(result.environment.get("measured", "")),
        figures=figures_of(result.summary, LIMITS.get(name, ())),
        plots=plots,
        tables=tables_of(result.rows),
        num_rows=len(result.rows),
    )


def figures_of(summary: Mapping[str, Any], limits: Sequence[Limit]) -> list[Figure]:
    """Put the figures with limits first, each beside its limit, then the others."""
    judged = []
    for limit in limits:
        value = summary.get(limit.key)
        verdict = "missing" if value is None else "holds" if limit.holds(value) else "broken"
        judged.append(Figure(limit.key, show(value), f"{limit.comparison} {show(limit.bound)}", verdict))
    held = {limit.key for limit in limits}
    return judged + [Figure(name, show(value), "", "") for name, value in summary.items() if name not in held]


def tables_of(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Lay rows out, those with the same columns in one table."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        rest = {column: value for column, value in row.items() if column != "figure"}
        groups.setdefault((str(row.get("figure", "")), *rest), []).append(rest)
    tables = []
    for (title, *columns), group in groups.items():
        numeric = [all(isinstance(row[column], int | float | None) for row in group) for column in columns]
        cells = [[show(row[column]) for column in columns] for row in group]
        tables.append(Table(title, columns, numeric, cells))
    return tables


def machines(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Describe every environment among the results once, with the benchmarks that ran in it."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for result in results:
        own = {key: value for key, value in result.environment.items() if key != "measured"}
        for environment, benches in found:
            if environment == own:
                benches.append(result.bench)
                break
        else:
            found.append((own, [result.bench]))
    return [{"benches": benches, "facts": facts_of(environment)} for environment, benches in found]


def facts_of(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Flatten an environment to (name, value) for people."""
    facts = []
    for name, value in environment.items():
        if isinstance(value, dict):
            facts += [(inner, show(version)) for inner, version in value.items() if version is not None]
        elif name.endswith("_bytes") and isinstance(value, int):
            facts.append((name.removesuffix("_bytes"), show_bytes(value)))
        else:
            facts.append((name, show(value)))
    return facts
