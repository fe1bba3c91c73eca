"""Read engines: whatever does the reading, the same bytes, results and errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_tier.meta import read_engine
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.read_engine import (
    ALIGNMENT,
    InlineEngine,
    ReadBatch,
    ReadEngine,
    RingEngine,
    RingUnavailable,
    ThreadEngine,
    aligned_bytes,
    choose_read_path,
)
from tests.faults.faulty_file_system import FaultyFileSystem

SIZE = 40 * ALIGNMENT + 100
CONTENT = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)


def make_engine(name: str) -> ReadEngine:
    if name == "ring":
        try:
            return RingEngine(8)  # shorter than the batches, so that it fills
        except RingUnavailable:
            return InlineEngine()
    return ThreadEngine(3) if name == "threads" else InlineEngine()


@pytest.fixture(params=["ring", "threads", "inline"])
def engine(request: pytest.FixtureRequest) -> Iterator[ReadEngine]:
    made = make_engine(request.param)
    yield made
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


def make_batch(fd: int, count: int, *, seed: int = 0, fs: FileSystem = REAL) -> ReadBatch:
    rng = np.random.default_rng(seed)
    offsets = rng.integers(0, SIZE - 5000, count)
    lengths = rng.integers(1, 5000, count)
    at = np.cumsum(lengths) - lengths
    return ReadBatch(
        [(fs, fd)], np.zeros(count, np.int64), offsets, lengths, aligned_bytes(int(lengths.sum())), at
    )


def assert_right(batch: ReadBatch) -> None:
    assert batch.results.tolist() == batch.lengths.tolist()
    for offset, length, at in zip(batch.offsets, batch.lengths, batch.at, strict=True):
        np.testing.assert_array_equal(batch.buffer[at : at + length], CONTENT[offset : offset + length])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_a_batch_brings_what_was_asked_for(engine: ReadEngine, fd: int, count: int) -> None:
    batch = make_batch(fd, count)
    engine.start(batch)
    engine.wait(batch)
    assert_right(batch)


def test_batches_may_overlap_and_end_in_any_order(engine: ReadEngine, fd: int) -> None:
    batches = [make_batch(fd, count, seed=count) for count in (20, 3, 11)]
    for batch in batches:
        engine.start(batch)
    for batch in (batches[2], batches[0], batches[1]):
        engine.wait(batch)
        assert_right(batch)
        engine.wait(batch)  # a second wait changes nothing
        assert_right(batch)


def test_what_is_done_needs_no_wait(fd: int) -> None:
    for name in ("ring", "threads"):
        engine, batch = make_engine(name), make_batch(fd, 5)
        engine.start(batch)
        assert isinstance(engine.is_done(batch), bool)
        engine.wait(batch)
        engine.close()
        assert_right(batch)


def test_the_end_of_a_file_is_a_short_result(engine: ReadEngine, fd: int) -> None:
    batch = make_batch(fd, 3)
    batch.offsets[1], batch.lengths[1] = SIZE - 10, min(int(batch.lengths[1]), 4000)
    batch.lengths[1] = max(int(batch.lengths[1]), 11)
    batch.at[:] = np.cumsum(batch.lengths) - batch.lengths
    batch.buffer = aligned_bytes(int(batch.lengths.sum()))
    engine.start(batch)
    engine.wait(batch)
    assert batch.results.tolist() == [batch.lengths[0], 10, batch.lengths[2]]


def test_an_error_is_its_own_reads(engine: ReadEngine, fd: int) -> None:
    closed = os.open("/", os.O_RDONLY)
    batch = make_batch(fd, 4)
    batch.files = [(REAL, fd), (REAL, closed)]
    batch.file_of[2] = 1  # a directory cannot be read
    engine.start(batch)
    engine.wait(batch)
    os.close(closed)
    assert batch.results[2] == -errno.EISDIR
    assert (batch.results[[0, 1, 3]] == batch.lengths[[0, 1, 3]]).all()


def test_injected_faults_reach_every_engine(engine: ReadEngine, fd: int) -> None:
    batch = make_batch(fd, 3, fs=FaultyFileSystem(0, error=errno.EIO))
    engine.start(batch)
    engine.wait(batch)
    assert sorted(batch.results.tolist())[0] == -errno.EIO
    assert (batch.results > 0).sum() == 2
    short = make_batch(fd, 3, fs=FaultyFileSystem(0, short=True))
    engine.start(short)
    engine.wait(short)
    assert_right(short)


def test_an_engine_without_work_closes(engine: ReadEngine) -> None:
    engine.start(ReadBatch([], *(np.zeros(0, np.int64),) * 3, aligned_bytes(0), np.zeros(0, np.int64)))


# ---- choosing -----------------------------------------------------------------------------------------------


def choose(directory: Path, fs: FileSystem = REAL) -> tuple[bool, int, str]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = choose_read_path(fd, fs)
        path.engine.close()
        return path.direct, path.grid, path.reason
    finally:
        os.close(fd)


def test_the_choice_says_what_was_probed(tmp_path: Path) -> None:
    direct, grid, reason = choose(tmp_path)
    assert direct == (grid > 1) == ("direct I/O on a grid" in reason)
    assert "/s at 4 KiB" in reason or "no io_uring here" in reason
    assert list(tmp_path.iterdir()) == []


def test_a_forbidden_ring_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: RingEngine, entries: int = 8) -> None:
        raise RingUnavailable("io_uring_setup: errno 1 (Operation not permitted)")

    monkeypatch.setattr(RingEngine, "__init__", forbidden)
    assert "threads" in choose(tmp_path)[2]
    assert "no io_uring here, io_uring_setup: errno 1 (Operation not permitted)" in choose(tmp_path)[2]


def test_the_slower_engine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ring_seconds, name in ((0.89, "ring"), (0.91, "threads")):
        seconds = {"ring": ring_seconds, "threads": 1.0}
        monkeypatch.setattr(read_engine, "_probe", lambda engine, fs, fd, s=seconds: s[engine.name])
        assert choose(tmp_path)[2].startswith(
            (name, "threads, direct I/O on a grid of 512 bytes: no io_uring")
        )


class NoDirect(FileSystem):
    """A file system without direct I/O."""

    def reopen(self, fd: int, flags: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class NoUnnamedFiles(FileSystem):
    """A file system without unnamed files."""

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_direct_io_the_page_cache_is_used(tmp_path: Path) -> None:
    direct, grid, reason = choose(tmp_path, NoDirect())
    assert (direct, grid) == (False, 1) and "page cache, this file system knows no direct I/O" in reason


def test_what_cannot_be_probed_is_read_the_plain_way(tmp_path: Path) -> None:
    direct, grid, reason = choose(tmp_path, NoUnnamedFiles())
    assert (direct, grid) == (False, 1)
    assert reason.startswith("threads, page cache: no probe file (Operation not supported")


def test_memory_is_aligned() -> None:
    for length in (1, 511, 4096, 10_000):
        data = aligned_bytes(length)
        assert data.nbytes == length and data.ctypes.data % ALIGNMENT == 0
