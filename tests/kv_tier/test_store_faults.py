"""Faults of the world stop at the store: a lost page costs the requests that use it, and nobody else."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.span_file import SpanFile
from kv_tier.meta.span_format import SectionType
from kv_tier.spans import SpaceLimits
from tests.faults.faulty_file_system import FaultyFileSystem
from tests.kv_tier.conftest import EngineFactory, opening_engines
from tests.models.synthetic_engine import Session, SyntheticEngine, make_script

PROMPT = 64  # two stretches
SCRIPT, MATE_SCRIPT = make_script(110, seed=20), make_script(110, seed=21)


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[EngineFactory]:
    """Engines that do not read ahead: a page leaves the disk when it is attended, not before."""
    yield from opening_engines(tmp_path, warm_up=False)


def flip(path: Path, offset: int) -> None:
    """Flip one bit on disk, behind every open descriptor."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)
    finally:
        os.close(fd)


def flip_page(span: SpanFile, layer: int, head: int, ordinal: int) -> None:
    """Flip a bit of one page's KV."""
    header = span.header
    place = head * header.num_pages + int(span.place_of[layer, head, ordinal])
    start = span.sections[SectionType.KV].offset + layer * header.layer_bytes
    flip(span.path, start + place * header.page_head_bytes + 5)


def flip_pages(span: SpanFile, places: list[tuple[int, int, int]]) -> None:
    for layer, head, ordinal in places:
        flip_page(span, layer, head, ordinal)


def flip_section(span: SpanFile, kind: SectionType) -> None:
    flip(span.path, span.sections[kind].offset + 3)


def sealed_pair(engine: SyntheticEngine) -> tuple[Session, Session]:
    """Return two prefilled requests whose KV is on SSD alone."""
    pair = engine.start(SCRIPT), engine.start(MATE_SCRIPT)
    for session in pair:
        engine.prefill(session, PROMPT)
        engine.seal(session)
    engine.evict()
    assert engine.store.frames.num_free == engine.store.frames.num_usable
    return pair


def first_span(engine: SyntheticEngine, session: Session) -> SpanFile:
    """Return the span of a request's first stretch."""
    place = engine.spans.locate(engine.keys(session.script, 1)[0])
    assert place is not None
    return place[0]


def run_on(engine: SyntheticEngine, mode: str, *sessions: Session) -> list[torch.Tensor]:
    """Take one step that reads the sessions' first page: a sink for decode, all pages for extend."""
    if mode == "decode":
        return engine.decode(*sessions)
    return engine.extend(*((session, 5) for session in sessions))


Damage = Callable[[SpanFile], object]
DAMAGES: dict[str, tuple[Damage, list[int]]] = {
    "one page": (lambda span: flip_page(span, 1, 1, 0), [0]),
    "two pages": (lambda span: flip_pages(span, [(0, 0, 0), (1, 1, 5)]), [0, 5]),
    "the packing order": (lambda span: flip_section(span, SectionType.LAYOUT), list(range(8))),
    "the checksums": (lambda span: flip_section(span, SectionType.CHECKSUMS), list(range(8))),
    "the end of the file": (
        lambda span: os.truncate(span.path, span.sections[SectionType.KV].offset),
        list(range(8)),
    ),
}


@pytest.mark.parametrize("mode", ["decode", "extend"])
@pytest.mark.parametrize("num_frames", [18, 256])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_fails_the_requests_that_use_it_and_no_other(
    new_engine: EngineFactory, mode: str, damage: str, num_frames: int
) -> None:
    sound = new_engine(num_frames=num_frames)
    expected = run_on(sound, mode, *sealed_pair(sound))
    engine = new_engine(num_frames=num_frames)
    victim, mate = sealed_pair(engine)
    inflict, lost = DAMAGES[damage]
    span = first_span(engine, victim)
    inflict(span)
    span.release_tables()
    outs = run_on(engine, mode, victim, mate)
    failure = engine.state(victim).failure
    assert failure is not None and failure.startswith("LOST_PAGE")
    assert engine.state(mate).failure is None
    assert torch.equal(outs[1], expected[1])
    table, counters = engine.store.table, engine.store.counters
    assert [o for o in range(16) if table.lost[victim.pages[o]]] == lost
    assert not table.lost[mate.pages].any()
    assert (counters.pages_lost, counters.requests_failed) == (len(lost), 1)
    assert engine.spans.num_quarantined == len(lost)
    assert engine.num_restorable(SCRIPT) == 0  # the first page is a miss now
    engine.store.check_integrity()
    engine.end(victim)
    engine.store.check_integrity()


