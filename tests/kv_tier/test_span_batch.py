"""Batches of pages: few reads, every page checked, a failed read costs its own pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kv_tier import span_batch
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.read_engine import THROUGH_CACHE, ReadPath
from kv_tier.meta.span_file import SpanFile, SpanParts, write_span
from kv_tier.meta.span_format import SectionType, Shape
from kv_tier.span_batch import PageBatch, Pages, Wants
from tests.faults.faulty_file_system import FaultyFileSystem
from tests.kv_tier.meta.span_samples import by_ordinal, sample_header, sample_parts
from tests.models.read_paths import READ_PATHS, make_read_path

SHAPE = Shape(num_layers=2, num_kv_heads=3, head_dim=16, page_size=4, stretch_tokens=128, dtype_code=1)
NUM_PAGES = 32


@pytest.fixture(params=READ_PATHS)
def path(request: pytest.FixtureRequest, data_dir: DataDir) -> Iterator[ReadPath]:
    made = make_read_path(request.param, data_dir.spans_fd)
    yield made
    made.engine.close()


def make_span(data_dir: DataDir, span_id: int = 1, shape: Shape = SHAPE) -> tuple[SpanFile, SpanParts]:
    header = sample_header(shape, sequence=span_id, num_pages=NUM_PAGES)
    parts = sample_parts(header, seed=span_id)
    return write_span(data_dir, span_id, header, parts), parts


def want(span: SpanFile, pairs: list[tuple[int, int]], first_row: int = 0) -> Wants:
    heads, ordinals = np.array(pairs, np.int64).T
    return Wants(span, heads, ordinals, np.arange(first_row, first_row + len(pairs)))


def expected(parts: SpanParts, layer: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.stack([by_ordinal(parts, layer, h)[o] for h, o in pairs]).reshape(len(pairs), -1).view(np.uint8)


def in_rows(pages: Pages) -> np.ndarray:
    data = np.zeros_like(pages.data)
    data[pages.rows] = pages.data
    return data


def test_pages_of_several_spans_and_heads(data_dir: DataDir, path: ReadPath) -> None:
    rng = np.random.default_rng(0)
    spans = [make_span(data_dir, span_id) for span_id in (1, 2, 3)]
    for layer in (0, 1):
        wants, wanted, row = [], [], 0
        for span, parts in spans:
            keys = rng.permutation(SHAPE.num_kv_heads * NUM_PAGES)[: rng.integers(1, 20)]
            pairs = [divmod(int(key), NUM_PAGES) for key in keys]
            wants.append(want(span, pairs, row))
            wanted.append(expected(parts, layer, pairs))
            row += len(pairs)
        pages = PageBatch(path, layer, wants).finish()
        assert pages.lost == [] and 0 < pages.num_reads <= row
        np.testing.assert_array_equal(in_rows(pages), np.concatenate(wanted))
    for span, _ in spans:
        span.close()


@pytest.mark.parametrize("head_dim", [1, 20, 33])
def test_pages_off_every_grid(data_dir: DataDir, path: ReadPath, head_dim: int) -> None:
    span, parts = make_span(data_dir, shape=replace(SHAPE, head_dim=head_dim))
    pairs = [(0, 31), (2, 0), (1, 7), (1, 8)]
    pages = PageBatch(path, 1, [want(span, pairs)]).finish()
    np.testing.assert_array_equal(in_rows(pages), expected(parts, 1, pairs))
    span.close()


def test_neighbours_and_small_gaps_are_one_read(data_dir: DataDir) -> None:
    span, _ = make_span(data_dir)
    size = span.header.page_head_bytes
    at = span.order[0, 1].astype(int)  # ordinal at each place
    for places, gap, reads in (
        ([3, 4, 5], 0, 1),
        ([5, 3, 4], 0, 1),
        ([3, 5], 0, 2),
        ([3, 5], size - 1, 2),
        ([3, 5], size, 1),
        ([0, 9, 31], 8 * size, 2),
    ):
        pairs = [(1, at[place]) for place in places]
        pages = PageBatch(THROUGH_CACHE, 0, [want(span, pairs)], gap_bytes=gap).finish()
        assert pages.num_reads == reads, places
        spread = max(places) - min(places) + 1 if reads == 1 else None
        assert spread is None or pages.bytes_read == spread * size
    span.close()


def test_long_runs_are_cut(data_dir: DataDir, path: ReadPath, monkeypatch: pytest.MonkeyPatch) -> None:
    span, parts = make_span(data_dir)
    monkeypatch.setattr(span_batch, "MAX_READ_BYTES", 1000)
    pairs = [(h, o) for h in range(3) for o in range(NUM_PAGES)]
    pages = PageBatch(path, 1, [want(span, pairs)]).finish()
    assert pages.num_reads > 10
    np.testing.assert_array_equal(in_rows(pages), expected(parts, 1, pairs))
    span.close()


def test_pages_that_nobody_keeps_are_read(data_dir: DataDir) -> None:
    span, parts = make_span(data_dir)
    pairs = [(h, o) for h in range(3) for o in range(NUM_PAGES)]
    every = want(span, pairs)
    rows = np.full(len(pairs), -1)
    rows[[5, 40]] = [1, 0]
    pages = PageBatch(THROUGH_CACHE, 0, [replace(every, rows=rows)]).finish()
    assert pages.bytes_read == span.header.layer_bytes
    np.testing.assert_array_equal(in_rows(pages), expected(parts, 0, [pairs[40], pairs[5]]))
    span.close()


def flip(data_dir: DataDir, span: SpanFile, layer: int, head: int, ordinal: int) -> None:
    offset = int(span_batch.page_places(layer, want(span, [(head, ordinal)]))[0][0])
    fd = os.open(data_dir.span_path(span.span_id), os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, offset + 3)[0] ^ 4]), offset + 3)
    os.close(fd)


def test_damage_is_named_and_the_rest_delivered(data_dir: DataDir, path: ReadPath) -> None:
    (one, parts), (two, other) = make_span(data_dir, 1), make_span(data_dir, 2)
    flip(data_dir, one, 1, 2, 9)
    flip(data_dir, two, 1, 0, 0)
    flip(data_dir, two, 1, 1, 1)  # nobody asks for this one
    pairs = [(2, 8), (2, 9), (0, 0)]
    pages = PageBatch(path, 1, [want(one, pairs), want(two, pairs, 3)]).finish()
    assert [(lost.span, lost.ordinals.tolist(), lost.rows.tolist()) for lost in pages.lost] == [
        (one, [9], [1]),
        (two, [0], [5]),
    ]
    assert all(isinstance(lost.error, CorruptExtentError) for lost in pages.lost)
    wanted = np.concatenate([expected(parts, 1, pairs), expected(other, 1, pairs)])
    wanted[[1, 5]] = 0
    np.testing.assert_array_equal(in_rows(pages), wanted)
    one.close()
    two.close()


def test_a_failed_read_loses_only_its_pages(data_dir: DataDir) -> None:
    span, parts = make_span(data_dir)
    places = span.order[0, 0].astype(int)
    pairs = [(0, places[0]), (0, places[20]), (0, places[21])]
    span._fs = FaultyFileSystem(1, error=errno.EIO)  # the second read
    pages = PageBatch(THROUGH_CACHE, 0, [want(span, pairs)], gap_bytes=0).finish()
    (lost,) = pages.lost
    assert isinstance(lost.error, ExtentIoError) and lost.error.errno == errno.EIO
    assert sorted(lost.rows.tolist()) == [1, 2]
    np.testing.assert_array_equal(in_rows(pages)[0], expected(parts, 0, pairs)[0])
    span.close()


def test_a_short_file_loses_what_it_lacks(data_dir: DataDir, path: ReadPath) -> None:
    span, parts = make_span(data_dir)
    _ = span.tables
    places = span.order[1, 2].astype(int)
    kv = span.sections[SectionType.KV]
    os.truncate(data_dir.span_path(1), kv.offset + span.header.layer_bytes)
    pages = PageBatch(path, 1, [want(span, [(2, places[5])])]).finish()
    assert [lost.rows.tolist() for lost in pages.lost] == [[0]] and not pages.data.any()
    assert "are missing" in str(pages.lost[0].error)
    np.testing.assert_array_equal(
        in_rows(PageBatch(path, 0, [want(span, [(2, 1)])]).finish()), expected(parts, 0, [(2, 1)])
    )
    span.close()


def test_damaged_tables_lose_the_pages_of_their_span(data_dir: DataDir, path: ReadPath) -> None:
    (one, _), (two, parts) = make_span(data_dir, 1), make_span(data_dir, 2)
    fd = os.open(data_dir.span_path(1), os.O_RDWR)
    os.pwrite(fd, b"?", one.sections[SectionType.CHECKSUMS].offset)
    os.close(fd)
    one.release_tables()
    pages = PageBatch(path, 0, [want(one, [(0, 1), (1, 1)]), want(two, [(2, 2)], 2)]).finish()
    assert [lost.rows.tolist() for lost in pages.lost] == [[0, 1]]
    assert pages.rows.tolist() == [2]
    np.testing.assert_array_equal(pages.data, expected(parts, 0, [(2, 2)]))
    one.close()
    two.close()


def test_only_a_span_without_tables_is_an_empty_batch(data_dir: DataDir) -> None:
    span, _ = make_span(data_dir)
    span.release_tables()
    span._fs = FaultyFileSystem(0)
    batch = PageBatch(THROUGH_CACHE, 0, [want(span, [(0, 0)])])
    assert batch.is_done
    pages = batch.finish()
    assert len(pages.rows) == 0 and len(pages.lost) == 1 and pages.num_reads == 0
    span.close()
