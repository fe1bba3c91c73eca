"""Write span files whole.

write_span:  .tmp-<id> <- KV, header and index | fsync | rename to <id>.span | fsync directory
             a fault or crash before the rename leaves no span; after it, a whole one
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_tier.meta.data_dir import DataDir, key_name, span_name, temporary_name
from kv_tier.meta.encryption import DataKey, SpanCipher
from kv_tier.meta.errors import ExtentIoError
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.page_keys import KEY_BYTES
from kv_tier.meta.read_engine import ALIGNMENT, aligned_bytes
from kv_tier.meta.span_format import (
    BLOCK_BYTES,
    NO_SKETCH,
    SECRET_SECTIONS,
    Raw,
    Section,
    SectionType,
    SpanHeader,
    crc32c,
    crc32c_rows,
    encode_header,
    key_chain_problem,
    plan_sections,
    with_crc,
)
from kv_tier.meta.span_io import Bytes, bytes_of, check_array, inverse, naming, write_all
from kv_tier.meta.span_reader import SpanFile

CHUNK_BYTES = 64 << 20
_NO_UNLINKED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@functools.cache
def _beside(pid: int) -> ThreadPoolExecutor:
    """Return the thread that prepares one thing while another is written; a forked process has none of its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix="kvdrive-beside")


@dataclass(frozen=True)
class SpanParts:
    """Hold what goes into a span; L layers, H KV heads, n pages, D head_dim, raw = ``header.bits_dtype``.

    Attributes:
        tokens: [n, page_size] uint32.
        keys: n page keys of 32 bytes.
        means: [L, H, n, D] raw; page means, by page ordinal.
        order: [L, H, n] uint16; page ordinal stored at each place, a permutation per (layer, KV head).
        clusters: [L, H, n] uint16; cluster id at each place.
        kv: L arrays [H, n (place), 2 (K, V), page_size, D] raw, C-contiguous; one array [L, ...] serves too, and goes
            past the page cache if its memory is aligned (``read_engine.aligned_bytes``). Where the header says another
            encoding, L arrays [H, n (place), stored_page_bytes] uint8. One layer is taken at a time.
        centroids: [L, H, num_clusters, D] raw, or None without clusters.
        sketch: [L, H, n, sketch_bytes] uint8, by page ordinal, or None; sketch_digest: 32 bytes, what it was made with.
    """

    tokens: Raw
    keys: Sequence[bytes]
    means: Raw
    order: Raw
    clusters: Raw
    kv: Iterable[Raw]
    centroids: Raw | None = None
    sketch: Raw | None = None
    sketch_digest: bytes = NO_SKETCH

    @property
    def num_clusters(self) -> int:
        return 0 if self.centroids is None else int(self.centroids.shape[2])

    @property
    def sketch_bytes(self) -> int:
        return 0 if self.sketch is None else int(self.sketch.shape[3])


def write_span(
    data_dir: DataDir,
    span_id: int,
    header: SpanHeader,
    parts: SpanParts,
    *,
    key: DataKey | None = None,
    fs: FileSystem = REAL,
) -> SpanFile:
    """Write a span that others see whole or not at all, durable when this returns.

    Args:
        data_dir: its ``spans/`` receives the file; the caller owns the directory as the engine.
        span_id: never used before in this directory; equals ``header.sequence``.
        header: planned for these parts.
        parts: arrays matching the header; read, not kept.
        key: of a header that says encrypted; its wrap is durable before the span is visible.

    Returns:
        The span, open.

    Raises:
        ExtentIoError: a file operation failed (``errno`` tells a full disk); no span is visible, and a
            failed fsync is not retried: the kernel may have dropped the pages.
    """
    assert span_id == header.sequence, (span_id, header.sequence)
    path = data_dir.span_path(span_id)
    temporary, final = temporary_name(span_id), span_name(span_id)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with naming("create", path):
        if fs.exists(final, dir_fd=data_dir.spans_fd):
            raise FileExistsError(errno.EEXIST, "a span id was used twice")
        fd = fs.open(temporary, flags, dir_fd=data_dir.spans_fd)
    try:
        if key is not None:
            write_wrap(data_dir, span_id, key.wrap, fs=fs)
        span = _write_parts(fs, fd, path, header, parts, key, data_dir)
        with naming("fsync", path):
            fs.fsync(fd)
        fs.drop_cache(fd)
        with naming("rename", path):
            fs.rename(temporary, final, source_dir_fd=data_dir.spans_fd, target_dir_fd=data_dir.spans_fd)
        with naming("fsync the directory of", path):
            fs.fsync_dir(data_dir.spans_fd)
    except BaseException:
        _discard(fs, fd, (temporary, final), data_dir.spans_fd)
        if key is not None:
            with contextlib.suppress(OSError):
                fs.unlink(key_name(span_id), dir_fd=data_dir.keys_fd)
        raise
    return span


