"""The SSD budget: it always holds, what leaves is what was used longest ago, and every byte is accounted for."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_tier.meta.data_dir import DataDir, temporary_name
from kv_tier.meta.errors import CapacityError, ConfigError, ExtentIoError, KVDriveError
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.fsck import check_spans
from kv_tier.spans import TOUCH_EVERY_NS, SealJob, SpaceLimits, SpanStore
from tests.faults.chains import (
    GEOMETRY,
    IDENTITY,
    assert_serves_nothing_wrong,
    keys_of,
    open_store,
    parts_of,
    seal,
    seal_chain,
)
from tests.faults.faulty_file_system import FaultyFileSystem

CHAINS = [list(range(1000 * n, 1000 * n + 8)) for n in range(1, 9)]  # one whole stretch each
SPAN_BYTES = 7 * 4096


class Clock:
    """Nanoseconds that pass when told, later than any file's own time."""

    def __init__(self) -> None:
        self.now = time.time_ns() + 3600 * 10**9

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Slow(FileSystem):
    """Hold every fsync until told to go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        self.entered.set()
        assert self.go_on.wait(30)
        super().fsync(fd)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[DataDir]:
    with DataDir.open(tmp_path / "data", role="engine") as data_dir:
        yield data_dir


def there(store: SpanStore) -> list[int]:
    """List the chains, by number, that can be restored."""
    return [n for n, chain in enumerate(CHAINS) if store.num_restorable(keys_of(chain)) == 4]


def use(store: SpanStore, number: int) -> None:
    """Attach a chain's pages and let them go."""
    places = store.hold(keys_of(CHAINS[number]))
    assert places is not None
    for span, _ in places:
        store.release(span, 1)


def on_disk(data_dir: DataDir) -> int:
    return sum(
        path.stat().st_size for name in ("spans", "quarantine") for path in (data_dir.path / name).iterdir()
    )


# ---- who leaves ---------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_leaves_first(root: DataDir) -> None:
    store = open_store(root, ssd_bytes=4 * SPAN_BYTES, clock_ns=Clock())
    for n in range(4):
        seal_chain(store, CHAINS[n])
    assert store.used_bytes == 4 * SPAN_BYTES
    for n in (0, 2):
        use(store, n)
    for n in (4, 5):
        seal_chain(store, CHAINS[n])
    assert there(store) == [0, 2, 4, 5] and store.num_evicted == 2
    store.close()


def test_the_order_of_use_survives_a_restart(root: DataDir) -> None:
    clock = Clock()
    store = open_store(root, ssd_bytes=4 * SPAN_BYTES, clock_ns=clock)
    for n in range(4):
        seal_chain(store, CHAINS[n])
        clock.now += TOUCH_EVERY_NS
    use(store, 0)
    clock.now += TOUCH_EVERY_NS
    use(store, 2)
    store.close()
    store = open_store(root, ssd_bytes=4 * SPAN_BYTES, clock_ns=clock)
    for n in (4, 5):
        seal_chain(store, CHAINS[n])
    assert there(store) == [0, 2, 4, 5]
    store.close()


def test_frequent_use_costs_one_system_call_a_minute(root: DataDir) -> None:
    class Counting(FileSystem):
        num_touches = 0

        def set_modified_ns(self, fd: int, ns: int) -> None:
            self.num_touches += 1
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))  # nobody minds

    clock, fs = Clock(), Counting()
    store = open_store(root, clock_ns=clock, fs=fs)
    seal_chain(store, CHAINS[0])
    clock.now += TOUCH_EVERY_NS
    for _ in range(50):
        use(store, 0)
    assert fs.num_touches == 1
    store.close()


def test_attached_and_pinned_spans_stay(root: DataDir) -> None:
    store = open_store(root, ssd_bytes=3 * SPAN_BYTES, clock_ns=Clock())
    for n in range(3):
        seal_chain(store, CHAINS[n])
    held = store.hold(keys_of(CHAINS[0])[:1])
    assert held is not None
    store.pin(keys_of(CHAINS[1])[2:3])
    seal_chain(store, CHAINS[3])
    assert there(store) == [0, 1, 3]
    store.pin(keys_of(CHAINS[3]))
    refused = seal_chain(store, CHAINS[4])[0]
    assert isinstance(refused.error, CapacityError) and "could leave; raise ssd_bytes" in str(refused.error)
    store.pin(keys_of(CHAINS[1]), pinned=False)
    seal_chain(store, CHAINS[4])
    assert there(store) == [0, 3, 4]
    store.release(held[0][0], 1)
    store.close()


