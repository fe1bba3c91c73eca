"""How raw reads are planned, and what the summary makes of the repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdrive_sglang.bench.resume import (
    READ_BYTES,
    SUMMARY_KEYS,
    Turn,
    drop_page_cache,
    plan_blocks,
    read_raw,
    result_of,
)

A, B = Path("a"), Path("b")


def test_blocks_cover_the_bytes_asked_for_and_no_more() -> None:
    blocks = plan_blocks([(A, READ_BYTES + 8192), (B, 3 * READ_BYTES)], 2 * READ_BYTES + 4096)
    assert blocks == [
        (A, 0, READ_BYTES),
        (A, READ_BYTES, 8192),
        (B, 0, READ_BYTES - 4096),
    ]


def test_bytes_are_rounded_up_to_whole_blocks_of_4096() -> None:
    assert plan_blocks([(A, 8192)], 4097) == [(A, 0, 8192)]


@pytest.mark.parametrize("threads", [1, 3])
def test_raw_reads_take_time(tmp_path: Path, threads: int) -> None:
    files = [tmp_path / name for name in ("1", "2")]
    for file in files:
        file.write_bytes(os.urandom(READ_BYTES + 4096))
    assert read_raw(files, 2 * READ_BYTES, threads=threads, direct=False) > 0


def test_a_file_system_without_direct_reads_is_never_the_fastest(tmp_path: Path) -> None:
    file = tmp_path / "1"
    file.write_bytes(bytes(8192))
    assert read_raw([file], 8192, threads=1, direct=True) > 0


def test_dropping_falls_back_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdrive_sglang.bench.resume.DROP_CACHES", tmp_path / "none" / "drop_caches")
    file = tmp_path / "1"
    file.write_bytes(bytes(8192))
    assert drop_page_cache([file]) == "posix_fadvise on the span files"


def test_the_summary_holds_medians_and_what_they_make() -> None:
    warm = [Turn(0.2, [1, 2]), Turn(0.1, [3, 4]), Turn(0.3, [5, 6])]
    resumed = [Turn(0.5, [1, 2], 100), Turn(0.4, [3, 4], 300), Turn(0.6, [5, 6], 200)]
    slow, slower = [Turn(7.5, [1])] * 3, [Turn(9.0, [1])] * 3
    result = result_of(warm, resumed, slow, slower, [0.1, 0.3, 0.2], "drop_caches")
    summary = result.summary
    assert set(SUMMARY_KEYS) <= set(summary)
    assert summary["reprefill_over_resumed"] == pytest.approx(7.5 / 0.5)
    assert summary["resume_excess_s"] == pytest.approx(0.5 - 0.2 - 1.5 * 0.2)
    assert summary["bytes_read"] == 200
    assert summary["tokens_equal"] is True
    assert len(result.rows) == 3


def test_one_other_token_is_not_equal() -> None:
    turns, other = [Turn(0.2, [1, 2])], [Turn(0.5, [1, 3], 100)]
    result = result_of(turns, other, turns, turns, [0.1], "drop_caches")
    assert result.summary["tokens_equal"] is False
