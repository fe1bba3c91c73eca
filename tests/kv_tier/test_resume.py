"""Resumed = never stopped: a new process attaches the spans of an old one and gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_tier.spans import Identity
from kv_tier.steps import AppendRule
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import (
    GEOMETRY,
    IDENTITY,
    Session,
    SyntheticEngine,
    fork_script,
    make_script,
)

SPARSE = AppendRule("sparse", sparse_max_tokens=12)
SCRIPT = make_script(130, seed=7)
FIRST_TURN, NUM_PAGES = 76, 19
INDEX_BYTES_PER_PAGE = GEOMETRY.mean_bytes


def first_turn(engine: SyntheticEngine) -> Session:
    """Prefill 64 positions, decode 12: 16 exact pages and 3 approximate ones."""
    session = engine.start(SCRIPT)
    engine.prefill(session, 64)
    engine.generate(session, FIRST_TURN - 64)
    return session


def second_turn(engine: SyntheticEngine, session: Session) -> torch.Tensor:
    """Append sparsely, decode, append exactly, decode: every way to use an attached page."""
    parts = [*engine.extend((session, 9)), engine.generate(session, 6)]
    parts += [*engine.extend((session, 20)), engine.generate(session, 6)]
    assert engine.state(session).failure is None
    return torch.cat(parts, dim=1)


def never_stopped(engine: SyntheticEngine) -> torch.Tensor:
    return second_turn(engine, first_turn(engine))


def stop_after_first_turn(path: Path, budget_pages: int | None) -> None:
    """Run a process that ends after the first turn was sealed."""
    with SyntheticEngine(path, budget_pages=budget_pages, append=SPARSE) as engine:
        engine.seal(first_turn(engine), open_stretch=True)


@pytest.mark.parametrize("budget_pages", [6, 11, None])
@pytest.mark.parametrize("num_frames", [9, 20, 256])
def test_a_resumed_session_continues_as_if_it_had_never_stopped(
    new_engine: EngineFactory, tmp_path: Path, budget_pages: int | None, num_frames: int
) -> None:
    expected = never_stopped(new_engine(budget_pages=budget_pages, append=SPARSE))
    stop_after_first_turn(tmp_path / "stopped", budget_pages)
    engine = new_engine(tmp_path / "stopped", budget_pages=budget_pages, append=SPARSE, num_frames=num_frames)
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    assert torch.equal(second_turn(engine, session), expected)
    engine.store.check_integrity()


def test_attaching_reads_indexes_and_no_kv(new_engine: EngineFactory, tmp_path: Path) -> None:
    stop_after_first_turn(tmp_path / "stopped", 6)
    engine = new_engine(tmp_path / "stopped", append=SPARSE)
    assert engine.num_restorable(SCRIPT) == NUM_PAGES
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    assert engine.store.counters.bytes_read == NUM_PAGES * INDEX_BYTES_PER_PAGE
    assert engine.store.counters.reads == 0
    assert engine.store.counters.pages_attached == NUM_PAGES
    assert engine.store.frames.num_free == engine.store.frames.num_usable
    table = engine.store.table
    assert table.exact[session.pages].tolist() == [True] * 16 + [False] * 3
    assert (table.filled[session.pages] == GEOMETRY.page_size).all()


def test_sparse_decode_reads_what_it_attends_and_not_more(new_engine: EngineFactory, tmp_path: Path) -> None:
    stop_after_first_turn(tmp_path / "stopped", 6)
    engine = new_engine(tmp_path / "stopped", append=SPARSE, fetch_mode="blockwise", read_path="cached")
    engine.store.fetcher.gap_bytes = 0
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    attached = engine.store.counters.bytes_read
    engine.generate(session, 1)
    per_step = 5 * GEOMETRY.page_bytes  # the budget's pages but the new one, whose frame is written
    assert engine.store.counters.bytes_read - attached == per_step
    assert engine.state(session).figures.bytes_read == per_step


def test_the_same_pages_serve_two_sessions_that_part_later(new_engine: EngineFactory, tmp_path: Path) -> None:
    stop_after_first_turn(tmp_path / "stopped", 6)
    engine = new_engine(tmp_path / "stopped", append=SPARSE)
    other_script = fork_script(SCRIPT, FIRST_TURN, seed=8)
    mine, other = engine.resume(SCRIPT, NUM_PAGES), engine.resume(other_script, NUM_PAGES)
    assert mine is not None and other is not None
    together = [engine.decode(mine, other) for _ in range(8)]
    engine.end(mine)
    engine.store.check_integrity()
    alone = new_engine(append=SPARSE)
    session = first_turn(alone)
    session.script = other_script
    expected = alone.generate(session, 8)
    assert torch.equal(torch.cat([outs[1] for outs in together], dim=1), expected)


def test_a_turn_ends_again_in_the_same_stretch(new_engine: EngineFactory, tmp_path: Path) -> None:
    """The open stretch's second span supersedes the first, whose file goes away."""
    engine = new_engine(tmp_path / "stopped", append=SPARSE)
    session = first_turn(engine)
    engine.seal(session, open_stretch=True)
    before = engine.span_paths()
    engine.generate(session, 8)
    engine.seal(session, open_stretch=True)
    after = engine.span_paths()
    assert len(before) == len(after) == 3 and before[:2] == after[:2] and before[2] != after[2]
    engine.evict()
    engine.store.check_integrity()
    out = engine.generate(session, 4)
    engine.close()
    again = new_engine(tmp_path / "stopped", append=SPARSE)
    resumed = again.resume(SCRIPT, 21)
    assert resumed is not None
    assert torch.equal(again.generate(resumed, 4), out)


