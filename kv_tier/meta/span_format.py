"""Span files, version 1: header, section table, sizes and offsets. ``docs/extent_format.md`` is the contract.

    | block 0: header | TOKENS | KEYS | MEANS | LAYOUT | [CENTROIDS] | CHECKSUMS | [others] | KV |
      4096 bytes        each section starts at a multiple of 4096 and is padded with zeros to the next one

Pure functions of bytes; ``span_file`` does the input and output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kv_tier.meta.page_keys import KEY_BYTES, chain_keys

MAGIC = b"KVDRSPAN"
FORMAT_VERSION = 1
SECTION_VERSION = 1
BLOCK_BYTES = 4096
MAX_SECTIONS = 8
MAX_PAGES = 2**16 - 1
NO_HASH = bytes(32)

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
    ("dtype", "I"),
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
"""KV elements as unsigned integers of the same width: this package computes with no KV."""

_RAW_DTYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint16, 2: np.uint16, 3: np.uint32}


class DtypeCode(IntEnum):
    """Element types of KV, means and centroids."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3


class SectionType(IntEnum):
    """Sections version 1 knows; readers pass over other types."""

    TOKENS = 1
    KEYS = 2
    MEANS = 3
    LAYOUT = 4
    CENTROIDS = 5
    CHECKSUMS = 6
    KV = 7


OPTIONAL_SECTIONS = frozenset({SectionType.CENTROIDS})


def crc32c(data: bytes | Raw) -> int:
    """Compute the CRC-32C of a buffer without copying it; an array must be C-contiguous."""
    return int(google_crc32c.value(data))


def padded_bytes(length: int) -> int:
    """Round up to whole blocks."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Section:
    """Place one section in the file.

    Attributes:
        type: a SectionType, or a number this version does not know.
        offset, length: bytes; the length is without padding.
        crc: CRC-32C of section and padding; 0 for KV, whose pages have their own.
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


@dataclass(frozen=True)
class SpanHeader:
    """Say whose KV a span holds and in which shape.

    Attributes:
        sequence: creation counter, also the span's id: a later one supersedes.
        fingerprint: 32 bytes, model and configuration.
        num_layers, num_kv_heads, head_dim: of this shard.
        page_size, stretch_tokens: positions; the pages of a span lie in one stretch.
        dtype: a DtypeCode.
        first_page: ordinal in the sequence of the span's first page.
        num_pages: pages in the span, at least 1.
        num_exact_pages: leading pages whose KV came from exact prefill.
        parent_key: key of the page before the first; zeros when first_page is 0.
        selection: hash of the selection configuration; zeros when every page is exact.
        tp_rank, tp_size, pp_rank, pp_size: the shard.
    """

    sequence: int
    fingerprint: bytes
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    stretch_tokens: int
    dtype: int
    first_page: int
    num_pages: int
    num_exact_pages: int
    parent_key: bytes = NO_HASH
    selection: bytes = NO_HASH
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def raw_dtype(self) -> np.dtype[Any]:
        """Unsigned integer type as wide as one KV element."""
        return np.dtype(_RAW_DTYPES[self.dtype])

    @property
    def page_head_bytes(self) -> int:
        """Bytes of keys and values of one page in one (layer, KV head)."""
        return 2 * self.page_size * self.head_dim * self.raw_dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's region of the KV section."""
        return self.num_kv_heads * self.num_pages * self.page_head_bytes

    @property
    def num_extents(self) -> int:
        """Page checksums in the file: one for each (layer, KV head, page)."""
        return self.num_layers * self.num_kv_heads * self.num_pages

    @property
    def cluster_bytes(self) -> int:
        """Bytes of the centroids per cluster, over all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.raw_dtype.itemsize

    def problem(self) -> str | None:
        """Say what makes this header invalid; None when it is valid."""
        pages_per_stretch = self.stretch_tokens // self.page_size if self.page_size else 0
        dimensions = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        last_page = self.first_page + self.num_pages
        checks: tuple[tuple[bool, str], ...] = (
            (self.dtype in _RAW_DTYPES, f"dtype code {self.dtype} is none of {sorted(_RAW_DTYPES)}"),
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
                (self.selection == NO_HASH) == (self.num_exact_pages == self.num_pages),
                "selection must be zeros if and only if every page is exact",
            ),
            (
                (self.parent_key == NO_HASH) == (self.first_page == 0),
                "parent_key must be zeros if and only if first_page is 0",
            ),
            (
                self.tp_rank < self.tp_size and self.pp_rank < self.pp_size,
                f"shard tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}",
            ),
        )
        return next((text for holds, text in checks if not holds), None)


def section_lengths(header: SpanHeader, num_clusters: int) -> dict[int, int]:
    """Compute every section's length in bytes, in file order; no centroids without clusters."""
    lengths = {
        SectionType.TOKENS: 4 * header.num_pages * header.page_size,
        SectionType.KEYS: KEY_BYTES * header.num_pages,
        SectionType.MEANS: header.num_pages * header.cluster_bytes,
        SectionType.LAYOUT: 2 * 2 * header.num_extents,
        SectionType.CENTROIDS: num_clusters * header.cluster_bytes,
        SectionType.CHECKSUMS: 4 * (header.num_extents + header.num_layers),
        SectionType.KV: header.num_layers * header.layer_bytes,
    }
    return {int(kind): length for kind, length in lengths.items() if length}


