"""Token chains whose KV follows from their page keys: whoever serves a page can be checked without remembering it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kv_tier.geometry import Geometry
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError
from kv_tier.meta.kv_codec import KvEncoding, decode_pages, encode_pages
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.read_engine import aligned_bytes
from kv_tier.meta.span_file import SpanFile, SpanParts
from kv_tier.spans import Identity, SealJob, SpanStore
from tests.kv_tier.meta.span_samples import read_pages

GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=2, page_size=2, stretch_tokens=8)
IDENTITY = Identity(fingerprint=b"f" * 32, selection=b"s" * 32)
PER_STRETCH = GEOMETRY.pages_per_stretch

Raw = npt.NDArray[Any]


def keys_of(tokens: list[int]) -> list[bytes]:
    """Return the keys of the full pages of a chain."""
    return page_keys(tokens, GEOMETRY.page_size)


def kv_of(key: bytes) -> Raw:
    """Define a page's KV: [L, H, 2, page_size, head_dim] uint16 from its key."""
    g = GEOMETRY
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    shape = (g.num_layers, g.num_kv_heads, 2, g.page_size, g.head_dim)
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def seen_of(key: bytes, encoding: int) -> Raw:
    """Define what a reader sees of a page in a span of some encoding."""
    kv = kv_of(key)
    if encoding == KvEncoding.RAW:
        return kv
    g = GEOMETRY
    rows = encode_pages(kv, encoding, 1).reshape(g.num_layers * g.num_kv_heads, -1)
    return decode_pages(rows, encoding, g.page_size, g.head_dim, 1).view(np.uint16).reshape(kv.shape)


def parts_of(tokens: list[int], begin: int, end: int) -> SpanParts:
    """Build the content of the span of pages [begin, end) of a chain; packed in reverse, without clusters."""
    g, n = GEOMETRY, end - begin
    keys = keys_of(tokens)[begin:end]
    pages = np.array(tokens[begin * g.page_size : end * g.page_size], np.uint32).reshape(n, g.page_size)
    order = np.broadcast_to(np.arange(n, dtype=np.uint16)[::-1], (g.num_layers, g.num_kv_heads, n))
    pages_kv = np.stack([kv_of(key) for key in reversed(keys)], axis=2)
    kv = aligned_bytes(pages_kv.nbytes).view(pages_kv.dtype).reshape(pages_kv.shape)  # as the store packs it
    kv[:] = pages_kv
    means = np.zeros((g.num_layers, g.num_kv_heads, n, g.head_dim), np.uint16)
    return SpanParts(pages, keys, means, np.ascontiguousarray(order), np.zeros_like(order), kv)


def open_store(data_dir: DataDir, **settings: Any) -> SpanStore:
    """Open a store of these chains' engine."""
    return SpanStore(data_dir, GEOMETRY, IDENTITY, **({"ssd_bytes": 1 << 30} | settings))


def seal(store: SpanStore, tokens: list[int], begin: int, end: int, *, durable: bool = True) -> SealJob:
    """Write pages [begin, end) of a chain and wait for the writer; the job's hold is released."""
    parts = parts_of(tokens, begin, end)
    parent = keys_of(tokens)[begin - 1] if begin else bytes(32)
    ids = np.arange(begin, end)
    job = SealJob(ids, ids, begin, end - begin, durable, parent, parts)
    store.submit(job)
    job.done.wait()
    store.finished()
    if job.span is not None and durable:
        store.release(job.span, 1)
    return job


def seal_chain(store: SpanStore, tokens: list[int], done: int = 0) -> list[SealJob]:
    """Write what a turn's end writes: every stretch of the chain that pages from ``done`` on touch."""
    num_pages = len(tokens) // GEOMETRY.page_size
    begins = range(done // PER_STRETCH * PER_STRETCH, num_pages, PER_STRETCH)
    return [seal(store, tokens, begin, min(begin + PER_STRETCH, num_pages)) for begin in begins]


def transcode(store: SpanStore, keys: list[bytes]) -> list[SpanFile]:
    """Do to files what a suspend does with ``cold_encoding``; returns the new spans."""
    done = []
    for old in store.hold_whole(keys):
        layers = range(GEOMETRY.num_layers)
        kv = [encode_pages(old.read_layer(layer), KvEncoding.INT8, 1) for layer in layers]
        done.append(store.rewrite(old, KvEncoding.INT8, kv))
        store.replace(old, done[-1])
        store.release(old, 1)
    return done


def read(span: SpanFile, ordinal: int) -> Raw:
    """Read one page in all layers and heads, as ``kv_of`` lays it out."""
    g = GEOMETRY
    page = np.empty((g.num_layers, g.num_kv_heads, 1, 2, g.page_size, g.head_dim), np.uint16)
    for layer in range(g.num_layers):
        for head in range(g.num_kv_heads):
            page[layer, head], lost = read_pages(span, layer, head, [ordinal])
            if lost:
                raise CorruptExtentError(f"{span.path}: page {ordinal} is lost", lost)
    return page[:, :, 0]


def assert_serves_nothing_wrong(store: SpanStore) -> None:
    """Read every page that the store offers and compare it with its definition."""
    for key, places in store.places.items():
        for span, ordinal in places:
            np.testing.assert_array_equal(read(span, ordinal), seen_of(key, span.header.encoding))
