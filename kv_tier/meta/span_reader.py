"""Read span files; every byte handed out was checked.

Reads use positions, so any number of threads may share a SpanFile; none may outlive ``close``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kv_tier.meta.data_dir import key_name
from kv_tier.meta.encryption import WRAP_BYTES, Keyring, SpanCipher
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.kv_codec import KvEncoding, decode_pages
from kv_tier.meta.page_keys import KEY_BYTES
from kv_tier.meta.read_engine import THROUGH_CACHE, ReadBuffer, ReadPath, aligned_bytes
from kv_tier.meta.span_format import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    NO_SKETCH,
    Raw,
    Section,
    SectionType,
    SpanHeader,
    crc32c,
    crc32c_rows,
    decode_header,
    encode_header,
    key_chain_problem,
)
from kv_tier.meta.span_io import Bytes, inverse, naming, read_into

_opening = threading.Lock()


def read_wrap(span: Path, span_id: int, keys_fd: int, fs: FileSystem) -> bytes:
    """Read the wrapped key of a span.

    Raises:
        CorruptExtentError: there is none: the span is shredded.
        ExtentIoError: it cannot be read.
    """
    path = span.with_name(key_name(span_id))
    try:
        fd = fs.open(path.name, os.O_RDONLY, dir_fd=keys_fd)
    except FileNotFoundError:
        raise CorruptExtentError(f"{span}: its key is gone, so that nobody can read it") from None
    except OSError as error:
        raise ExtentIoError.of(error, "open", path) from error
    try:
        data = np.zeros(WRAP_BYTES, np.uint8)
        read_into(fs, fd, path, data, 0)
    finally:
        fs.close(fd)
    return data.tobytes()


@dataclass(frozen=True)
class SpanTables:
    """Hold a span's packing order and checksums.

    Attributes:
        order: [L, H, n] uint16; page ordinal at each place.
        place_of: [L, H, n] uint16; place of each page ordinal.
        clusters: [L, H, n] uint16; cluster id at each place.
        page_crcs: [L, H, n (place)] uint32.
        layer_crcs: [L] uint32.
    """

    order: Raw
    place_of: Raw
    clusters: Raw
    page_crcs: Raw
    layer_crcs: Raw


class SpanFile:
    """Read one immutable span through an open file; every byte handed out was checked.

    Attributes:
        path: where it was opened, for messages.
        fd: the file, owned by this object until ``close``.
        header: the decoded header.
        sections: the section table, by type.
        tokens: [num_pages, page_size] uint32.
        keys: num_pages keys of 32 bytes.
        sketch_digest: what the sketch was made with, checked when that is read; zeros without one.
        bad_pages: ordinals of pages known to be lost; kept by the owner.
        num_attached: logical pages that point here; kept by the owner.
        retired: no longer offered, closed once nothing is attached; kept by the owner.

    An encrypted span that was opened without a keyring can be verified and moved about; its tokens are zeros and its means,
    centroids and KV cannot be asked for.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        header: SpanHeader,
        sections: dict[int, Section],
        tokens: npt.NDArray[np.uint32],
        keys: list[bytes],
        *,
        dir_fds: tuple[int | None, int | None] = (None, None),
        cipher: SpanCipher | None = None,
        fs: FileSystem = REAL,
    ) -> None:
        self.path = path
        self.fd = fd
        self.header = header
        self.sections = sections
        self.tokens = tokens
        self.keys = keys
        self.sketch_digest = NO_SKETCH
        self.bad_pages: set[int] = set()
        self.num_attached = 0
        self.retired = False
        self._dir_fd, self._keys_fd = dir_fds
        self._cipher = cipher
        self._fs = fs
        self._tables: SpanTables | None = None
        self._direct_fd = -1

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        dir_fd: int | None = None,
        keys_fd: int | None = None,
        keyring: Keyring | None = None,
        fs: FileSystem = REAL,
    ) -> Self:
        """Open and validate everything but means, centroids, sketch and KV, which are checked when read.

        Args:
            path: the file; with ``dir_fd`` only its last part is used.
            dir_fd: handle of the directory that holds it, valid as long as ``unlink`` may be called.
            keys_fd: handle of the directory of wrapped keys, likewise.
            keyring: unwraps the key of an encrypted span.

        Raises:
            CorruptExtentError: the file is not a valid span, or its wrapped key is gone or damaged.
            FingerprintMismatch: it is intact and of another format version, or encrypted under another key.
            ExtentIoError: it cannot be opened or read.
        """
        try:
            fd = fs.open(path.name if dir_fd is not None else str(path), os.O_RDONLY, dir_fd=dir_fd)
        except OSError as error:
            raise ExtentIoError.of(error, "open", path) from error
        try:
            return cls._load(path, fd, (dir_fd, keys_fd), keyring, fs)
        except BaseException:
            fs.close(fd)
            raise

    @classmethod
    def _load(
        cls,
        path: Path,
        fd: int,
        dir_fds: tuple[int | None, int | None],
        keyring: Keyring | None,
        fs: FileSystem,
    ) -> Self:
        try:
            size = fs.size(fd)
        except OSError as error:
            raise ExtentIoError.of(error, "stat", path) from error
        block = np.empty(BLOCK_BYTES, np.uint8)
        read_into(fs, fd, path, block, 0)
        header, sections = decode_header(block.tobytes(), path)
        if size != header.file_bytes:
            raise CorruptExtentError(f"{path}: {size} bytes, its header says {header.file_bytes}")
        cipher = None
        if header.encrypted and keyring is not None:
            assert dir_fds[1] is not None, f"{path}: opened without the directory of its key"
            wrap = read_wrap(path, header.sequence, dir_fds[1], fs)
            cipher = SpanCipher(keyring.unwrap(wrap, header.sequence), header.associated)
        no_tokens = np.zeros((header.num_pages, header.page_size), np.uint32)
        span = cls(path, fd, header, sections, no_tokens, [], dir_fds=dir_fds, cipher=cipher, fs=fs)
        sealed = span._read_section(SectionType.TOKENS)
        keys = span._read_section(SectionType.KEYS).tobytes()
        span.keys = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        if not span.is_closed:
            tokens = span._plain_section(SectionType.TOKENS, sealed).view(np.uint32)
            span.tokens = tokens.reshape(header.num_pages, header.page_size)
        if problem := span._chain_problem():
            raise CorruptExtentError(f"{path}: {problem}")
        span._read_tables()
        if section := sections.get(SectionType.SKETCH):
            digest = np.empty(DIGEST_BYTES, np.uint8)
            span._read(digest, section.offset)
            span.sketch_digest = digest.tobytes()
        return span

    @property
    def span_id(self) -> int:
        return self.header.sequence

    @property
    def is_closed(self) -> bool:
        """Whether it is encrypted and was opened without a keyring."""
        return self.header.encrypted and self._cipher is None

    def _chain_problem(self) -> str | None:
        return None if self.is_closed else key_chain_problem(self.header, self.tokens, self.keys)

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Type of the arrays handed out: unsigned integers as wide as one KV element."""
        return self.header.bits_dtype

    @property
    def tables(self) -> SpanTables:
        """Packing order and checksums: read at the first use, kept until ``release_tables``.

        Raises: as ``read_means``.
        """
        tables = self._tables
        if tables is None:
            tables = self._tables = self._read_tables()
        return tables

    @property
    def place_of(self) -> Raw:
        """[L, H, num_pages] uint16; place of each page ordinal. Raises as ``read_means``."""
        return self.tables.place_of

    @property
    def order(self) -> Raw:
        """[L, H, num_pages] uint16; page ordinal at each place. Raises as ``read_means``."""
        return self.tables.order

    @property
    def clusters(self) -> Raw:
        """[L, H, num_pages] uint16; cluster id at each place. Raises as ``read_means``."""
        return self.tables.clusters

    def release_tables(self) -> None:
        """Forget packing order and checksums (about 0.5% of the file); the next read loads them again."""
        self._tables = None

    def read_means(self) -> Raw:
        """Read the page means.

        Returns:
            [L, H, num_pages, D] raw, by page ordinal; owned by the caller.

        Raises:
            CorruptExtentError: the bytes fail their checksum or end early.
            ExtentIoError: the read failed.
        """
        header = self.header
        shape = (header.num_layers, header.num_kv_heads, header.num_pages, header.head_dim)
        return self._plain_section(SectionType.MEANS).view(header.bits_dtype).reshape(shape)

    def read_centroids(self) -> Raw | None:
        """Read the centroids: [L, H, num_clusters, D] raw, None without any. Raises as ``read_means``."""
        if not self.header.num_clusters:
            return None
        header = self.header
        shape = (header.num_layers, header.num_kv_heads, self.header.num_clusters, header.head_dim)
        return self._plain_section(SectionType.CENTROIDS).view(header.bits_dtype).reshape(shape)

    def read_sketch(self) -> Raw:
        """Read the sketches: [L, H, num_pages, sketch_bytes] uint8, by page ordinal. Raises as ``read_means``."""
        header = self.header
        data = self._read_section(SectionType.SKETCH)
        if data[:DIGEST_BYTES].tobytes() != self.sketch_digest:
            raise CorruptExtentError(f"{self.path}: the sketch's digest changed since the file was opened")
        shape = (header.num_layers, header.num_kv_heads, header.num_pages, header.sketch_bytes)
        return self._plain_section(SectionType.SKETCH, data[DIGEST_BYTES:]).reshape(shape)

    def read_layer(
        self, layer: int, *, path: ReadPath = THROUGH_CACHE, buffer: ReadBuffer | None = None
    ) -> Raw:
        """Read one layer's KV with one I/O.

        Args:
            layer: 0-based layer of this shard.
            path: through the page cache or past it; its engine is not used.
            buffer: receives the bytes; without it, new memory does.

        Returns:
            [H, num_pages, 2, page_size, D] raw, decoded, owned by the caller (or the buffer); along axis 1 the pages stand in
            place order (``order``).

        Raises:
            CorruptExtentError: pages fail their checksum (``bad_pages``: their ordinals), or the file
                ends early.
            ExtentIoError: the read failed.
        """
        header = self.header
        rows = self._read_stored_layer(layer, path, buffer).reshape(-1, header.stored_page_bytes)
        if header.encrypted:
            good = self._open_pages(layer * len(rows) + np.arange(len(rows)), rows)
            self._raise_bad_pages(self.order[layer].reshape(-1)[~good].tolist(), f"layer {layer}")
        shape = (header.num_kv_heads, header.num_pages, 2, header.page_size, header.head_dim)
        return self.decode(rows).reshape(-1).view(header.bits_dtype).reshape(shape)

    def decode(self, rows: Bytes) -> Bytes:
        """Decode pages that were checked and opened: [n, stored_page_bytes] -> [n, page_head_bytes] uint8.

        The result is the same array where nothing is encoded or sealed.
        """
        header = self.header
        if header.encrypted:
            rows = np.ascontiguousarray(rows[:, : -header.tag_bytes])
        if header.encoding == KvEncoding.RAW:
            return rows
        return decode_pages(rows, header.encoding, header.page_size, header.head_dim, header.dtype_code)

    def _open_pages(self, numbers: npt.NDArray[np.int64], rows: Bytes) -> npt.NDArray[np.bool_]:
        """Replace sealed pages ([n, stored_page_bytes]) by their plaintext, tags stay; returns [n] which are what was sealed.

        Args:
            numbers: [n] where each page stands in the KV section, in pages.
        """
        assert self._cipher is not None, f"{self.path}: encrypted, and opened without a keyring"
        plain, good = self._cipher.open_rows(SectionType.KV, numbers, rows)
        rows[:, : plain.shape[1]] = plain
        return good

    def _read_stored_layer(self, layer: int, path: ReadPath, buffer: ReadBuffer | None) -> Bytes:
        """Read and check the bytes of one layer; raises as ``read_layer``."""
        header = self.header
        fs, fd = self.kv_file(path.direct)
        offset = self._kv_offset(layer)
        start = offset // path.grid * path.grid
        end = -(-(offset + header.layer_bytes) // path.grid) * path.grid
        data = aligned_bytes(end - start) if buffer is None else buffer.take(end - start)
        read_into(fs, fd, self.path, data, start)
        if not path.direct and path is not THROUGH_CACHE:
            fs.drop_cache(fd)
        data = data[offset - start :][: header.layer_bytes]
        if crc32c(data) != self.tables.layer_crcs[layer]:
            self._raise_bad_layer(layer, data)
        return data

    def verify(self) -> list[str]:
        """Read and check every byte of the file, padding included.

        Returns:
            One line for each problem; empty when the file is what was written.
        """
        return [str(problem) for problem in self._problems()]

    def close(self) -> None:
        """Close the file; closing twice is harmless. An unlinked span's space is freed here."""
        for fd in (self.fd, self._direct_fd):
            if fd >= 0:
                self._fs.close(fd)
        self.fd = self._direct_fd = -1

    def unlink(self) -> None:
        """Remove the file's name for good, and before it its wrapped key; reads through this object go on until ``close``.

        Raises:
            ExtentIoError: it could not be removed, or the removal could not be made durable.
        """
        assert self._dir_fd is not None, f"{self.path}: opened without a directory handle"
        if self.header.encrypted and self._keys_fd is not None:
            with naming("unlink the key of", self.path), contextlib.suppress(FileNotFoundError):
                self._fs.unlink(key_name(self.span_id), dir_fd=self._keys_fd)
        with naming("unlink", self.path), contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self.path.name, dir_fd=self._dir_fd)
        with naming("fsync the directory of", self.path):
            self._fs.fsync_dir(self._dir_fd)

    def _read(self, data: Bytes, offset: int) -> None:
        read_into(self._fs, self.fd, self.path, data, offset)

    def _read_section(self, kind: int) -> Bytes:
        section = self.sections[kind]
        data = np.empty(section.end - section.offset, np.uint8)
        self._read(data, section.offset)
        if (crc := crc32c(data)) != section.crc:
            found = f"crc {crc:08x}, stored {section.crc:08x}"
            raise CorruptExtentError(f"{self.path}: section {SectionType(kind).name} has {found}")
        return data[: section.length]

    def _plain_section(self, kind: int, data: Bytes | None = None) -> Bytes:
        """Read a section and open what is sealed; raises as ``read_means``."""
        data = self._read_section(kind) if data is None else data
        if not self.header.encrypted:
            return data
        assert self._cipher is not None, f"{self.path}: encrypted, and opened without a keyring"
        plain = self._cipher.open(kind, 0, data.data)
        if plain is None:
            raise CorruptExtentError(f"{self.path}: section {SectionType(kind).name} is not what was sealed")
        return np.frombuffer(bytearray(plain), np.uint8)

    def _read_tables(self) -> SpanTables:
        header = self.header
        shape = (header.num_layers, header.num_kv_heads, header.num_pages)
        order = self._read_section(SectionType.LAYOUT).view(np.uint16).reshape(2, *shape)
        crcs = self._read_section(SectionType.CHECKSUMS).view(np.uint32)
        order, clusters = order
        place_of = inverse(order)
        if place_of is None:
            raise CorruptExtentError(f"{self.path}: the packing order is no permutation of the pages")
        if self.header.num_clusters and int(clusters.max()) >= self.header.num_clusters:
            raise CorruptExtentError(f"{self.path}: cluster {clusters.max()} of {self.header.num_clusters}")
        page_crcs = crcs[: header.num_extents].reshape(shape)
        return SpanTables(order, place_of, clusters, page_crcs, crcs[header.num_extents :])

    def kv_file(self, direct: bool) -> tuple[FileSystem, int]:
        """Return where KV is read from: past the page cache if asked, on a descriptor that closes with the span.

        Where no second descriptor is to be had, the first gives the same bytes, through the page cache.

        Raises:
            ExtentIoError: the file cannot be opened a second time.
        """
        if not direct:
            return self._fs, self.fd
        if self._direct_fd < 0:
            with _opening:
                if self._direct_fd < 0:
                    try:
                        self._direct_fd = self._fs.reopen(self.fd, os.O_RDONLY | os.O_DIRECT)
                    except OSError as error:
                        if error.errno not in (errno.EMFILE, errno.ENFILE):
                            raise ExtentIoError.of(error, "open", self.path) from error
                        return self._fs, self.fd
        return self._fs, self._direct_fd

    def layer_places(self, layer: int) -> tuple[Raw, Raw, int]:
        """Return where the pages of a layer lie: the place of each page ordinal ([H, n] uint16), the CRC-32C at each place
        ([H, n] uint32), and the byte where the places begin, head after head, ``stored_page_bytes`` apart.

        Raises: as ``tables``.
        """
        tables = self.tables
        return tables.place_of[layer], tables.page_crcs[layer], self._kv_offset(layer)

    def open_pages(self, offsets: npt.NDArray[np.int64], rows: Bytes) -> npt.NDArray[np.bool_]:
        """Replace pages that are sealed by their plaintext.

        Args:
            offsets: [n] where they lie in the file; rows: [n, stored_page_bytes] uint8, changed in place.

        Returns:
            [n] whether a page is what was sealed.
        """
        begin = self.sections[SectionType.KV].offset
        return self._open_pages((offsets - begin) // self.header.stored_page_bytes, rows)

    def _kv_offset(self, layer: int) -> int:
        assert 0 <= layer < self.header.num_layers, (layer, self.header.num_layers)
        return self.sections[SectionType.KV].offset + layer * self.header.layer_bytes

    def _raise_bad_pages(self, bad_pages: list[int], where: str) -> None:
        if bad_pages:
            lost = sorted(set(bad_pages))
            raise CorruptExtentError(f"{self.path}: {where}: pages {lost} fail their checksum", lost)

    def _raise_bad_layer(self, layer: int, data: Bytes) -> None:
        """Name the pages to blame for a layer whose checksum is wrong; all of them when none stands out."""
        bad = self._bad_pages(layer, data) or list(range(self.header.num_pages))
        self._raise_bad_pages(bad, f"layer {layer}")

    def _bad_pages(self, layer: int, data: Bytes) -> list[int]:
        """Return the ordinals of the pages of a layer, in place order in ``data``, that fail in any head."""
        rows = data.reshape(-1, self.header.stored_page_bytes)
        crcs = np.array(crc32c_rows(rows), np.uint32)
        bad: list[int] = (
            self.tables.order[layer].reshape(-1)[crcs != self.tables.page_crcs[layer].reshape(-1)].tolist()
        )
        return bad

    def _problems(self) -> Iterator[str | Exception]:
        found: list[Exception] = []
        with _collecting(found):
            self._check_header()
        for kind in self.sections:
            with _collecting(found):
                if kind != SectionType.KV:
                    self._read_section(kind)
        if not found:
            with _collecting(found):
                self._tables = self._read_tables()
        yield from found
        if found:
            return
        if problem := self._chain_problem():
            yield problem
        for layer in range(self.header.num_layers):
            yield from self._layer_problems(layer)
        yield from self._padding_problems()

    def _check_header(self) -> None:
        block = np.empty(BLOCK_BYTES, np.uint8)
        self._read(block, 0)
        if block.tobytes() != encode_header(self.header, self.sections):
            raise CorruptExtentError(f"{self.path}: the header changed since the file was opened")
        with naming("stat", self.path):
            size = self._fs.size(self.fd)
        if size != self.header.file_bytes:
            raise CorruptExtentError(f"{self.path}: {size} bytes, its header says {self.header.file_bytes}")

    def _layer_problems(self, layer: int) -> list[Exception]:
        found: list[Exception] = []
        with _collecting(found):
            data = self._read_stored_layer(layer, THROUGH_CACHE, None)
            self._raise_bad_pages(self._bad_pages(layer, data), f"layer {layer}")
        return found

    def _padding_problems(self) -> list[Exception]:
        kv = self.sections[SectionType.KV]
        padding = np.empty(kv.end - kv.offset - kv.length, np.uint8)
        found: list[Exception] = []
        with _collecting(found):
            self._read(padding, kv.offset + kv.length)
            if padding.any():
                raise CorruptExtentError(f"{self.path}: the padding after the KV is not zero")
        return found


@contextlib.contextmanager
def _collecting(found: list[Exception]) -> Iterator[None]:
    try:
        yield
    except (CorruptExtentError, ExtentIoError) as error:
        found.append(error)
