"""Spans in fewer bits: what is read is what was decoded, beside raw spans too, and damage is found."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kv_tier.meta.kv_codec import KvEncoding, decode_pages, encode_pages
from kv_tier.meta.read_engine import THROUGH_CACHE
from kv_tier.meta.span_file import SpanFile, SpanParts, supersedes, write_span
from kv_tier.meta.span_format import (
    HEADER_CRC_OFFSET,
    SECTION_STRUCT,
    SECTION_TABLE_OFFSET,
    SectionType,
    SpanHeader,
    crc32c,
    plan_sections,
)
from kv_tier.span_batch import PageBatch, Wants
from tests.kv_tier.meta.span_samples import (
    approximate,
    assert_damage_shows,
    by_ordinal,
    finite_kv,
    golden_span,
    read_pages,
    sample_header,
    sample_parts,
)
from tests.kv_tier.meta.test_meta_span_file import headers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extent_format.md").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parent / "data" / "golden_v1_int8.span"

ENCODINGS = st.sampled_from([KvEncoding.INT8, KvEncoding.FP8])


def encoded(
    header: SpanHeader, encoding: KvEncoding, seed: int = 0
) -> tuple[SpanHeader, SpanParts, SpanParts]:
    """Return header and parts of a span in fewer bits, and the parts as a reader sees them."""
    kv = finite_kv(header, seed)
    parts = replace(sample_parts(header, seed), kv=kv)
    header = replace(approximate(header, 0), encoding=encoding)
    stored = encode_pages(kv, encoding, header.dtype_code)
    rows = stored.reshape(-1, header.stored_page_bytes)
    seen = decode_pages(rows, encoding, header.page_size, header.head_dim, header.dtype_code)
    return (
        header,
        replace(parts, kv=stored),
        replace(parts, kv=seen.view(header.bits_dtype).reshape(kv.shape)),
    )


@settings(max_examples=60, deadline=None)
@given(header=headers(), encoding=ENCODINGS, data=st.data())
def test_round_trip(header: SpanHeader, encoding: KvEncoding, data: st.DataObject) -> None:
    header, parts, seen = encoded(header, encoding)
    with tempfile.TemporaryDirectory() as root, DataDir.open(root, role="engine") as data_dir:
        write_span(data_dir, header.sequence, header, parts).close()
        span = SpanFile.open(data_dir.span_path(header.sequence))
        assert span.header == header and span.path.stat().st_size == header.file_bytes
        np.testing.assert_array_equal(span.read_means(), parts.means)
        for layer in range(header.num_layers):
            np.testing.assert_array_equal(span.read_layer(layer), np.asarray(seen.kv)[layer])
        layer = data.draw(st.integers(0, header.num_layers - 1))
        head = data.draw(st.integers(0, header.num_kv_heads - 1))
        ordinals = data.draw(
            st.lists(st.integers(0, header.num_pages - 1), min_size=1, max_size=8, unique=True)
        )
        pages, lost = read_pages(span, layer, head, ordinals)
        assert lost == [] and span.verify() == []
        np.testing.assert_array_equal(pages, by_ordinal(seen, layer, head)[ordinals])
        span.close()


@settings(max_examples=60, deadline=None)
@given(header=headers(), encoding=ENCODINGS, data=st.data())
def test_any_flipped_bit_and_any_truncation(
    header: SpanHeader, encoding: KvEncoding, data: st.DataObject
) -> None:
    header, parts, _ = encoded(header, encoding)
    with tempfile.TemporaryDirectory() as root, DataDir.open(Path(root) / "data", role="engine") as data_dir:
        write_span(data_dir, header.sequence, header, parts).close()
        assert_damage_shows(data_dir, data_dir.span_path(header.sequence), data)


def test_raw_and_encoded_spans_in_one_batch(data_dir: DataDir) -> None:
    """Wants in any order; a page thrown away and a damaged one in each file."""
    raw_header = sample_header(num_pages=4, sequence=1)
    raw = sample_parts(raw_header)
    spans: list[SpanFile] = [write_span(data_dir, 1, raw_header, raw)]
    seen = [raw]
    for sequence, encoding in ((2, KvEncoding.FP8), (3, KvEncoding.INT8), (4, KvEncoding.FP8)):
        header, parts, plain = encoded(sample_header(num_pages=4, sequence=sequence), encoding, sequence)
        spans.append(write_span(data_dir, sequence, header, parts))
        seen.append(plain)
    for span in spans[:3]:
        damage_page(data_dir, span, layer=1, place=int(span.place_of[1, 0, 2]))
    ordinals = np.array([3, 0, 2, 1])
    wants = [
        Wants(span, np.zeros(4, np.int64), ordinals, np.where(ordinals == 0, -1, 4 * n + ordinals))
        for n, span in enumerate(spans)
    ]
    pages = PageBatch(THROUGH_CACHE, 1, [wants[n] for n in (2, 0, 3, 1)]).finish()
    assert sorted(pages.rows.tolist()) == [4 * n + o for n in range(4) for o in (1, 2, 3)]
    lost = {(gone.span.span_id, int(o)) for gone in pages.lost for o in gone.ordinals}
    assert lost == {(1, 2), (2, 2), (3, 2)}
    for row, page in zip(pages.rows.tolist(), pages.data, strict=True):
        number, ordinal = divmod(row, 4)
        expected: Any = by_ordinal(seen[number], 1, 0)[ordinal].reshape(-1).view(np.uint8)
        if (number + 1, ordinal) in lost:
            expected = np.zeros_like(expected)
        np.testing.assert_array_equal(page, expected)
    with pytest.raises(CorruptExtentError, match="fail their checksum") as caught:
        spans[2].read_layer(1)
    assert caught.value.bad_pages == [2]
    for span in spans:
        span.close()


def damage_page(data_dir: DataDir, span: SpanFile, layer: int, place: int) -> None:
    offset = span.sections[SectionType.KV].offset + layer * span.header.layer_bytes
    with data_dir.span_path(span.span_id).open("r+b") as file:
        file.seek(offset + place * span.header.stored_page_bytes + 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def golden_int8() -> tuple[SpanHeader, SpanParts]:
    """Return the span of the worked example with its KV as int8: 8.0, 8.0625, ... in steps of an eighth."""
    header, parts = golden_span()
    header = replace(header, num_exact_pages=0, selection=bytes(range(32, 64)), encoding=KvEncoding.INT8)
    return header, replace(parts, kv=encode_pages(np.asarray(parts.kv), KvEncoding.INT8, 1))


def test_golden_file(data_dir: DataDir) -> None:
    header, parts = golden_int8()
    span = write_span(data_dir, header.sequence, header, parts)
    assert data_dir.span_path(header.sequence).read_bytes() == GOLDEN.read_bytes()
    span.close()
    span = SpanFile.open(GOLDEN)
    assert span.header == header and span.verify() == []
    seen = (span.read_layer(0).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(seen.reshape(-1), np.rint(np.arange(8, 9, 0.0625) * 8) / 8)
    span.close()


def test_the_example_on_the_page() -> None:
    channel = np.array([0.5, -3.0], np.float32).view(np.uint32)
    kv = np.zeros((1, 2, 2, 1), np.uint32)
    kv[0, 0, :, 0] = channel
    stored = encode_pages(kv, KvEncoding.INT8, 3)[0]
    line = next(line for line in PAGE.splitlines() if line.startswith("    channel 0.5, -3.0"))
    assert f"codes 16, -96 ({stored[:2].tobytes().hex(' ')})" in line
    assert f"exponent {stored[4]} ({stored[4:5].tobytes().hex()})" in line


def test_lengths_on_the_page() -> None:
    header = encoded(sample_header(num_pages=5), KvEncoding.INT8)[0]
    sizes = {"L": 2, "H": 1, "n": 5, "P": 2, "D": 2}
    stated = re.search(r"holds pages of B = ([\w ]+) \+ ([\w ]+) bytes, its length is L H n B", PAGE)
    assert stated is not None
    page_bytes = sum(
        math.prod(sizes.get(word) or int(word) for word in part.split()) for part in stated.groups()
    )
    assert header.stored_page_bytes == page_bytes
    assert plan_sections(header)[SectionType.KV].length == 2 * 1 * 5 * page_bytes
    assert f"1 plain, {KvEncoding.INT8} int8, {KvEncoding.FP8} fp8" in PAGE


def test_an_encoding_from_the_future_is_a_miss_and_stays(data_dir: DataDir) -> None:
    header, parts, _ = encoded(sample_header(), KvEncoding.INT8)
    write_span(data_dir, 1, header, parts).close()
    path = data_dir.span_path(1)
    data = bytearray(path.read_bytes())
    entry = SECTION_TABLE_OFFSET + 6 * SECTION_STRUCT.size
    assert data[entry : entry + 8] == b"\x07\0\0\0\x02\0\0\0"  # KV, version 2
    data[entry + 4] = 9
    data[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc32c(bytes(data[:HEADER_CRC_OFFSET])).to_bytes(
        4, "little"
    )
    path.write_bytes(data)
    with pytest.raises(
        FingerprintMismatch, match=r"section 7 has version 9, this build reads 1, 2, 3, 257, 258, 259"
    ):
        SpanFile.open(path)


def test_no_page_of_an_encoded_span_is_exact() -> None:
    header = replace(sample_header(), encoding=KvEncoding.INT8)
    assert header.problem() == "3 exact pages in a span of KV encoding 2"


def test_fewer_bits_supersede_exact_pages_and_not_the_other_way() -> None:
    exact = sample_header(sequence=1)
    cold = replace(approximate(sample_header(sequence=2), 0), encoding=KvEncoding.INT8)
    keys = sample_parts(exact).keys
    assert supersedes(cold, keys, exact, keys)
    assert not supersedes(exact, keys, cold, keys)
    assert supersedes(replace(exact, sequence=3), keys, cold, keys)
