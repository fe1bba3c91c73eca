"""The few file operations the store makes, as one object, so that a test can fail any of them.

Every method is one system call and raises OSError as the kernel reports it; callers name the file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Any


class FileSystem:
    """Pass operations to the operating system. Thread-safe; reads and writes release the GIL."""

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        """Open ``name``, relative to ``dir_fd`` when given; follows no link, leaks into no child."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)

    def reopen(self, fd: int, flags: int) -> int:
        """Open the file behind a descriptor once more, with other flags; it need not have a name any more."""
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the file's size in bytes."""
        return os.fstat(fd).st_size

    def size_of(self, name: str, *, dir_fd: int | None = None) -> int:
        """Return the size in bytes of the file, or link, of that name."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size

    def modified_ns(self, fd: int) -> int:
        """Return the file's modification time, nanoseconds since the epoch."""
        return os.fstat(fd).st_mtime_ns

    def set_modified_ns(self, fd: int, ns: int) -> None:
        """Set the file's access and modification times."""
        os.utime(fd, ns=(ns, ns))

    def exists(self, name: str, *, dir_fd: int | None = None) -> bool:
        try:
            os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def names(self, dir_fd: int) -> list[str]:
        """List a directory, sorted."""
        return sorted(os.listdir(dir_fd))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        """Write a buffer; returns the bytes written, possibly fewer than given."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Fill writable buffers in order; returns the bytes read, fewer at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def set_direct(self, fd: int, direct: bool) -> bool:
        """Let reads and writes of a descriptor go past the page cache, or not; False where that is not possible."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def drop_cache(self, fd: int) -> None:
        """Let the page cache forget what is clean of a file."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def truncate(self, fd: int, size: int) -> None:
        """Set a file's size in bytes."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, dir_fd: int) -> None:
        os.fsync(dir_fd)

    def rename(self, source: str, target: str, *, source_dir_fd: int, target_dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_dir_fd, dst_dir_fd=target_dir_fd)

    def unlink(self, name: str, *, dir_fd: int | None = None) -> None:
        os.unlink(name, dir_fd=dir_fd)


REAL = FileSystem()
