"""Span files: round trips, every flipped bit, every truncation, every failed operation."""

import contextlib
import errno
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.meta import span_writer
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError, FingerprintMismatch, KVDriveError
from kv_tier.meta.read_engine import aligned_bytes
from kv_tier.meta.span_file import (
    SpanFile,
    SpanParts,
    quarantine_span,
    scan_spans,
    write_span,
    write_unlinked_span,
)
from kv_tier.meta.span_format import SectionType, Shape, SpanHeader, crc32c
from tests.faults.faulty_file_system import FaultyFileSystem, PowerLoss
from tests.kv_tier.meta.span_samples import (
    TINY,
    approximate,
    by_ordinal,
    read_pages,
    sample_header,
    sample_parts,
    sample_span,
)


@st.composite
def headers(draw: st.DrawFn) -> SpanHeader:
    page_size, pages_per_stretch = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    shape = Shape(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 33)),
        page_size=page_size,
        stretch_tokens=page_size * pages_per_stretch,
        dtype_code=draw(st.sampled_from([1, 2, 3])),
    )
    num_pages = draw(st.integers(1, pages_per_stretch))
    offset = draw(st.integers(0, pages_per_stretch - num_pages))
    header = sample_header(
        shape,
        sequence=draw(st.integers(0, 2**64 - 1)),
        num_pages=num_pages,
        num_clusters=draw(st.integers(0, 5)),
        sketch_bytes=draw(st.sampled_from([0, 1, 24])),
        first_page=draw(st.integers(0, 3)) * pages_per_stretch + offset,
    )
    num_exact = draw(st.integers(0, num_pages))
    return header if num_exact == num_pages else approximate(header, num_exact)


def assert_reads_back(span: SpanFile, header: SpanHeader, parts: SpanParts) -> None:
    assert span.header == header
    assert span.span_id == header.sequence
    assert span.keys == parts.keys
    np.testing.assert_array_equal(span.tokens, parts.tokens)
    np.testing.assert_array_equal(span.read_means(), parts.means)
    np.testing.assert_array_equal(span.order, parts.order)
    np.testing.assert_array_equal(span.clusters, parts.clusters)
    np.testing.assert_array_equal(np.argsort(parts.order, axis=-1), span.place_of)
    centroids = span.read_centroids()
    assert (centroids is None) == (parts.centroids is None)
    if centroids is not None:
        np.testing.assert_array_equal(centroids, parts.centroids)
    assert span.sketch_digest == parts.sketch_digest
    if parts.sketch is not None:
        np.testing.assert_array_equal(span.read_sketch(), parts.sketch)
    for layer in range(header.num_layers):
        np.testing.assert_array_equal(span.read_layer(layer), np.asarray(parts.kv)[layer])
    assert span.verify() == []


@settings(max_examples=60, deadline=None)
@given(header=headers(), data=st.data())
def test_round_trip(header: SpanHeader, data: st.DataObject) -> None:
    parts = sample_parts(header)
    with tempfile.TemporaryDirectory() as root, DataDir.open(root, role="engine") as data_dir:
        written = write_span(data_dir, header.sequence, header, parts)
        opened = SpanFile.open(data_dir.span_path(header.sequence))
        assert opened.path.stat().st_size == header.file_bytes
        for span in (written, opened):
            assert_reads_back(span, header, parts)
        layer = data.draw(st.integers(0, header.num_layers - 1))
        head = data.draw(st.integers(0, header.num_kv_heads - 1))
        ordinals = data.draw(
            st.lists(st.integers(0, header.num_pages - 1), min_size=1, max_size=8, unique=True)
        )
        pages, lost = read_pages(opened, layer, head, ordinals)
        assert lost == []
        np.testing.assert_array_equal(pages, by_ordinal(parts, layer, head)[ordinals])
        written.close()
        opened.close()


def test_tables_can_be_released(data_dir: DataDir) -> None:
    header, parts = sample_span()
    span = write_span(data_dir, 1, header, parts)
    np.testing.assert_array_equal(span.order, parts.order)
    span.release_tables()
    np.testing.assert_array_equal(span.order, parts.order)
    span.close()


def kv_offset(span: SpanFile, layer: int, head: int, place: int) -> int:
    header = span.header
    index = (layer * header.num_kv_heads + head) * header.num_pages + place
    return span.sections[SectionType.KV].offset + index * header.page_head_bytes