@pytest.mark.parametrize(
    ("identity", "num_restorable"),
    [
        (IDENTITY, NUM_PAGES),
        (Identity(fingerprint=b"f" * 32, selection=b"another selection config, 32 byte"[:32]), 16),
        (Identity(fingerprint=b"another model".ljust(32), selection=b"s" * 32), 0),
        (Identity(fingerprint=b"f" * 32, selection=b"s" * 32, tp_rank=1, tp_size=2), 0),
    ],
    ids=["same", "other selection", "other model", "other shard"],
)
def test_identity_decides_what_is_served(
    new_engine: EngineFactory, tmp_path: Path, identity: Identity, num_restorable: int
) -> None:
    stop_after_first_turn(tmp_path / "stopped", 6)
    engine = new_engine(tmp_path / "stopped", append=SPARSE, identity=identity)
    assert engine.num_restorable(SCRIPT) == num_restorable
    assert engine.spans.num_foreign == (0 if num_restorable else 3)
    assert engine.spans.gauges()["ssd_used_bytes"] == sum(p.stat().st_size for p in engine.span_paths())
    assert engine.resume(SCRIPT, num_restorable + 1) is None
    engine.store.check_integrity()


def test_exact_pages_continue_under_another_selection(new_engine: EngineFactory, tmp_path: Path) -> None:
    """What another config left exact is as good as this engine's own prefill."""
    stop_after_first_turn(tmp_path / "stopped", 6)
    other = Identity(fingerprint=b"f" * 32, selection=b"o" * 32)
    engine = new_engine(tmp_path / "stopped", append=SPARSE, identity=other, budget_pages=9)
    session = engine.resume(SCRIPT, 16)
    assert session is not None
    fresh = new_engine(append=SPARSE, budget_pages=9)
    expected = fresh.start(SCRIPT)
    fresh.prefill(expected, 64)
    assert torch.equal(engine.generate(session, 10), fresh.generate(expected, 10))


def test_spilled_pages_die_with_the_process(new_engine: EngineFactory, tmp_path: Path) -> None:
    with SyntheticEngine(tmp_path / "stopped", num_frames=9, append=SPARSE) as engine:
        first_turn(engine)
        assert engine.store.counters.pages_spilled > 0
    engine = new_engine(tmp_path / "stopped")
    assert engine.num_restorable(SCRIPT) == 0 and engine.span_paths() == []


def test_sealing_what_was_spilled_makes_it_durable(new_engine: EngineFactory, tmp_path: Path) -> None:
    with SyntheticEngine(tmp_path / "stopped", num_frames=9, append=SPARSE) as engine:
        engine.seal(first_turn(engine), open_stretch=True)
        engine.store.check_integrity()
    engine = new_engine(tmp_path / "stopped", append=SPARSE)
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    assert torch.equal(second_turn(engine, session), never_stopped(new_engine(append=SPARSE)))
