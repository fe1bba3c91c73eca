"""Move bytes between arrays and span files: whole reads and writes, errors that name the file."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.kv_codec import KvEncoding
from kv_tier.meta.span_format import Raw, SpanHeader

Bytes = npt.NDArray[np.uint8]


def read_into(fs: FileSystem, fd: int, path: Path, data: Bytes, offset: int) -> None:
    """Fill ``data`` from ``offset`` on, going on after a short read.

    Raises:
        CorruptExtentError: the file ends first.
        ExtentIoError: the read failed.
    """
    done = 0
    while done < data.nbytes:
        try:
            got = fs.preadv(fd, [data[done:] if done else data], offset + done)
        except OSError as error:
            raise ExtentIoError.of(error, "read", path, offset + done) from error
        if got == 0:
            missing = data.nbytes - done
            raise CorruptExtentError(f"{path}: ends at byte {offset + done}, {missing} bytes are missing")
        done += got


def write_all(fs: FileSystem, fd: int, path: Path, data: Bytes, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        with naming("write", path, offset + done):
            written = fs.pwrite(fd, data[done:], offset + done)
            if written == 0:
                raise OSError(errno.ENOSPC, "nothing was written")
        done += written


@contextlib.contextmanager
def naming(operation: str, path: Path, offset: int = -1) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExtentIoError.of(error, operation, path, offset) from error


def check_array(name: str, array: Raw, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    assert array.shape == shape, (name, array.shape, shape)
    assert array.dtype == dtype, (name, array.dtype, dtype)


def bytes_of(array: Raw, header: SpanHeader) -> Bytes:
    """View one layer's KV, C-contiguous, as flat bytes, without a copy."""
    pages = (header.num_kv_heads, header.num_pages)
    if header.kv_version == KvEncoding.RAW:
        check_array("kv", array, (*pages, 2, header.page_size, header.head_dim), header.bits_dtype)
    else:
        check_array("kv", array, (*pages, header.stored_page_bytes), np.dtype(np.uint8))
    assert array.flags.c_contiguous, array.strides
    return array.reshape(-1).view(np.uint8)


def inverse(page_at: Raw) -> Raw | None:
    """Invert the permutations along the last axis; None when one is none."""
    num_pages = page_at.shape[-1]
    if int(page_at.max()) >= num_pages:
        return None
    places = np.broadcast_to(np.arange(num_pages, dtype=np.uint16), page_at.shape)
    place_of = np.full(page_at.shape, 2**16 - 1, np.uint16)
    np.put_along_axis(place_of, page_at.astype(np.int64), places, axis=-1)
    return place_of if int(place_of.max()) < num_pages else None