def test_watermarks_evict_in_batches(root: DataDir) -> None:
    store = open_store(root, ssd_bytes=SpaceLimits(8 * SPAN_BYTES, 0.75, 0.5), clock_ns=Clock())
    for n in range(6):
        seal_chain(store, CHAINS[n])
    assert there(store) == [0, 1, 2, 3, 4, 5] and store.num_evicted == 0
    seal_chain(store, CHAINS[6])  # would be above 6 of 8: down to 4, itself included
    assert there(store) == [3, 4, 5, 6] and store.num_evicted == 3
    store.close()


@pytest.mark.parametrize("marks", [(0.5, 0.6), (1.1, 0.5), (0.5, 0.0)])
def test_watermarks_that_make_no_sense_are_named(marks: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="ssd_low_watermark="):
        SpaceLimits(100, *marks)


# ---- what counts --------------------------------------------------------------------------------------------


def test_everything_in_the_directories_counts(root: DataDir) -> None:
    (root.path / "quarantine" / "old.span").write_bytes(b"q" * 5000)
    root.span_path(3).write_bytes(b"x" * 4096)  # set aside by the scan
    (root.path / "spans" / "notes.txt").write_bytes(b"n" * 100)
    store = open_store(root)
    assert store.bytes_of["quarantine"] == 9096 and store.bytes_of["foreign"] == 100
    assert store.used_bytes == on_disk(root)
    seal_chain(store, CHAINS[0])
    spilled = seal(store, CHAINS[1], 0, 4, durable=False).span
    assert spilled is not None and store.bytes_of["spilled"] == SPAN_BYTES
    assert store.used_bytes == on_disk(root) + SPAN_BYTES
    store.release(spilled, 1)
    held = store.hold(keys_of(CHAINS[0]))
    assert held is not None
    store.drop(keys_of(CHAINS[0]))
    assert store.bytes_of["retired"] == SPAN_BYTES and store.used_bytes == on_disk(root) + SPAN_BYTES
    for span, _ in held:
        store.release(span, 1)
    assert store.used_bytes == on_disk(root)
    gauges = store.gauges()
    kinds = [name for name in gauges if name.endswith("_bytes") and name != "ssd_used_bytes"]
    assert gauges["ssd_used_bytes"] == sum(gauges[name] for name in kinds)
    store.close()


def test_quarantined_files_leave_before_any_span(root: DataDir) -> None:
    store = open_store(root, ssd_bytes=3 * SPAN_BYTES)
    for n in range(3):
        seal_chain(store, CHAINS[n])
    victim = store.locate(keys_of(CHAINS[1])[0])
    assert victim is not None
    store.quarantine(victim[0], "a test")
    assert store.used_bytes == on_disk(root) == 3 * SPAN_BYTES
    seal_chain(store, CHAINS[3])
    assert there(store) == [0, 2, 3] and store.num_evicted == 0
    assert store.used_bytes == on_disk(root) == 3 * SPAN_BYTES
    store.close()


def test_the_budget_holds_while_a_file_is_written(root: DataDir) -> None:
    """Room is made before the first byte of the new file, so the disk never holds more than ssd_bytes."""

    class Watching(FileSystem):
        most = 0

        def pwrite(self, fd: int, data: object, offset: int) -> int:
            written = super().pwrite(fd, data, offset)
            self.most = max(self.most, on_disk(root))
            return written

    fs = Watching()
    store = open_store(root, ssd_bytes=3 * SPAN_BYTES, fs=fs)
    for chain in CHAINS:
        seal_chain(store, chain)
    assert fs.most == 3 * SPAN_BYTES and store.used_bytes == on_disk(root)
    store.close()


def test_what_cannot_be_removed_stays_counted_until_it_can(root: DataDir) -> None:
    class Stuck(FileSystem):
        stuck = False

        def unlink(self, name: str, *, dir_fd: int | None = None) -> None:
            if self.stuck:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(name, dir_fd=dir_fd)

    fs = Stuck()
    store = open_store(root, ssd_bytes=2 * SPAN_BYTES, fs=fs)
    for n in range(2):
        seal_chain(store, CHAINS[n])
    fs.stuck = True
    job = seal_chain(store, CHAINS[2])[0]
    assert isinstance(job.error, CapacityError) and "1 of which failed" in str(job.error)
    assert store.bytes_of["undeleted"] == SPAN_BYTES and store.used_bytes == on_disk(root) == 2 * SPAN_BYTES
    assert there(store) == [1]  # what cannot be removed anyway stays in service
    fs.stuck = False
    seal_chain(store, CHAINS[2])
    assert there(store) == [1, 2] and store.used_bytes == on_disk(root) == 2 * SPAN_BYTES
    store.close()


