"""Span files, version 1: header, section table, sizes and offsets. ``docs/extent_format.md`` is the contract.

    | block 0: header | TOKENS | KEYS | MEANS | LAYOUT | [CENTROIDS] | [SKETCH] | CHECKSUMS | KV |
      4096 bytes        each section starts at a multiple of 4096 and is padded with zeros to the next one

Pure functions of bytes; ``span_reader`` and ``span_writer`` do the input and output.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from kv_tier.meta.encryption import TAG_BYTES
from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kv_tier.meta.kv_codec import KvEncoding, stored_page_bytes
from kv_tier.meta.page_keys import KEY_BYTES, chain_keys

assert sys.byteorder == "little", "KV and index arrays are views of little-endian bytes"

MAGIC = b"KVDRSPAN"
FORMAT_VERSION = 1
SECTION_VERSION = 1
BLOCK_BYTES = 4096
MAX_SECTIONS = 8
MAX_PAGES = 2**16 - 1
NO_KEY = bytes(32)
NO_SELECTION = bytes(32)
NO_SKETCH = bytes(32)
DIGEST_BYTES = 32

HEADER_FIELDS: tuple[tuple[str, str], ...] = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("fingerprint", "32s"),
    ("selection", "32s"),
    ("parent_key", "32s"),
    ("tp_rank", "H"),
    ("tp_size", "H"),
    ("pp_rank", "H"),
    ("pp_size", "H"),
    ("num_layers", "I"),
    ("num_kv_heads", "I"),
    ("head_dim", "I"),
    ("page_size", "I"),
    ("stretch_tokens", "I"),
    ("dtype_code", "I"),
    ("first_page", "I"),
    ("num_pages", "I"),
    ("num_exact_pages", "I"),
    ("sequence", "Q"),
)
SECTION_FIELDS: tuple[tuple[str, str], ...] = (
    ("type", "I"),
    ("version", "I"),
    ("offset", "Q"),
    ("length", "Q"),
    ("crc", "I"),
    ("pad", "I"),
)
HEADER_STRUCT = struct.Struct("<" + "".join(code for _, code in HEADER_FIELDS))
SECTION_STRUCT = struct.Struct("<" + "".join(code for _, code in SECTION_FIELDS))
SECTION_TABLE_OFFSET = HEADER_STRUCT.size
HEADER_CRC_OFFSET = BLOCK_BYTES - 4

Raw = npt.NDArray[Any]
"""KV elements as unsigned integers of the same width: nothing here but ``kv_codec`` computes with KV."""

_RAW_DTYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint16, 2: np.uint16, 3: np.uint32}


class DtypeCode(IntEnum):
    """Element types of KV, means and centroids."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3


class SectionType(IntEnum):
    """Sections of version 1, in file order."""

    TOKENS = 1
    KEYS = 2
    MEANS = 3
    LAYOUT = 4
    CENTROIDS = 5
    SKETCH = 8
    CHECKSUMS = 6
    KV = 7


ENCRYPTED = 0x100
"""Set in the version of an encrypted span's KV section, beside its encoding."""

SECRET_SECTIONS = (SectionType.TOKENS, SectionType.MEANS, SectionType.CENTROIDS, SectionType.SKETCH)
"""What is sealed beside KV: the others tell no token and no key."""


def crc32c(data: bytes | Raw) -> int:
    """Compute the CRC-32C of a buffer without copying it; an array must be C-contiguous."""
    return int(google_crc32c.value(data))


def crc32c_rows(rows: Raw) -> list[int]:
    """Compute the CRC-32C of each row of a C-contiguous [num_rows, row_bytes] uint8 array."""
    return list(map(google_crc32c.value, rows))


