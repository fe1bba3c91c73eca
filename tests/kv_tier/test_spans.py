"""The span store alone: what can be restored, superseded, dropped, waited for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kv_tier import spans as spans_module
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.encryption import DataKey
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.span_file import SpanFile, SpanParts, write_span
from kv_tier.meta.span_format import SpanHeader
from kv_tier.spans import Usage
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import GEOMETRY, Session, SyntheticEngine, fork_script, make_script

SCRIPT = make_script(100, seed=30)


def prefilled(engine: SyntheticEngine, num_tokens: int = 80) -> Session:
    session = engine.start(SCRIPT)
    engine.prefill(session, num_tokens)
    return session


def test_keys_are_restorable_once_their_span_is_sealed(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = prefilled(engine)
    keys = engine.keys(SCRIPT, 25)
    assert engine.spans.num_restorable(keys) == 0
    engine.seal(session)
    assert engine.spans.num_restorable(keys) == 16
    assert engine.spans.num_restorable(keys[3:]) == 13  # a lookup may begin inside a span
    assert engine.spans.wait_sealed(keys[:16], wait_s=10.0) == 16
    assert engine.spans.wait_sealed(keys, wait_s=0.0) == 16


def test_whoever_waits_is_told_when_the_writer_is_done(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = prefilled(engine)
    keys = engine.keys(SCRIPT, 16)
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(engine.spans.wait_sealed(keys, wait_s=30.0)))
    waiter.start()
    engine.seal(session)
    waiter.join()
    assert found == [16]


def test_holding_is_all_or_nothing(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.seal(prefilled(engine))
    keys = engine.keys(SCRIPT, 17)
    attached = [span.num_attached for span in engine.spans.spans.values()]
    assert engine.spans.hold(keys) is None
    assert [span.num_attached for span in engine.spans.spans.values()] == attached
    places = engine.spans.hold(keys[:16])
    assert places is not None and [ordinal for _, ordinal in places] == [*range(8), *range(8)]
    for span, _ in places:
        engine.spans.release(span, 1)
    engine.store.check_integrity()


def test_headers_say_what_a_span_holds(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.seal(prefilled(engine), open_stretch=True)
    keys = engine.keys(SCRIPT, 20)
    headers = [span.header for span in engine.spans.spans.values()]
    assert [(h.first_page, h.num_pages, h.num_exact_pages) for h in headers] == [
        (0, 8, 8),
        (8, 8, 8),
        (16, 4, 4),
    ]
    assert [h.parent_key for h in headers] == [bytes(32), keys[7], keys[15]]
    assert [h.num_clusters for h in headers] == [1, 1, 1]
    assert [h.sequence for h in headers] == [1, 2, 3]
    assert all(not span.verify() for span in engine.spans.spans.values())
    paths = engine.span_paths()
    assert engine.spans.bytes_written == engine.spans.used_bytes == sum(p.stat().st_size for p in paths)


def test_a_longer_span_of_the_same_chain_supersedes(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = prefilled(engine, 40)
    engine.seal(session, open_stretch=True)
    old = engine.spans.locate(engine.keys(SCRIPT, 10)[9])
    engine.prefill(session, 52)
    engine.seal(session, open_stretch=True)
    new = engine.spans.locate(engine.keys(SCRIPT, 10)[9])
    assert old is not None and new is not None and new[0].header.num_pages == 5
    assert old[0].retired and old[0].fd == -1  # its pages were bound to the new one
    assert len(engine.span_paths()) == 2
    engine.store.check_integrity()


def test_another_branch_of_the_stretch_does_not_supersede(new_engine: EngineFactory) -> None:
    engine = new_engine()
    other_script = fork_script(SCRIPT, 36, seed=31)
    for script in (SCRIPT, other_script):
        session = engine.start(script)
        engine.prefill(session, 48)
        engine.seal(session, open_stretch=True)
    assert engine.num_restorable(SCRIPT) == engine.num_restorable(other_script) == 12
    firsts = [(s.header.first_page, s.header.num_pages) for s in engine.spans.spans.values()]
    assert firsts == [(0, 8), (8, 4), (8, 4)]  # the shared stretch was not written again


def test_an_approximate_span_does_not_replace_an_exact_one(new_engine: EngineFactory) -> None:
    """The same tokens, once prefilled and once generated: other configs still need the exact pages."""
    engine = new_engine(budget_pages=6)
    exact = engine.start(SCRIPT)
    engine.prefill(exact, 64)
    engine.seal(exact)
    sparse = engine.start(SCRIPT)
    engine.prefill(sparse, 33)
    engine.generate(sparse, 31)
    keys = engine.keys(SCRIPT, 16)
    engine._seal_pages(sparse, keys, 8, 16)
    engine.settle()
    counts = sorted((s.header.first_page, s.header.num_exact_pages) for s in engine.spans.spans.values())
    assert counts == [(0, 8), (8, 0), (8, 8)]
    engine._seal_pages(exact, keys, 8, 16)  # the other way round, exact replaces both
    engine.settle()
    counts = sorted((s.header.first_page, s.header.num_exact_pages) for s in engine.spans.spans.values())
    assert counts == [(0, 8), (8, 8)]
    engine.store.check_integrity()


@pytest.mark.parametrize(("num_keys", "num_dropped"), [(25, 3), (20, 3), (19, 2), (7, 0), (0, 0)])
def test_dropping_deletes_the_spans_that_hold_nothing_else(
    new_engine: EngineFactory, num_keys: int, num_dropped: int
) -> None:
    engine = new_engine()
    session = prefilled(engine)
    engine.seal(session, open_stretch=True)
    engine.end(session)
    keys = engine.keys(SCRIPT, num_keys)
    sizes = [path.stat().st_size for path in engine.span_paths()]
    assert engine.spans.drop(keys) == (num_dropped, sum(sizes[:num_dropped]))
    assert [path.stat().st_size for path in engine.span_paths()] == sizes[num_dropped:]
    assert engine.spans.used_bytes == sum(sizes[num_dropped:])


def test_attached_pages_outlive_a_drop(new_engine: EngineFactory) -> None:
    outs = []
    for dropped in (False, True):
        engine = new_engine()
        session = prefilled(engine)
        engine.seal(session)
        engine.evict()
        if dropped:
            used = engine.spans.used_bytes
            assert engine.spans.drop(engine.keys(SCRIPT, 20))[0] == 2
            assert engine.span_paths() == [] and engine.num_restorable(SCRIPT) == 0
            assert engine.spans.used_bytes == used  # the disk gives it back with the last page
        outs.append(engine.generate(session, 4))
        assert engine.state(session).failure is None
        engine.store.check_integrity()
        engine.end(session)
    assert engine.spans.used_bytes == 0
    assert torch.equal(*outs)


def test_usage_counts_every_file_once(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.seal(prefilled(engine), open_stretch=True)
    sizes = [path.stat().st_size for path in engine.span_paths()]
    page_bytes = GEOMETRY.page_bytes
    whole = engine.spans.usage(engine.keys(SCRIPT, 25))
    assert (whole.num_spans, whole.ssd_bytes) == (3, sum(sizes))
    assert (whole.kv_bytes, whole.other_kv_bytes) == (20 * page_bytes, 0)
    part = engine.spans.usage(engine.keys(SCRIPT, 9)[8:])
    assert (part.num_spans, part.ssd_bytes) == (1, sizes[1])
    assert (part.kv_bytes, part.other_kv_bytes) == (page_bytes, 7 * page_bytes)
    assert engine.spans.usage([b"?" * 32]) == Usage(0, 0, 0, 0)


# ---- the writer ---------------------------------------------------------------------------------------------


class Gate:
    """Stand in for ``write_span`` and let it go on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.num_begun = threading.Semaphore(0)
        monkeypatch.setattr(spans_module, "write_span", self)

    def __call__(
        self,
        data_dir: DataDir,
        span_id: int,
        header: SpanHeader,
        parts: SpanParts,
        *,
        key: DataKey | None,
        fs: FileSystem,
    ) -> SpanFile:
        self.num_begun.release()
        assert self.open.wait(30)
        return write_span(data_dir, span_id, header, parts, key=key, fs=fs)