def write_unlinked_span(
    data_dir: DataDir,
    header: SpanHeader,
    parts: SpanParts,
    *,
    key: DataKey | None = None,
    fs: FileSystem = REAL,
) -> SpanFile:
    """Write a span that no name leads to: it lives until closed and never survives the process.

    Args and Raises: as ``write_span``; nothing is made durable, and the key is kept in memory alone.
    """
    path = data_dir.path / "spans" / f"(unlinked span {header.sequence})"
    with naming("create", path):
        fd = _open_unlinked(fs, data_dir, header.sequence)
    try:
        return _write_parts(fs, fd, path, header, parts, key, None)
    except BaseException:
        _discard(fs, fd, (), data_dir.spans_fd)
        raise


def _open_unlinked(fs: FileSystem, data_dir: DataDir, span_id: int) -> int:
    try:
        return fs.open(".", os.O_RDWR | os.O_TMPFILE, dir_fd=data_dir.spans_fd)
    except OSError as error:
        if error.errno not in _NO_UNLINKED_FILES:
            raise
    name = temporary_name(span_id)
    fd = fs.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=data_dir.spans_fd)
    try:
        fs.unlink(name, dir_fd=data_dir.spans_fd)
    except BaseException:
        fs.close(fd)
        raise
    return fd


def _discard(fs: FileSystem, fd: int, names: Iterable[str], dir_fd: int) -> None:
    """Drop a file that could not be finished; what cannot be removed now, the next scan removes."""
    with contextlib.suppress(OSError):
        fs.close(fd)
    for name in names:
        with contextlib.suppress(OSError):
            fs.unlink(name, dir_fd=dir_fd)


def _write_parts(
    fs: FileSystem,
    fd: int,
    path: Path,
    header: SpanHeader,
    parts: SpanParts,
    key: DataKey | None,
    data_dir: DataDir | None,
) -> SpanFile:
    """Write KV, then all that is before it in one piece; return the span reading through ``fd``.

    KV in one array of aligned memory goes to the disk past the page cache, while the front is prepared.
    """
    assert header.encrypted == (key is not None), header.encrypted
    cipher = None if key is None else SpanCipher(key.key, header.associated)
    assert header.problem() is None, header.problem()
    tokens, keys = np.array(parts.tokens, dtype=np.uint32), list(parts.keys)
    sections = plan_sections(header)
    section = sections[SectionType.KV]
    kv = parts.kv if cipher is None else _sealed(header, parts.kv, cipher)
    if isinstance(kv, np.ndarray) and kv.flags.c_contiguous and kv.ctypes.data % ALIGNMENT == 0:
        data = kv.reshape(-1).view(np.uint8)
        prepare = functools.partial(_front, header, sections, parts, tokens, keys, kv, cipher)
        front = _write_past_cache(fs, fd, path, data, section.offset, section.end, prepare)
    else:
        layers = _written(fs, fd, path, header, kv, section)
        front = _front(header, sections, parts, tokens, keys, layers, cipher)
    _write_past_cache(fs, fd, path, front, 0, len(front))
    dir_fds = (None, None) if data_dir is None else (data_dir.spans_fd, data_dir.keys_fd)
    span = SpanFile(path, fd, header, sections, tokens, keys, dir_fds=dir_fds, cipher=cipher, fs=fs)
    span.sketch_digest = parts.sketch_digest
    return span


def _front(
    header: SpanHeader,
    sections: dict[int, Section],
    parts: SpanParts,
    tokens: Raw,
    keys: Sequence[bytes],
    layers: Iterable[Raw],
    cipher: SpanCipher | None,
) -> Bytes:
    """Return the header and all sections before KV, [bytes up to KV] in aligned memory.

    Args:
        sections: planned; get their checksums.
        layers: the KV of each layer as it is in the file, for its checksums.
    """
    _check_parts(header, parts, tokens, keys)
    arrays: dict[int, list[Raw]] = {
        SectionType.TOKENS: [tokens],
        SectionType.KEYS: [np.frombuffer(b"".join(keys), np.uint8)],
        SectionType.MEANS: [parts.means],
        SectionType.LAYOUT: [parts.order, parts.clusters],
        SectionType.CHECKSUMS: list(_checksums(header, layers)),
    }
    if parts.centroids is not None:
        arrays[SectionType.CENTROIDS] = [parts.centroids]
    if parts.sketch is not None:
        arrays[SectionType.SKETCH] = [np.frombuffer(parts.sketch_digest, np.uint8), parts.sketch]
    front = aligned_bytes(sections[SectionType.KV].offset)
    front[:] = 0
    for kind, pieces in arrays.items():
        data = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
        if cipher is not None and kind in SECRET_SECTIONS:
            plain = data[:1] if kind == SectionType.SKETCH else []  # constants of a model are no secret
            secret = np.concatenate(data[len(plain) :])
            data = [*plain, np.frombuffer(cipher.seal(kind, 0, secret.data), np.uint8)]
        sections[kind] = section = with_crc(sections[kind], data)
        front[section.offset : section.offset + section.length] = np.concatenate(data)
    front[:BLOCK_BYTES] = np.frombuffer(encode_header(header, sections), np.uint8)
    return front


