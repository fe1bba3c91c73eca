"""The span format: code, documentation page and golden file hold each other."""

import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CorruptExtentError, FingerprintMismatch
from kv_tier.meta.span_file import SpanFile, write_span
from kv_tier.meta.span_format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    HEADER_CRC_OFFSET,
    HEADER_FIELDS,
    MAX_SECTIONS,
    SECTION_FIELDS,
    SECTION_STRUCT,
    SECTION_TABLE_OFFSET,
    DtypeCode,
    SectionType,
    SpanHeader,
    crc32c,
    decode_header,
    encode_header,
    plan_sections,
)
from tests.kv_tier.meta.span_samples import TINY, approximate, golden_span, sample_header

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extent_format.md").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parent / "data" / "golden_v1.span"


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading of the page."""
    text = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def fields_with_offsets(fields: tuple[tuple[str, str], ...]) -> list[list[str]]:
    rows, offset = [], 0
    for name, code in fields:
        size = struct.calcsize("<" + code)
        rows.append([str(offset), str(size), name])
        offset += size
    return rows


def test_header_table_on_the_page() -> None:
    rows = [row[:3] for row in table("Header")]
    table_bytes = MAX_SECTIONS * SECTION_STRUCT.size
    rest = SECTION_TABLE_OFFSET + table_bytes
    assert rows == [
        *fields_with_offsets(HEADER_FIELDS),
        [str(SECTION_TABLE_OFFSET), str(table_bytes), "section table"],
        [str(rest), str(HEADER_CRC_OFFSET - rest), "zero"],
        [str(HEADER_CRC_OFFSET), "4", "header_crc"],
    ]
    assert HEADER_CRC_OFFSET + 4 == BLOCK_BYTES
    assert f"| version | {FORMAT_VERSION} |" in PAGE


def test_section_entry_table_on_the_page() -> None:
    assert [row[:3] for row in table("Section table entry")] == fields_with_offsets(SECTION_FIELDS)


def test_sections_table_on_the_page() -> None:
    """Types, names, and the length formulas, evaluated for a header with distinct sizes."""
    header = replace(
        sample_header(num_clusters=2, sketch_bytes=17),
        num_layers=3,
        num_kv_heads=5,
        head_dim=7,
        page_size=11,
        stretch_tokens=11 * 13,
        num_pages=13,
        num_exact_pages=13,
        dtype_code=DtypeCode.FLOAT32,
    )
    sizes = {"L": 3, "H": 5, "D": 7, "P": 11, "n": 13, "C": 2, "E": 4, "S": 17}
    planned = plan_sections(header)
    rows = table("Sections")
    assert [(int(row[0]), row[1]) for row in rows] == [(kind.value, kind.name) for kind in SectionType]
    for row in rows:
        assert planned[int(row[0])].length == evaluate(row[2], sizes), row


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """Evaluate a sum of products such as ``L n + 2`` or ``4 (L H n + L)``."""
    factor, _, inner = formula.partition("(") if "(" in formula else ("", "", formula)
    total = 0
    for product in inner.rstrip(")").split("+"):
        total += int(np.prod([sizes[word] if word in sizes else int(word) for word in product.split()]))
    return total * int(np.prod([sizes[word] if word in sizes else int(word) for word in factor.split()]))


def test_dtype_codes_on_the_page() -> None:
    row = next(row for row in table("Header") if row[2] == "dtype_code")
    named = {int(code): name for code, name in re.findall(r"(\d) (\w+)", row[3])}
    assert named == {code.value: code.name.lower() for code in DtypeCode}


def test_worked_example_is_the_golden_file() -> None:
    data = bytearray(GOLDEN.stat().st_size)
    for line in PAGE.split("```hex\n", 1)[1].split("```", 1)[0].splitlines():
        offset, row = line.split("#")[0].split("  ", 1)
        data[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(row)
    assert bytes(data) == GOLDEN.read_bytes()


def test_golden_file_is_what_is_written(data_dir: DataDir) -> None:
    header, parts = golden_span()
    write_span(data_dir, header.sequence, header, parts).close()
    assert data_dir.span_path(header.sequence).read_bytes() == GOLDEN.read_bytes()


def test_golden_file_is_read() -> None:
    header, parts = golden_span()
    span = SpanFile.open(GOLDEN)
    assert span.header == header
    assert span.keys == parts.keys
    np.testing.assert_array_equal(span.read_layer(0), np.asarray(parts.kv)[0])
    np.testing.assert_array_equal(span.read_means(), parts.means)
    assert span.verify() == []
    span.close()


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


def encoded(header: SpanHeader) -> bytes:
    return encode_header(header, plan_sections(header))


def with_field(block: bytes, name: str, value: bytes) -> bytes:
    """Overwrite a header field and make the checksum right again."""
    offset = 0
    for field, code in HEADER_FIELDS:
        if field == name:
            break
        offset += struct.calcsize("<" + code)
    return resealed(block, offset, value)


def resealed(block: bytes, offset: int, value: bytes) -> bytes:
    body = bytearray(block[:HEADER_CRC_OFFSET])
    body[offset : offset + len(value)] = value
    return bytes(body) + crc32c(bytes(body)).to_bytes(4, "little")


@pytest.mark.parametrize(
    "header",
    [
        sample_header(),
        sample_header(first_page=1),
        approximate(sample_header(), 1),
        sample_header(sketch_bytes=5),
    ],
)
def test_header_round_trip(header: SpanHeader) -> None:
    decoded, sections = decode_header(encoded(header))
    assert decoded == header
    assert sections == plan_sections(header)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", b"KVDRSPAM", "not a span file"),
        ("header_bytes", u32(8192), "canonical"),
        ("file_bytes", bytes(8), "canonical"),
        ("dtype_code", u32(4), "dtype code 4"),
        ("num_layers", u32(0), "a dimension is zero"),
        ("page_size", u32(0), "a dimension is zero"),
        ("num_pages", u32(0), "num_pages=0"),
        ("num_pages", u32(2**16), "num_pages=65536"),
        ("stretch_tokens", u32(7), "no multiple of page_size=2"),
        ("first_page", u32(2), r"pages \[2, 5\) cross a stretch of 4 pages"),
        ("num_exact_pages", u32(4), "num_exact_pages=4 of 3"),
        ("num_exact_pages", u32(2), "selection must be zeros"),
        ("selection", b"S" * 32, "selection must be zeros"),
        ("parent_key", b"P" * 32, "parent_key must be zeros"),
        ("tp_rank", b"\1\0", "shard tp 1 of 1"),
        ("num_layers", u32(3), "section MEANS has"),
        ("num_layers", u32(2**32 - 1), "sections .* must be"),
    ],
)
def test_intact_but_impossible_headers(field: str, value: bytes, message: str) -> None:
    block = with_field(encoded(sample_header()), field, value)
    with pytest.raises(CorruptExtentError, match=message):
        decode_header(block, "x.span")


def entry(index: int, field: str) -> int:
    """Return the offset in the header of a field of a section table entry."""
    offset = SECTION_TABLE_OFFSET + index * SECTION_STRUCT.size
    for name, code in SECTION_FIELDS:
        if name == field:
            return offset
        offset += struct.calcsize("<" + code)
    raise KeyError(field)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (entry(0, "type"), u32(0), "must be"),
        (entry(1, "type"), u32(1), "must be"),
        (entry(6, "type"), u32(9), "must be"),
        (entry(7, "type"), u32(8) + u32(1), "must be"),
        (entry(7, "type"), u32(9) + u32(1), "must be"),
        (entry(2, "offset"), u32(8192), "section MEANS has"),
        (entry(0, "length"), u32(4), "section TOKENS has 4 bytes"),
        (entry(4, "length"), u32(9), "section CENTROIDS has 9 bytes"),
        (entry(6, "crc"), u32(1), "section KV has crc 00000001"),
        (entry(0, "pad"), u32(1), "canonical"),
        (entry(7, "pad"), u32(1), "canonical"),
        (entry(7, "pad") + 4, b"\1", "canonical"),
    ],
)
def test_impossible_section_tables(offset: int, value: bytes, message: str) -> None:
    with pytest.raises(CorruptExtentError, match=message):
        decode_header(resealed(encoded(sample_header()), offset, value))


def test_other_versions_are_intact_strangers() -> None:
    block = encoded(sample_header())
    with pytest.raises(FingerprintMismatch, match="version 2, this build reads 1"):
        decode_header(with_field(block, "version", u32(2)))
    with pytest.raises(FingerprintMismatch, match="section 3 has version 2"):
        decode_header(resealed(block, entry(2, "version"), u32(2)))


def test_a_short_block_is_refused() -> None:
    with pytest.raises(CorruptExtentError, match="has 12 bytes, must be 4096"):
        decode_header(b"KVDRSPAN1234")


def test_plan_takes_a_shape() -> None:
    header = sample_header(num_pages=2)
    assert SpanHeader.plan(TINY, **{k: v for k, v in vars(header).items() if k not in vars(TINY)}) == header
    assert header.file_bytes == 8 * BLOCK_BYTES


def test_meta_imports_no_torch() -> None:
    """The service loads these modules and must stay small."""
    names = [p.stem for p in (ROOT / "kv_tier" / "meta").glob("*.py") if p.stem != "__init__"]
    lines = [f"import kv_tier.meta.{name}" for name in names]
    check = "import sys; found = {'torch', 'sglang', 'grpc'} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", "\n".join([*lines, check])], check=True, cwd=ROOT)
