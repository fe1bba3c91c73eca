"""Do many reads at once, into one buffer: with the kernel's ring where it is faster, with threads otherwise.

An engine takes a batch (``start``), works on it while the caller computes, and hands it back complete (``wait``).
Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_tier.meta.file_system import REAL, FileSystem

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

ALIGNMENT = 4096  # of memory, and of offsets and lengths where the device has no finer grid
FINE_GRID = 512
HUGE_PAGE = 2 << 20
THREADS = 8
RING_ENTRIES = 1024
INLINE_READS = 16
LEAST_LENT, MOST_SPARE = 1 << 20, 2  # bytes of a loan; buffers that wait for the next one


def aligned_bytes(length: int) -> Bytes:
    """Allocate ``length`` bytes, not cleared, at an address that direct I/O accepts.

    Large ones lie on huge pages where the kernel has them: it pins memory page by page for every direct read or write.
    """
    if length < HUGE_PAGE:
        raw = np.empty(length + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + length]
    memory = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    return raw[start : start + length]


class ReadBuffer:
    """Memory for one read after another of one thread: touched once, not once per read."""

    def __init__(self) -> None:
        self._memory = aligned_bytes(0)

    def take(self, length: int) -> Bytes:
        """Return ``length`` bytes that are the caller's until the next call."""
        if len(self._memory) < length:
            self._memory = aligned_bytes(length)
        return self._memory[:length]


