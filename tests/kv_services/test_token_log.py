from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path

import pytest

from kv_services import conversation, token_log
from kv_services.conversation import Finish, Kind, State, Turn, Usage
from kv_services.errors import LogCorrupt, StorageFailed
from kv_services.token_log import Record, RecordType

META = conversation.meta_record("s_" + "a" * 26, "t", Kind.SESSION, "", "r", "d", 1, "títle", {"k": "v"})


def ids(*values: int) -> array[int]:
    return array("I", values)


def turn_records(
    number: int, prompt: array[int], answer: array[int], finish: Finish = Finish.STOP
) -> list[Record]:
    turn = Turn(number, f"r{number}", "d", "tokens", prompt, answer, "text", finish, Usage(prompt_tokens=3))
    return [
        conversation.input_record(number, f"r{number}", "d", "tokens", prompt, 5),
        conversation.output_record(turn, 4, 6),
    ]


RECORDS = [
    META,
    *turn_records(0, ids(1, 2, 3), ids(4, 2**32 - 1)),
    Record(RecordType.STATE, {"state": State.SUSPENDED, "ms": 7}),
    Record(RecordType.UPDATE, {"title": "", "labels": {}, "ms": 8}),
    Record(RecordType.STATE, {"state": State.ACTIVE, "ms": 9}),
    *turn_records(1, ids(7), ids(8), Finish.CANCELLED),
]


def as_values(records: list[Record]) -> list[tuple[int, dict[str, object], list[int]]]:
    return [(record.type, record.head, list(record.tokens)) for record in records]


def write(path: Path) -> list[int]:
    """Write RECORDS; return the end of each."""
    ends = [token_log.create(path, RECORDS[:1])]
    for record in RECORDS[1:]:
        ends.append(token_log.append(path, record, ends[-1]))
    return ends


def test_what_is_appended_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = write(path)
    records, size = token_log.load(path)
    assert as_values(records) == as_values(RECORDS)
    assert size == ends[-1] == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    whole = tmp_path / "whole"
    token_log.create(whole, RECORDS)
    assert whole.read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["log", "whole"]


def test_torn_tail_at_every_byte(tmp_path: Path) -> None:
    path, torn = tmp_path / "log", tmp_path / "torn"
    ends = write(path)
    data = path.read_bytes()
    for size in range(ends[0], len(data)):
        torn.write_bytes(data[:size])
        num_whole = sum(end <= size for end in ends)
        records, good = token_log.load(torn)
        assert as_values(records) == as_values(RECORDS[:num_whole])
        assert good == ends[num_whole - 1]
        assert torn.stat().st_size == size  # loading changes nothing
        conversation.fold(records, good)
        end = token_log.append(torn, RECORDS[num_whole], good)
        assert torn.read_bytes() == data[: ends[num_whole]]
        assert end == ends[num_whole]


@pytest.mark.parametrize("junk", [b"\0" * 40, b"\xff" * 7, bytes(range(100))])
def test_unwritten_blocks_behind_the_last_record_are_a_torn_tail(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "log"
    ends = write(path)
    path.write_bytes(path.read_bytes() + junk)
    assert token_log.load(path)[1] == ends[-1]


def test_every_flipped_bit_before_the_last_record_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = write(path)
    data = bytearray(path.read_bytes())
    for at in range(ends[-2]):
        data[at] ^= 1 << at % 8
        with pytest.raises(LogCorrupt, match="backup"):
            token_log.decode(bytes(data), path)
        data[at] ^= 1 << at % 8


def test_damaged_last_record_is_never_read_as_something_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = write(path)
    data = bytearray(path.read_bytes())
    for at in range(ends[-2], ends[-1]):
        data[at] ^= 1 << at % 8
        records, good = token_log.decode(bytes(data), path)
        assert (as_values(records), good) == (as_values(RECORDS[:-1]), ends[-2])
        data[at] ^= 1 << at % 8


def test_unknown_record_type_names_the_newest_known() -> None:
    class Newer:
        type, head, tokens = 99, {"x": 1}, ()

    data = token_log.MAGIC + token_log.encode(META) + token_log.encode(Newer())  # type: ignore[arg-type]  # a newer record
    with pytest.raises(LogCorrupt, match=r"type 99, this version knows 1\.\.7"):
        token_log.decode(data, Path("x"))


@pytest.mark.crash
@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_failed_append_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "log"
    ends = write(path)
    before = path.read_bytes()
    real = getattr(os, failing)
    calls = []

    def fail(*arguments: object) -> object:
        calls.append(arguments)
        if failing == "pwrite" and len(calls) == 1:
            return real(arguments[0], bytes(arguments[1])[:5], arguments[2])  # type: ignore[call-overload]  # a short write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(StorageFailed, match="No space left") as caught:
        token_log.append(path, RECORDS[1], ends[-1])
    assert caught.value.metadata["errno"] == str(errno.ENOSPC)
    monkeypatch.undo()
    assert path.read_bytes() == before


@pytest.mark.crash
def test_failed_create_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageFailed, match="broken"):
        token_log.create(tmp_path / "log", RECORDS)
    assert os.listdir(tmp_path) == []


def test_append_to_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="cannot append to"):
        token_log.append(tmp_path / "log", RECORDS[1], 8)
    with pytest.raises(FileNotFoundError):
        token_log.load(tmp_path / "log")
