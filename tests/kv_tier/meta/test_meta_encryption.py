"""Encrypted spans: only the key opens them, every part is bound to its place, and without its wrap a span is noise."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.meta.data_dir import DataDir, key_name
from kv_tier.meta.encryption import TAG_BYTES, WRAP_BYTES, DataKey, Keyring, SpanCipher
from kv_tier.meta.errors import ConfigError, CorruptExtentError, FingerprintMismatch
from kv_tier.meta.fsck import check_spans, repair_spans
from kv_tier.meta.kv_codec import KvEncoding
from kv_tier.meta.span_file import SpanFile, SpanParts, scan_spans, write_span, write_unlinked_span
from kv_tier.meta.span_format import SectionType, SpanHeader, plan_sections
from tests.kv_tier.meta.span_samples import (
    assert_damage_shows,
    by_ordinal,
    read_pages,
    sample_header,
    sample_parts,
)
from tests.kv_tier.meta.test_meta_encoded_spans import encoded
from tests.kv_tier.meta.test_meta_span_file import headers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extent_format.md").read_text(encoding="utf-8")
KEYRING = Keyring(b"k" * 32)


def write(data_dir: DataDir, header: SpanHeader, parts: SpanParts) -> SpanFile:
    header = replace(header, encrypted=True)
    return write_span(data_dir, header.sequence, header, parts, key=KEYRING.new_key(header.sequence))


def open_span(data_dir: DataDir, span_id: int, keyring: Keyring | None = KEYRING) -> SpanFile:
    return SpanFile.open(
        data_dir.span_path(span_id), dir_fd=data_dir.spans_fd, keys_fd=data_dir.keys_fd, keyring=keyring
    )


def sealed_file(data_dir: DataDir, span_id: int = 1) -> SpanParts:
    """Write the file of an encrypted span; return what it holds."""
    header = sample_header(sequence=span_id, num_pages=4)
    parts = sample_parts(header, seed=span_id)
    write(data_dir, header, parts).close()
    return parts


# ---- the master key -----------------------------------------------------------------------------------------


def test_the_key_file_is_read_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("6b" * 32 + "\n")
    file.chmod(0o600)
    ring = Keyring.from_file(file)
    assert ring.key_id == KEYRING.key_id
    assert "6b6b" not in repr(ring) and "kkkk" not in repr(ring) + repr(ring.new_key(1))


@pytest.mark.parametrize("content", ["", "6b" * 31, "zz" * 32, "6b" * 33])
def test_a_key_file_that_holds_something_else_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"encryption_key_file=.* 64 hexadecimal digits") as caught:
        Keyring.from_file(file)
    assert "6b6b" not in str(caught.value)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("6b" * 32)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640 .* chmod 600"):
        Keyring.from_file(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keyring.from_file(tmp_path / "none")


def test_a_wrap_gives_its_key_to_the_right_span_and_master_key_alone() -> None:
    made = KEYRING.new_key(7)
    assert len(made.wrap) == WRAP_BYTES and made.key not in made.wrap
    assert KEYRING.unwrap(made.wrap, 7) == made.key
    with pytest.raises(FingerprintMismatch, match="another key"):
        Keyring(b"o" * 32).unwrap(made.wrap, 7)
    with pytest.raises(CorruptExtentError, match="that of span 7"):
        KEYRING.unwrap(made.wrap, 8)
    for at in range(WRAP_BYTES):
        damaged = bytearray(made.wrap)
        damaged[at] ^= 1
        with pytest.raises((CorruptExtentError, FingerprintMismatch)):
            KEYRING.unwrap(bytes(damaged), 7)
    with pytest.raises(CorruptExtentError, match="bytes, must have"):
        KEYRING.unwrap(made.wrap[:-1], 7)


def test_the_wrap_is_the_table_on_the_page() -> None:
    text = PAGE.split("`keys/<id>.key` holds the key", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    wrap = KEYRING.new_key(7).wrap
    parts = {row[2]: wrap[int(row[0]) : int(row[0]) + int(row[1])] for row in rows[1:]}
    assert sum(int(row[1]) for row in rows[1:]) == len(wrap)
    assert parts["magic"] == b"KVDRWRAP" and parts["version"] == b"\x01\0\0\0" and parts["zero"] == bytes(4)
    assert parts["span id"] == (7).to_bytes(8, "little") and parts["key id"] == KEYRING.key_id
    assert hashlib.sha256(b"kvdrive master key id" + b"k" * 32).digest()[:8] == KEYRING.key_id


def test_a_page_is_sealed_as_the_page_says(data_dir: DataDir) -> None:
    parts = sealed_file(data_dir)
    key = KEYRING.unwrap((data_dir.path / "keys" / key_name(1)).read_bytes(), 1)
    data = data_dir.span_path(1).read_bytes()
    span = open_span(data_dir, 1, keyring=None)
    header = span.header
    span.close()
    kv = plan_sections(header)[SectionType.KV]
    number, size = (1 * header.num_kv_heads + 0) * header.num_pages + 2, header.stored_page_bytes
    nonce = (7).to_bytes(4, "little") + number.to_bytes(8, "little")
    associated = data[:172] + (256 + 1).to_bytes(4, "little")
    plain = AESGCM(key).decrypt(nonce, data[kv.offset + number * size :][:size], associated)
    assert plain == np.asarray(parts.kv)[1, 0, 2].tobytes()


def test_no_two_keys_are_alike() -> None:
    keys = [KEYRING.new_key(7) for _ in range(20)]
    assert len({made.key for made in keys}) == len({made.wrap for made in keys}) == 20


# ---- parts --------------------------------------------------------------------------------------------------


def test_a_part_opens_in_its_place_alone() -> None:
    cipher = SpanCipher(b"d" * 32, b"header")
    rows = np.arange(40, dtype=np.uint8).reshape(4, 10)
    sealed = cipher.seal_rows(SectionType.KV, 8, rows)
    assert sealed.shape == (4, 10 + TAG_BYTES)
    plain, good = cipher.open_rows(SectionType.KV, np.arange(8, 12), sealed)
    assert good.all() and np.array_equal(plain, rows)
    plain, good = cipher.open_rows(SectionType.KV, np.array([9, 9, 11, 10]), sealed)
    assert good.tolist() == [False, True, False, False] and not plain[~good].any()
    assert cipher.open(SectionType.MEANS, 8, sealed[0]) is None
    assert SpanCipher(b"d" * 32, b"other header").open(SectionType.KV, 8, sealed[0]) is None
    assert SpanCipher(b"e" * 32, b"header").open(SectionType.KV, 8, sealed[0]) is None


def test_the_header_is_bound_to_every_part() -> None:
    header = replace(sample_header(), encrypted=True)
    changes: list[dict[str, Any]] = [
        {"sequence": 2},
        {"fingerprint": b"G" * 32},
        {"tp_size": 2},
        {"encoding": 2},
        {"num_pages": 4},
    ]
    seen = {header.associated, *(replace(header, **change).associated for change in changes)}
    assert len(seen) == 1 + len(changes)


@settings(max_examples=50, deadline=None)
@given(header=headers(), encoding=st.sampled_from([*KvEncoding]), data=st.data())
def test_round_trip(header: SpanHeader, encoding: KvEncoding, data: st.DataObject) -> None:
    parts = seen = sample_parts(header)
    if encoding != KvEncoding.RAW:
        header, parts, seen = encoded(header, encoding)
    header = replace(header, encrypted=True)
    with tempfile.TemporaryDirectory() as root, DataDir.open(root, role="engine") as data_dir:
        written = write(data_dir, header, parts)
        opened = open_span(data_dir, header.sequence)
        assert opened.path.stat().st_size == header.file_bytes
        layer = data.draw(st.integers(0, header.num_layers - 1))
        head = data.draw(st.integers(0, header.num_kv_heads - 1))
        ordinals = data.draw(
            st.lists(st.integers(0, header.num_pages - 1), min_size=1, max_size=8, unique=True)
        )
        for span in (written, opened):
            assert span.header == header and span.keys == parts.keys and span.verify() == []
            np.testing.assert_array_equal(span.tokens, parts.tokens)
            np.testing.assert_array_equal(span.read_means(), parts.means)
            centroids = span.read_centroids()
            assert (centroids is None) == (parts.centroids is None)
            if centroids is not None:
                np.testing.assert_array_equal(centroids, parts.centroids)
            np.testing.assert_array_equal(span.read_layer(layer), np.asarray(seen.kv)[layer])
            pages, lost = read_pages(span, layer, head, ordinals)
            assert lost == []
            np.testing.assert_array_equal(pages, by_ordinal(seen, layer, head)[ordinals])
            span.close()


def test_nothing_that_tells_of_the_text_is_in_the_file(data_dir: DataDir) -> None:
    header = sample_header(num_pages=4, num_clusters=2)
    parts = sample_parts(header)
    write(data_dir, header, parts).close()
    data = data_dir.span_path(1).read_bytes()
    for secret in (parts.tokens[0], parts.means[0], parts.centroids, np.asarray(parts.kv)[0]):
        assert np.ascontiguousarray(secret).tobytes()[:8] not in data


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_and_any_truncation(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root, DataDir.open(Path(root) / "data", role="engine") as data_dir:
        sealed_file(data_dir)
        assert_damage_shows(data_dir, data_dir.span_path(1), data)


def test_what_has_a_right_checksum_and_a_wrong_tag_is_lost(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who can write the file can mend checksums; here a page stands where another one should."""
    sealed_file(data_dir)
    span = open_span(data_dir, 1)
    cipher = span._cipher
    assert cipher is not None
    places = span.place_of[1, 0]
    right = cipher.open
    moved = int(places[2]) + 4

    def swapped(kind: int, number: int, data: bytes | memoryview) -> bytes | None:
        return right(kind, number + 1 if (kind, number) == (SectionType.KV, moved) else number, data)

    monkeypatch.setattr(cipher, "open", swapped)
    pages, lost = read_pages(span, 1, 0, range(4))
    assert lost == [2] and not pages[2].any() and pages[1].any()
    with pytest.raises(CorruptExtentError) as caught:
        span.read_layer(1)
    assert caught.value.bad_pages == [2]
    span.close()