def test_damage_in_a_page_that_nobody_attends_fails_nobody(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    victim, _ = sealed_pair(engine)
    engine.generate(victim, 1)
    window = engine.state(victim).window
    assert window is not None
    unused = min(set(range(1, 8)) - set(window.pages(0, 0)))
    again = new_engine(budget_pages=6)
    victim, _ = sealed_pair(again)
    flip_page(first_span(again, victim), 0, 0, unused)
    again.generate(victim, 1)
    assert again.state(victim).failure is None and again.store.counters.pages_lost == 0


def test_sharers_of_a_lost_page_fail_together(new_engine: EngineFactory) -> None:
    engine = new_engine()
    victim, mate = sealed_pair(engine)
    sharer = engine.resume(SCRIPT, 16)
    assert sharer is not None
    flip_page(first_span(engine, victim), 0, 1, 0)
    engine.decode(victim, mate, sharer)
    failures = [engine.state(session).failure for session in (victim, mate, sharer)]
    assert [failure is not None for failure in failures] == [True, False, True]
    assert engine.store.counters.pages_lost == 1


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_a_read_error_fails_the_requests_that_meet_it(new_engine: EngineFactory, mode: str) -> None:
    engine = new_engine()
    victim, mate = sealed_pair(engine)
    span = first_span(engine, victim)
    assert span.tables is not None
    span._fs = AlwaysFailing()
    run_on(engine, mode, victim, mate)
    failure = engine.state(victim).failure
    assert failure is not None and failure.startswith("LOST_PAGE")
    assert engine.state(mate).failure is None
    engine.store.check_integrity()


class AlwaysFailing(FaultyFileSystem):
    """Fail every read; closing still works."""

    def _step(self, operation: str) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO), operation)


