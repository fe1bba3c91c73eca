"""`kvdrive bench all`: processes that measure nothing, and pages from files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvdrive_sglang.cli import bench_all, bench_command
from kvdrive_sglang.cli.main import build_app
from tests.models import bench_results

SCRIPT = """
import json, sys
name, path, full = sys.argv[1:]
print("starting", file=sys.stderr)
if name == "decode":
    sys.exit("error: the tokens differ")
json.dump({**json.loads(RESULTS)[name], "full": full}, open(path, "w"))
"""


def kvdrive(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each benchmark be a small process; "decode" fails."""
    results = json.dumps({name: bench_results.result(name) for name in ("exactness", "resume")})
    script = f"RESULTS = {results!r}\n{SCRIPT}"
    monkeypatch.setattr(
        bench_all,
        "command_of",
        lambda name, path, full: [sys.executable, "-c", script, name, str(path), str(full)],
    )
    names = ("exactness", "decode", "resume")
    monkeypatch.setattr(bench_command, "BENCHES", {name: f"kvdrive_sglang.bench.{name}" for name in names})


@pytest.mark.usefixtures("processes")
def test_one_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    results, page = tmp_path / "deep" / "results", tmp_path / "report.html"
    results.mkdir(parents=True)
    (results / "decode.json").write_text(json.dumps(bench_results.result("decode")))
    ended = kvdrive("all", "--json-dir", results, "--html", page)
    assert ended.exit_code == 1
    assert "decode failed: error: the tokens differ" in ended.stdout
    assert sorted(path.name for path in results.iterdir()) == ["exactness.json", "resume.json"]
    text = page.read_text()
    assert "Failed: error: the tokens differ" in text
    assert "3 of 3 hold" in text and "1 of 2 hold" in text


@pytest.mark.usefixtures("processes")
def test_the_directory_is_made_and_full_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "BENCHES", {"resume": "kvdrive_sglang.bench.resume"})
    ended = kvdrive("all", "--json-dir", tmp_path / "new", "--full")
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "new" / "resume.json").read_text())["full"] == "True"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_page_from_files_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_all, "run_one", None)
    (tmp_path / "resume.json").write_text(json.dumps(bench_results.result("resume")))
    page = tmp_path / "report.html"
    ended = kvdrive("all", "--from", tmp_path, "--html", page)
    assert ended.exit_code == 0, ended.output
    text = page.read_text()
    assert "First token of a turn after a long session" in text
    assert "Not measured: there is no decode.json." in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("all", "--json", "x.json"), "--json-dir"),
        (("all", "--from", "x"), "--html"),
        (("all", "--from", "x", "--html", "y", "--full"), "--html"),
        (("resume", "--html", "y"), "belong to"),
        (("resume", "--json-dir", "y"), "belong to"),
    ],
)
def test_options_that_contradict_are_refused(arguments: tuple[str, ...], said: str) -> None:
    ended = kvdrive(*arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr


def test_places_that_cannot_be_written_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_all, "run_one", None)
    (tmp_path / "file").touch()
    ended = kvdrive("all", "--json-dir", tmp_path / "file")
    assert ended.exit_code == 1 and "pass another --json-dir" in ended.stderr
    ended = kvdrive("all", "--html", tmp_path / "missing" / "page.html")
    assert ended.exit_code == 1 and "pass another --html" in ended.stderr


def test_a_page_without_jinja_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvdrive_sglang.bench.html", raising=False)
    monkeypatch.delattr("kvdrive_sglang.bench.html", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ended = kvdrive("all", "--from", tmp_path, "--html", tmp_path / "page.html")
    assert ended.exit_code == 1 and "extra `report`" in ended.stderr


def test_the_command_of_a_benchmark_runs_the_program(tmp_path: Path) -> None:
    command = bench_all.command_of("no-such-bench", tmp_path / "x.json", full=True)
    assert command[-1] == "--full"
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "none of exactness" in ended.stderr


def test_a_silent_failure_says_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "BENCHES", {"resume": "kvdrive_sglang.bench.resume"})
    monkeypatch.setattr(
        bench_all, "command_of", lambda name, path, full: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    ended = kvdrive("all", "--json-dir", tmp_path)
    assert "resume failed: it ended with status 3 and said nothing" in ended.stdout


def test_sigterm_ends_the_running_benchmark(tmp_path: Path) -> None:
    """The parent is told to stop while its child works; the child is ended, and both are gone."""
    child = textwrap.dedent("""
        import os, pathlib, sys, threading
        print(os.getpid(), file=sys.stderr, flush=True)
        threading.Event().wait(60)
    """)
    parent = f"import sys; from kvdrive_sglang.cli.bench_all import run_one; run_one([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    pid = int(process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    process.stderr.close()
    assert not Path(f"/proc/{pid}").exists()
