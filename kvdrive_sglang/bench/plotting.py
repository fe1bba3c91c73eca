"""Painting for the report page: matplotlib axes in, SVG that follows the page's theme out.

Colours are CSS variables of the page (``--ink``, ``--grid``, ``--c1`` to ``--c8``); text is text.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvdrive_sglang.bench.report import show

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

Row = Mapping[str, Any]
Rows = Sequence[Row]

SIZE_INCHES: Final = (4.4, 2.9)  # 317 points: near the width of a phone, so that text keeps its size there
INK: Final = "#010101"
GRID: Final = "#020202"
SERIES: Final = tuple(f"#0303{number:02x}" for number in range(1, 9))
VARIABLES: Final = {
    INK: "var(--ink)",
    GRID: "var(--grid)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(SERIES, 1)},
}
MARKERS: Final = "os^DvPX*"
MOST_LABELLED_BARS: Final = 8
OWN_COLOURS: Final = {  # what we made in blue, what it is compared with in grey, whatever else is in the plot
    **dict.fromkeys(("sparse", "pipelined", "resumed_ttft_s", "per layer and head"), SERIES[0]),
    **dict.fromkeys(("torch_native", "sequential", "uniform"), SERIES[6]),
    "dense": SERIES[1],
}
STYLE: Final[dict[RcKeyType, Any]] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Plot:
    """Hold one picture.

    Attributes:
        title: what it shows, as a sentence.
        alt: what a reader without the picture should know.
        svg: an ``<svg>`` element whose ids are its own.
    """

    title: str
    alt: str
    svg: str


def plot(title: str, alt: str, paint: Callable[[Axes], None]) -> Plot:
    """Paint on fresh axes; the same rows give the same bytes."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        paint(axes)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return Plot(title, alt, _for_a_page(file.getvalue(), title, alt))


def _for_a_page(svg: str, title: str, alt: str) -> str:
    """Cut the element out, name it, and replace colours by variables and ids by ones that no other plot has."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    found = re.search(r'viewBox="([^"]*)"', svg)
    assert found is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    prefix = re.sub(r"\W+", "-", title).lower()
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    return (
        f'<svg viewBox="{found[1]}" role="img" aria-label="{html.escape(alt)}"'
        f' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


# ---- helpers ------------------------------------------------------------------------------------------------------


def having(
    rows: Rows, labels: Iterable[str] = (), numbers: Iterable[str] = (), positive: Iterable[str] = ()
) -> list[Row]:
    """Keep the rows that hold all ``labels`` as text or numbers, and all ``numbers``, those of ``positive`` not zero."""
    labels, positive = tuple(labels), tuple(positive)
    numbers = (*numbers, *positive)
    return [
        row
        for row in rows
        if all(isinstance(row.get(key), str) or is_number(row.get(key)) for key in labels)
        and all(is_number(row.get(key)) for key in numbers)
        and all(row[key] > 0 for key in positive)
    ]


def is_number(value: Any) -> bool:
    """Say whether a value can be a measurement: no truth value, not negative, of a size that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def distinct(rows: Rows, key: str) -> list[Any]:
    """List the values of a key in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def coloured(rows: Rows, key: str) -> list[tuple[Any, str, str]]:
    """List the values of a key with a colour and a marker each; some have a colour of their own."""
    found = distinct(rows, key) if rows else []
    return [
        (value, OWN_COLOURS.get(str(value), SERIES[i % len(SERIES)]), MARKERS[i % len(MARKERS)])
        for i, value in enumerate(found)
    ]


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def tokens_of(context: Any) -> float:
    """Read a context such as 4000, "4K" or "7.5K" as tokens; 0 for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KM]?)", str(context).strip(), re.IGNORECASE)
    return float(found[1]) * {"": 1, "K": 1e3, "M": 1e6}[found[2].upper()] if found else 0.0


def by_context(rows: Rows) -> list[Row]:
    """Keep the rows whose context is a number of tokens, the shortest first."""
    found = [row for row in rows if 0 < tokens_of(row["context"]) < 1e15]
    return sorted(found, key=lambda row: tokens_of(row["context"]))


