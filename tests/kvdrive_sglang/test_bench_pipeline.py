"""`kvdrive bench pipeline` in small: a real store, real files, and what the summary makes of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_tier.geometry import Geometry
from kv_tier.pipeline import Pipeline
from kvdrive_sglang.bench import pipeline
from kvdrive_sglang.bench.batch_driver import BatchSession, seal
from kvdrive_sglang.bench.engines import BenchFailed
from kvdrive_sglang.bench.limits import LIMITS
from kvdrive_sglang.bench.made_up import Inputs
from kvdrive_sglang.bench.plots import PLOTS

GEOMETRY = Geometry(num_layers=1, num_kv_heads=2, head_dim=16)
BATCH, STEPS, PROMPT = 3, 6, 3072


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs(GEOMETRY, 2, PROMPT, STEPS, BATCH, 0.8)


@pytest.fixture(scope="module")
def directory(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pipeline") / "8-pages"
    seal(inputs, place, BATCH, 8)
    return place


@pytest.fixture
def session(inputs: Inputs, directory: Path) -> Iterator[BatchSession]:
    with BatchSession(
        inputs, directory, BATCH, budget_tokens=1024, window_multiple=2, frame_share=0.25
    ) as opened:
        yield opened


def test_rows_and_summary_of_a_small_run(session: BatchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LEAST_BATCH", BATCH)
    said: list[str] = []
    rows = pipeline.compare(session, 1, said.append)
    assert [(row["load"], row["mode"]) for row in rows] == [
        (load, mode)
        for load in ("hits 0.8", "first step")
        for mode in ("sequential", "at once", "four parts", "pipelined")
    ]
    assert {row["micro_batch"] for row in rows} == {0, 1, 3}
    assert all(row["ms_per_token"] > row["wait_ms"] >= 0 for row in rows)
    first = [row for row in rows if row["load"] == "first step"]
    assert all(row["reads_per_step"] > 0 and row["mib_per_step"] > 0 for row in first)
    summary = pipeline.summarise(rows)
    assert set(pipeline.SUMMARY_KEYS) - set(summary) == {"default_over_tuned", "outputs_equal"}
    assert {limit.key for limit in LIMITS["pipeline"]} <= set(summary)
    assert len(list(PLOTS["pipeline"](rows))) == 2
    assert said[-1] == "hits 0.8, batch 3: turn 4 of 4"


def test_a_step_has_the_same_work_whatever_the_plan(session: BatchSession) -> None:
    read = []
    with torch.inference_mode():
        for plan in (Pipeline(BATCH), Pipeline(1), Pipeline(1, ahead=0)):
            session.restart()
            steps = [session.step(plan) for _ in range(STEPS)]
            read.append([cost.reads for _, cost in steps])
    assert read[1] == read[2]
    assert read[1][0] > 0
    session.store.check_integrity()


def test_other_bits_are_refused(session: BatchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = session.step, [0]

    def wrong(plan: Pipeline) -> Any:
        calls[0] += 1
        out, cost = step(plan)
        return (out + 1 if calls[0] == STEPS + 2 else out), cost

    monkeypatch.setattr(session, "step", wrong)
    with pytest.raises(BenchFailed, match="step 1: at once computes other bits than sequential"):
        pipeline.alternate(
            session, {"at once": Pipeline(3), "sequential": Pipeline(1, ahead=0)}, 1, lambda said: None
        )


def test_a_trace_of_pipelined_steps(session: BatchSession, tmp_path: Path) -> None:
    events = json.loads(pipeline.traced_steps(session, tmp_path / "t.json"))
    assert {"select", "fetch", "wait", "attend", "io"} <= {event["name"] for event in events}
    assert session.store.trace is None


def test_the_tuned_row(inputs: Inputs, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LEAST_BATCH", BATCH)
    monkeypatch.setattr(pipeline, "TUNE_S", 0.0)
    made, gain = pipeline.tune(inputs, directory.parent, lambda said: None)
    assert (made["mode"], made["window_multiple"], made["pages_per_cluster"]) == ("tuned", 2, 8)
    assert made["ms_per_token"] > 0 and gain == 1


def row(load: str, batch: int, mode: str, step_ms: float, wait_ms: float) -> dict[str, Any]:
    figures = {"ms_per_token": step_ms, "wait_ms": wait_ms, "compute_ms": step_ms - wait_ms}
    return {"load": load, "batch": batch, "mode": mode, **figures}


def test_the_worst_of_what_counts_is_the_summary() -> None:
    rows = []
    for load, batch, slow, fast in (
        ("hits 0.95", 8, 100.0, 100.0),
        ("hits 0.8", 1, 100.0, 100.0),
        ("hits 0.8", 4, 200.0, 125.0),
        ("hits 0.8", 8, 300.0, 200.0),
    ):
        rows += [
            row(load, batch, "sequential", slow, slow / 4),
            row(load, batch, "at once", slow - 10, 10),
            row(load, batch, "pipelined", fast, 0),
        ]
    summary = pipeline.summarise(rows)
    assert summary["sequential_over_pipelined"] == 1.5
    assert summary["at_once_over_pipelined"] == 1.45
    assert summary["possible"] == pytest.approx(4 / 3)
    assert summary["hits_0.8_batch_4_sequential_over_pipelined"] == 1.6
