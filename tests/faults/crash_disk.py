"""A disk that loses power: it writes down every operation, and rebuilds what may be left after any number of them.

    recorded    create, write, truncate, fsync of a file; rename, unlink, fsync of a directory; marks of the test
    after k     what was synced is there. Of the rest: names come back in the order they were made, up to some point; data comes
                back not at all, whole but for the last write, which is torn, or in some sectors

A fsync of a file does not make its name durable; a fsync of a directory makes all earlier changes of names durable (one
journal, as in ext4, XFS and btrfs).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kv_tier.meta.file_system import FileSystem

SECTOR_BYTES = 512
DIRECTORIES = ("spans", "keys", "quarantine", "sessions")

Keep = Literal["none", "all", "some"]
Names = dict[tuple[str, str], int]


class Op(NamedTuple):
    """One operation: ``kind`` and what it needs. ``file`` is an inode of our own counting, ``names`` are (directory, name)."""

    kind: str
    file: int = -1
    source: tuple[str, str] = ("", "")
    target: tuple[str, str] = ("", "")
    offset: int = 0
    data: bytes = b""
    mark: Any = None


@dataclass(frozen=True)
class Loss:
    """What a power loss leaves of unsynced names and data.

    ``data``: "all" tears the very last write.
    """

    names: Keep
    data: Keep


LOSSES = (
    Loss("none", "none"),
    Loss("all", "none"),
    Loss("all", "all"),
    Loss("some", "some"),
    Loss("all", "some"),
)

Image = dict[tuple[str, str], bytes]


class RecordingFileSystem(FileSystem):
    """Do what the real one does below ``root``, and write it down.

    Args:
        root: a data directory; what it holds now counts as durable.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Op] = []
        self.base = read_image(root)
        self._names: Names = {name: number for number, name in enumerate(self.base)}
        self._next_file = len(self._names)
        self._open: dict[int, int] = {}
        self._lock = threading.RLock()

    def mark(self, mark: Any) -> None:
        """Write down what the test promised or began at this point."""
        with self._lock:
            self.log.append(Op("mark", mark=mark))

    def _place(self, name: str, dir_fd: int | None) -> tuple[str, str]:
        parent = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) if dir_fd is not None else Path(name).parent
        return str(parent.relative_to(self.root)), Path(name).name

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        with self._lock:
            fd = super().open(name, flags, mode, dir_fd=dir_fd)
            if flags & os.O_DIRECTORY:  # includes O_TMPFILE, whose file no name leads to
                self._open.pop(fd, None)
                return fd
            place = self._place(name, dir_fd)
            if place not in self._names:
                self._names[place] = self._next_file
                self.log.append(Op("create", self._next_file, target=place))
                self._next_file += 1
            elif flags & os.O_TRUNC:
                self.log.append(Op("truncate", self._names[place]))
            self._open[fd] = self._names[place]
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def _note(self, kind: str, fd: int, offset: int = 0, data: bytes = b"") -> None:
        if fd in self._open:
            self.log.append(Op(kind, self._open[fd], offset=offset, data=data))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        with self._lock:
            done = super().pwrite(fd, data, offset)
            self._note("write", fd, offset, bytes(memoryview(data).cast("B"))[:done])
            return done

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().truncate(fd, size)
            self._note("truncate", fd, size)

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._note("fsync", fd)

    def fsync_dir(self, dir_fd: int) -> None:
        with self._lock:
            self.log.append(Op("fsync_dir"))

    def rename(self, source: str, target: str, *, source_dir_fd: int, target_dir_fd: int) -> None:
        with self._lock:
            places = self._place(source, source_dir_fd), self._place(target, target_dir_fd)
            super().rename(source, target, source_dir_fd=source_dir_fd, target_dir_fd=target_dir_fd)
            self.log.append(Op("rename", source=places[0], target=places[1]))
            self._names[places[1]] = self._names.pop(places[0])

    def unlink(self, name: str, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._place(name, dir_fd)
            super().unlink(name, dir_fd=dir_fd)
            if place in self._names:
                self.log.append(Op("unlink", source=place))
                del self._names[place]

    def crashes(self) -> Iterator[int]:
        """Yield every number of operations after which the power may go."""
        yield from (n for n in range(len(self.log) + 1) if n == len(self.log) or self.log[n].kind != "mark")

    def after(self, num_ops: int, loss: Loss, seed: int = 0) -> Image:
        """Return what the disk holds when the power goes after so many operations."""
        return _Replay(self.base, self.log[:num_ops], loss, random.Random(f"{num_ops}/{loss}/{seed}")).image()

    def marks(self, num_ops: int) -> list[Any]:
        """Return the marks among the first operations."""
        return [op.mark for op in self.log[:num_ops] if op.kind == "mark"]


class _Replay:
    """Follow a log: what is durable, and what is not yet."""

    def __init__(self, base: Image, log: list[Op], loss: Loss, rng: random.Random) -> None:
        self.loss, self.rng = loss, rng
        self.names: Names = {name: number for number, name in enumerate(base)}
        self.synced: dict[int, bytes] = dict(enumerate(base.values()))
        self.unsynced_names: list[Op] = []
        self.unsynced_data: dict[int, list[Op]] = {}
        for op in log:
            self._follow(op)
        self.last = log[-1] if log else None

    def _follow(self, op: Op) -> None:
        if op.kind in ("create", "rename", "unlink"):
            self.unsynced_names.append(op)
        elif op.kind in ("write", "truncate"):
            self.unsynced_data.setdefault(op.file, []).append(op)
        elif op.kind == "fsync":
            content = self.synced.get(op.file, b"")
            for change in self.unsynced_data.pop(op.file, []):
                content = _apply(content, change)
            self.synced[op.file] = content
        elif op.kind == "fsync_dir":
            for change in self.unsynced_names:
                self._rename(change)
            self.unsynced_names = []

    def _rename(self, op: Op) -> None:
        if op.kind == "create":
            self.names[op.target] = op.file
        elif op.kind == "rename":
            self.names[op.target] = self.names.pop(op.source)
        else:
            del self.names[op.source]

    def image(self) -> Image:
        num = {
            "none": 0,
            "all": len(self.unsynced_names),
            "some": self.rng.randint(0, len(self.unsynced_names)),
        }[self.loss.names]
        for op in self.unsynced_names[:num]:
            self._rename(op)
        return {name: self._content(file) for name, file in self.names.items()}

    def _content(self, file: int) -> bytes:
        content = self.synced.get(file, b"")
        for op in self.unsynced_data.get(file, []):
            if self.loss.data == "none":
                continue
            if self.loss.data == "some":
                for piece in _sectors(op):
                    if self.rng.random() < 0.5:
                        content = _apply(content, piece)
            elif op is self.last and op.kind == "write":
                content = _apply(content, op._replace(data=op.data[: self.rng.randint(0, len(op.data))]))
            else:
                content = _apply(content, op)
        return content


def _apply(content: bytes, op: Op) -> bytes:
    if op.kind == "truncate":
        return content[: op.offset] + bytes(max(0, op.offset - len(content)))
    if not op.data:
        return content
    content += bytes(max(0, op.offset - len(content)))
    return content[: op.offset] + op.data + content[op.offset + len(op.data) :]


def _sectors(op: Op) -> Iterator[Op]:
    if op.kind != "write":
        yield op
        return
    start = 0
    while start < len(op.data):
        end = min(len(op.data), start + SECTOR_BYTES - (op.offset + start) % SECTOR_BYTES)
        yield op._replace(offset=op.offset + start, data=op.data[start:end])
        start = end


def read_image(root: Path) -> Image:
    """Read the files below a data directory that the store writes."""
    return {
        (name, path.name): path.read_bytes()
        for name in DIRECTORIES
        if (root / name).is_dir()
        for path in sorted((root / name).iterdir())
    }


def write_image(image: Image, root: Path, secret: bytes = b"s" * 32) -> None:
    """Make a data directory that holds an image; what it held before is gone."""
    root.mkdir(mode=0o700, exist_ok=True)
    for name in (*DIRECTORIES, "catalog"):
        (root / name).mkdir(mode=0o700, exist_ok=True)
        for path in (root / name).iterdir():
            path.unlink()
    (root / "secret").write_bytes(secret)
    (root / "secret").chmod(0o600)
    for (directory, name), content in image.items():
        (root / directory / name).write_bytes(content)