@dataclass
class ReadBatch:
    """Reads that belong together; the arrays are the engine's until ``wait`` returned.

    Attributes:
        files: (file system, descriptor) of the files read.
        file_of: [n] index into ``files``.
        offsets, lengths: [n] bytes in the file.
        buffer: receives every read.
        at: [n] where in ``buffer`` a read goes.
        results: [n] set by the engine: bytes read, or minus the error number.
    """

    files: Sequence[tuple[FileSystem, int]]
    file_of: Ints
    offsets: Ints
    lengths: Ints
    buffer: Bytes
    at: Ints
    results: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.results = np.zeros(len(self.offsets), np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def read_one(self, number: int) -> None:
        """Do one read here and now, going on after a short one."""
        fs, fd = self.files[self.file_of[number]]
        offset, length, at = int(self.offsets[number]), int(self.lengths[number]), int(self.at[number])
        done = 0
        while done < length:
            try:
                got = fs.preadv(fd, [self.buffer[at + done : at + length]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and done:  # the file ended off the device's grid
                    break
                self.results[number] = -(error.errno or errno.EIO)
                return
            if got == 0:
                break
            done += got
        self.results[number] = done


class ReadEngine(Protocol):
    """Read batches. Only one thread may use an engine; several batches may be under way."""

    name: str

    def start(self, batch: ReadBatch) -> None:
        """Begin a batch; blocks only while the queue is full."""
        ...

    def wait(self, batch: ReadBatch) -> None:
        """Block until ``batch.results`` is complete; short reads have been continued up to the file's end."""
        ...

    def is_done(self, batch: ReadBatch) -> bool:
        """Whether ``wait`` would not block."""
        ...

    def close(self) -> None:
        """Finish what is under way and free what the engine holds."""
        ...


class InlineEngine:
    """Read on the caller's thread, when it waits."""

    name = "inline"

    def start(self, batch: ReadBatch) -> None:
        pass

    def wait(self, batch: ReadBatch) -> None:
        for number in range(len(batch)):
            batch.read_one(number)

    def is_done(self, batch: ReadBatch) -> bool:
        return False

    def close(self) -> None:
        pass


class ThreadEngine:
    """Read with ``preadv`` on a few threads, each taking every n-th read of a batch."""

    name = "threads"

    def __init__(self, depth: int = THREADS) -> None:
        self.depth = depth
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="kvdrive-reader")
        self._jobs: dict[int, list[Future[None]]] = {}

    def start(self, batch: ReadBatch) -> None:
        strides = min(self.depth, len(batch))
        self._jobs[id(batch)] = [self._pool.submit(self._read, batch, i, strides) for i in range(strides)]

    @staticmethod
    def _read(batch: ReadBatch, first: int, stride: int) -> None:
        for number in range(first, len(batch), stride):
            batch.read_one(number)

    def wait(self, batch: ReadBatch) -> None:
        for job in self._jobs.pop(id(batch), []):
            job.result()

    def is_done(self, batch: ReadBatch) -> bool:
        return all(job.done() for job in self._jobs.get(id(batch), []))

    def close(self) -> None:
        self._pool.shutdown()


class RingUnavailable(Exception):
    """The kernel, or a policy of the container, gives this process no ring; the message says which."""


_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_OFF_SQ, _OFF_CQ, _OFF_SQES = 0, 0x8000000, 0x10000000
_GETEVENTS = 1
_OP_READ = 22
_SQE = np.dtype(
    {
        "names": ["opcode", "fd", "off", "addr", "len", "user_data"],
        "formats": [np.uint8, np.int32, np.uint64, np.uint64, np.uint32, np.uint64],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_CQE = np.dtype([("user_data", np.uint64), ("res", np.int32), ("flags", np.uint32)])
_PARAMS = struct.Struct(
    "=10I 10I 10I"
)  # head and features | offsets in the submission ring | in the completion ring


@dataclass
class _Pending:
    batch: ReadBatch
    left: int
    submitted: Future[None] | None = None


class RingEngine:
    """Read through io_uring, spoken over raw system calls; a whole batch costs one or two of them.

    The kernel takes what is submitted inside ``io_uring_enter``: microseconds for each read, and until there is room once
    the device's queue is full. So a batch of more than ``INLINE_READS`` is submitted by a thread of the engine's own,
    while the caller computes. The ring's memory is the caller's alone: it fills entries before it hands them over, and
    takes completions after the thread is through with the batch, so that plain stores and loads are enough.

    Raises:
        RingUnavailable: no ring is to be had here.
    """

    name = "ring"

    def __init__(self, entries: int = RING_ENTRIES) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = (ctypes.c_char * _PARAMS.size)()
        self._fd = self._call(_SETUP, entries, params)
        try:
            self._map(params.raw)
        except OSError as error:
            os.close(self._fd)
            raise RingUnavailable(f"its memory cannot be mapped: {error.strerror}") from error
        self._batches: dict[int, _Pending] = {}
        self._number = 0
        self._in_flight = 0
        self._submitter = ThreadPoolExecutor(1, thread_name_prefix="kvdrive-submit")

    def _map(self, raw: bytes) -> None:
        fields = _PARAMS.unpack(raw)
        self.entries, cq_entries = fields[0], fields[1]
        sq, cq = fields[10:20], fields[20:30]
        self._sq_map = mmap.mmap(self._fd, sq[6] + 4 * self.entries, offset=_OFF_SQ)
        self._cq_map = mmap.mmap(self._fd, cq[5] + 16 * cq_entries, offset=_OFF_CQ)
        self._sqe_map = mmap.mmap(self._fd, 64 * self.entries, offset=_OFF_SQES)
        self._sq_tail = np.frombuffer(self._sq_map, np.uint32, 1, sq[1])
        np.frombuffer(self._sq_map, np.uint32, self.entries, sq[6])[:] = np.arange(self.entries)
        self._cq_head = np.frombuffer(self._cq_map, np.uint32, 1, cq[0])
        self._cq_tail = np.frombuffer(self._cq_map, np.uint32, 1, cq[1])
        self._sqes = np.frombuffer(self._sqe_map, _SQE, self.entries)
        self._draft = np.zeros(self.entries, _SQE)
        self._draft["opcode"] = _OP_READ
        self._numbers = np.arange(self.entries)
        self._cqes = np.frombuffer(self._cq_map, _CQE, cq_entries, cq[5])

    def _call(self, number: int, *args: Any) -> int:
        result = int(self._libc.syscall(number, *args))
        if result < 0:
            code = ctypes.get_errno()
            if number == _SETUP:
                raise RingUnavailable(f"io_uring_setup: errno {code} ({os.strerror(code)})")
            raise OSError(code, os.strerror(code), "io_uring_enter")
        return result

    def start(self, batch: ReadBatch) -> None:
        number = self._number = (self._number + 1) % 2**31
        self._batches[number] = _Pending(batch, len(batch))
        todo = np.arange(len(batch))
        if not all(fs is REAL for fs, _ in batch.files):
            ours = np.array([fs is REAL for fs, _ in batch.files], bool)[batch.file_of]
            for other in todo[~ours].tolist():
                batch.read_one(other)
                self._batches[number].left -= 1
            todo = todo[ours]
        fds = np.array([fd for _, fd in batch.files], np.int32)[batch.file_of]
        base = batch.buffer.ctypes.data
        while len(todo):
            room = self.entries - self._in_flight
            if room == 0:
                self._reap(1)
                continue
            now, todo = todo[:room], todo[room:]
            tail = int(self._sq_tail[0])
            entries = self._draft[: len(now)]
            entries["fd"] = fds[now]
            entries["off"] = batch.offsets[now]
            entries["addr"] = batch.at[now] + base
            entries["len"] = batch.lengths[now]
            entries["user_data"] = now + (number << 32)
            self._sqes[(tail + self._numbers[: len(now)]) % self.entries] = entries
            self._sq_tail[0] = (tail + len(now)) % 2**32
            self._in_flight += len(now)
            if len(now) > INLINE_READS:
                self._batches[number].submitted = self._submitter.submit(self._enter, len(now), 0)
            else:
                self._enter(len(now), 0)

    def _enter(self, submit: int, complete: int) -> None:
        while submit or complete:
            try:
                done = self._call(_ENTER, self._fd, submit, complete, _GETEVENTS, None, 0)
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
                continue
            submit -= done
            complete = 0

    def _reap(self, least: int) -> None:
        """Take what is complete; block for ``least`` completions first if nothing is."""
        if self._cq_tail[0] == self._cq_head[0]:
            self._enter(0, least)
        self._harvest()

    def _harvest(self) -> None:
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        count = (tail - head) % 2**32
        if count == 0:
            return
        done = self._cqes[(head + np.arange(count)) % len(self._cqes)]
        self._cq_head[0] = tail
        self._in_flight -= count
        indexes = (done["user_data"] & np.uint64(2**32 - 1)).astype(np.int64)
        if len(self._batches) == 1:
            (pending,) = self._batches.values()
            pending.batch.results[indexes] = done["res"]
            pending.left -= count
            return
        owners = (done["user_data"] >> np.uint64(32)).astype(np.int64)
        for number in np.unique(owners).tolist():
            mine = owners == number
            pending = self._batches[number]
            pending.batch.results[indexes[mine]] = done["res"][mine]
            pending.left -= int(mine.sum())

    def _pending(self, batch: ReadBatch) -> tuple[int, _Pending] | None:
        return next(((n, p) for n, p in self._batches.items() if p.batch is batch), None)

    def is_done(self, batch: ReadBatch) -> bool:
        found = self._pending(batch)
        if found is None:
            return True
        submitted = found[1].submitted
        if submitted is None or submitted.done():
            self._harvest()
        return found[1].left == 0

    def wait(self, batch: ReadBatch) -> None:
        found = self._pending(batch)
        if found is None:
            return
        number, pending = found
        if pending.submitted is not None:
            pending.submitted.result()
        while pending.left:
            self._reap(pending.left)  # other batches' completions count too: never more than must come
        del self._batches[number]
        retry = (batch.results >= 0) & (batch.results < batch.lengths)
        retry |= (batch.results == -errno.EINTR) | (batch.results == -errno.EAGAIN)
        for short in np.flatnonzero(retry).tolist():
            batch.read_one(short)

    def close(self) -> None:
        for pending in list(self._batches.values()):
            self.wait(pending.batch)
        self._submitter.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---- choosing ---------------------------------------------------------------------------------------------------

PROBE_BYTES = 8 << 20
PROBE_READS = 256
RING_GAIN = 0.9  # the ring must take at most this share of the threads' time


@dataclass(frozen=True)
class ReadPath:
    """How this directory is read.

    Attributes:
        engine: owned by whoever holds this value.
        direct: past the page cache, instead of through it.
        grid: offsets and lengths are multiples of so many bytes; 1 through the page cache.
        reason: what the probe found, for people.
    """

    engine: ReadEngine
    direct: bool
    grid: int
    reason: str
    _spare: list[Bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def lend(self, length: int) -> Bytes:
        """Return at least ``length`` bytes for one batch, rather ones whose pages are there already; for one thread."""
        fits = [i for i, memory in enumerate(self._spare) if len(memory) >= length]
        return self._spare.pop(fits[0]) if fits else aligned_bytes(max(length, LEAST_LENT))

    def give_back(self, memory: Bytes) -> None:
        """End a loan."""
        self._spare.append(memory)
        del self._spare[:-MOST_SPARE]


THROUGH_CACHE = ReadPath(InlineEngine(), False, 1, "page cache")


def open_direct(fs: FileSystem, fd: int) -> int:
    """Open a file a second time, past the page cache; -1 where its file system cannot."""
    try:
        again = fs.reopen(fd, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1
    if not _readable(fs, again, ALIGNMENT):
        fs.close(again)
        return -1
    return again


def _readable(fs: FileSystem, fd: int, grid: int) -> bool:
    """Whether a direct read of ``grid`` bytes at an odd multiple of ``grid`` works; the first of a short file, else."""
    try:
        fs.preadv(fd, [aligned_bytes(grid)], grid)
    except OSError:
        return False
    return True


def choose_read_path(dir_fd: int, fs: FileSystem = REAL) -> ReadPath:
    """Probe a directory: does it take direct I/O, and does the ring beat the threads there.

    Writes an unnamed file of 8 MiB, which is gone afterwards. A directory that cannot be probed is read through the
    page cache, with threads.
    """
    threads = ThreadEngine()
    try:
        fd = fs.open(".", os.O_RDWR | os.O_TMPFILE, dir_fd=dir_fd)
    except OSError as error:
        return ReadPath(threads, False, 1, f"threads, page cache: no probe file ({error.strerror})")
    direct_fd = -1
    try:
        fs.pwrite(fd, bytes(PROBE_BYTES), 0)
        fs.fsync(fd)
        direct_fd = open_direct(fs, fd)
        direct, grid = direct_fd >= 0, 1
        cache = "page cache, this file system knows no direct I/O"
        if direct:
            grid = FINE_GRID if _readable(fs, direct_fd, FINE_GRID) else ALIGNMENT
            cache = f"direct I/O on a grid of {grid} bytes"
        try:
            ring = RingEngine()
        except RingUnavailable as why:
            return ReadPath(threads, direct, grid, f"threads, {cache}: no io_uring here, {why}")
        slow, fast = (_probe(engine, fs, direct_fd if direct else fd) for engine in (threads, ring))
        wins = fast <= RING_GAIN * slow
        (threads if wins else ring).close()
        rates = f"ring {PROBE_READS / fast:,.0f}/s, threads {PROBE_READS / slow:,.0f}/s at 4 KiB"
        engine: ReadEngine = ring if wins else threads
        return ReadPath(engine, direct, grid, f"{engine.name}, {cache}: {rates}")
    except OSError as error:
        return ReadPath(threads, False, 1, f"threads, page cache: the probe failed ({error.strerror})")
    finally:
        fs.close(fd)
        if direct_fd >= 0:
            fs.close(direct_fd)


def _probe(engine: ReadEngine, fs: FileSystem, fd: int) -> float:
    """Return the seconds that scattered small reads take, the best of three times."""
    blocks = np.random.default_rng(0).permutation(PROBE_BYTES // ALIGNMENT)[:PROBE_READS].astype(np.int64)
    steps = np.arange(PROBE_READS, dtype=np.int64)
    buffer, lengths = aligned_bytes(PROBE_READS * ALIGNMENT), np.full(PROBE_READS, ALIGNMENT)
    best = float("inf")
    for _ in range(3):
        batch = ReadBatch([(fs, fd)], 0 * steps, blocks * ALIGNMENT, lengths, buffer, steps * ALIGNMENT)
        begin = time.perf_counter()
        engine.start(batch)
        engine.wait(batch)
        best = min(best, time.perf_counter() - begin)
        if (batch.results != ALIGNMENT).any():
            raise OSError(errno.EIO, "a probe read was short")
    return best
