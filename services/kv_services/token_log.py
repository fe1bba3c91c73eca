"""Token log: the append-only file that a session is.

    file   := magic record*                     magic = b"KVDRTLG1"
    record := u32 body_bytes | u8 type | 3 zero bytes | u32 crc32c of these 8 bytes      (12 bytes)
              body                                                                       (body_bytes)
              u32 crc32c of the body
    body   := u32 head_bytes | head (JSON, UTF-8) | u32 token id *

All integers are little endian. The first record is META. A file is created whole (written beside, fsynced, renamed,
directory fsynced), and every later record is fsynced before anything depends on it. So a crash can only tear the last
record: loading ignores it, and the next append cuts it off. Damage with intact records behind it is no torn tail: `LogCorrupt`.

Example: a log with META, INPUT(turn 0), OUTPUT(turn 0), INPUT(turn 1) and half of an OUTPUT was torn while its second
answer was being written. Loading leaves the second turn open.

Downside: a flipped bit in the very last record looks like a torn tail and costs that record.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c

from kv_services.errors import LogCorrupt, StorageFailed

MAGIC = b"KVDRTLG1"
TEMPORARY_SUFFIX = ".tmp"
_FRONT = struct.Struct("<IB3x")
_U32 = struct.Struct("<I")
_FRAME_BYTES = _FRONT.size + 2 * _U32.size


class RecordType(enum.IntEnum):
    """What a record says. Unknown types are corrupt: a newer writer bumps the magic."""

    META = 1
    """Who the session is: ids, tenant, kind, creation. First record, only once."""
    BASE = 2
    """Tokens the session starts from (a document)."""
    INPUT = 3
    """A turn's prompt tokens, written before the engine sees them."""
    OUTPUT = 4
    """A turn's answer. Ends the turn."""
    WITHDRAW = 5
    """The open turn never happened: its prompt is no part of the session."""
    STATE = 6
    """The session changes state."""
    UPDATE = 7
    """The title or labels change."""


@dataclass(frozen=True)
class Record:
    """One record.

    Args:
        head: JSON object.
        tokens: [num_tokens] token ids.
    """

    type: RecordType
    head: dict[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] = ()


def encode(record: Record) -> bytes:
    """Encode a record as it lies in the file."""
    head = json.dumps(record.head, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    words = array("I", record.tokens)
    if sys.byteorder == "big":
        words.byteswap()
    body = _U32.pack(len(head)) + head + words.tobytes()
    front = _FRONT.pack(len(body), record.type)
    return front + _crc(front) + body + _crc(body)


def create(path: Path, records: Iterable[Record]) -> int:
    """Create a log that holds `records`, or nothing at all.

    Returns:
        Bytes of the file.

    Raises:
        StorageFailed: the operating system failed a step; no file is left.
    """
    data = MAGIC + b"".join(encode(record) for record in records)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _storage_failed("create", path, error) from error
    return len(data)


def append(path: Path, record: Record, at: int) -> int:
    """Append a record at byte `at`, the end of the intact log, and fsync it. Cuts off a torn tail behind `at`.

    Returns:
        Bytes of the intact log now.

    Raises:
        StorageFailed: the operating system failed a step; the log is as it was.
    """
    data = encode(record)
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError as error:
        raise _storage_failed("open", path, error) from error
    try:
        _write_at(descriptor, data, at)
    except OSError as error:
        os.ftruncate(descriptor, at)
        raise _storage_failed("append to", path, error) from error
    finally:
        os.close(descriptor)
    return at + len(data)


def load(path: Path) -> tuple[list[Record], int]:
    """Read a log up to its torn tail, if it has one. Changes nothing, so that it may run beside an append.

    Returns:
        The records and the bytes of the intact log.

    Raises:
        FileNotFoundError: no such log.
        LogCorrupt: damage that a torn append does not explain.
    """
    return decode(path.read_bytes(), path)


def decode(data: bytes, path: Path) -> tuple[list[Record], int]:
    """Decode the records of a log's bytes; see `load`. `path` is for messages."""
    if not data.startswith(MAGIC):
        raise LogCorrupt(
            f"{path}: starts with {data[:8]!r}, not {MAGIC!r}; restore it from a backup", path=path
        )
    records: list[Record] = []
    at = len(MAGIC)
    while at < len(data):
        record, end = _decode_one(data, at)
        if record is None:
            break
        records.append(record)
        at = end
    if not records or records[0].type is not RecordType.META:
        raise LogCorrupt(f"{path}: has no META record; restore it from a backup", path=path)
    if _intact_behind(data, at):
        raise LogCorrupt(
            f"{path}: record at byte {at} is damaged; restore the log from a backup", path=path, value=at
        )
    return records, at


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _decode_one(data: bytes, at: int) -> tuple[Record | None, int]:
    body_at = at + _FRONT.size + _U32.size
    if body_at > len(data) or data[body_at - 4 : body_at] != _crc(data[at : at + _FRONT.size]):
        return None, at
    body_bytes, kind = _FRONT.unpack_from(data, at)
    body, end = data[body_at : body_at + body_bytes], body_at + body_bytes + _U32.size
    if end > len(data) or data[end - 4 : end] != _crc(body):
        return None, at
    head_end = _U32.size + _U32.unpack_from(body)[0]
    tokens = array("I", body[head_end:])
    if sys.byteorder == "big":
        tokens.byteswap()
    return Record(_type(kind, at), json.loads(body[_U32.size : head_end]), tokens), end


def _type(kind: int, at: int) -> RecordType:
    try:
        return RecordType(kind)
    except ValueError:
        known = max(RecordType)
        raise LogCorrupt(
            f"record at byte {at} has type {kind}, this version knows 1..{known}; use the version that wrote the log",
            value=kind,
            limit=known,
        ) from None


def _intact_behind(data: bytes, at: int) -> bool:
    """Tell whether an intact record starts somewhere behind the damage at `at`."""
    starts = range(at + 1, len(data) - _FRAME_BYTES + 1)
    return any(
        _decode_one(data, start)[0] is not None
        for start in starts
        if data[start + 5 : start + 8] == b"\0\0\0"
    )


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    if os.fstat(descriptor).st_size > at:
        os.ftruncate(descriptor, at)
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], at + written)
    os.fsync(descriptor)


def _crc(data: bytes) -> bytes:
    return _U32.pack(google_crc32c.value(data))


def _storage_failed(verb: str, path: Path, error: OSError) -> StorageFailed:
    return StorageFailed(
        f"cannot {verb} {path}: {error.strerror} (errno {error.errno}); free space or fix permissions, then repeat",
        path=path,
        errno=error.errno or 0,
    )