def lines(
    axes: Axes, rows: Rows, series: str, x: Callable[[Row], float], y: Callable[[Row], float], error: str = ""
) -> None:
    """Draw a line per value of ``series``; ``error`` names the standard errors of y."""
    for value, colour, marker in coloured(rows, series):
        own = sorted((row for row in rows if row[series] == value), key=x)
        xs, ys = [x(row) for row in own], [y(row) for row in own]
        axes.plot(xs, ys, color=colour, marker=marker, label=str(value))
        if error:
            errors(axes, own, xs, ys, error, colour)
    if len(distinct(rows, series)) > 1:
        axes.legend()


def errors(axes: Axes, rows: Rows, xs: Sequence[float], ys: Sequence[float], key: str, colour: str) -> None:
    """Draw the standard errors that rows hold under ``key``, nothing where they hold none."""
    spread = [row[key] if is_number(row.get(key)) else 0.0 for row in rows]
    axes.errorbar(xs, ys, yerr=spread, fmt="none", color=colour, elinewidth=0.8, capsize=2)


def bars(
    axes: Axes, rows: Rows, x: str, series: str, y: str, label: Callable[[float], str] = "{:.3g}".format
) -> None:
    """Draw groups of bars: a group per value of ``x``, in it a bar per value of ``series``, means over the rest."""
    groups, members = distinct(rows, x), coloured(rows, series)
    width = 0.84 / len(members)
    for i, (member, colour, _) in enumerate(members):
        heights = {
            g: mean(values)
            for g, group in enumerate(groups)
            if (values := [row[y] for row in rows if row[x] == group and row[series] == member])
        }
        places = [g + (i - (len(members) - 1) / 2) * width for g in heights]
        drawn = axes.bar(places, list(heights.values()), 0.94 * width, color=colour, label=str(member))
        if len(groups) * len(members) <= MOST_LABELLED_BARS:
            axes.bar_label(drawn, [label(height) for height in heights.values()], fontsize=6.5, padding=1)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.grid(visible=False, axis="x")
    if len(members) > 1:
        legend_above(axes)


def dots(axes: Axes, rows: Rows, name: str, series: str, value: str) -> None:
    """Draw a line of dots per value of ``name`` over a logarithmic axis, with a colour per value of ``series``."""
    names = distinct(rows, name)
    for member, colour, marker in coloured(rows, series):
        own = [row for row in rows if row[series] == member]
        places = [names.index(row[name]) for row in own]
        axes.plot([row[value] for row in own], places, marker, color=colour, markersize=6, label=str(member))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.08)
    plain_log(axes, "x")
    legend_above(axes)


def legend_above(axes: Axes, columns: int = 4, **style: Any) -> None:
    """Put the legend over the axes, where it hides nothing."""
    axes.legend(ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), **style)


def logarithmic(axes: Axes, which: str, ticks: Iterable[float], labels: Iterable[str] | None = None) -> None:
    """Make an axis logarithmic with ticks at the values that were measured."""
    places = sorted(set(ticks))
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_ticks(places, list(labels) if labels is not None else [show(place) for place in places])
    axis.set_minor_locator(NullLocator())


def plain_log(axes: Axes, which: str, label: Callable[[float], str] = show) -> None:
    """Make an axis logarithmic, plain numbers at 1, 2 and 5, or at decades where there are many; data is drawn before."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axis.set_minor_formatter(NullFormatter())


def show_size(num_bytes: float) -> str:
    """Print bytes in powers of 1000, three digits, as axes have them."""
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= power:
            return f"{num_bytes / power:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def context_axis(axes: Axes, rows: Rows) -> None:
    contexts = {tokens_of(row["context"]): str(row["context"]) for row in rows}
    places = sorted(contexts)
    logarithmic(axes, "x", places, [contexts[place] for place in places])
    axes.set_xlabel("context (tokens)")


def words(rows: Rows, name: str, value: str, unit: str) -> str:
    """Spell a few rows out for an alt text."""
    return "; ".join(f"{row[name]} {show(row[value])} {unit}".strip() for row in rows)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write small text at a point of the data, moved by ``offset`` points."""
    axes.annotate(text, at, offset, textcoords="offset points", **{"fontsize": 7, **style})
