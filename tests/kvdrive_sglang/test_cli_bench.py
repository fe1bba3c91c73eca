"""`kvdrive bench` and what benchmarks return, with a benchmark that measures nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from kv_tier.meta.errors import KVDriveError
from kvdrive_sglang.bench import report
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.cli import bench_command
from kvdrive_sglang.cli.main import build_app

RESULT = BenchResult(
    "toy",
    [{"backend": "a[b]", "ms": 1.23456}, {"backend": "c", "ms": 2000.0, "tokens": 7000, "equal": True}],
    {"ratio": 2.5, "tokens_equal": True},
)


def run(full: bool, progress: Callable[[str], None]) -> BenchResult:
    progress(f"full={full}")
    return RESULT


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(NAME="toy", SUMMARY_KEYS=("ratio", "tokens_equal"), run=run)
    monkeypatch.setitem(bench_command.BENCHES, "toy", "toy_module")
    monkeypatch.setattr(bench_command, "import_module", lambda name: module)
    return module


def kvdrive(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)], env={"COLUMNS": "120"})


def test_table_summary_and_json(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    ended = kvdrive("toy", "--json", path, "--full")
    assert ended.exit_code == 0, ended.output
    assert "full=True" in ended.stderr
    assert all(word in ended.stdout for word in ("a[b]", "1.235", "2,000", "7,000", "ratio", "2.5", "yes"))
    written = json.loads(path.read_text())
    assert set(written) == {"bench", "environment", "rows", "summary"}
    assert written["environment"]["measured"].endswith(" UTC")
    assert (written["bench"], written["rows"], written["summary"]) == ("toy", RESULT.rows, RESULT.summary)
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.json"]


@pytest.mark.parametrize(
    "arguments", [("toy", "--json"), ("--json", "toy"), ("toy", "--json", "--full"), ("toy", "--json", "-")]
)
def test_json_without_a_file_is_standard_output(arguments: tuple[str, ...]) -> None:
    ended = kvdrive(*arguments)
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["summary"] == RESULT.summary
    assert "ratio" in ended.stderr


def test_rows_of_a_figure_are_a_table_of_their_own() -> None:
    rows = [{"figure": "7", "pool": 1.5}, {"figure": "15", "bytes": 3}, {"figure": "7", "pool": 2.0}]
    tables = report.rows_tables(BenchResult("toy", rows, {}))
    assert [table.title for table in tables] == ["kvdrive bench toy, 7", "kvdrive bench toy, 15"]
    assert [[column.header for column in table.columns] for table in tables] == [["pool"], ["bytes"]]
    assert [table.row_count for table in tables] == [2, 1]


def test_an_unknown_name_lists_the_known_ones() -> None:
    ended = kvdrive("speed")
    assert ended.exit_code == 2
    assert "exactness, decode, resume, prefill, tiers, fidelity, cache" in ended.stderr


def test_a_result_file_that_cannot_be_written_is_refused_first(tmp_path: Path, toy: SimpleNamespace) -> None:
    toy.run = None  # not reached
    assert "No such file" in kvdrive("toy", "--json", tmp_path / "missing" / "toy.json").stderr
    assert "Is a directory" in kvdrive("toy", "--json", tmp_path).stderr


def test_a_trace_is_written_where_there_is_one(
    tmp_path: Path, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    refused = kvdrive("toy", "--trace", path)
    assert refused.exit_code == 2 and "has no trace" in refused.stderr
    monkeypatch.setattr(bench_command, "TRACED", "toy")
    toy.run = lambda full, progress: replace(RESULT, trace="[]")
    ended = kvdrive("toy", "--trace", path)
    assert ended.exit_code == 0, ended.output
    assert path.read_text() == "[]" and "trace" not in report.as_json(replace(RESULT, trace="[]"))


def test_a_failed_benchmark_writes_nothing(tmp_path: Path, toy: SimpleNamespace) -> None:
    def fail(full: bool, progress: Callable[[str], None]) -> BenchResult:
        raise KVDriveError("the tokens differ")

    toy.run = fail
    ended = kvdrive("toy", "--json", tmp_path / "toy.json")
    assert ended.exit_code == 1 and "the tokens differ" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_summary_key_that_is_missing_is_our_fault(toy: SimpleNamespace) -> None:
    toy.SUMMARY_KEYS = ("ratio", "speed")
    with pytest.raises(AssertionError, match="speed"):
        bench_command.run("toy", False, lambda step: None)


def test_every_registered_benchmark_is_found() -> None:
    names = {name: module for name, module in bench_command.BENCHES.items() if name != "toy"}
    assert names == {name: f"kvdrive_sglang.bench.{name}" for name in names}
    assert set(names) >= {"exactness", "decode", "resume", "tiers", "fidelity", "cache"}


def test_environment_names_machine_and_versions() -> None:
    found = report.environment()
    assert found["cpu"] and found["cores"] >= 1 and found["memory_bytes"] > 1 << 28
    assert found["versions"]["sglang"] == "0.5.23"
    assert report.version_of("no-such-package") is None


def test_values_for_people() -> None:
    shown = [report.show(value) for value in (None, True, 12345, 0.000123456, 12345.6, "x")]
    assert shown == ["", "yes", "12,345", "0.0001235", "12,346", "x"]


def test_bytes_for_people() -> None:
    shown = [report.show_bytes(number) for number in (0, 1023, 1024, 5 << 30, 3 << 40)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB"]


def test_columns_come_in_order_of_first_appearance() -> None:
    assert report.columns_of(RESULT.rows) == ["backend", "ms", "tokens", "equal"]
    assert report.columns_of([]) == []
