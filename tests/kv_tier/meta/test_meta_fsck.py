"""The file checker on damage made by hand: what it names, what a repair leaves, that a check changes nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kv_tier.meta.data_dir import DataDir, span_name, temporary_name
from kv_tier.meta.errors import ExtentIoError
from kv_tier.meta.fsck import Repair, SpanReport, check_spans, repair_spans
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.span_file import SpanParts, write_span
from kv_tier.meta.span_format import SectionType, plan_sections
from tests.faults.faulty_file_system import FaultyFileSystem
from tests.kv_tier.meta.span_samples import TINY, sample_header, sample_parts, sample_span


def write(data_dir: DataDir, span_id: int, **fields: int) -> Path:
    header = sample_header(TINY, sequence=span_id, **fields)
    write_span(data_dir, span_id, header, sample_parts(header)).close()
    return data_dir.span_path(span_id)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def kinds(report: SpanReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in report.findings]


def snapshot(data_dir: DataDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in data_dir.path.rglob("*") if path.is_file()}


def test_whole_spans_are_clean(data_dir: DataDir) -> None:
    for span_id in (1, 2):
        write(data_dir, span_id, first_page=span_id - 1, num_pages=2)
    seen: list[tuple[int, int]] = []
    report = check_spans(data_dir, progress=lambda done, total: seen.append((done, total)))
    assert report.findings == report.notes == [] and sorted(report.spans) == [1, 2]
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    keys = report.spans[1].keys
    assert report.num_durable(keys) == len(keys) and report.holders(keys[1:]) == [1]
    assert report.num_durable([keys[0], b"?" * 32, keys[1]]) == 1


@pytest.mark.parametrize("kind", [None, *SectionType])
def test_damage_anywhere_is_found_and_set_aside(data_dir: DataDir, kind: SectionType | None) -> None:
    write(data_dir, 1)
    path = write(data_dir, 2, first_page=4, sketch_bytes=3)
    offset = 100 if kind is None else plan_sections(sample_header(sketch_bytes=3))[kind].offset
    flip(path, offset)
    before = snapshot(data_dir)
    report = check_spans(data_dir)
    assert kinds(report) == [("span-damaged", f"spans/{path.name}")]
    assert sorted(report.spans) == [1] and snapshot(data_dir) == before
    repair_spans(data_dir, report.findings)
    assert not path.exists() and data_dir.quarantine_path(path.name).exists()
    again = check_spans(data_dir)
    assert again.findings == [] and [note.kind for note in again.notes] == ["quarantine"]


def test_padding_after_the_kv_counts(data_dir: DataDir) -> None:
    path = write(data_dir, 1)
    flip(path, path.stat().st_size - 1)
    assert "padding" in check_spans(data_dir).findings[0].detail


def test_leftovers_strangers_and_wrong_names(data_dir: DataDir) -> None:
    path = write(data_dir, 1)
    shutil.copy(path, data_dir.span_path(9))
    (data_dir.path / "spans" / temporary_name(3)).write_bytes(b"half")
    (data_dir.path / "spans" / "notes.txt").write_bytes(b"mine")
    report = check_spans(data_dir)
    assert kinds(report) == [
        ("leftover", f"spans/{temporary_name(3)}"),
        ("span-misnamed", f"spans/{span_name(9)}"),
    ]
    assert [note.kind for note in report.notes] == ["foreign-file"]
    assert check_spans(data_dir, live=True).findings == report.findings[1:]  # it is being written
    repair_spans(data_dir, report.findings)
    assert check_spans(data_dir).findings == []
    assert sorted(path.name for path in (data_dir.path / "spans").iterdir()) == [span_name(1), "notes.txt"]


def test_a_superseded_span_is_a_leak(data_dir: DataDir) -> None:
    header, parts = sample_span(sequence=1, num_pages=2)
    whole = sample_header(sequence=2, num_pages=3)
    longer = sample_parts(whole)
    tokens = longer.tokens.copy()
    tokens[:2] = parts.tokens
    longer = replace(longer, tokens=tokens, keys=page_keys(tokens.ravel(), whole.page_size))
    write_span(data_dir, 1, header, parts).close()
    write_span(data_dir, 2, whole, longer).close()
    report = check_spans(data_dir)
    assert kinds(report) == [("superseded", f"spans/{span_name(1)}")] and sorted(report.spans) == [2]
    assert check_spans(data_dir, live=True).findings == []
    repair_spans(data_dir, report.findings)
    assert check_spans(data_dir).findings == [] and not data_dir.span_path(1).exists()


def test_a_span_that_cannot_be_read_is_named(data_dir: DataDir) -> None:
    path = write(data_dir, 1)
    report = check_spans(data_dir, fs=FaultyFileSystem(0))
    assert kinds(report) == [("span-unreadable", f"spans/{path.name}")]
    assert report.findings[0].repair is Repair.SET_ASIDE and "errno 5" in report.findings[0].detail


def test_quarantine_keeps_what_has_the_same_name(data_dir: DataDir) -> None:
    for text in (b"first", b"second", b"third"):
        data_dir.span_path(1).write_bytes(text)
        repair_spans(data_dir, check_spans(data_dir).findings)
    kept = sorted((path.name, path.read_bytes()) for path in (data_dir.path / "quarantine").iterdir())
    name = span_name(1)
    assert kept == [(name, b"first"), (f"{name}-1", b"second"), (f"{name}-2", b"third")]


@pytest.mark.parametrize("fail_at", range(3))
def test_a_repair_that_fails_names_the_file(data_dir: DataDir, fail_at: int) -> None:
    data_dir.span_path(1).write_bytes(b"x")
    report = check_spans(data_dir)
    with pytest.raises(ExtentIoError, match="errno 5"):
        repair_spans(data_dir, report.findings, fs=FaultyFileSystem(fail_at))
    repair_spans(data_dir, check_spans(data_dir).findings)
    assert check_spans(data_dir).findings == []


def test_spans_of_several_engines_do_not_add_up(data_dir: DataDir) -> None:
    header, parts = sample_span(sequence=1, num_pages=3)
    cut = SpanParts(
        parts.tokens, parts.keys, parts.means, parts.order, parts.clusters, parts.kv, parts.centroids
    )
    write_span(data_dir, 1, header, parts).close()
    write_span(data_dir, 2, replace(header, sequence=2, fingerprint=b"G" * 32), cut).close()
    report = check_spans(data_dir)
    assert report.findings == [] and [note.kind for note in report.notes] == ["engines"]
    assert report.num_durable(parts.keys) == 3
