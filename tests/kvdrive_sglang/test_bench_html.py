"""The page: self-contained, verdicts beside limits, and what it says where there are no figures."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvdrive_sglang.bench import html
from kvdrive_sglang.bench.html import Result, figures_of, machines, page, question_of, read_result, tables_of
from kvdrive_sglang.bench.limits import LIMITS, Limit
from kvdrive_sglang.cli.bench_command import BENCHES
from tests.models import bench_results

EXACTNESS = {"exactness": BENCHES["exactness"]}


def made(name: str, **changes: object) -> Result:
    return Result(**{**bench_results.result(name), **changes})


class Outline(HTMLParser):
    """Note the tags and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "style")
        ]


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(BENCHES, {name: made(name) for name in BENCHES})
    outline = Outline(text)
    assert not {"script", "img", "link", "iframe"} & set(outline.tags)
    assert not [address for address in outline.addresses if "//" in address]
    assert (
        "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "width=device-width" in text
    )
    assert outline.tags.count("details") == len(BENCHES) and outline.tags.count("svg") >= len(BENCHES)


def test_verdicts_rows_and_environment_are_there_and_escaped() -> None:
    text = page(EXACTNESS, {"exactness": made("exactness")})
    assert "1 of 2 hold" in text
    assert "✓ = 0" in text and "✗ = 0" in text
    assert "Made-up CPU &lt;3 GHz&gt;" in text and "16.0 GiB" in text and "triton" not in text
    assert "Measured 2026-01-02 03:04 UTC." in text
    assert "<td>budget all, alone</td>" in text and "13 rows" in text


def test_a_missing_file_and_a_failure_are_notes() -> None:
    text = page(EXACTNESS, {"exactness": "Failed: tokens <differ>."})
    assert "Failed: tokens &lt;differ&gt;." in text and "no figures" in text and "<svg" not in text


def test_a_failed_benchmark_is_red_a_missing_one_is_not() -> None:
    assert 'badge broken">no figures' in page(EXACTNESS, {"exactness": "Failed: x"})
    assert 'badge broken">no figures' not in page(EXACTNESS, {"exactness": "Not measured: x"})


def test_a_page_without_matplotlib_has_tables_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvdrive_sglang.bench.plot")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    text = page(EXACTNESS, {"exactness": made("exactness")})
    assert "matplotlib is not installed" in text
    assert "<svg" not in text and "<td>budget all, alone</td>" in text


def test_unknown_rows_get_a_table_only() -> None:
    text = page(EXACTNESS, {"exactness": made("exactness", rows=[{"other": 1.5}], summary={})})
    assert "<svg" not in text and "1.5</td>" in text and "0 of 0 hold, 2 not measured" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no x.json"),
        ("{", "not what a benchmark writes"),
        ("[]", "not what a benchmark writes"),
        ('{"bench": "x", "environment": {}, "rows": [1], "summary": {}}', "not what a benchmark writes"),
        (b"\xff\xfe", "not what a benchmark writes"),
    ],
)
def test_a_file_that_is_no_result_is_told(tmp_path: Path, content: str | bytes | None, said: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert said in str(read_result(path))


def test_a_directory_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    assert read_result(tmp_path) == f"{tmp_path.name} cannot be read: Is a directory."


def test_results_are_read_with_their_infinities(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**bench_results.result("resume"), "rows": [{"kl_se": float("nan")}]}))
    found = read_result(path)
    assert isinstance(found, Result) and found.summary["tokens_equal"] is True


def test_figures_with_limits_come_first() -> None:
    limits = (Limit("a", "≥", 2), Limit("b", "≤", 1.0), Limit("c", "=", True))
    figures = figures_of({"z": 5000, "b": 1.5, "a": 2}, limits)
    assert [(figure.name, figure.value, figure.verdict) for figure in figures] == [
        ("a", "2", "holds"),
        ("b", "1.5", "broken"),
        ("c", "", "missing"),
        ("z", "5,000", ""),
    ]


def test_what_is_no_number_holds_no_limit() -> None:
    assert not Limit("a", "≥", 1).holds("many")
    assert not Limit("a", "≤", 1).holds(float("nan"))
    assert Limit("a", "=", True).holds(True) and not Limit("a", "=", True).holds(False)


def test_limits_name_figures_that_their_benchmarks_report() -> None:
    from importlib import import_module

    for name, module in BENCHES.items():
        keys = set(import_module(module).SUMMARY_KEYS)
        assert {limit.key for limit in LIMITS[name]} & keys


def test_rows_with_the_same_columns_share_a_table() -> None:
    tables = tables_of([{"a": 1, "b": "x"}, {"figure": "3", "c": None}, {"a": 2, "b": "y"}])
    assert [(table.title, table.columns, table.numeric, table.cells) for table in tables] == [
        ("", ["a", "b"], [True, False], [["1", "x"], ["2", "y"]]),
        ("3", ["c"], [True], [[""]]),
    ]


def test_one_environment_is_told_once() -> None:
    other = {**bench_results.ENVIRONMENT, "cores": 64}
    found = machines([made("resume"), made("decode", environment=other), made("exactness")])
    assert [machine["benches"] for machine in found] == [["resume", "exactness"], ["decode"]]
    assert ("cores", "64") in found[1]["facts"]


def test_questions_come_from_the_modules_unimported() -> None:
    assert question_of(BENCHES["resume"]) == "A session of 7,000 tokens goes on after its engine was killed."
    assert all(re.match(r"[A-Z0-9].*[.?]$", question_of(module)) for module in BENCHES.values())


def test_the_template_is_packaged() -> None:
    assert (Path(html.__file__).parent / html.TEMPLATE).is_file()