# ---- keys and files -----------------------------------------------------------------------------------------


def keys_in(data_dir: DataDir) -> list[str]:
    return sorted(os.listdir(data_dir.keys_fd))


def test_without_the_master_key_a_span_can_be_verified_and_not_read(data_dir: DataDir) -> None:
    parts = sealed_file(data_dir)
    span = open_span(data_dir, 1, keyring=None)
    assert span.is_closed and span.keys == parts.keys and span.verify() == []
    assert not span.tokens.any()
    span.close()
    with pytest.raises(FingerprintMismatch, match="another key"):
        open_span(data_dir, 1, Keyring(b"o" * 32))
    spans, bad = scan_spans(data_dir, keyring=Keyring(b"o" * 32))
    assert spans == [] and [file.quarantined for file in bad] == [False], "it stays where it is"
    assert keys_in(data_dir) == [key_name(1)]
    assert (data_dir.path / "keys" / key_name(1)).stat().st_mode & 0o777 == 0o600


def test_the_wrap_goes_before_the_span(data_dir: DataDir) -> None:
    sealed_file(data_dir)
    span = open_span(data_dir, 1)
    span.unlink()
    assert keys_in(data_dir) == [] and not data_dir.span_path(1).exists()
    span.close()


def test_a_span_without_its_wrap_is_shredded(data_dir: DataDir) -> None:
    sealed_file(data_dir)
    os.unlink(key_name(1), dir_fd=data_dir.keys_fd)
    with pytest.raises(CorruptExtentError, match="its key is gone"):
        open_span(data_dir, 1)
    findings = check_spans(data_dir).findings
    assert [(f.kind, f.where) for f in findings] == [("key-missing", f"spans/{1:016x}.span")]
    repair_spans(data_dir, findings)
    assert check_spans(data_dir).findings == [] and not data_dir.span_path(1).exists()
    sealed_file(data_dir, 2)
    os.unlink(key_name(2), dir_fd=data_dir.keys_fd)
    spans, bad = scan_spans(data_dir, keyring=KEYRING)
    assert spans == [] and [file.quarantined for file in bad] == [True]


