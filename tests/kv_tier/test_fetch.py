"""Fetching: what is read when, what stays in DRAM, and that a guess costs nobody anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_tier import fetch as fetch_module
from kv_tier.fetch import REST_FETCHES, TRIAL_FETCHES, PrefetchTrial
from kv_tier.modes import FetchMode
from kv_tier.page_table import NOWHERE
from kv_tier.steps import AppendRule
from kv_tier.window import Absent
from tests.kv_tier.conftest import EngineFactory
from tests.kv_tier.test_store_faults import flip_page
from tests.models.synthetic_engine import Session, SyntheticEngine, make_script

PROMPT = 96  # three stretches, 24 pages
SCRIPT = make_script(200, seed=30)


def attached(engine: SyntheticEngine) -> Session:
    """Return a session all of whose KV is on SSD, in a fresh request."""
    first = engine.start(SCRIPT)
    engine.prefill(first, PROMPT)
    engine.seal(first)
    engine.end(first)
    engine.store.staging.forget(np.arange(engine.store.limits.num_pages))
    session = engine.resume(SCRIPT, PROMPT // 4)
    assert session is not None
    return session


def read_by(engine: SyntheticEngine, session: Session, steps: int = 1) -> int:
    before = engine.store.counters.bytes_read
    engine.generate(session, steps)
    engine.store.fetcher.settle()
    return engine.store.counters.bytes_read - before


def test_layerwise_reads_the_layer_and_blockwise_the_selection(new_engine: EngineFactory) -> None:
    amounts = {}
    for mode in ("layerwise", "blockwise"):
        engine = new_engine(fetch_mode=mode, read_path="cached", budget_pages=6)
        engine.store.fetcher.gap_bytes = 0
        session = attached(engine)
        amounts[mode] = [read_by(engine, session) for _ in range(4)]
    page_bytes = new_engine().geometry.page_bytes
    assert amounts["layerwise"] == [24 * page_bytes] * 4  # every step again
    assert amounts["blockwise"][0] == 5 * page_bytes
    assert sum(amounts["blockwise"][1:]) < 3 * 5 * page_bytes


@pytest.mark.parametrize("mode", ["hierarchical", "balanced"])
def test_pages_read_once_stay_in_dram(new_engine: EngineFactory, mode: FetchMode) -> None:
    """A window of one budget forgets what DRAM still has: far fewer bytes from SSD, the same answers."""
    outs, amounts = [], []
    for fetch_mode in ("blockwise", mode):
        engine = new_engine(fetch_mode=fetch_mode, window_multiple=1, warm_up=False)
        session = attached(engine)
        before = engine.store.counters.bytes_read
        outs.append(engine.generate(session, 40))
        engine.store.check_integrity()
        amounts.append(engine.store.counters.bytes_read - before - engine.store.counters.bytes_prefetched)
    assert torch.equal(*outs)
    assert amounts[1] < amounts[0] / 2
    assert len(engine.store.staging.frames) > 0


def test_staging_keeps_what_leaves_the_windows_and_not_what_is_in_them(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", window_multiple=1, warm_up=False)
    session = attached(engine)
    engine.store.fetcher._rows_short = 100
    engine.store.fetcher.grow_staging()
    engine.generate(session, 1)
    staging, windows = engine.store.staging, engine.store.windows
    assert windows is not None and not (staging.row_of >= 0).any()
    window = engine.state(session).window
    assert window is not None
    before = [slot_of[window.row].copy() for slot_of in windows.slot_of]
    engine.generate(session, 20)
    seen = 0
    for layer, slot_of in enumerate(windows.slot_of):
        head, ordinal = ((before[layer] >= 0) & (slot_of[window.row] < 0)).nonzero()
        pages = np.array(session.pages)[ordinal]
        kept = staging.row_of[2 * layer + head, pages] >= 0
        assert (kept == (engine.store.table.frames[pages] == NOWHERE)).all()  # new pages have a frame
        seen += int(kept.sum())
    assert seen
    engine.store.check_integrity()


def test_near_critical_pages_come_before_they_are_asked_for(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "NEAR_SHARE", 1)  # ranks up to twice the budget
    engine = new_engine(fetch_mode="hierarchical", warm_up=False)
    session = attached(engine)
    engine.generate(session, 1)
    staging = engine.store.staging
    assert engine.store.fetcher._under_way or (staging.row_of >= 0).any()
    engine.store.fetcher.settle()
    assert engine.store.counters.bytes_prefetched > 0
    engine.generate(session, 1)  # staging borrowed frames between the steps
    engine.store.fetcher.settle()
    assert (staging.row_of >= 0).sum() > 0
    engine.store.check_integrity()


def test_a_page_on_its_way_is_waited_for(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", warm_up=False, read_path="threads")
    session = attached(engine)
    expected = new_engine(fetch_mode="blockwise")
    sound = expected.generate(attached(expected), 3)
    engine.store.fetcher._rows_short = 1000
    engine.store.fetcher.grow_staging()
    pages = np.array(session.pages)
    for layer in range(2):
        for head in range(2):
            engine.store.fetcher.prefetch(layer, np.full(len(pages), head), pages)
    before = engine.store.counters.bytes_read
    assert torch.equal(engine.generate(session, 3), sound)
    prefetched = engine.store.counters.bytes_prefetched
    assert engine.store.counters.bytes_read - before == prefetched  # nothing was read on demand
    engine.store.check_integrity()


def test_a_guess_that_fails_fails_nobody(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", warm_up=False, budget_pages=6)
    session = attached(engine)
    place = engine.spans.locate(engine.keys(SCRIPT, 16)[15])
    assert place is not None
    flip_page(place[0], 0, 0, place[1])
    engine.store.fetcher.prefetch(0, np.zeros(24, np.int64), np.array(session.pages))
    engine.store.fetcher.settle()
    assert engine.store.counters.pages_lost == 0 and engine.state(session).failure is None
    assert engine.store.staging.row_of[0, session.pages[15]] == -1
    engine.store.check_integrity()


def test_what_arrives_for_an_ended_request_is_dropped(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", warm_up=False)
    session = attached(engine)
    pages = np.array(session.pages)
    engine.store.fetcher._rows_short = 100
    engine.store.fetcher.grow_staging()
    engine.store.fetcher.prefetch(0, np.zeros(24, np.int64), pages)
    engine.end(session)
    assert not engine.store.fetcher._under_way
    assert (engine.store.staging.row_of == -1).all()
    engine.store.check_integrity()


def test_staging_gives_its_frames_to_a_prompt(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="balanced", num_frames=40, warm_up=False)
    session = attached(engine)
    engine.store.fetcher._rows_short = 10_000
    engine.store.fetcher.grow_staging()
    assert engine.store.frames.num_free == 0 and len(engine.store.staging.frames) == 40
    other = engine.start(make_script(130, seed=31))
    engine.prefill(other, 100)
    assert engine.state(other).failure is None
    assert len(engine.store.staging.frames) < 40
    engine.generate(session, 2)
    engine.store.check_integrity()


def test_stalls_become_quotas(new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "PROFILE_FETCHES", 4)
    engine = new_engine(fetch_mode="balanced", num_frames=40, window_multiple=1, warm_up=False)
    session = attached(engine)
    engine.generate(session, 30)
    staging = engine.store.staging
    assert 0 < staging.quota.sum() <= staging.num_rows / 2 + 4
    engine.store.check_integrity()


def test_warm_up_fills_the_window_from_dram(new_engine: EngineFactory) -> None:
    outs, hits = [], []
    for warm_up in (False, True):
        engine = new_engine(fetch_mode="hierarchical", warm_up=warm_up)
        session = engine.start(SCRIPT)
        engine.prefill(session, PROMPT)
        outs.append(engine.generate(session, 1))
        hits.append(engine.store.counters.window_hits)
        engine.store.check_integrity()
    assert torch.equal(*outs)
    assert hits[0] == 0 and hits[1] > 0


def test_a_sparse_append_reads_about_what_it_selects(new_engine: EngineFactory) -> None:
    """Warm-up after it must not read the session."""
    engine = new_engine(
        budget_pages=6, append=AppendRule("sparse", sparse_max_tokens=16), read_path="cached", num_pages=300
    )
    engine.store.fetcher.gap_bytes = 0
    session = attached(engine)
    before = engine.store.counters.bytes_read
    engine.extend((session, 8))
    engine.store.fetcher.settle()
    assert engine.store.counters.bytes_read - before <= 1.5 * 6 * engine.geometry.page_bytes
    engine.generate(session, 2)
    engine.store.check_integrity()


def test_warm_up_brings_as_much_from_ssd_as_there_is_room_for(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", num_frames=12, budget_pages=6)
    session = attached(engine)
    store, state = engine.store, engine.state(session)
    state.sync(torch.tensor(session.pages), store.table)
    scores = torch.arange(24.0).expand(2, 24)
    room = store.frames.num_free
    assert 0 < room < 24
    for layer in range(2):
        store.fetcher.warm(layer, state, scores, from_ssd=True)
    store.fetcher.grow_staging()
    store.fetcher.settle()
    best = np.array(session.pages)[: -room - 1 : -1]
    assert (store.staging.row_of[:, best] >= 0).all() and store.staging.held.tolist() == [room] * 4
    store.check_integrity()


def test_guesses_rest_while_they_cost_more_than_they_save() -> None:
    trial = PrefetchTrial()
    trial.demanded(4, 8_000)
    assert trial.page_ns == 250  # of 2000 ns a page; recent ones weigh most
    trial.used(10)
    trial.spent_ns = 2_600
    guesses = [trial.next_fetch() for _ in range(TRIAL_FETCHES + REST_FETCHES)]
    assert guesses == [True] * (TRIAL_FETCHES - 1) + [False] * REST_FETCHES + [True]
    trial.spent_ns = trial.saved_ns = 1.0  # it pays: no rest
    assert all(trial.next_fetch() for _ in range(3 * TRIAL_FETCHES))


def test_a_guess_counts_once_and_only_when_it_is_used(new_engine: EngineFactory) -> None:
    engine = new_engine(fetch_mode="hierarchical", warm_up=False)
    session = attached(engine)
    fetcher = engine.store.fetcher
    fetcher.prefetch(0, np.zeros(24, np.int64), np.array(session.pages), guess=True)
    fetcher.grow_staging()
    fetcher.settle()
    assert fetcher.trial.saved_ns == 0
    fetcher.trial.page_ns = 1.0
    engine.state(session).sync(torch.tensor(session.pages), engine.store.table)
    states, absent = [engine.state(session)], Absent(*np.array([[0, 0], [0, 0], [3, 7]]))
    k, v = (torch.zeros(2, engine.geometry.page_elements, dtype=engine.geometry.dtype) for _ in range(2))
    for _ in range(2):
        fetcher.finish(fetcher.start(0, absent, states), k, v, np.arange(2))
    assert fetcher.trial.saved_ns == 2
