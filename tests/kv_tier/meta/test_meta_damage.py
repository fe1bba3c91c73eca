"""Damage of any kind to spans of any shape: the checker finds it, and a reader never hands it out."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kv_tier.meta.span_file import SpanFile, write_span
from kv_tier.meta.span_format import (
    BLOCK_BYTES,
    HEADER_CRC_OFFSET,
    SECTION_STRUCT,
    SECTION_TABLE_OFFSET,
    SpanHeader,
)
from tests.kv_tier.meta.span_samples import assert_damage_shows, golden_span, sample_parts
from tests.kv_tier.meta.test_meta_span_file import headers


def damaged(path: Path) -> bool:
    """Tell whether opening, or reading every byte, fails."""
    try:
        span = SpanFile.open(path)
    except (CorruptExtentError, FingerprintMismatch):
        return True
    try:
        return bool(span.verify())
    finally:
        span.close()


@settings(max_examples=60, deadline=None)
@given(header=headers(), data=st.data())
def test_any_flipped_bit_and_any_truncation(header: SpanHeader, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root, DataDir.open(Path(root) / "data", role="engine") as data_dir:
        write_span(data_dir, header.sequence, header, sample_parts(header)).close()
        assert_damage_shows(data_dir, data_dir.span_path(header.sequence), data)


def test_every_bit_that_means_something_and_the_lengths_about_it(tmp_path: Path) -> None:
    """Exhaustive on the golden span: all bits of header fields and of every section's content, and all lengths there."""
    header, parts = golden_span()
    with DataDir.open(tmp_path / "data", role="engine") as data_dir:
        span = write_span(data_dir, header.sequence, header, parts)
        path = data_dir.span_path(header.sequence)
        offsets = [
            *range(SECTION_TABLE_OFFSET + 8 * SECTION_STRUCT.size),
            *range(HEADER_CRC_OFFSET, BLOCK_BYTES),
        ]
        for section in span.sections.values():
            offsets += range(section.offset, section.offset + section.length)
        span.close()
        good = np.fromfile(path, np.uint8)
        with path.open("r+b", buffering=0) as file:
            for offset in offsets:
                for bit in range(8):
                    file.seek(offset)
                    file.write(bytes([good[offset] ^ (1 << bit)]))
                    assert damaged(path), (offset, bit)
                file.seek(offset)
                file.write(good[offset : offset + 1].tobytes())
            assert not damaged(path)
            for length in sorted({*offsets, *range(0, len(good), BLOCK_BYTES), len(good) - 1}, reverse=True):
                file.truncate(length)
                assert damaged(path), length
