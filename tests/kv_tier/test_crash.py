"""Power loss after every single operation of write, publish, supersede, transcode, delete, quarantine and repair.

Whatever is left: the next engine opens it, everything acknowledged is there, nothing wrong is served, and fsck finds nothing
that its repair does not settle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.fsck import check_spans, repair_spans
from tests.faults.chains import (
    assert_serves_nothing_wrong,
    keys_of,
    open_store,
    parts_of,
    seal,
    seal_chain,
    transcode,
)
from tests.faults.crash_disk import LOSSES, Image, Loss, RecordingFileSystem, read_image, write_image

pytestmark = pytest.mark.crash

TRUNK = list(range(100, 122))  # 11 pages of 2 tokens: two whole stretches of 4 pages and 3 pages
BRANCH = [*TRUNK[:12], *range(300, 310)]  # leaves the trunk after 6 pages


def promise(fs: RecordingFileSystem, verb: str, keys: list[bytes]) -> None:
    fs.mark((verb, tuple(keys)))


def work(data_dir: DataDir, fs: RecordingFileSystem) -> None:
    """Do everything an engine does to its files; marks say what it promised, and when."""
    store = open_store(data_dir, fs=fs)
    for num_tokens in (6, 14, 22):  # each turn supersedes the open span of the one before
        seal_chain(store, TRUNK[:num_tokens], done=max(0, num_tokens - 8) // 2)
        promise(fs, "sealed", keys_of(TRUNK[:num_tokens]))
    seal_chain(store, BRANCH, done=4)
    promise(fs, "sealed", keys_of(BRANCH))
    assert len(transcode(store, keys_of(TRUNK)[:5])) == 1  # the first stretch, and not the page behind it
    doomed = keys_of(TRUNK)[6:]
    promise(fs, "dropping", doomed)
    store.drop(doomed)
    promise(fs, "dropped", keys_of(TRUNK)[8:])  # the span of pages 4 to 8 holds pages of the branch too
    gone = store.locate(keys_of(BRANCH)[-1])
    assert gone is not None
    promise(fs, "dropping", gone[0].keys)
    store.quarantine(gone[0], "a test")
    seal(store, list(range(50)), 0, 4, durable=False)
    store.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordingFileSystem:
    root = tmp_path_factory.mktemp("recorded") / "data"
    DataDir.open(root, role="engine").close()
    fs = RecordingFileSystem(root)
    with DataDir.open(root, role="engine") as data_dir:
        work(data_dir, fs)
    return fs


def check_promises(root: Path, marks: list[tuple[str, tuple[bytes, ...]]]) -> None:
    """Open a directory as the next engine does, and hold it against what was promised."""
    due: set[bytes] = set()
    gone: set[bytes] = set()
    for verb, keys in marks:
        if verb == "sealed":
            due |= set(keys)
        elif verb == "dropping":
            due -= set(keys)
        else:
            gone |= set(keys)
    with DataDir.open(root, role="engine") as data_dir:
        store = open_store(data_dir)
        try:
            missing = [key for key in due if store.locate(key) is None]
            assert not missing, f"{len(missing)} of {len(due)} acknowledged pages are gone"
            assert not [key for key in gone if store.locate(key) is not None], "deleted pages are back"
            assert_serves_nothing_wrong(store)
            on_disk = sum(
                path.stat().st_size for name in ("spans", "quarantine") for path in (root / name).iterdir()
            )
            assert store.used_bytes == on_disk
            assert store.num_remove_errors == 0
        finally:
            store.close()


def assert_fsck_settles(root: Path) -> None:
    """A crash leaves leftovers and leaks, never damage; one repair, or the next engine, removes them all."""
    with DataDir.open(root, role="engine") as data_dir:
        findings = check_spans(data_dir).findings
        assert {finding.kind for finding in findings} <= {"leftover", "superseded"}, findings
        repair_spans(data_dir, findings)
        assert check_spans(data_dir).findings == []


def crash_states(fs: RecordingFileSystem) -> Iterator[tuple[int, Loss, Image]]:
    for num_ops in fs.crashes():
        seen = []
        for loss in LOSSES:
            image = fs.after(num_ops, loss)
            if image not in seen:  # many losses agree
                seen.append(image)
                yield num_ops, loss, image


def test_the_work_does_what_its_names_say(recorded: RecordingFileSystem) -> None:
    kinds = [op.kind for op in recorded.log]
    assert kinds.count("rename") == 9  # eight spans, one quarantined
    assert kinds.count("unlink") == 4  # two superseded, one transcoded, one dropped
    assert len(kinds) > 60


@pytest.mark.slow
@pytest.mark.parametrize("settle", ["engine", "fsck"])
def test_power_loss_after_every_operation(recorded: RecordingFileSystem, tmp_path: Path, settle: str) -> None:
    for num_ops, loss, image in crash_states(recorded):
        where = f"after {num_ops} operations, {loss}"
        write_image(image, tmp_path / "data")
        try:
            if settle == "fsck":
                assert_fsck_settles(tmp_path / "data")
            check_promises(tmp_path / "data", recorded.marks(num_ops))
            if settle == "engine":
                with DataDir.open(tmp_path / "data", role="engine") as data_dir:
                    assert check_spans(data_dir).findings == []
        except AssertionError as error:
            raise AssertionError(where) from error


def recover_by_engine(data_dir: DataDir, fs: RecordingFileSystem) -> None:
    open_store(data_dir, fs=fs).close()


def recover_by_fsck(data_dir: DataDir, fs: RecordingFileSystem) -> None:
    repair_spans(data_dir, check_spans(data_dir).findings, fs=fs)


@pytest.mark.parametrize("recover", [recover_by_engine, recover_by_fsck])
def test_power_loss_during_the_repair(
    recorded: RecordingFileSystem, tmp_path: Path, recover: Callable[[DataDir, RecordingFileSystem], None]
) -> None:
    """The repair itself is stopped after each of its operations, then done again."""
    worst = {}  # by what there is to repair
    for num_ops, _, image in crash_states(recorded):
        write_image(image, tmp_path / "data")
        with DataDir.open(tmp_path / "data", role="engine") as data_dir:
            kinds = tuple(finding.kind for finding in check_spans(data_dir).findings)
        worst[kinds] = num_ops, image
    assert {"leftover", "superseded"} <= {kind for kinds in worst for kind in kinds}
    for num_ops, image in worst.values():
        damaged = dict(image) | {("spans", f"{99:016x}.span"): b"KVDRSPAN" + bytes(8000)}
        write_image(damaged, tmp_path / "data")
        fs = RecordingFileSystem(tmp_path / "data")
        with DataDir.open(tmp_path / "data", role="engine") as data_dir:
            recover(data_dir, fs)
        for _, _, again in crash_states(fs):
            write_image(again, tmp_path / "data")
            check_promises(tmp_path / "data", recorded.marks(num_ops))
            with DataDir.open(tmp_path / "data", role="engine") as data_dir:
                assert check_spans(data_dir).findings == []


def test_the_disk_model_finds_a_missing_fsync(recorded: RecordingFileSystem, tmp_path: Path) -> None:
    """A writer that renames before it syncs, as a check of the checker."""
    root = tmp_path / "data"
    DataDir.open(root, role="engine").close()
    fs = RecordingFileSystem(root)
    monkey = pytest.MonkeyPatch()
    with DataDir.open(root, role="engine") as data_dir, monkey.context() as patch:
        patch.setattr(RecordingFileSystem, "fsync", lambda self, fd: None)
        store = open_store(data_dir, fs=fs)
        seal_chain(store, TRUNK[:8])
        promise(fs, "sealed", keys_of(TRUNK[:8]))
        store.close()
    write_image(fs.after(len(fs.log), Loss("all", "none")), root)
    with pytest.raises(AssertionError, match="acknowledged pages are gone"):
        check_promises(root, fs.marks(len(fs.log)))


def test_ids_are_never_taken_from_what_cannot_be_read(tmp_path: Path) -> None:
    """Files of other versions, strangers and quarantined ones keep their names; the first seal after a restart works."""
    root = tmp_path / "data"
    with DataDir.open(root, role="engine") as data_dir:
        store = open_store(data_dir)
        seal_chain(store, TRUNK[:8])
        store.close()
        names = {"spans": (f"{2:016x}.span", f"{5:016x}.span.bak"), "quarantine": (f"{7:016x}.span",)}
        (data_dir.path / "spans" / names["spans"][0]).mkdir()  # no more readable than a bad sector
        (data_dir.path / "spans" / names["spans"][1]).write_bytes(b"mine")
        (data_dir.path / "quarantine" / names["quarantine"][0]).write_bytes(b"bad")
        before = read_image_of_files(root)
        store = open_store(data_dir)
        jobs = seal_chain(store, TRUNK[:16], done=4)
        assert [job.error for job in jobs] == [None] and store.num_seal_errors == 0
        assert jobs[0].span is not None and jobs[0].span.span_id == 8
        store.close()
    assert before.items() <= read_image_of_files(root).items()


def read_image_of_files(root: Path) -> Image:
    return {
        (path.parent.name, path.name): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.parent != root
    }


def test_a_damaged_file_keeps_its_parts_apart(tmp_path: Path) -> None:
    """The image helpers agree with the directory: the rest of this file stands on them."""
    image = {("spans", f"{1:016x}.span"): b"a" * 700, ("sessions", "s.log"): b""}
    write_image(image, tmp_path / "data")
    assert read_image(tmp_path / "data") == image
    assert parts_of(TRUNK, 0, 4).tokens.shape == (4, 2)
