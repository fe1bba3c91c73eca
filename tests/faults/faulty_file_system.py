"""A file system that fails where it is told to, and one that loses power."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from kv_tier.meta.file_system import FileSystem


class PowerLoss(BaseException):
    """Ends the process in a test: nothing may catch it and go on using the disk."""


class FaultyFileSystem(FileSystem):
    """Do what the real one does, write down each operation, and let one of them fail.

    Args:
        fail_at: 0-based operation to fail, -1 for none.
        error: errno of the failure; with ``short`` unused.
        short: instead of failing, writes and reads move one byte only from ``fail_at`` on.
        power_loss: raise PowerLoss at ``fail_at`` and at every later operation.

    Attributes:
        operations: names of the operations so far, in order.
    """

    def __init__(
        self, fail_at: int = -1, *, error: int = errno.EIO, short: bool = False, power_loss: bool = False
    ) -> None:
        self.fail_at = fail_at
        self.error = error
        self.short = short
        self.power_loss = power_loss
        self.operations: list[str] = []
        self.unsynced: set[int] = set()
        self.unsynced_renames: list[tuple[str, int, str, int]] = []

    def lose_unsynced(self) -> None:
        """Apply what a power failure may do: unsynced files are empty, unsynced renames never happened."""
        for fd in self.unsynced:
            os.ftruncate(fd, 0)
        for source, source_fd, target, target_fd in reversed(self.unsynced_renames):
            os.rename(target, source, src_dir_fd=target_fd, dst_dir_fd=source_fd)

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._step("open")
        return super().open(name, flags, mode, dir_fd=dir_fd)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        cut = self._step("pwrite")
        self.unsynced.add(fd)
        return super().pwrite(fd, data[:1] if cut else data, offset)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        cut = self._step("preadv")
        return super().preadv(fd, [buffers[0][:1]] if cut else buffers, offset)

    def fsync(self, fd: int) -> None:
        self._step("fsync")
        super().fsync(fd)
        self.unsynced.discard(fd)

    def fsync_dir(self, dir_fd: int) -> None:
        self._step("fsync_dir")
        super().fsync_dir(dir_fd)
        self.unsynced_renames.clear()

    def rename(self, source: str, target: str, *, source_dir_fd: int, target_dir_fd: int) -> None:
        self._step("rename")
        super().rename(source, target, source_dir_fd=source_dir_fd, target_dir_fd=target_dir_fd)
        self.unsynced_renames.append((source, source_dir_fd, target, target_dir_fd))

    def unlink(self, name: str, *, dir_fd: int | None = None) -> None:
        self._step("unlink")
        super().unlink(name, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        if self.power_loss and self._reached(len(self.operations)):
            raise PowerLoss
        super().close(fd)
        self.unsynced.discard(fd)

    def _reached(self, number: int) -> bool:
        return 0 <= self.fail_at <= number

    def _step(self, operation: str) -> bool:
        """Count one operation; returns whether it moves one byte only."""
        number = len(self.operations)
        self.operations.append(operation)
        if self.power_loss and self._reached(number):
            raise PowerLoss
        if self.short:
            return self._reached(number)
        if number == self.fail_at:
            raise OSError(
                self.error, os.strerror(self.error), f"injected at operation {number} ({operation})"
            )
        return False
