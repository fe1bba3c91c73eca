"""The trace: a file that the viewers take, whose spans nest, and which shows what overlaps."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_tier import within_budget
from kv_tier.attention import attend_selected
from kv_tier.meta.errors import ConfigError
from kv_tier.meta.read_engine import ReadBatch, ThreadEngine
from kv_tier.pipeline import Pipeline
from kv_tier.trace import STAGES, Trace
from tests.kv_tier.conftest import EngineFactory
from tests.kv_tier.test_pipeline import STEPS, decode, on_ssd
from tests.models.synthetic_engine import GEOMETRY

Event = dict[str, Any]


def spans_of(path: Path, missing: str = "") -> dict[str, list[Event]]:
    """Read a trace, whose end may be missing; the spans of each track by its name."""
    events = json.loads(path.read_text() + missing)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            spans[names[event["tid"]]].append(event)
        else:
            assert event["ph"] == "M"
    return spans


def overlap(a: Event, b: Event) -> bool:
    return bool(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"])


def traced(
    new_engine: EngineFactory, path: Path, pipeline: Pipeline, steps: int = STEPS, **settings: Any
) -> dict[str, list[Event]]:
    trace = Trace(path)
    engine = new_engine(pipeline=pipeline, trace=trace, **settings)
    decode(engine, on_ssd(engine), steps)
    engine.store.trace = None
    trace.close()
    return spans_of(path)


def reads_of(spans: dict[str, list[Event]]) -> list[Event]:
    return [event for track, events in spans.items() if track != STAGES for event in events]


@pytest.mark.parametrize("read_path", ["ring", "threads", "cached", "coarse"])
def test_spans_nest_and_reads_have_tracks_of_their_own(
    new_engine: EngineFactory, tmp_path: Path, read_path: str
) -> None:
    spans = traced(new_engine, tmp_path / "t.json", Pipeline(1), read_path=read_path, window_multiple=1)
    for name in ("select", "fetch", "wait", "attend"):
        assert sum(event["name"] == name for event in spans[STAGES]) == STEPS * 5 * GEOMETRY.num_layers
    ended: list[float] = []  # of the spans that are open, the innermost last
    for event in sorted(spans[STAGES], key=lambda e: (e["ts"], -e["dur"])):
        while ended and ended[-1] <= event["ts"]:
            ended.pop()
        assert not ended or event["ts"] + event["dur"] <= ended[-1] + 0.01, event
        ended.append(event["ts"] + event["dur"])
    reads = reads_of(spans)
    assert {event["name"] for event in reads} == {"io"}
    assert {event["args"]["micro_batch"] for event in reads} == set(range(5)) == set(range(len(spans) - 1))
    for track, events in spans.items():
        ordered = sorted(events, key=lambda e: e["ts"])
        if track != STAGES:
            assert not any(overlap(a, b) for a, b in itertools.pairwise(ordered))


class GatedEngine(ThreadEngine):
    """Read the first batch of every layer at once, the others when somebody opens the gate."""

    def __init__(self, per_layer: int) -> None:
        super().__init__(2)
        self.per_layer, self.num_started = per_layer, 0
        self.gate = threading.Event()

    def start(self, batch: ReadBatch) -> None:
        first = self.num_started % self.per_layer == 0
        self.num_started += 1
        if first:
            self.gate.clear()
            super().start(batch)
        else:
            self._jobs[id(batch)] = [self._pool.submit(self._read_gated, batch)]

    def _read_gated(self, batch: ReadBatch) -> None:
        assert self.gate.wait(60)
        self._read(batch, 0, 1)


def test_a_read_that_lasts_overlaps_the_attention_of_others(
    new_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, gated = Trace(tmp_path / "t.json"), GatedEngine(per_layer=5)
    engine = new_engine(pipeline=Pipeline(1), trace=trace)
    sessions = on_ssd(engine)
    fetcher = engine.store.fetcher
    fetcher.path.engine.close()
    fetcher.path = replace(fetcher.path, engine=gated)

    def attend(*args: Any) -> torch.Tensor:
        gated.gate.set()
        return attend_selected(*args)

    monkeypatch.setattr(within_budget, "attend_selected", attend)
    decode(engine, sessions, 1)
    trace.flush()
    spans = spans_of(tmp_path / "t.json", "]")
    reads, attends = reads_of(spans), [e for e in spans[STAGES] if e["name"] == "attend"]
    assert len(reads) == len(attends) == 5 * GEOMETRY.num_layers == gated.num_started
    for read in reads:
        number, layer = read["args"]["micro_batch"], read["args"]["layer"]
        first = next(e for e in attends if e["args"]["layer"] == layer and e["args"]["micro_batch"] == 0)
        assert overlap(read, first) == (number > 0)


def test_nothing_overlaps_where_every_stage_waits(new_engine: EngineFactory, tmp_path: Path) -> None:
    spans = traced(new_engine, tmp_path / "t.json", Pipeline(1, ahead=0), window_multiple=1)
    reads = reads_of(spans)
    others = [event for event in spans[STAGES] if event["name"] == "attend"]
    assert reads and not any(overlap(read, attend) for read in reads for attend in others)


def test_a_trace_changes_no_number(new_engine: EngineFactory, tmp_path: Path) -> None:
    plain = new_engine(pipeline=Pipeline(2))
    watched = new_engine(pipeline=Pipeline(2), trace=Trace(tmp_path / "t.json"))
    assert torch.equal(decode(plain, on_ssd(plain)), decode(watched, on_ssd(watched)))


def test_a_trace_ends_growing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", most_events=3)
    for number in range(5):
        trace.span("a", "b", number, number + 1)
    trace.close()
    assert [event["ts"] for event in spans_of(tmp_path / "t.json")["b"]] == [0, 0.001, 0.002]


def test_a_trace_is_readable_before_it_is_complete(tmp_path: Path) -> None:
    """Viewers take the array without its end, as a killed process leaves it."""
    trace = Trace(tmp_path / "t.json")
    trace.span("a", "b", 1000, 3000, layer=2)
    trace.flush()
    (process, track, span) = json.loads((tmp_path / "t.json").read_text() + "]")
    assert process["ph"] == track["ph"] == "M"
    assert (span["ts"], span["dur"], span["args"]) == (1, 2, {"layer": 2})
    trace.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace_path=.*missing.*No such file"):
        Trace(tmp_path / "missing" / "t.json")