# ---- deletion -----------------------------------------------------------------------------------------------


def test_a_file_that_was_shared_goes_with_its_last_owner(root: DataDir) -> None:
    trunk = [*range(100, 108), 7, 8]  # a whole stretch and one page
    branch = [*trunk, 9, 10, 11, 12]  # two pages more, in one span with the trunk's last one
    store = open_store(root)
    seal_chain(store, trunk)
    seal_chain(store, branch)
    own = keys_of(branch)[5:]
    assert store.left_beside(own) == [(4, keys_of(trunk)[4])]
    assert store.drop(own) == (0, 0)  # the trunk lives: its page is in there
    assert store.num_restorable(keys_of(trunk)) == 5
    left = store.left_beside(keys_of(trunk))
    assert left == [(5, own[0])]
    assert store.drop(keys_of(trunk), [own[0]])[0] == 2
    assert store.used_bytes == on_disk(root) == 0
    store.close()


def test_stretches_of_a_turn_that_never_was_are_found_behind_it(root: DataDir) -> None:
    kept, lost = (
        [*range(8)],
        [*range(26)],
    )  # the session kept one stretch; a withdrawn turn wrote two and a half more
    store = open_store(root)
    seal_chain(store, lost)
    left = store.left_beside(keys_of(kept))
    assert left == [(4, keys_of(lost)[4]), (8, keys_of(lost)[8]), (12, keys_of(lost)[12])]
    assert store.drop(keys_of(kept), [key for _, key in left])[0] == 4
    assert on_disk(root) == 0
    store.close()


def test_a_span_that_is_still_to_be_written_is_deleted_too(root: DataDir) -> None:
    fs = Slow()
    store = open_store(root, fs=fs)
    parts, ids = [parts_of(CHAINS[n], 0, 4) for n in range(3)], np.arange(4)
    jobs = [SealJob(ids, ids, 0, 4, True, bytes(32), part) for part in parts]
    for job in jobs[:2]:
        store.submit(job)
    assert fs.entered.wait(30)
    assert store.drop([*keys_of(CHAINS[0]), *keys_of(CHAINS[1])]) == (0, 0)  # one under way, one behind it
    store.submit(jobs[2])
    fs.go_on.set()
    for job in jobs:
        assert job.done.wait(30) and job.span is not None and job.parts is None
        store.release(job.span, 1)
    assert there(store) == [2] and store.used_bytes == on_disk(root) == SPAN_BYTES
    store.close()


def test_spans_that_another_configuration_wrote_are_deleted_and_counted(root: DataDir) -> None:
    store = open_store(root)
    ids = np.arange(4)
    job = SealJob(ids, ids, 0, 0, True, bytes(32), parts_of(CHAINS[0], 0, 4))  # no exact page
    store.submit(job)
    assert job.done.wait(30) and job.span is not None
    store.close()
    other = dataclasses.replace(IDENTITY, selection=b"t" * 32)
    store = SpanStore(root, GEOMETRY, other, ssd_bytes=1 << 30)
    assert there(store) == [] and store.usage(keys_of(CHAINS[0])).ssd_bytes == SPAN_BYTES
    assert store.drop(keys_of(CHAINS[0])) == (1, SPAN_BYTES)
    assert on_disk(root) == 0
    store.close()


def test_write_amplification_of_turns_is_counted(root: DataDir) -> None:
    """Five turns of one page each into a stretch of four: 1 + 2 + 3 + 4 + 1 pages written for 5."""
    store = open_store(root)
    tokens: list[int] = []
    for turn in range(5):
        tokens += [turn, turn + 1]
        seal_chain(store, tokens, done=turn)
    counters = store.counters()
    assert (counters["pages_written"], counters["pages_rewritten"]) == (11, 6)
    assert counters["bytes_written"] == 5 * SPAN_BYTES
    store.close()


# ---- faults -------------------------------------------------------------------------------------------------


def num_operations(root: DataDir) -> int:
    fs = FaultyFileSystem()
    store = open_store(root, fs=fs)
    seal_chain(store, CHAINS[7])
    store.close()
    store = open_store(root)
    store.drop(keys_of(CHAINS[7]))
    store.close()
    return fs.operations.index("fsync_dir") + 1


