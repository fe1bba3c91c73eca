"""Spans with made-up content, small enough to flip every bit of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.fsck import check_spans
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.read_engine import THROUGH_CACHE, ReadPath
from kv_tier.meta.span_file import SpanFile
from kv_tier.meta.span_format import NO_SKETCH, Raw, Shape, SpanHeader
from kv_tier.meta.span_writer import SpanParts
from kv_tier.span_batch import PageBatch, Wants

TINY = Shape(num_layers=2, num_kv_heads=1, head_dim=2, page_size=2, stretch_tokens=8, dtype_code=1)


def sample_header(
    shape: Shape = TINY,
    *,
    sequence: int = 1,
    num_pages: int = 3,
    num_clusters: int = 2,
    first_page: int = 0,
    sketch_bytes: int = 0,
) -> SpanHeader:
    """Return the header of an exact span; one that does not start the sequence gets a parent key."""
    return SpanHeader.plan(
        shape,
        sequence=sequence,
        fingerprint=b"F" * 32,
        parent_key=b"P" * 32 if first_page else bytes(32),
        first_page=first_page,
        num_pages=num_pages,
        num_exact_pages=num_pages,
        num_clusters=num_clusters,
        sketch_bytes=sketch_bytes,
    )


def sample_parts(header: SpanHeader, seed: int = 0) -> SpanParts:
    """Return random content for a header, the same for the same seed."""
    rng = np.random.default_rng(seed)
    pages = (header.num_layers, header.num_kv_heads, header.num_pages)
    tokens = rng.integers(0, 2**32, (header.num_pages, header.page_size), dtype=np.uint32)

    def bits(*size: int) -> npt.NDArray[Any]:
        return rng.integers(0, 2 ** (8 * header.bits_dtype.itemsize), size, dtype=header.bits_dtype.type)

    clusters, sketch = header.num_clusters, None
    if header.sketch_bytes:
        sketch = rng.integers(0, 256, (*pages, header.sketch_bytes), dtype=np.uint8)
    return SpanParts(
        tokens=tokens,
        keys=page_keys(
            tokens.ravel(), header.page_size, prior=header.parent_key if header.first_page else None
        ),
        means=bits(*pages, header.head_dim),
        order=np.argsort(rng.random(pages), axis=-1).astype(np.uint16),
        clusters=rng.integers(0, max(1, clusters), pages, dtype=np.uint16),
        centroids=bits(*pages[:2], clusters, header.head_dim) if clusters else None,
        sketch=sketch,
        sketch_digest=b"D" * 32 if header.sketch_bytes else NO_SKETCH,
        kv=bits(*pages, 2, header.page_size, header.head_dim),
    )


def finite_kv(header: SpanHeader, seed: int = 0) -> Raw:
    """Return KV of numbers, [L, H, n, 2, P, D] raw: random bits include those of no number."""
    pages = (header.num_layers, header.num_kv_heads, header.num_pages)
    shape = (*pages, 2, header.page_size, header.head_dim)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if header.dtype_code == 1:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if header.dtype_code == 2 else values.view(np.uint32)


def sample_span(shape: Shape = TINY, *, sequence: int = 1, **fields: int) -> tuple[SpanHeader, SpanParts]:
    """Return a header and its parts."""
    header = sample_header(shape, sequence=sequence, **fields)
    return header, sample_parts(header)


def approximate(header: SpanHeader, num_exact_pages: int) -> SpanHeader:
    """Return the header of the same span, its later pages from sparse attention."""
    return replace(header, num_exact_pages=num_exact_pages, selection=b"S" * 32)


def golden_span() -> tuple[SpanHeader, SpanParts]:
    """Return the span of the worked example in docs/extent_format.md; every byte is spelled out."""
    shape = Shape(num_layers=1, num_kv_heads=1, head_dim=2, page_size=2, stretch_tokens=4, dtype_code=1)
    header = SpanHeader.plan(
        shape,
        sequence=7,
        fingerprint=bytes(range(32)),
        first_page=0,
        num_pages=2,
        num_exact_pages=2,
        num_clusters=1,
    )
    tokens = np.array([[1, 2], [3, 50000]], np.uint32)
    return header, SpanParts(
        tokens=tokens,
        keys=page_keys(tokens.ravel(), 2),
        means=np.arange(0x3F80, 0x3F84, dtype=np.uint16).reshape(1, 1, 2, 2),
        order=np.array([[[1, 0]]], np.uint16),
        clusters=np.array([[[0, 0]]], np.uint16),
        centroids=np.array([[[[0x4000, 0x4001]]]], np.uint16),
        kv=np.arange(0x4100, 0x4110, dtype=np.uint16).reshape(1, 1, 2, 2, 2, 2),
    )


def by_ordinal(parts: SpanParts, layer: int, head: int) -> Raw:
    """Return [n, 2, page_size, D]: the definition that packed reads must agree with."""
    kv = np.asarray(parts.kv)[layer, head]
    pages: Raw = np.empty_like(kv)
    for place, ordinal in enumerate(parts.order[layer, head]):
        pages[ordinal] = kv[place]
    return pages


def read_pages(
    span: SpanFile, layer: int, head: int, ordinals: Sequence[int], path: ReadPath = THROUGH_CACHE
) -> tuple[Raw, list[int]]:
    """Read some pages of one head as one batch: [n, 2, page_size, D] in the order asked for, and the ordinals lost."""
    header, count = span.header, len(ordinals)
    want = Wants(span, np.full(count, head), np.array(ordinals, np.int64), np.arange(count))
    pages = PageBatch(path, layer, [want]).finish()
    data = np.empty_like(pages.data)
    data[pages.rows] = pages.data
    lost = sorted({int(o) for gone in pages.lost for o in gone.ordinals})
    shape = (count, 2, header.page_size, header.head_dim)
    return data.view(header.bits_dtype).reshape(shape), lost


def assert_damage_shows(data_dir: DataDir, path: Path, data: st.DataObject) -> None:
    """Flip a bit of a sound span file, then cut it short; fsck sees both."""
    good = path.read_bytes()
    assert check_spans(data_dir).findings == []
    bit = data.draw(st.integers(0, 8 * len(good) - 1), label="bit")
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bad)
    assert [finding.kind for finding in check_spans(data_dir).findings] == ["span-damaged"]
    path.write_bytes(good[: data.draw(st.integers(0, len(good) - 1), label="length")])
    assert [finding.kind for finding in check_spans(data_dir).findings] == ["span-damaged"]