def plan_sections(header: SpanHeader, num_clusters: int) -> dict[int, Section]:
    """Lay the sections out back to back, checksums still 0; by type, in file order."""
    sections = {}
    offset = BLOCK_BYTES
    for kind, length in section_lengths(header, num_clusters).items():
        sections[kind] = Section(kind, offset, length)
        offset = sections[kind].end
    return sections


def file_bytes(sections: Mapping[int, Section]) -> int:
    """Return the size of a file that holds these sections."""
    return max((section.end for section in sections.values()), default=BLOCK_BYTES)


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
        sections: by type, in file order, back to back from the second block on.

    Returns:
        4096 bytes.
    """
    assert header.problem() is None, header.problem()
    assert 0 < len(sections) <= MAX_SECTIONS, sorted(sections)
    return _encode(header, sections.values())


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
    if len(block) != BLOCK_BYTES:
        raise CorruptExtentError(f"{name}: the header has {len(block)} bytes, must be {BLOCK_BYTES}")
    (stored_crc,) = struct.unpack_from("<I", block, HEADER_CRC_OFFSET)
    actual_crc = crc32c(block[:HEADER_CRC_OFFSET])
    if stored_crc != actual_crc:
        raise CorruptExtentError(f"{name}: header crc {actual_crc:08x}, stored {stored_crc:08x}")
    fields = dict(zip((field for field, _ in HEADER_FIELDS), HEADER_STRUCT.unpack_from(block), strict=True))
    if fields.pop("magic") != MAGIC:
        raise CorruptExtentError(f"{name}: not a span file (magic {block[:8]!r}, must be {MAGIC!r})")
    if (version := fields.pop("version")) != FORMAT_VERSION:
        raise FingerprintMismatch(f"{name}: span format version {version}, this build reads {FORMAT_VERSION}")
    del fields["header_bytes"], fields["file_bytes"]  # compared by _encode below
    header = SpanHeader(**fields)
    sections = _decode_sections(block)
    _check_section_versions(sections, name)
    problem = header.problem() or _places_problem(sections)
    by_type = {section.type: section for section in sections}
    problem = problem or _lengths_problem(header, by_type)
    if problem is None and _encode(header, sections) != block:
        problem = "the header is not in canonical form"
    if problem is not None:
        raise CorruptExtentError(f"{name}: {problem}")
    return header, by_type


def num_clusters(header: SpanHeader, sections: Mapping[int, Section]) -> int:
    """Return how many centroids each (layer, KV head) has; 0 without the section."""
    section = sections.get(SectionType.CENTROIDS)
    return section.length // header.cluster_bytes if section else 0


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


def _encode(header: SpanHeader, sections: Iterable[Section]) -> bytes:
    by_type = {section.type: section for section in sections}
    values: dict[str, Any] = {
        "magic": MAGIC,
        "version": FORMAT_VERSION,
        "header_bytes": BLOCK_BYTES,
        "file_bytes": file_bytes(by_type),
    }
    block = bytearray(BLOCK_BYTES)
    HEADER_STRUCT.pack_into(block, 0, *(values.get(f, getattr(header, f, None)) for f, _ in HEADER_FIELDS))
    for i, entry in enumerate(by_type.values()):
        place = SECTION_TABLE_OFFSET + i * SECTION_STRUCT.size
        row = (entry.type, entry.version, entry.offset, entry.length, entry.crc, 0)
        SECTION_STRUCT.pack_into(block, place, *row)
    struct.pack_into("<I", block, HEADER_CRC_OFFSET, crc32c(bytes(block[:HEADER_CRC_OFFSET])))
    return bytes(block)


def _decode_sections(block: bytes) -> list[Section]:
    """Read the table up to its first unused entry."""
    sections = []
    for i in range(MAX_SECTIONS):
        row = SECTION_STRUCT.unpack_from(block, SECTION_TABLE_OFFSET + i * SECTION_STRUCT.size)
        kind, version, offset, length, crc, _ = row
        if kind == 0:
            break
        sections.append(Section(kind, offset, length, crc, version))
    return sections


def _places_problem(sections: Sequence[Section]) -> str | None:
    types = [section.type for section in sections]
    if len(set(types)) != len(types):
        return f"a section type occurs twice: {types}"
    offset = BLOCK_BYTES
    for section in sections:
        if section.offset != offset or not 0 < section.length < 2**63 or section.end >= 2**63:
            return f"section {section.type}: {section.length} bytes at {section.offset}, must start at {offset}"
        offset = section.end
    return None


def _lengths_problem(header: SpanHeader, sections: Mapping[int, Section]) -> str | None:
    clusters = num_clusters(header, sections)
    for kind, length in section_lengths(header, clusters).items():
        if kind not in sections:
            return f"section {SectionType(kind).name} is missing"
        if sections[kind].length != length:
            return f"section {SectionType(kind).name} has {sections[kind].length} bytes, must have {length}"
    if clusters == 0 and SectionType.CENTROIDS in sections:
        return f"section CENTROIDS holds no whole centroid ({sections[SectionType.CENTROIDS].length} bytes)"
    if sections[SectionType.KV].crc:
        return f"section KV has crc {sections[SectionType.KV].crc:08x}, must be 0"
    return None


def _check_section_versions(sections: Sequence[Section], name: object) -> None:
    known = {int(kind) for kind in SectionType}
    for section in sections:
        if section.type in known and section.version != SECTION_VERSION:
            raise FingerprintMismatch(
                f"{name}: section {SectionType(section.type).name} version {section.version}, "
                f"this build reads {SECTION_VERSION}"
            )
