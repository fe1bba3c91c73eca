"""Plans of the pipeline: every stage once, in an order that can be run; and what the executor makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_tier import pipeline as pipeline_module
from kv_tier.fetch import Fetch, Fetcher
from kv_tier.modes import FETCH_MODES, FetchMode
from kv_tier.pipeline import AUTO, AUTO_PARTS, READS_PER_PART, Pipeline, plan_layer
from kv_tier.window import Absent
from tests.kv_tier.conftest import EngineFactory
from tests.kv_tier.test_store_faults import flip_page
from tests.models.read_paths import READ_PATHS
from tests.models.synthetic_engine import GEOMETRY, Session, SyntheticEngine, fork_script, make_script

PROMPT, STEPS = 64, 12
SCRIPTS = [make_script(110, seed=40 + n) for n in range(5)]
WHOLE = Pipeline(micro_batch=5)
PIPELINES = [
    Pipeline(1),
    Pipeline(2),
    Pipeline(3),
    Pipeline(4, 0),
    Pipeline(1, 0),
    Pipeline(1, 1),
    Pipeline(AUTO),
]


def order(num_requests: int, micro_batch: int, ahead: int | None) -> str:
    plan = plan_layer(num_requests, micro_batch, ahead)
    return " ".join(f"{stage[0].upper()}{number}" for stage, number in plan.order)


def test_the_plans_of_the_page() -> None:
    assert order(3, 1, 0) == "S0 F0 A0 S1 F1 A1 S2 F2 A2"
    assert order(3, 1, 1) == "S0 S1 F0 A0 S2 F1 A1 F2 A2"
    assert order(3, 1, None) == order(3, 1, 2) == "S0 S1 S2 F0 A0 F1 A1 F2 A2"
    assert order(3, 3, 0) == order(3, 3, None) == order(3, 8, 1) == "S0 F0 A0"
    assert order(0, 1, None) == ""
    assert plan_layer(5, 2, None).parts == ((0, 2), (2, 4), (4, 5))


@given(st.integers(0, 20), st.integers(1, 25), st.one_of(st.none(), st.integers(0, 6)))
def test_every_plan_can_be_run(num_requests: int, micro_batch: int, ahead: int | None) -> None:
    plan = plan_layer(num_requests, micro_batch, ahead)
    assert [n for begin, end in plan.parts for n in range(begin, end)] == list(range(num_requests))
    assert all(0 < end - begin <= micro_batch for begin, end in plan.parts)
    numbers = list(range(len(plan.parts)))
    for stage in ("select", "fetch", "attend"):
        assert [number for s, number in plan.order if s == stage] == numbers
    place = {key: at for at, key in enumerate(plan.order)}
    for number in numbers:
        assert place["select", number] < place["fetch", number] < place["attend", number]
        waiting = [n for n in numbers if place["select", n] < place["fetch", number] < place["fetch", n]]
        assert len(waiting) == min(len(plan.parts) - number - 1, len(plan.parts) if ahead is None else ahead)


def test_auto_cuts_as_far_as_reads_are_worth_it() -> None:
    auto = Pipeline()
    parts = [len(auto.plan(8, reads).parts) for reads in (0, READS_PER_PART, 2 * READS_PER_PART, 1e9)]
    assert parts == [1, 1, 2, AUTO_PARTS]
    assert auto.plan(1, 1e9).parts == ((0, 1),)
    assert auto.plan(0, 1e9).parts == ()
    assert Pipeline(2).plan(5, 0).parts == ((0, 2), (2, 4), (4, 5))


# ---- run --------------------------------------------------------------------------------------------------------


def on_ssd(engine: SyntheticEngine) -> list[Session]:
    """Return sessions of several lengths, all of whose sealed KV is on SSD alone."""
    sessions = []
    for number, script in enumerate(SCRIPTS):
        session = engine.start(script)
        engine.prefill(session, PROMPT + 3 * number)
        engine.seal(session, open_stretch=True)
        sessions.append(session)
    engine.evict()
    return sessions


def decode(engine: SyntheticEngine, sessions: list[Session], steps: int = STEPS) -> torch.Tensor:
    return torch.stack([torch.stack(engine.decode(*sessions)) for _ in range(steps)])


def borrow_rows(engine: SyntheticEngine, count: int) -> None:
    """Let staging have frames for ``count`` pages of single heads, at least."""
    engine.store.fetcher._rows_short = count
    engine.store.fetcher.grow_staging()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Everything in DRAM, every request alone."""
    with SyntheticEngine(tmp_path_factory.mktemp("expected")) as engine:
        sessions = []
        for number, script in enumerate(SCRIPTS):
            sessions.append(engine.start(script))
            engine.prefill(sessions[-1], PROMPT + 3 * number)
        return torch.stack([torch.stack([engine.decode(s)[0] for s in sessions]) for _ in range(STEPS)])


@pytest.mark.parametrize("mode", FETCH_MODES)
@pytest.mark.parametrize("pipeline", [WHOLE, *PIPELINES])
def test_no_plan_changes_a_number(
    new_engine: EngineFactory, expected: torch.Tensor, pipeline: Pipeline, mode: FetchMode
) -> None:
    engine = new_engine(pipeline=pipeline, fetch_mode=mode, num_frames=100, window_multiple=1, warm_up=False)
    sessions = on_ssd(engine)
    assert torch.equal(decode(engine, sessions), expected)
    assert engine.store.counters.bytes_read > 0
    engine.store.check_integrity()


@pytest.mark.parametrize("read_path", READ_PATHS)
def test_several_fetches_under_way_bring_the_same_from_every_engine(
    new_engine: EngineFactory, expected: torch.Tensor, read_path: str
) -> None:
    engine = new_engine(pipeline=Pipeline(1), read_path=read_path, window_multiple=1)
    assert torch.equal(decode(engine, on_ssd(engine)), expected)