def damage(data_dir: DataDir, span: SpanFile, offset: int, mask: int = 1) -> None:
    path = data_dir.span_path(span.span_id)
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def test_damaged_pages_are_named_and_the_others_delivered(data_dir: DataDir) -> None:
    shape = replace(TINY, num_kv_heads=2)
    header, parts = sample_span(shape, num_pages=4)
    span = write_span(data_dir, 1, header, parts)
    damage(data_dir, span, kv_offset(span, 1, 0, 2))
    damage(data_dir, span, kv_offset(span, 1, 1, 0))
    lost = [int(parts.order[1, 0, 2]), int(parts.order[1, 1, 0])]
    with pytest.raises(CorruptExtentError, match="fail their checksum") as caught:
        span.read_layer(1)
    assert caught.value.bad_pages == sorted(set(lost))
    pages, bad = read_pages(span, 1, 0, range(4))
    assert bad == lost[:1] and not pages[lost[0]].any()
    good = [i for i in range(4) if i != lost[0]]
    np.testing.assert_array_equal(pages[good], by_ordinal(parts, 1, 0)[good])
    span.read_layer(0)
    assert len(span.verify()) == 1
    span.close()


# A bit that flips on disk ----------------------------------------------------------------------------------


def read_everything(path: Path) -> None:
    """Do what a reader may do; raises if any byte it would hand out is wrong."""
    span = SpanFile.open(path)
    try:
        span.read_means()
        span.read_centroids()
        if span.header.sketch_bytes:
            span.read_sketch()
        header = span.header
        for layer in range(header.num_layers):
            span.read_layer(layer)
            for head in range(header.num_kv_heads):
                assert read_pages(span, layer, head, range(header.num_pages))[1] == []
    finally:
        span.close()


def read_and_verify(path: Path) -> list[str]:
    try:
        read_everything(path)
    except CorruptExtentError as error:
        return [str(error)]
    span = SpanFile.open(path)
    with contextlib.closing(span):
        return span.verify()


@pytest.mark.slow
def test_every_byte_is_covered(data_dir: DataDir) -> None:
    """Flip one bit of every byte, and every bit of the header's and each section's first bytes."""
    header, parts = sample_span()
    write_span(data_dir, 1, header, parts).close()
    path = data_dir.span_path(1)
    good = path.read_bytes()
    span = SpanFile.open(path)
    kv = span.sections[SectionType.KV]
    dense = set(range(512)) | set(range(4090, 4096))
    dense |= {section.offset + i for section in span.sections.values() for i in range(8)}
    with contextlib.closing(span), path.open("r+b", buffering=0) as file:
        for offset in range(len(good)):
            for bit in range(8) if offset in dense else [offset % 8]:
                os.pwrite(file.fileno(), bytes([good[offset] ^ (1 << bit)]), offset)
                if offset < kv.offset + kv.length:
                    with pytest.raises(CorruptExtentError):
                        read_everything(path)
                else:
                    assert read_and_verify(path) == [f"{path}: the padding after the KV is not zero"]
            os.pwrite(file.fileno(), good[offset : offset + 1], offset)
    read_everything(path)


def test_damage_behind_an_open_file_is_found(data_dir: DataDir) -> None:
    """Verify must see what happened after the file was opened, in every section."""
    header, parts = sample_span()
    span = write_span(data_dir, 1, header, parts)
    good = data_dir.span_path(1).read_bytes()
    for section_offset in [0, *(section.offset for section in span.sections.values())]:
        damage(data_dir, span, section_offset)
        assert len(span.verify()) == 1, section_offset
        data_dir.span_path(1).write_bytes(good)
    assert span.verify() == []
    span.close()


def test_every_truncation_is_found(data_dir: DataDir) -> None:
    header, parts = sample_span()
    span = write_span(data_dir, 1, header, parts)
    path = data_dir.span_path(1)
    lengths = {0, 1, len(path.read_bytes()) - 1}
    for section in span.sections.values():
        lengths |= {section.offset - 1, section.offset, section.offset + 1, section.offset + section.length}
    for length in sorted(lengths - {header.file_bytes}, reverse=True):
        os.truncate(path, length)
        with pytest.raises(CorruptExtentError, match=r"bytes, its header says|are missing"):
            SpanFile.open(path)
        assert span.verify()
    with pytest.raises(CorruptExtentError, match="ends at byte"):
        span.read_layer(0)
    span.close()


def test_a_longer_file_is_refused(data_dir: DataDir) -> None:
    header, parts = sample_span()
    write_span(data_dir, 1, header, parts).close()
    with data_dir.span_path(1).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptExtentError, match="its header says"):
        SpanFile.open(data_dir.span_path(1))


