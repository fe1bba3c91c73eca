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

import contextlib
import enum
import errno
import json
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c

from kv_services.errors import LogCorrupt, StorageFailed
from kv_tier.meta.file_system import REAL, FileSystem

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


def create(path: Path, records: Iterable[Record], fs: FileSystem = REAL) -> int:
    """Create a log that holds `records`, or nothing at all.

    Returns:
        Bytes of the file.

    Raises:
        StorageFailed: the operating system failed a step; no file is left.
    """
    data = MAGIC + b"".join(encode(record) for record in records)
    try:
        with _opened(fs, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as directory:
            try:
                _write_beside(fs, directory, path.name, data)
            except OSError:
                with contextlib.suppress(OSError):
                    fs.unlink(path.name, dir_fd=directory)
                raise
    except OSError as error:
        raise storage_failed("create", path, error) from error
    return len(data)


def rewrite(path: Path, record: Record, at: int, fs: FileSystem = REAL) -> int:
    """Append a record as `append` does, to a copy that then takes the log's name.

    Returns:
        Bytes of the log now.

    Raises:
        StorageFailed: the operating system failed a step; the log is as it was, and must still be rewritten.
        LogCorrupt: what it held before is not what was written.
    """
    try:
        data = path.read_bytes()[:at]
        decode(data, path)
        data += encode(record)
        with _opened(fs, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as directory:
            _write_beside(fs, directory, path.name, data)
    except OSError as error:
        raise storage_failed("rewrite", path, error) from error
    return len(data)


def append(path: Path, record: Record, at: int, fs: FileSystem = REAL) -> int:
    """Append a record at byte `at`, the end of the intact log, and fsync it. Cuts off a torn tail behind `at`.

    Returns:
        Bytes of the intact log now.

    Raises:
        StorageFailed: the operating system failed a step; the log is as it was, and whoever appends next must `rewrite` it: a
            fsync that failed is final for the file, because the kernel may have dropped what it could not write.
    """
    data = encode(record)
    try:
        with _opened(fs, str(path), os.O_WRONLY) as descriptor:
            try:
                _write_at(fs, descriptor, data, at)
            except OSError:
                with contextlib.suppress(OSError):
                    fs.truncate(descriptor, at)  # a torn tail that stays is cut off by the next append
                raise
    except OSError as error:
        raise storage_failed("append to", path, error) from error
    return at + len(data)


def cut_tail(path: Path, at: int, fs: FileSystem = REAL) -> None:
    """Cut off what lies behind the intact log, durably.

    Raises:
        StorageFailed: the operating system failed a step.
    """
    try:
        with _opened(fs, str(path), os.O_WRONLY) as descriptor:
            fs.truncate(descriptor, at)
            fs.fsync(descriptor)
    except OSError as error:
        raise storage_failed("cut the tail of", path, error) from error


def remove(path: Path, fs: FileSystem = REAL) -> None:
    """Remove a log, durably; one that is gone already is no error.

    Raises:
        StorageFailed: the operating system failed a step; the log may be there after a crash.
    """
    try:
        with _opened(fs, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as directory:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(path.name, dir_fd=directory)
            fs.fsync_dir(directory)
    except OSError as error:
        raise storage_failed("remove", path, error) from error


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


@contextlib.contextmanager
def _opened(fs: FileSystem, name: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    descriptor = fs.open(name, flags, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        fs.close(descriptor)


def _write_beside(fs: FileSystem, directory: int, name: str, data: bytes) -> None:
    """Write a file under a temporary name, and give it its name once it is durable."""
    temporary = name + TEMPORARY_SUFFIX
    try:
        with _opened(fs, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, directory) as descriptor:
            _write_at(fs, descriptor, data, 0)
        fs.rename(temporary, name, source_dir_fd=directory, target_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary, dir_fd=directory)
        raise
    fs.fsync_dir(directory)


def _write_at(fs: FileSystem, descriptor: int, data: bytes, at: int) -> None:
    if fs.size(descriptor) > at:
        fs.truncate(descriptor, at)
    written = 0
    while written < len(data):
        count = fs.pwrite(descriptor, data[written:], at + written)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count
    fs.fsync(descriptor)


def _crc(data: bytes) -> bytes:
    return _U32.pack(google_crc32c.value(data))


def storage_failed(verb: str, path: Path, error: OSError) -> StorageFailed:
    """Make the error for a step on a log that the operating system failed."""
    return StorageFailed(
        f"cannot {verb} {path}: {error.strerror} (errno {error.errno}); free space or fix permissions, then repeat",
        path=path,
        errno=error.errno or 0,
    )