@pytest.mark.crash
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_fault_at_any_operation_costs_that_span_alone(root: DataDir, error: int) -> None:
    for fail_at in range(num_operations(root)):
        store = open_store(root)
        seal_chain(store, CHAINS[0])
        fs = store.fs = FaultyFileSystem(fail_at, error=error)
        (failed,) = seal_chain(store, CHAINS[1])
        where = f"operation {fail_at} ({fs.operations[fail_at]})"
        assert isinstance(failed.error, ExtentIoError) and failed.error.errno == error, where
        assert os.strerror(error) in str(failed.error) and ".span" in str(failed.error), where
        assert there(store) == [0] and store.num_seal_errors == 1, where
        (again,) = seal_chain(
            store, CHAINS[1]
        )  # the fault is over; another file, because this one's fsync may have lied
        assert again.error is None and there(store) == [0, 1], where
        assert again.span is not None and again.span.span_id > 2, where
        assert_serves_nothing_wrong(store)
        assert store.used_bytes == on_disk(root), where
        for n in (0, 1):
            store.drop(keys_of(CHAINS[n]))
        store.close()
        assert check_spans(root).findings == [] and on_disk(root) == 0, where


@pytest.mark.crash
def test_short_writes_go_on(root: DataDir) -> None:
    store = open_store(root, fs=FaultyFileSystem(6, short=True))
    (job,) = seal_chain(store, CHAINS[0])
    assert job.error is None
    assert_serves_nothing_wrong(store)
    store.close()
    assert check_spans(root).findings == []


@pytest.mark.crash
def test_what_a_failed_write_leaves_is_removed_by_the_next(root: DataDir) -> None:
    class Broken(FileSystem):
        broken = True

        def fsync(self, fd: int) -> None:
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync(fd)

        def unlink(self, name: str, *, dir_fd: int | None = None) -> None:
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(name, dir_fd=dir_fd)

    fs = Broken()
    store = open_store(root, fs=fs)
    seal_chain(store, CHAINS[0])
    assert (root.path / "spans" / temporary_name(1)).exists()
    seal_chain(store, CHAINS[0])
    assert store.bytes_of["leftover"] == SPAN_BYTES  # the first one's, counted when the second made room
    fs.broken = False
    seal_chain(store, CHAINS[1])
    assert there(store) == [1] and store.used_bytes == on_disk(root) == SPAN_BYTES
    store.close()


@pytest.mark.crash
def test_a_disk_that_answers_nothing_stops_no_writer(root: DataDir) -> None:
    class Dead(FileSystem):
        dead = False

        def __getattribute__(self, name: str) -> object:
            if name in {"open", "unlink", "exists", "size_of", "names"} and self.dead:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().__getattribute__(name)

    fs = Dead()
    store = open_store(root, fs=fs)
    seal_chain(store, CHAINS[0])
    fs.dead = True
    for n in (1, 2, 3, 4):
        (job,) = seal_chain(store, CHAINS[n])
        assert isinstance(job.error, KVDriveError)
    fs.dead = False
    seal_chain(store, CHAINS[5])
    assert there(store) == [0, 5] and store.used_bytes == on_disk(root)
    store.close()


@pytest.mark.crash
def test_what_the_writer_did_not_expect_is_one_failed_seal(
    root: DataDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(root)
    with monkeypatch.context() as patch:
        patch.setattr("kv_tier.spans.write_span", lambda *_, **__: 1 // 0)
        (job,) = seal_chain(store, CHAINS[0])
    assert isinstance(job.error, ExtentIoError) and "ZeroDivisionError" in str(job.error)
    assert "Traceback" in caplog.text
    seal_chain(store, CHAINS[0])
    assert there(store) == [0] and store.used_bytes == on_disk(root)
    store.close()


@pytest.mark.crash
def test_a_slow_disk_holds_up_nobody_but_the_writer(root: DataDir) -> None:
    store = open_store(root)
    seal_chain(store, CHAINS[0])
    fs = store.fs = Slow()
    writer = threading.Thread(target=lambda: seal_chain(store, CHAINS[1]))
    writer.start()
    assert fs.entered.wait(30)
    use(store, 0)
    assert_serves_nothing_wrong(store)
    assert there(store) == [0] and store.gauges()["ssd_writing_bytes"] == SPAN_BYTES
    assert store.drop(keys_of(CHAINS[0]))[0] == 1
    fs.go_on.set()
    writer.join()
    assert there(store) == [1]
    store.close()


def test_parts_fit_the_span_size_assumed_here() -> None:
    assert np.asarray(parts_of(CHAINS[0], 0, 4).kv).nbytes < 4096