def _sealed(header: SpanHeader, kv: Iterable[Raw], cipher: SpanCipher) -> Iterator[Raw]:
    """Seal every page of every layer, with its tag behind it."""
    pages = (header.num_kv_heads, header.num_pages)
    for number, layer in enumerate(kv):
        rows = layer.reshape(math.prod(pages), -1).view(np.uint8)
        yield cipher.seal_rows(SectionType.KV, number * len(rows), rows).reshape(*pages, -1)


def write_wrap(data_dir: DataDir, span_id: int, wrap: bytes, *, fs: FileSystem = REAL) -> None:
    """Store the wrapped key of a span, durably.

    Raises:
        ExtentIoError: a file operation failed.
    """
    path = data_dir.path / "keys" / key_name(span_id)
    with naming("create", path):
        fd = fs.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=data_dir.keys_fd)
    try:
        write_all(fs, fd, path, np.frombuffer(wrap, np.uint8), 0)
        with naming("fsync", path):
            fs.fsync(fd)
    finally:
        fs.close(fd)
    with naming("fsync the directory of", path):
        fs.fsync_dir(data_dir.keys_fd)


def _written(
    fs: FileSystem, fd: int, path: Path, header: SpanHeader, kv: Iterable[Raw], section: Section
) -> Iterator[Raw]:
    """Write every layer through the page cache before it is handed out, and the padding last."""
    for number, layer in enumerate(kv):
        offset = section.offset + number * header.layer_bytes
        write_all(fs, fd, path, layer.reshape(-1).view(np.uint8), offset)
        yield layer
    end = section.offset + section.length
    write_all(fs, fd, path, np.zeros(section.end - end, np.uint8), end)


def _checksums(header: SpanHeader, layers: Iterable[Raw]) -> tuple[Raw, Raw]:
    """Return the checksums of every page, [num_extents], and of every layer, [L]."""
    page_crcs: list[int] = []
    layer_crcs: list[int] = []
    for layer in layers:
        data = bytes_of(layer, header)
        page_crcs += crc32c_rows(data.reshape(-1, header.stored_page_bytes))
        layer_crcs.append(crc32c(data))
    assert len(layer_crcs) == header.num_layers, (len(layer_crcs), header.num_layers)
    return np.array(page_crcs, np.uint32), np.array(layer_crcs, np.uint32)


def _write_past_cache(
    fs: FileSystem,
    fd: int,
    path: Path,
    data: Bytes,
    begin: int,
    end: int,
    beside: Callable[[], Any] | None = None,
) -> Any:
    """Write ``data`` at ``begin`` and zeros up to ``end`` in large direct writes; through the page cache where there are
    none.

    Returns:
        what ``beside`` returns, which runs on another thread meanwhile; None without it.
    """
    whole = len(data) // ALIGNMENT * ALIGNMENT
    done = 0
    direct = fs.set_direct(fd, True)
    # what is beside keeps the interpreter locked: nothing that gives the lock away may come between this and a write
    result = None if beside is None else _beside(os.getpid()).submit(beside)
    if direct:
        try:
            while done < whole:
                chunk = data[done : min(done + CHUNK_BYTES, whole)]
                try:
                    written = fs.pwrite(fd, chunk, begin + done)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        break  # a device with a coarser grid than ours
                    raise ExtentIoError.of(error, "write", path, begin + done) from error
                done += written
                if written < len(chunk):
                    break  # the rest may lie off the device's grid
        finally:
            fs.set_direct(fd, False)
    tail = np.zeros(end - begin - done, np.uint8)
    tail[: len(data) - done] = data[done:]
    write_all(fs, fd, path, tail, begin + done)
    return None if result is None else result.result()


def _check_parts(header: SpanHeader, parts: SpanParts, tokens: Raw, keys: Sequence[bytes]) -> None:
    """Assert that the arrays fit the header, and the keys the tokens."""
    pages = (header.num_layers, header.num_kv_heads, header.num_pages)
    assert tokens.shape == (header.num_pages, header.page_size), tokens.shape
    assert [len(key) for key in keys] == [KEY_BYTES] * header.num_pages, [len(key) for key in keys]
    problem = key_chain_problem(header, tokens, keys)
    assert problem is None, problem
    check_array("means", parts.means, (*pages, header.head_dim), header.bits_dtype)
    check_array("order", parts.order, pages, np.dtype(np.uint16))
    check_array("clusters", parts.clusters, pages, np.dtype(np.uint16))
    assert inverse(parts.order) is not None, "order is no permutation"
    assert parts.num_clusters == header.num_clusters, (parts.num_clusters, header.num_clusters)
    if parts.centroids is not None:
        shape = (*pages[:2], header.num_clusters, header.head_dim)
        check_array("centroids", parts.centroids, shape, header.bits_dtype)
        assert int(parts.clusters.max()) < header.num_clusters, (parts.clusters.max(), header.num_clusters)
    assert parts.sketch_bytes == header.sketch_bytes, (parts.sketch_bytes, header.sketch_bytes)
    if parts.sketch is not None:
        check_array("sketch", parts.sketch, (*pages, header.sketch_bytes), np.dtype(np.uint8))
