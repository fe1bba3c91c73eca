"""Plots: what is drawn from made-up rows, that a page can hold them all, and that no row is too strange."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import cycle
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvdrive_sglang.bench import plots, plotting
from kvdrive_sglang.bench.plotting import Plot, having, show_size, tokens_of
from tests.models.bench_results import MADE

SHOWN = {  # words that the texts of a benchmark's plots must hold: axes, units, series
    "exactness": {"budget all, alone", "prompt (tokens)", "equal", "tie", "mismatch"},
    "decode": {
        "ms per token",
        "microseconds per layer",
        "memory reads all KV",
        "GFLOP per second",
        "32K",
        "7.5K x 8",
    },
    "resume": {"seconds to the first token", "from disk", "0.44 s"},
    "prefill": {"seconds to the first token", "bare", "7.90 s"},
    "fidelity": {
        "mean KL (nats)",
        "budget (tokens)",
        "share of steps",
        "random",
        "bfloat16",
        "two-level, pages/4",
    },
    "cache": {
        "hit rate (%), mean over texts",
        "x2",
        "belady",
        "bytes per step",
        "2.1 MB",
        "gather",
        "eviction policy",
    },
    "tiers": {"ms per token, logarithmic", "KiB per read, logarithmic", "balanced, cold", "shape"},
    "cold": {"mean KL (nats)", "int8", "0.01 nats, 56% of the bytes"},
    "pipeline": {"batch 4", "sequential", "pipelined", "ms per token of each request"},
}
COUNTS = {"exactness": 2, "decode": 7, "resume": 1, "prefill": 1, "fidelity": 3}
COUNTS |= {"cache": 8, "tiers": 6, "cold": 1, "pipeline": 3}
STRANGE: list[Any] = [None, "x", True, float("nan"), float("inf"), 0, -1.0, [1], {}, 1e300, 10**400]


@functools.cache
def drawn(name: str) -> tuple[Plot, ...]:
    return tuple(plots.PLOTS[name](MADE[name]()[0]))


@pytest.mark.parametrize("name", MADE)
def test_every_plot_is_an_element_with_a_title_an_alt_text_and_its_words(name: str) -> None:
    assert len(drawn(name)) == COUNTS[name]
    words = set()
    for one in drawn(name):
        element = ElementTree.fromstring(one.svg)
        assert element.tag == "{http://www.w3.org/2000/svg}svg"
        assert (element.get("role"), element.get("aria-label")) == ("img", one.alt)
        assert one.title and one.alt.endswith(".")
        words |= {text.text for text in element.iter("{http://www.w3.org/2000/svg}text")}
    assert words >= SHOWN[name]


def test_colours_are_the_pages_and_ids_are_their_plots() -> None:
    every = [one for name in MADE for one in drawn(name)]
    assert len({one.title for one in every}) == len(every)
    ids = [found for one in every for found in re.findall(r'\bid="([^"]+)"', one.svg)]
    assert len(ids) == len(set(ids))
    for one in every:
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', one.svg)
        assert {"".join(pair) for pair in used} <= set(ids)
        assert not re.search(r"#[0-9a-f]{6}|(src|href)=\"[^#]", one.svg)
        assert "var(--ink)" in one.svg


def test_the_same_rows_give_the_same_bytes() -> None:
    rows = MADE["pipeline"]()[0]
    assert tuple(plots.pipeline(rows)) == drawn("pipeline")


def test_alt_texts_tell_the_figures() -> None:
    assert "9 comparisons: 8 equal, 1 tie, 0 mismatch" in drawn("exactness")[0].alt
    assert "At 32K: torch_native 700 ms; dense 160 ms; sparse 90 ms." in drawn("decode")[0].alt
    assert "11.0 GB/s" in drawn("decode")[3].alt
    assert "re-prefill 9.30 s; resumed from disk 0.44 s" in drawn("resume")[0].alt
    assert "At x2: lru 1.00; lfu 1.05; lookahead 0.92; smoothed 0.86; belady 0.55." in drawn("cache")[2].alt
    assert "uniform windows fetch 1.17 times the bytes" in drawn("cache")[5].alt


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paint, but write no SVG: that is most of the time."""

    def painted(title: str, alt: str, paint: Callable[[Axes], None]) -> Plot:
        paint(Figure().subplots())
        return Plot(title, alt, "")

    monkeypatch.setattr(plots, "plot", painted)


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("name", MADE)
def test_rows_without_the_keys_draw_nothing_and_raise_nothing(name: str) -> None:
    draw, rows = plots.PLOTS[name], MADE[name]()[0]
    assert list(draw([])) == []
    assert list(draw([{"other": 1.0}, {}])) == []
    for key in dict.fromkeys(key for row in rows for key in row):
        strange = cycle(STRANGE)
        list(draw([{**row, key: next(strange)} if key in row else row for row in rows]))


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize(
    ("name", "key"), [("decode", "memory_gb_per_s"), ("decode", "ms_per_token"), ("cache", "bytes_smoothed")]
)
def test_a_column_of_strange_values_raises_nothing(name: str, key: str, strange: Any) -> None:
    rows = [{**row, key: strange} if key in row else row for row in MADE[name]()[0]]
    list(plots.PLOTS[name](rows))


def test_only_the_best_index_of_a_size_is_named() -> None:
    rows = [
        {"selection": name, "index_bytes": size, "kl": kl}
        for name, size, kl in (("a", 8, 0.1), ("b", 4, 0.2), ("c", 16, 0.09), ("d", 16, 0.01), ("e", 8, 0.3))
    ]
    assert [row["selection"] for row in plots.frontier(rows)] == ["b", "a", "d"]


def test_having_wants_labels_and_measurements() -> None:
    rows: list[dict[str, Any]] = [
        {"a": "x", "b": 1},
        {"a": None, "b": 1},
        {"a": "x", "b": float("nan")},
        {"a": "x", "b": 0},
        {"b": 2},
    ]
    assert having(rows, ["a"], ["b"]) == [rows[0], rows[3]]
    assert having(rows, ["a"], positive=["b"]) == [rows[0]]


def test_contexts_and_sizes_for_people() -> None:
    assert [tokens_of(text) for text in ("1K", "7.5k", 32000, "2M", "long", "1.2.3K")] == [
        1e3,
        7.5e3,
        32e3,
        2e6,
        0,
        0,
    ]
    assert [show_size(size) for size in (0, 999, 1500, 2.1e6, 3e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.1 MB",
        "3 GB",
    ]


def test_whole_axes_keep_their_names() -> None:
    rows = [{"context": context, "n": 1} for context in ("7.5K", "1K")]
    axes = Figure().subplots()
    plotting.context_axis(axes, rows)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1K", "7.5K"]