def test_what_layers_read_is_expected_of_the_next(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default begins whole, and cuts once layers read."""
    monkeypatch.setattr(pipeline_module, "READS_PER_PART", 10)
    engine = new_engine()
    sessions = on_ssd(engine)
    watched = Watched(engine.store.fetcher, monkeypatch)
    decode(engine, sessions, 1)
    assert watched.most == 1
    decode(engine, sessions, 1)
    assert watched.most > 1
    assert engine.store.fetcher.expected_reads > 10
    resident = new_engine()
    session = resident.start(SCRIPTS[0])
    resident.prefill(session, PROMPT)
    resident.generate(session, 3)
    assert resident.store.fetcher.expected_reads == 0


def test_cutting_a_batch_reads_nothing_more(new_engine: EngineFactory) -> None:
    read = []
    for pipeline in (WHOLE, Pipeline(1)):
        engine = new_engine(pipeline=pipeline, read_path="cached", window_multiple=1)
        engine.store.fetcher.gap_bytes = 0
        decode(engine, on_ssd(engine))
        read.append(engine.store.counters.bytes_read)
        assert engine.store.counters.pages_read_again == 0
    assert read[0] == read[1]


@pytest.mark.parametrize("mode", ["blockwise", "hierarchical"])
def test_what_micro_batches_read_twice_is_counted(new_engine: EngineFactory, mode: FetchMode) -> None:
    """Requests that share a prefix: one call reads its pages once, two micro-batches once each."""
    shared = SCRIPTS[0]
    scripts = [shared, fork_script(shared, PROMPT, seed=7)]
    outs, again, read = [], [], []
    for pipeline in (WHOLE, Pipeline(1)):
        engine = new_engine(pipeline=pipeline, fetch_mode=mode, warm_up=False)
        first = engine.start(shared)
        engine.prefill(first, PROMPT)
        engine.seal(first)
        engine.evict()
        second = engine.start(scripts[1])
        second.pages, second.num_tokens = first.pages[:], PROMPT
        borrow_rows(engine, 1000)
        outs.append(decode(engine, [first, second], 1))
        again.append(engine.store.counters.pages_read_again)
        read.append(engine.store.counters.bytes_read)
        engine.store.fetcher.settle()
        engine.store.staging.check_integrity()
    assert torch.equal(*outs)
    assert again[0] == 0 and again[1] > 0
    assert read[0] < read[1]


def test_a_staged_page_stays_until_the_fetch_that_found_it_copied_it(new_engine: EngineFactory) -> None:
    """Rows are short: another micro-batch must not take the row for what its window lets go."""
    engine = new_engine(fetch_mode="hierarchical", num_frames=200, warm_up=False)
    session, other = on_ssd(engine)[:2]
    borrow_rows(engine, 1)
    fetcher, staging = engine.store.fetcher, engine.store.staging
    fetcher.prefetch(0, np.array([1]), np.array(session.pages[5:6]))
    fetcher.settle()
    found = fetcher.start(0, Absent(*np.array([[0], [1], [5]])), [engine.state(session)])
    assert found.sources[0] >= 0 and not found.batches
    pages = np.arange(12)
    later = fetcher.start(0, Absent(0 * pages, pages % 2, pages), [engine.state(other)])
    k, v = (torch.zeros(len(pages), GEOMETRY.page_elements, dtype=GEOMETRY.dtype) for _ in range(2))
    fetcher.finish(later, k, v, pages, pages + 12)
    assert staging.num_free == 0
    fetcher.finish(found, k, v, np.array([0]))
    assert torch.equal(k[0].view(4, -1), SCRIPTS[0].k[0, 20:24, 1])
    assert torch.equal(v[1].view(4, -1), SCRIPTS[1].v[0, 4:8, 1])
    engine.store.check_integrity()


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_lost_page_fails_its_micro_batch_alone(
    new_engine: EngineFactory, expected: torch.Tensor, pipeline: Pipeline
) -> None:
    engine = new_engine(pipeline=pipeline)
    sessions = on_ssd(engine)
    place = engine.spans.locate(engine.keys(SCRIPTS[2], 1)[0])
    assert place is not None
    flip_page(place[0], 1, 1, 0)
    out = decode(engine, sessions, 1)
    failed = [engine.state(session).failure is not None for session in sessions]
    assert failed == [False, False, True, False, False]
    sound = np.flatnonzero(~np.array(failed))
    assert torch.equal(out[0, sound], expected[0, sound])
    assert engine.store.counters.pages_lost == 1
    engine.store.check_integrity()


class Watched:
    """Pass a fetcher's calls on, and keep the largest number of fetches that were under way at once."""

    def __init__(self, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way, self.most = 0, 0
        start, finish = fetcher.start, fetcher.finish

        def begin(*args: Any) -> Fetch:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return start(*args)

        def end(*args: Any) -> None:
            self.under_way -= 1
            finish(*args)

        monkeypatch.setattr(fetcher, "start", begin)
        monkeypatch.setattr(fetcher, "finish", end)


@pytest.mark.parametrize(
    ("pipeline", "most"), [(Pipeline(1), 5), (Pipeline(1, 0), 1), (Pipeline(2, 1), 2), (WHOLE, 1)]
)
def test_reads_are_under_way_as_the_plan_has_it(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, most: int
) -> None:
    engine = new_engine(pipeline=pipeline)
    sessions = on_ssd(engine)
    watched = Watched(engine.store.fetcher, monkeypatch)
    decode(engine, sessions, 2)
    assert (watched.most, watched.under_way) == (most, 0)