def padded_bytes(length: int) -> int:
    """Round up to whole blocks."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Section:
    """Place one section in the file.

    Attributes:
        type: a SectionType.
        offset, length: bytes; the length is without padding.
        crc: CRC-32C of section and padding; 0 for KV, whose pages have their own.
        version: 1, or what a newer writer put there; of KV, its encoding and ``ENCRYPTED``.
    """

    type: int
    offset: int
    length: int
    crc: int = 0
    version: int = SECTION_VERSION

    @property
    def end(self) -> int:
        """Offset after the padding."""
        return self.offset + padded_bytes(self.length)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Give the sizes that all spans of one engine share.

    Attributes:
        num_layers, num_kv_heads, head_dim: of this shard.
        page_size, stretch_tokens: positions; the pages of a span lie in one stretch.
        dtype_code: a DtypeCode.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    stretch_tokens: int
    dtype_code: int

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Unsigned integer type as wide as one KV element."""
        return np.dtype(_RAW_DTYPES[self.dtype_code])

    @property
    def page_head_bytes(self) -> int:
        """Bytes of keys and values of one page in one (layer, KV head)."""
        return 2 * self.page_size * self.head_dim * self.bits_dtype.itemsize

    @property
    def summary_bytes(self) -> int:
        """Bytes of one mean or centroid over all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.bits_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class SpanHeader(Shape):
    """Say whose KV a span holds and in which shape.

    Attributes:
        sequence: creation counter, also the span's id: a later one supersedes.
        fingerprint: 32 bytes, model and configuration.
        first_page: ordinal in the sequence of the span's first page.
        num_pages: pages in the span, at least 1.
        num_exact_pages: leading pages whose KV came from exact prefill.
        num_clusters: centroids of each (layer, KV head); 0 when the span is not clustered.
        encoding: a KvEncoding; a span in fewer bits has no exact page.
        encrypted: pages, tokens, means and centroids are sealed, each with a tag behind it.
        sketch_bytes: of one page in one (layer, KV head); 0 when the span holds no sketch.
        parent_key: key of the page before the first; zeros when first_page is 0.
        selection: hash of the selection configuration; zeros when every page is exact.
        tp_rank, tp_size, pp_rank, pp_size: the shard.
    """

    sequence: int
    fingerprint: bytes
    first_page: int
    num_pages: int
    num_exact_pages: int
    num_clusters: int = 0
    encoding: int = KvEncoding.RAW
    encrypted: bool = False
    sketch_bytes: int = 0
    parent_key: bytes = NO_KEY
    selection: bytes = NO_SELECTION
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @classmethod
    def plan(cls, shape: Shape, **fields: Any) -> Self:
        """Build the header of a span of ``shape``; ``fields`` are the other attributes."""
        return cls(**vars(shape), **fields)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return plan_sections(self)[SectionType.KV].end

    @property
    def stored_page_bytes(self) -> int:
        """Bytes in the file of keys and values of one page in one (layer, KV head)."""
        size = stored_page_bytes(self.encoding, self.page_size, self.head_dim, self.bits_dtype.itemsize)
        return size + self.tag_bytes

    @property
    def tag_bytes(self) -> int:
        """Bytes behind every part that is sealed."""
        return TAG_BYTES if self.encrypted else 0

    @property
    def kv_version(self) -> int:
        """Version of the KV section."""
        return self.encoding | (ENCRYPTED if self.encrypted else 0)

    @property
    def associated(self) -> bytes:
        """What is bound to every sealed part: the header's fields, and how KV is stored."""
        return _pack_fields(self) + struct.pack("<I", self.kv_version)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's region of the KV section."""
        return self.num_kv_heads * self.num_pages * self.stored_page_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV section."""
        return self.num_layers * self.layer_bytes

    @property
    def num_extents(self) -> int:
        """Page checksums in the file: one for each (layer, KV head, page)."""
        return self.num_layers * self.num_kv_heads * self.num_pages

    def problem(self) -> str | None:
        """Say what makes this header invalid; None when it is valid."""
        pages_per_stretch = self.stretch_tokens // self.page_size if self.page_size else 0
        dimensions = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        last_page = self.first_page + self.num_pages
        checks: tuple[tuple[bool, str], ...] = (
            (
                self.dtype_code in _RAW_DTYPES,
                f"dtype code {self.dtype_code} is none of {sorted(_RAW_DTYPES)}",
            ),
            (min(dimensions) > 0, f"a dimension is zero: {dimensions}"),
            (0 < self.num_pages <= MAX_PAGES, f"num_pages={self.num_pages} is not in 1..{MAX_PAGES}"),
            (
                pages_per_stretch > 0 and self.stretch_tokens % self.page_size == 0,
                f"stretch_tokens={self.stretch_tokens} is no multiple of page_size={self.page_size}",
            ),
            (
                pages_per_stretch > 0
                and self.first_page // pages_per_stretch == (last_page - 1) // pages_per_stretch,
                f"pages [{self.first_page}, {last_page}) cross a stretch of {pages_per_stretch} pages",
            ),
            (
                0 <= self.num_exact_pages <= self.num_pages,
                f"num_exact_pages={self.num_exact_pages} of {self.num_pages} pages",
            ),
            (
                self.encoding == KvEncoding.RAW or self.num_exact_pages == 0,
                f"{self.num_exact_pages} exact pages in a span of KV encoding {self.encoding}",
            ),
            (
                (self.selection == NO_SELECTION) == (self.num_exact_pages == self.num_pages),
                "selection must be zeros if and only if every page is exact",
            ),
            (
                (self.parent_key == NO_KEY) == (self.first_page == 0),
                "parent_key must be zeros if and only if first_page is 0",
            ),
            (
                self.tp_rank < self.tp_size and self.pp_rank < self.pp_size,
                f"shard tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}",
            ),
        )
        return next((text for holds, text in checks if not holds), None)


def plan_sections(header: SpanHeader) -> dict[int, Section]:
    """Lay the sections out back to back, checksums still 0; by type, in file order."""
    lengths = {
        SectionType.TOKENS: 4 * header.num_pages * header.page_size,
        SectionType.KEYS: KEY_BYTES * header.num_pages,
        SectionType.MEANS: header.num_pages * header.summary_bytes,
        SectionType.LAYOUT: 2 * 2 * header.num_extents,
        SectionType.CENTROIDS: header.num_clusters * header.summary_bytes,
        SectionType.SKETCH: header.sketch_bytes and DIGEST_BYTES + header.num_extents * header.sketch_bytes,
        SectionType.CHECKSUMS: 4 * (header.num_extents + header.num_layers),
        SectionType.KV: header.kv_bytes,
    }
    sections: dict[int, Section] = {}
    offset = BLOCK_BYTES
    for kind, plain_bytes in lengths.items():
        if plain_bytes:
            length = plain_bytes + (header.tag_bytes if kind in SECRET_SECTIONS else 0)
            version = header.kv_version if kind == SectionType.KV else SECTION_VERSION
            sections[kind] = Section(kind, offset, length, version=version)
            offset = sections[kind].end
    return sections


def with_crc(section: Section, data: Sequence[bytes | Raw]) -> Section:
    """Return ``section`` with the checksum of ``data``, zero padding included."""
    crc = 0
    for part in (*data, bytes(section.end - section.offset - section.length)):
        crc = int(google_crc32c.extend(crc, part))
    return replace(section, crc=crc)


def encode_header(header: SpanHeader, sections: Mapping[int, Section]) -> bytes:
    """Encode block 0.

    Args:
        header: a valid header; anything else is a defect of the caller.
        sections: ``plan_sections(header)`` with checksums, by type, in file order.

    Returns:
        4096 bytes.
    """
    assert header.problem() is None, header.problem()
    block = bytearray(BLOCK_BYTES)
    block[: HEADER_STRUCT.size] = _pack_fields(header)
    for i, entry in enumerate(sections.values()):
        row = (entry.type, entry.version, entry.offset, entry.length, entry.crc, 0)
        SECTION_STRUCT.pack_into(block, SECTION_TABLE_OFFSET + i * SECTION_STRUCT.size, *row)
    struct.pack_into("<I", block, HEADER_CRC_OFFSET, crc32c(bytes(block[:HEADER_CRC_OFFSET])))
    return bytes(block)


def _pack_fields(header: SpanHeader) -> bytes:
    fixed = {"magic": MAGIC, "version": FORMAT_VERSION, "header_bytes": BLOCK_BYTES}
    values = [fixed[name] if name in fixed else getattr(header, name) for name, _ in HEADER_FIELDS]
    return HEADER_STRUCT.pack(*values)


def decode_header(block: bytes, name: object = "span") -> tuple[SpanHeader, dict[int, Section]]:
    """Decode and validate block 0.

    Args:
        block: the first 4096 bytes of the file.
        name: the file, for messages.

    Returns:
        The header, and the sections by type in file order.

    Raises:
        CorruptExtentError: the bytes are not a header that a writer of this format made.
        FingerprintMismatch: an intact header of another format or section version.
    """
    fields = _decode_fields(block, name)
    sections = _decode_sections(block, name)
    version = sections[SectionType.KV].version if SectionType.KV in sections else int(KvEncoding.RAW)
    fields |= {"encoding": version & ~ENCRYPTED, "encrypted": bool(version & ENCRYPTED)}
    header = SpanHeader(**fields, num_clusters=0)
    problem = header.problem()
    if problem is None:
        header = replace(
            header,
            num_clusters=_num_clusters(header, sections),
            sketch_bytes=_sketch_bytes(header, sections),
        )
        problem = _sections_problem(header, sections)
    if problem is None and encode_header(header, sections) != block:
        problem = "the header is not in canonical form"
    if problem is not None:
        raise CorruptExtentError(f"{name}: {problem}")
    return header, sections


def key_chain_problem(header: SpanHeader, tokens: Raw, keys: Sequence[bytes]) -> str | None:
    """Recompute the keys from the tokens, as far as a span alone allows.

    The first key of a sequence depends on the namespace, which no span holds; all others are checked.
    """
    known = 1 if header.first_page == 0 else 0
    prior = keys[0] if known else header.parent_key
    expected = chain_keys(tokens[known:], header.page_size, prior)
    for i, key in enumerate(expected, start=known):
        if keys[i] != key:
            return f"key of page {i} is {keys[i].hex()}, its tokens give {key.hex()}"
    return None


def _decode_fields(block: bytes, name: object) -> dict[str, Any]:
    """Check what every version shares (checksum, magic, version) and unpack the rest."""
    if len(block) != BLOCK_BYTES:
        raise CorruptExtentError(f"{name}: the header has {len(block)} bytes, must be {BLOCK_BYTES}")
    (stored_crc,) = struct.unpack_from("<I", block, HEADER_CRC_OFFSET)
    actual_crc = crc32c(block[:HEADER_CRC_OFFSET])
    if stored_crc != actual_crc:
        raise CorruptExtentError(f"{name}: header crc {actual_crc:08x}, stored {stored_crc:08x}")
    values = HEADER_STRUCT.unpack_from(block)
    fields = {field: value for (field, _), value in zip(HEADER_FIELDS, values, strict=True)}
    if fields["magic"] != MAGIC:
        raise CorruptExtentError(f"{name}: not a span file (magic {block[:8]!r}, must be {MAGIC!r})")
    if fields["version"] != FORMAT_VERSION:
        version = fields["version"]
        raise FingerprintMismatch(f"{name}: span format version {version}, this build reads {FORMAT_VERSION}")
    implied = ("magic", "version", "header_bytes", "file_bytes")
    return {field: value for field, value in fields.items() if field not in implied}


def _decode_sections(block: bytes, name: object) -> dict[int, Section]:
    """Read the table up to its first unused entry."""
    sections: dict[int, Section] = {}
    for i in range(MAX_SECTIONS):
        row = SECTION_STRUCT.unpack_from(block, SECTION_TABLE_OFFSET + i * SECTION_STRUCT.size)
        kind, version, offset, length, crc, _ = row
        if kind == 0:
            break
        plain = [int(encoding) for encoding in KvEncoding]
        known = plain + [ENCRYPTED | n for n in plain] if kind == SectionType.KV else [SECTION_VERSION]
        if version not in known:
            readable = ", ".join(map(str, known))
            raise FingerprintMismatch(
                f"{name}: section {kind} has version {version}, this build reads {readable}"
            )
        sections[kind] = Section(kind, offset, length, crc, version)
    return sections


def _num_clusters(header: SpanHeader, sections: Mapping[int, Section]) -> int:
    section = sections.get(SectionType.CENTROIDS)
    return (section.length - header.tag_bytes) // header.summary_bytes if section else 0


def _sketch_bytes(header: SpanHeader, sections: Mapping[int, Section]) -> int:
    section = sections.get(SectionType.SKETCH)
    codes = section.length - DIGEST_BYTES - header.tag_bytes if section else 0
    return max(0, codes) // header.num_extents


def _sections_problem(header: SpanHeader, sections: Mapping[int, Section]) -> str | None:
    """Compare the table with the one the header implies."""
    planned = plan_sections(header)
    if list(sections) != list(planned):
        return f"sections {list(sections)}, must be {list(map(int, planned))}"
    for kind, plan in planned.items():
        found = sections[kind]
        if (found.offset, found.length) != (plan.offset, plan.length):
            place, wanted = f"{found.length} bytes at {found.offset}", f"{plan.length} at {plan.offset}"
            return f"section {SectionType(kind).name} has {place}, must have {wanted}"
    if sections[SectionType.KV].crc:
        return f"section KV has crc {sections[SectionType.KV].crc:08x}, must be 0"
    return None