class NoDescriptors(FileSystem):
    """A process that may open no further file."""

    def reopen(self, fd: int, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_too_many_open_files_are_no_damage(new_engine: EngineFactory) -> None:
    sound = new_engine()
    expected = sound.generate(sealed_pair(sound)[0], 3)
    engine = new_engine()
    victim, _ = sealed_pair(engine)
    for span in engine.spans.spans.values():
        span._fs = NoDescriptors()
    assert torch.equal(engine.generate(victim, 3), expected)
    assert engine.state(victim).failure is None
    assert engine.spans.num_quarantined == 0


def test_pages_still_in_frames_outlive_their_span(new_engine: EngineFactory) -> None:
    """What is resident is sound: it must not depend on the damaged file from now on."""
    outs = []
    for damaged in (False, True):
        engine = new_engine()
        victim, _ = sealed_pair(engine)
        sharer = engine.resume(SCRIPT, 16)
        assert sharer is not None
        engine.extend((victim, 3))  # brings all its pages back into frames
        if damaged:
            flip_page(first_span(engine, victim), 0, 0, 0)
            flip_page(first_span(engine, victim), 0, 0, 3)
        engine.decode(sharer)
        assert (engine.state(sharer).failure is not None) == damaged
        engine.evict()
        engine.store.check_integrity()
        outs.append(torch.cat([*engine.extend((victim, 3)), engine.generate(victim, 3)], dim=1))
        assert engine.state(victim).failure is None
    assert torch.equal(outs[0], outs[1])


def test_recomputed_bytes_heal_a_lost_page(new_engine: EngineFactory) -> None:
    sound = new_engine()
    expected = sound.generate(sealed_pair(sound)[0], 6)
    engine = new_engine()
    victim, _ = sealed_pair(engine)
    flip_page(first_span(engine, victim), 1, 0, 0)
    engine.decode(victim)
    lost = victim.pages[0]
    again = engine.start(SCRIPT)
    engine.prefill(again, PROMPT)
    engine.store.adopt(again.pages[0], lost)
    engine.end(again)
    engine.store.check_integrity()
    assert not engine.store.table.lost.any() and engine.store.counters.pages_healed == 1
    victim.generation, victim.num_tokens, victim.pages = -1, PROMPT, victim.pages[:16]  # the retry
    assert torch.equal(engine.generate(victim, 6), expected)
    assert engine.state(victim).failure is None


def test_a_healed_stretch_is_sealed_again(new_engine: EngineFactory, tmp_path: Path) -> None:
    engine = new_engine(tmp_path / "healed")
    victim, _ = sealed_pair(engine)
    flip_page(first_span(engine, victim), 1, 0, 0)
    engine.decode(victim)
    again = engine.start(SCRIPT)
    engine.prefill(again, PROMPT)
    engine.store.adopt(again.pages[0], victim.pages[0])
    engine.end(again)
    engine.seal(victim)
    assert engine.num_restorable(SCRIPT) == 16
    assert len(engine.span_paths()) == 4  # the damaged file is gone
    engine.close()
    reopened = new_engine(tmp_path / "healed")
    assert reopened.num_restorable(SCRIPT) == 16 and reopened.spans.num_quarantined == 0


# ---- damage that is found at start or at attach -------------------------------------------------------------


@pytest.mark.parametrize("kind", [SectionType.MEANS])
def test_an_index_that_fails_its_checksum_is_a_miss(new_engine: EngineFactory, kind: SectionType) -> None:
    engine = new_engine()
    victim, _ = sealed_pair(engine)
    span = first_span(engine, victim)
    held = {id(s): s.num_attached for s in engine.spans.spans.values()}
    flip_section(span, kind)
    assert engine.resume(SCRIPT, 16) is None
    assert span.span_id not in engine.spans.spans
    assert {id(s): s.num_attached for s in engine.spans.spans.values()}.items() <= held.items()
    assert engine.spans.num_quarantined == 1
    assert not span.path.exists() and engine.data_dir.quarantine_path(span.path.name).exists()
    engine.store.check_integrity()
    assert engine.resume(SCRIPT, 16) is None  # a plain miss from now on
    assert torch.isfinite(engine.generate(victim, 1).float()).all()  # whoever was attached reads on
    assert engine.state(victim).failure is None


@pytest.mark.parametrize(
    "kind",
    [
        "header",
        *(kind.name for kind in SectionType if kind.name not in ("MEANS", "CENTROIDS", "SKETCH", "KV")),
    ],
)
def test_a_span_that_is_bad_at_start_is_quarantined(
    new_engine: EngineFactory, tmp_path: Path, kind: str
) -> None:
    engine = new_engine(tmp_path / "stopped")
    victim, mate = sealed_pair(engine)
    span = first_span(engine, victim)
    offset = 100 if kind == "header" else span.sections[SectionType[kind]].offset
    engine.close()
    flip(span.path, offset)
    reopened = new_engine(tmp_path / "stopped")
    assert reopened.spans.num_quarantined == 1
    assert reopened.num_restorable(SCRIPT) == 0
    assert reopened.resume(SCRIPT, 16) is None
    resumed = reopened.resume(mate.script, 16)
    assert resumed is not None
    reopened.store.check_integrity()


# ---- writing ------------------------------------------------------------------------------------------------


def failing_writes(engine: SyntheticEngine, fail_at: int) -> None:
    """Let one file operation of the next span fail for want of space."""
    engine.spans.fs = FaultyFileSystem(fail_at, error=errno.ENOSPC)


@pytest.mark.parametrize("fail_at", [0, 1, 2, 4])
def test_a_full_disk_leaves_pages_in_dram_and_readable(new_engine: EngineFactory, fail_at: int) -> None:
    sound = new_engine()
    expected_session = sound.start(SCRIPT)
    sound.prefill(expected_session, PROMPT)
    expected = sound.generate(expected_session, 4)
    engine = new_engine()
    session = engine.start(SCRIPT)
    engine.prefill(session, 32)
    failing_writes(engine, fail_at)
    engine.seal(session)
    assert engine.spans.num_seal_errors == 1 and engine.span_paths() == []
    assert list((engine.data_dir.path / "spans").iterdir()) == []
    assert engine.evict() == 0 and engine.num_restorable(SCRIPT) == 0
    engine.prefill(session, PROMPT)
    engine.seal(session)  # space again: both stretches go out now
    assert engine.spans.num_seal_errors == 1 and len(engine.span_paths()) == 2
    assert engine.evict() == 16
    assert torch.equal(engine.generate(session, 4), expected)
    engine.store.check_integrity()


def test_a_spill_that_fails_costs_only_who_asked_for_frames(
    new_engine: EngineFactory,
) -> None:
    engine = new_engine(num_frames=18)
    first = engine.start(SCRIPT)
    engine.prefill(first, PROMPT)
    failing_writes(engine, 0)
    second = engine.start(MATE_SCRIPT)
    engine.extend((second, 20))
    failure = engine.state(second).failure
    assert failure is not None and failure.startswith("NO_FRAMES")
    assert engine.spans.num_seal_errors == 1
    engine.generate(first, 2)
    assert engine.state(first).failure is None
    engine.end(second)
    engine.store.check_integrity()


def unlinked_files(engine: SyntheticEngine) -> list[str]:
    """List the open files of a data directory that no name leads to."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them, among others
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [
        link for link in links if link.startswith(str(engine.data_dir.path)) and link.endswith("(deleted)")
    ]


def test_spills_give_their_space_back(new_engine: EngineFactory) -> None:
    engine = new_engine(num_frames=18)
    for seed in range(3):
        session = engine.start(make_script(120, seed=seed))
        engine.prefill(session, 118)
        assert engine.spans.used_bytes > 0 and unlinked_files(engine)
        engine.end(session)
        engine.store.check_integrity()
        assert engine.spans.used_bytes == 0
        assert unlinked_files(engine) == []


# ---- the SSD budget -----------------------------------------------------------------------------------------


def span_bytes(new_engine: EngineFactory) -> int:
    """Return the size of the file of one stretch."""
    engine = new_engine()
    session = engine.start(SCRIPT)
    engine.prefill(session, 32)
    engine.seal(session)
    return engine.span_paths()[0].stat().st_size


def seal_one_stretch(engine: SyntheticEngine, seed: int, *, keep: bool = False) -> Session:
    session = engine.start(make_script(40, seed=seed))
    engine.prefill(session, 32)
    engine.seal(session)
    if not keep:
        engine.end(session)
    return session


def test_the_oldest_unattached_span_makes_room(new_engine: EngineFactory) -> None:
    size = span_bytes(new_engine)
    engine = new_engine(ssd_bytes=3 * size)
    sessions = [seal_one_stretch(engine, seed, keep=seed == 0) for seed in range(5)]
    assert [engine.num_restorable(s.script) for s in sessions] == [8, 0, 0, 8, 8]  # the first is attached
    assert engine.spans.num_seal_errors == 0
    assert engine.spans.used_bytes == sum(path.stat().st_size for path in engine.span_paths()) == 3 * size
    engine.store.check_integrity()


def test_attached_spans_stay_and_the_new_one_is_refused(new_engine: EngineFactory) -> None:
    size = span_bytes(new_engine)
    engine = new_engine(ssd_bytes=2 * size)
    kept = [seal_one_stretch(engine, seed, keep=True) for seed in range(3)]
    assert engine.spans.num_seal_errors == 1
    assert [engine.num_restorable(session.script) for session in kept] == [8, 8, 0]
    assert engine.evict() == 16  # the refused one stays in DRAM
    for session in kept:
        engine.generate(session, 1)
        assert engine.state(session).failure is None


def test_a_span_that_can_never_fit_evicts_nobody(new_engine: EngineFactory) -> None:
    size = span_bytes(new_engine)
    engine = new_engine(ssd_bytes=2 * size)
    attached = seal_one_stretch(engine, 0, keep=True)
    free = seal_one_stretch(engine, 1)
    wide = engine.start(make_script(70, seed=2))
    engine.spans.limits = SpaceLimits(2 * size - 1)
    engine.spans.bytes_of["foreign"] += size  # two more files that never leave
    engine.prefill(wide, 32)
    engine.seal(wide)
    assert engine.spans.num_seal_errors == 1
    assert engine.num_restorable(attached.script) == engine.num_restorable(free.script) == 8


def test_the_refusal_names_what_is_in_use(
    new_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine(ssd_bytes=100)
    seal_one_stretch(engine, 0)
    assert "does not fit: ssd_bytes=100, in use 0" in caplog.text
    assert "raise ssd_bytes or delete sessions" in caplog.text