# Operations that fail --------------------------------------------------------------------------------------


def count_write_operations(data_dir: DataDir) -> list[str]:
    fs = FaultyFileSystem()
    header, parts = sample_span(sequence=99)
    span = write_span(data_dir, 99, header, parts, fs=fs)
    span.unlink()
    span.close()
    return fs.operations[: fs.operations.index("fsync_dir") + 1]


def test_the_write_path_is_write_sync_rename_sync(data_dir: DataDir) -> None:
    operations = count_write_operations(data_dir)
    assert operations[0] == "open"
    assert set(operations[1:-3]) == {"pwrite"}
    assert operations[-3:] == ["fsync", "rename", "fsync_dir"]


@pytest.mark.crash
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_operation_leaves_no_span(data_dir: DataDir, error: int) -> None:
    header, parts = sample_span()
    for fail_at, operation in enumerate(count_write_operations(data_dir)):
        fs = FaultyFileSystem(fail_at, error=error)
        with pytest.raises(ExtentIoError, match=os.strerror(error)) as caught:
            write_span(data_dir, 1, header, parts, fs=fs)
        assert caught.value.errno == error
        assert str(data_dir.span_path(1)) == caught.value.path
        assert os.listdir(data_dir.spans_fd) == [], operation
        assert fs.operations.count("fsync") <= 1, "a failed fsync is final"
    write_span(data_dir, 1, header, parts).close()


def aligned(header: SpanHeader, parts: SpanParts) -> SpanParts:
    """Return the same parts with the KV in memory that direct writes accept."""
    kv = np.asarray(parts.kv)
    memory = aligned_bytes(kv.nbytes)
    memory[:] = kv.reshape(-1).view(np.uint8)
    return replace(parts, kv=memory.view(kv.dtype).reshape(kv.shape))


class NoDirect(FaultyFileSystem):
    """A file system without direct I/O."""

    def set_direct(self, fd: int, direct: bool) -> bool:
        return False


class ShortWrites(FaultyFileSystem):
    """A disk that takes the first block of a large write and no more."""

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        return super().pwrite(fd, data[:512], offset)


