"""Ways to read a data directory, by name and without a probe's measurements."""

from __future__ import annotations

import os

from kv_tier.meta.file_system import REAL
from kv_tier.meta.read_engine import (
    ALIGNMENT,
    FINE_GRID,
    InlineEngine,
    ReadEngine,
    ReadPath,
    RingEngine,
    RingUnavailable,
    ThreadEngine,
    open_direct,
)

READ_PATHS = ("ring", "threads", "coarse", "cached")


def make_read_path(name: str, dir_fd: int) -> ReadPath:
    """Return a path that this machine has: without a ring its place is taken by threads, without direct I/O by the cache.

    Args:
        name: "ring" and "threads" are direct on the finest grid, "coarse" on one of 4096 bytes; "cached" goes through
            the page cache; "best" is "ring".
    """
    engine: ReadEngine = InlineEngine() if name == "coarse" else ThreadEngine(2)
    if name in ("ring", "best"):
        try:
            engine = RingEngine(16)
        except RingUnavailable:
            engine = ThreadEngine(2)
    grid = 1 if name == "cached" or not takes_direct(dir_fd) else FINE_GRID
    if grid > 1 and name == "coarse":
        grid = ALIGNMENT
    return ReadPath(engine, grid > 1, grid, name)


def takes_direct(dir_fd: int) -> bool:
    """Whether files of a directory can be read past the page cache, on the finest grid."""
    try:
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        direct = open_direct(REAL, fd)
        if direct >= 0:
            os.close(direct)
        return direct >= 0
    finally:
        os.close(fd)