def test_the_writer_holds_whoever_is_too_fast(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    sessions = [engine.start(make_script(40, seed=seed)) for seed in range(4)]
    for session in sessions:
        engine.prefill(session, 32)
    gate = Gate(monkeypatch)
    for session in sessions[:3]:  # one being written, two queued
        engine.seal(session, wait=False)
        if session is sessions[0]:
            assert gate.num_begun.acquire(timeout=30)
    opener = threading.Timer(0.05, gate.open.set)
    opener.start()
    engine.seal(sessions[3], wait=False)  # blocks until a place is free
    assert gate.open.is_set()
    opener.join()
    engine.settle()
    assert len(engine.span_paths()) == 4
    engine.store.check_integrity()


def test_pages_released_while_they_are_written_are_not_bound(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    first, second = prefilled(engine, 32), engine.start(make_script(40, seed=32))
    engine.prefill(second, 32)
    gate = Gate(monkeypatch)
    engine.seal(first, wait=False)
    engine.end(first)
    later = prefilled(engine, 32)  # takes the same logical pages for another life
    gate.open.set()
    engine.settle()
    assert engine.num_restorable(SCRIPT) == 8
    assert engine.store.counters.pages_sealed == 0
    assert (engine.store.table.span_of[later.pages] == -1).all()
    engine.store.check_integrity()


def test_a_span_dropped_before_its_pages_are_bound_stays_readable(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = prefilled(engine, 64)
    engine.seal(session, wait=False)
    keys = engine.keys(SCRIPT, 16)
    assert engine.spans.wait_sealed(keys, wait_s=30.0) == 16
    assert engine.spans.drop(keys)[0] == 2  # the control socket's thread was faster
    engine.settle()
    assert engine.evict() == 16
    engine.generate(session, 3)
    assert engine.state(session).failure is None
    engine.end(session)
    engine.store.check_integrity()
    assert engine.spans.used_bytes == 0


def test_ids_go_on_after_a_restart(new_engine: EngineFactory, tmp_path: Path) -> None:
    with SyntheticEngine(tmp_path / "stopped") as engine:
        engine.seal(prefilled(engine))
    again = new_engine(tmp_path / "stopped")
    session = again.start(make_script(40, seed=33))
    again.prefill(session, 32)
    again.seal(session)
    assert [path.stem for path in again.span_paths()] == [f"{span_id:016x}" for span_id in (1, 2, 3)]


def test_geometry_of_another_engine_is_foreign(
    new_engine: EngineFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SyntheticEngine(tmp_path / "stopped") as engine:
        engine.seal(prefilled(engine))
    other = type(GEOMETRY)(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, stretch_tokens=64)
    again = new_engine(tmp_path / "stopped", geometry=other)
    assert again.spans.num_foreign == 2 and again.num_restorable(SCRIPT) == 0
    assert "2 spans in" in caplog.text and "move them away or delete" in caplog.text
    assert len(again.span_paths()) == 2  # never deleted