@pytest.mark.parametrize("head_dim", [1, 33, 64])
def test_aligned_kv_is_written_the_same(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    monkeypatch.setattr(span_writer, "CHUNK_BYTES", 8192)
    shape = replace(TINY, head_dim=head_dim, num_kv_heads=3, page_size=8, stretch_tokens=128)
    files = []
    for span_id, fs in enumerate((None, FaultyFileSystem(), ShortWrites(), NoDirect()), start=1):
        header, parts = sample_span(shape, num_pages=13)
        header = replace(header, sequence=span_id)
        given = parts if fs is None else aligned(header, parts)
        write_span(data_dir, span_id, header, given, fs=fs or FaultyFileSystem()).close()
        span = SpanFile.open(data_dir.span_path(span_id))
        assert span.verify() == []
        kv = span.sections[SectionType.KV]
        files.append(data_dir.span_path(span_id).read_bytes()[kv.offset :])
        span.close()
    assert len(set(files)) == 1


@pytest.mark.crash
def test_a_failed_direct_write_leaves_no_span(data_dir: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_writer, "CHUNK_BYTES", 4096)
    header, parts = sample_span(replace(TINY, head_dim=64, page_size=8, stretch_tokens=64), num_pages=8)
    counted = FaultyFileSystem()
    write_span(data_dir, 1, header, aligned(header, parts), fs=counted).close()
    (data_dir.path / "spans" / data_dir.span_path(1).name).unlink()
    assert counted.operations.count("pwrite") > 6
    for fail_at in range(len(counted.operations)):
        fs = FaultyFileSystem(fail_at, error=errno.ENOSPC)
        with pytest.raises(ExtentIoError, match=os.strerror(errno.ENOSPC)):
            write_span(data_dir, 1, header, aligned(header, parts), fs=fs)
        assert os.listdir(data_dir.spans_fd) == [], fail_at


@pytest.mark.crash
def test_power_loss_leaves_a_whole_span_or_none(data_dir: DataDir) -> None:
    """Cut the power before every operation, with the unsynced data lost and with it kept."""
    header, parts = sample_span()
    num_operations = len(count_write_operations(data_dir))
    for fail_at in range(num_operations):
        for lost in (False, True):
            fs = FaultyFileSystem(fail_at, power_loss=True)
            with pytest.raises(PowerLoss):
                write_span(data_dir, 1, header, parts, fs=fs)
            if lost:
                fs.lose_unsynced()
            spans, bad = scan_spans(data_dir)
            assert bad == []
            assert len(spans) == (fail_at == num_operations - 1 and not lost)
            assert os.listdir(data_dir.spans_fd) == [span.path.name for span in spans]
            for span in spans:
                assert_reads_back(span, header, parts)
                span.unlink()
                span.close()


@pytest.mark.crash
def test_short_writes_and_reads_go_on(data_dir: DataDir) -> None:
    header, parts = sample_span(replace(TINY, num_layers=1, head_dim=1), num_pages=1)
    write_span(data_dir, 1, header, parts, fs=FaultyFileSystem(1, short=True)).close()
    span = SpanFile.open(data_dir.span_path(1), fs=FaultyFileSystem(1, short=True))
    np.testing.assert_array_equal(span.read_layer(0), np.asarray(parts.kv)[0])
    np.testing.assert_array_equal(span.read_means(), parts.means)
    span.close()


@pytest.mark.crash
def test_failed_reads_name_file_and_place(data_dir: DataDir) -> None:
    header, parts = sample_span()
    write_span(data_dir, 1, header, parts).close()
    path = data_dir.span_path(1)
    fs = FaultyFileSystem()
    SpanFile.open(path, fs=fs).close()
    for fail_at in range(len(fs.operations)):
        with pytest.raises(ExtentIoError, match=r"span.*errno 5") as caught:
            SpanFile.open(path, fs=FaultyFileSystem(fail_at))
        assert caught.value.errno == errno.EIO
    span = SpanFile.open(path, fs=(faulty := FaultyFileSystem()))
    _ = span.tables
    faulty.fail_at = len(faulty.operations)
    with pytest.raises(ExtentIoError) as caught:
        span.read_layer(1)
    assert caught.value.offset == kv_offset(span, 1, 0, 0)
    faulty.fail_at = len(faulty.operations)
    assert [line for line in span.verify() if "errno 5" in line]
    span.close()
    with pytest.raises(ExtentIoError, match="No such file"):
        SpanFile.open(data_dir.span_path(7))


def test_a_span_id_is_used_once(data_dir: DataDir) -> None:
    header, parts = sample_span()
    write_span(data_dir, 1, header, parts).close()
    before = data_dir.span_path(1).read_bytes()
    with pytest.raises(ExtentIoError, match="File exists"):
        write_span(data_dir, 1, header, sample_parts(header, seed=1))
    assert data_dir.span_path(1).read_bytes() == before


# Unlinked spans, removal, scan -----------------------------------------------------------------------------


class NoTemporaryFiles(FaultyFileSystem):
    """A file system without O_TMPFILE."""

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return super().open(name, flags, mode, dir_fd=dir_fd)


@pytest.mark.parametrize("fs", [FaultyFileSystem(), NoTemporaryFiles()], ids=["tmpfile", "unlink"])
def test_an_unlinked_span_has_no_name(data_dir: DataDir, fs: FaultyFileSystem) -> None:
    header, parts = sample_span()
    span = write_unlinked_span(data_dir, header, parts, fs=fs)
    assert os.listdir(data_dir.spans_fd) == []
    assert "fsync" not in fs.operations
    assert_reads_back(span, header, parts)
    span.close()


@pytest.mark.crash
def test_failed_unlinked_writes_leave_nothing(data_dir: DataDir) -> None:
    header, parts = sample_span()
    fs = NoTemporaryFiles()
    write_unlinked_span(data_dir, header, parts, fs=fs).close()
    for fail_at in range(len(fs.operations)):
        with pytest.raises(ExtentIoError):
            write_unlinked_span(data_dir, header, parts, fs=NoTemporaryFiles(fail_at, error=errno.ENOSPC))
        for name in os.listdir(data_dir.spans_fd):
            assert fs.operations[fail_at] == "unlink", "only a failed unlink may leave its file to the scan"
            os.unlink(name, dir_fd=data_dir.spans_fd)


def test_a_removed_span_reads_on_until_closed(data_dir: DataDir) -> None:
    header, parts = sample_span()
    span = write_span(data_dir, 1, header, parts)
    span.unlink()
    span.unlink()
    assert os.listdir(data_dir.spans_fd) == []
    assert_reads_back(span, header, parts)
    span.close()
    span.close()
    with pytest.raises(ExtentIoError):
        span.read_layer(0)


@pytest.fixture
def crowded(data_dir: DataDir) -> DataDir:
    for sequence in (1, 2, 3, 4, 5):
        header, parts = sample_span(sequence=sequence)
        write_span(data_dir, sequence, header, parts).close()
    spans = data_dir.path / "spans"
    with (spans / "0000000000000002.span").open("r+b") as file:
        file.truncate(5000)
    (spans / "0000000000000003.span").write_bytes(b"")
    (spans / "0000000000000004.span").rename(spans / "0000000000000044.span")
    (spans / ".tmp-0000000000000006").write_bytes(b"half")
    (spans / "notes.txt").write_bytes(b"mine")
    (spans / "0000000000000007.span").symlink_to(spans / "0000000000000001.span")
    return data_dir


def test_scan_sets_aside_what_is_no_span(crowded: DataDir) -> None:
    spans, bad = scan_spans(crowded)
    assert [span.span_id for span in spans] == [1, 5]
    assert {(b.name, b.quarantined) for b in bad} == {
        ("0000000000000002.span", True),
        ("0000000000000003.span", True),
        ("0000000000000044.span", True),
        ("0000000000000007.span", False),
        ("notes.txt", False),
    }
    assert all(b.reason for b in bad)
    moved = sorted(os.listdir(crowded.quarantine_fd))
    assert moved == ["0000000000000002.span", "0000000000000003.span", "0000000000000044.span"]
    assert not (crowded.path / "spans" / ".tmp-0000000000000006").exists()
    for span in spans:
        span.unlink()
        span.close()
    again, still_bad = scan_spans(crowded)
    assert again == []
    assert [b.name for b in still_bad] == ["0000000000000007.span", "notes.txt"]


@pytest.mark.crash
def test_scan_survives_every_failed_operation(crowded: DataDir) -> None:
    fs = FaultyFileSystem()
    copies = {p.name: p.read_bytes() for p in (crowded.path / "spans").iterdir() if not p.is_symlink()}
    for span in scan_spans(crowded, fs=fs)[0]:
        span.close()
    for fail_at in range(len(fs.operations)):
        for name, data in copies.items():
            (crowded.path / "spans" / name).write_bytes(data)
        spans, bad = scan_spans(crowded, fs=FaultyFileSystem(fail_at))
        assert {span.span_id for span in spans} <= {1, 5}
        assert len(spans) + len(bad) >= 7
        for span in spans:
            assert span.verify() == []
            span.close()


def test_scan_leaves_another_version_in_place(data_dir: DataDir) -> None:
    header, parts = sample_span()
    write_span(data_dir, 1, header, parts).close()
    path = data_dir.span_path(1)
    path.write_bytes(as_version(path.read_bytes(), 2))
    with pytest.raises(FingerprintMismatch, match="version 2"):
        SpanFile.open(path)
    spans, (bad,) = scan_spans(data_dir)
    assert spans == []
    assert not bad.quarantined
    assert path.exists()


def as_version(data: bytes, version: int) -> bytes:
    block = data[:8] + version.to_bytes(4, "little") + data[12:4092]
    return block + crc32c(block).to_bytes(4, "little") + data[4096:]


def test_quarantine_span_moves_a_span_in_use(data_dir: DataDir) -> None:
    header, parts = sample_span()
    span = write_span(data_dir, 1, header, parts)
    bad = quarantine_span(data_dir, span, "its index failed")
    assert bad.quarantined
    assert data_dir.quarantine_path(bad.name).exists()
    assert not data_dir.span_path(1).exists()
    assert_reads_back(span, header, parts)
    span.close()


def test_wrong_content_is_a_defect_of_the_caller(data_dir: DataDir) -> None:
    header, parts = sample_span(sketch_bytes=3)
    assert parts.sketch is not None
    wrong = [
        replace(parts, tokens=parts.tokens + 1),
        replace(parts, keys=parts.keys[::-1]),
        replace(parts, order=np.zeros_like(parts.order)),
        replace(parts, clusters=np.full_like(parts.clusters, 9)),
        replace(parts, means=parts.means[:, :, :2]),
        replace(parts, kv=np.asarray(parts.kv)[:1]),
        replace(parts, centroids=None),
        replace(parts, sketch=None),
        replace(parts, sketch=parts.sketch[:, :, :2]),
    ]
    for case in wrong:
        with pytest.raises(AssertionError):
            write_span(data_dir, 1, header, case)
        assert os.listdir(data_dir.spans_fd) == []


def test_errors_survive_pickling() -> None:
    for error in (CorruptExtentError("lost", [3, 1, 3]), ExtentIoError("read x", "x", 8, errno.EIO)):
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, KVDriveError)
        assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert CorruptExtentError("lost", [3, 1, 3]).bad_pages == [1, 3]
