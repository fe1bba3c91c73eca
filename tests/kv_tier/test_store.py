"""Logical pages, frames and device memory of the store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_tier.meta.errors import CapacityError
from kv_tier.store import StoreLimits, require_capacity
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import GEOMETRY, Session, make_script

SCRIPT = make_script(100, seed=40)


def test_released_pages_give_their_frames_back(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = engine.start(SCRIPT)
    engine.prefill(session, 70)
    engine.seal(session)
    engine.generate(session, 3)
    engine.end(session)
    engine.store.check_integrity()
    assert engine.store.frames.num_free == engine.store.frames.num_usable
    assert engine.store.span_files == {}
    assert engine.num_restorable(SCRIPT) == 16  # files stay


def test_the_padding_page_is_never_released(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.store.release_pages(np.array([0, 3, 0]))
    assert engine.store.table.frames[0] == 0
    engine.store.check_integrity()


def test_clear_forgets_pages_and_requests_and_keeps_files(new_engine: EngineFactory) -> None:
    engine = new_engine()
    for seed in range(3):
        session = engine.start(make_script(60, seed=seed))
        engine.prefill(session, 50)
        engine.generate(session, 2)
        engine.seal(session, wait=False)
    engine.store.clear()
    assert engine.store.frames.num_free == engine.store.frames.num_usable
    assert engine.store.gauges()["requests"] == 0
    engine.settle()
    engine.store.check_integrity()
    assert len(engine.span_paths()) == 3


def test_eviction_takes_the_pages_used_least_recently(new_engine: EngineFactory) -> None:
    engine = new_engine()
    sessions = [engine.start(make_script(40, seed=seed)) for seed in range(3)]
    for session in sessions:
        engine.prefill(session, 32, chunk=32)
        engine.seal(session)
    assert engine.store._evict_frames(8) == 8
    assert [(engine.store.table.frames[s.pages] >= 0).all() for s in sessions] == [False, True, True]
    assert engine.store.counters.frames_evicted == 8


def test_unsealed_pages_are_spilled_when_frames_run_out(new_engine: EngineFactory) -> None:
    engine = new_engine(num_frames=20)
    session = engine.start(SCRIPT)
    engine.prefill(session, 100, chunk=16)
    counters = engine.store.counters
    assert counters.pages_spilled > 0 and counters.frames_evicted > 0
    assert engine.span_paths() == []
    engine.store.check_integrity()


def test_admission_waits_for_frames(new_engine: EngineFactory) -> None:
    engine = new_engine(num_frames=10)
    assert engine.store.can_admit(36) and engine.store.can_admit(10**6)  # never more than there are
    session = engine.start(SCRIPT)
    engine.extend((session, 9))  # three pages, two of them full and spillable
    assert engine.store.can_admit(32)
    assert not engine.store.can_admit(36)
    engine.end(session)
    assert engine.store.can_admit(36)


# ---- no room ------------------------------------------------------------------------------------------------


def test_a_request_that_finds_no_frames_fails_alone(new_engine: EngineFactory) -> None:
    first_script, second_script = make_script(40, seed=1), make_script(60, seed=2)
    roomy, tight = new_engine(), new_engine(num_frames=10)
    outs = []
    for engine in (roomy, tight):
        first, second = engine.start(first_script), engine.start(second_script)
        outs.append(engine.extend((first, 18), (second, 37)))
        failure = engine.state(second).failure
        assert engine.state(first).failure is None
    assert failure is not None and failure.startswith("NO_FRAMES") and "dram_bytes" in failure
    assert torch.equal(outs[0][0], outs[1][0])
    assert tight.store.counters.requests_failed == 1
    tight.store.check_integrity()
    tight.end(second)
    tight.store.check_integrity()
    assert torch.equal(roomy.generate(roomy.sessions[0], 3), tight.generate(first, 3))
    assert not tight.store.table.lost.any()


def test_pages_without_frames_never_reach_a_span(new_engine: EngineFactory) -> None:
    engine = new_engine(num_frames=10)
    session = engine.start(SCRIPT)
    engine.extend((session, 48))
    assert engine.state(session).failure is not None
    engine.seal(session)
    assert engine.num_restorable(SCRIPT) == 8  # the stretch that found room; causal, so its KV is sound
    assert len(engine.span_paths()) == 1


def test_the_first_failure_is_the_one_reported(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = engine.start(SCRIPT)
    state = engine.state(session)
    engine.store.fail([state, state], "FIRST")
    engine.store.fail([state], "SECOND")
    assert state.failure == "FIRST" and engine.store.counters.requests_failed == 1


@pytest.mark.parametrize("num_frames", [2 * 3 + 4 + 1, 2 * 3 + 4])
def test_capacity_for_two_chunks_and_the_decode_tails(num_frames: int) -> None:
    limits = StoreLimits(
        num_pages=100, num_frames=num_frames, max_pages_per_request=10, window_multiple=2, max_requests=4
    )
    if num_frames == 11:
        require_capacity(limits, GEOMETRY, chunk_tokens=9)
        return
    with pytest.raises(CapacityError) as refusal:
        require_capacity(limits, GEOMETRY, chunk_tokens=9)
    assert str(refusal.value) == (
        "dram_bytes leaves 10 frames of 1024 bytes, but two prefill chunks of 9 tokens and 4 decode tails need 11: "
        "raise dram_bytes by 1024, or lower --chunked-prefill-size or --max-running-requests"
    )


# ---- requests -----------------------------------------------------------------------------------------------


def test_a_row_in_another_generation_is_another_request(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = engine.start(SCRIPT)
    state = engine.state(session)
    assert engine.store.find_request(session.row, session.generation) is state
    assert engine.store.find_request(session.row, session.generation + 1) is None
    assert engine.store.find_request(None, 0) is None
    assert engine.store.request(session.row, session.generation + 1) is not state
    assert engine.store.find_request(session.row, session.generation) is None


def test_device_memory_is_lent_kept_and_never_more(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6, num_device_requests=2, warm_up=False)
    per_request = engine.store.limits.device_bytes_per_request(GEOMETRY, budget_pages=6)
    sessions: list[Session] = []
    for seed in range(2):
        sessions.append(engine.start(make_script(60, seed=seed)))
        engine.prefill(sessions[-1], 40)
    assert engine.store.gauges()["device_bytes"] == 0  # exact prefill needs none but to warm up
    engine.decode(*sessions)
    assert engine.store.gauges()["device_bytes"] == 2 * per_request
    engine.end(sessions[0])
    assert engine.store.gauges()["windows_kept"] == engine.store.gauges()["windows_lent"] == 1
    again = engine.start(SCRIPT)
    engine.prefill(again, 40)
    engine.generate(again, 1)
    assert engine.store.gauges()["device_bytes"] == 2 * per_request
    state = engine.state(again)
    assert state.window is not None and state.index is not None
    caches = state.window.caches
    tensors, arrays = [*caches.k, *caches.v], [*caches.slot_of, *caches.page_of]
    for value in vars(caches.eviction).values():
        arrays.extend(value if isinstance(value, list) else [])
    held = sum(t.nbytes for t in tensors) + sum(a.nbytes for a in arrays)
    assert per_request == held // 2 + state.index.num_bytes


def test_gauges_add_up(new_engine: EngineFactory) -> None:
    engine = new_engine(num_frames=40)
    session = engine.start(SCRIPT)
    engine.prefill(session, 40)
    engine.seal(session)
    gauges = engine.store.gauges()
    assert gauges["frames_total"] == 40 and gauges["frames_free"] == 30
    assert gauges["spans"] == 1 and gauges["ssd_used_bytes"] == engine.span_paths()[0].stat().st_size
    assert gauges["dram_bytes"] >= 41 * GEOMETRY.page_bytes
    assert gauges["pages_lost_now"] == gauges["seal_jobs_outstanding"] == gauges["foreign_spans"] == 0


def test_a_page_replaced_in_a_running_row_is_read_anew(new_engine: EngineFactory) -> None:
    """The tree may point a running row to its own copy of a page, which holds the same KV elsewhere."""
    engine = new_engine(budget_pages=6)
    copy, session = engine.start(SCRIPT), engine.start(SCRIPT)
    for one in (copy, session):
        engine.prefill(one, 60)
    expected = engine.generate(copy, 6)
    first = engine.generate(session, 3)
    own = session.pages[:4]
    session.pages[:4] = copy.pages[:4]
    engine.store.release_pages(np.array(own))
    out = torch.cat([first, engine.generate(session, 3)], dim=1)
    assert torch.equal(out, expected)
    engine.store.check_integrity()