def test_wraps_without_a_span_are_leftovers(data_dir: DataDir) -> None:
    sealed_file(data_dir, 1)
    sealed_file(data_dir, 2)
    data_dir.span_path(2).unlink()
    findings = check_spans(data_dir).findings
    assert [(f.kind, f.where) for f in findings] == [("leftover", f"keys/{key_name(2)}")]
    repair_spans(data_dir, findings)
    assert keys_in(data_dir) == [key_name(1)]
    data_dir.span_path(1).unlink()
    scan_spans(data_dir)
    assert keys_in(data_dir) == []


def test_a_quarantined_span_loses_its_wrap(data_dir: DataDir) -> None:
    sealed_file(data_dir)
    data_dir.span_path(1).write_bytes(b"damaged")
    _, bad = scan_spans(data_dir, keyring=KEYRING)
    assert [file.quarantined for file in bad] == [True] and keys_in(data_dir) == []


def test_a_reader_of_an_older_directory_finds_no_wraps(data_dir: DataDir) -> None:
    os.rmdir(data_dir.path / "keys")
    with DataDir.inspect(data_dir.path) as reader:
        assert reader.keys_fd == -1
        assert check_spans(reader).findings == []


def test_a_spilled_span_keeps_its_key_in_memory(data_dir: DataDir) -> None:
    header = replace(sample_header(), encrypted=True)
    parts = sample_parts(header)
    key: DataKey = KEYRING.new_key(1)
    span = write_unlinked_span(data_dir, header, parts, key=key)
    np.testing.assert_array_equal(span.read_layer(1), np.asarray(parts.kv)[1])
    assert keys_in(data_dir) == []
    span.close()
