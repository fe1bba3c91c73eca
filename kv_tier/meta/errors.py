"""The exceptions of the store, in one tree.

KVDriveError
|- ConfigError            a setting is wrong or missing: which one, its limit, what to pass
|- CapacityError          a budget cannot hold what was asked for: which one, by how much
|- CorruptExtentError     bytes on disk are not what was written: a miss, never wrong KV
|- ExtentIoError          the operating system failed a file operation on a span
|- CannotEncode           KV that does not go into fewer bits: it stays as it is
|- FingerprintMismatch    intact bytes of another model, configuration or format version: a miss
|- DataDirError           the data directory cannot be used
|  |- DataDirBusy         another process owns it
|  `- DataDirForeign      it is not a data directory, or belongs to somebody else
`- CatalogUnavailable     the metadata store does not answer
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class KVDriveError(Exception):
    """Root of every error this product raises on purpose."""


class ConfigError(KVDriveError):
    """A setting is wrong or missing."""


class CapacityError(KVDriveError):
    """A budget cannot hold what was asked for."""


class CorruptExtentError(KVDriveError):
    """Bytes on disk are not what was written.

    Args:
        message: the file, what was expected and what was found.
        bad_pages: ordinals within the span of the pages that are lost; empty when the damage is
            not in pages' KV.
    """

    def __init__(self, message: str, bad_pages: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.bad_pages: list[int] = sorted(set(bad_pages))


class ExtentIoError(KVDriveError):
    """The operating system failed a file operation on a span.

    Args:
        message: the operation, the file and the operating system's words.
        path: the file.
        offset: byte offset of the operation, -1 when it has none.
        errno: the operating system's error number.
    """

    def __init__(self, message: str, path: str = "", offset: int = -1, errno: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.errno = errno

    @classmethod
    def of(cls, error: OSError, operation: str, path: object, offset: int = -1) -> ExtentIoError:
        """Build the error for ``operation`` on ``path`` that failed with ``error``."""
        number = error.errno or 0
        at = f" at byte {offset}" if offset >= 0 else ""
        message = f"{operation} {path}{at}: errno {number} ({os.strerror(number)})"
        return cls(message, str(path), offset, number)


class CannotEncode(KVDriveError):
    """A key or value is no number, or too large to be stored in fewer bits."""


class FingerprintMismatch(KVDriveError):
    """Intact bytes that another model, configuration or format version wrote."""


class DataDirError(KVDriveError):
    """The data directory cannot be used."""


class DataDirBusy(DataDirError):
    """Another process owns the data directory."""


class DataDirForeign(DataDirError):
    """The path is not a data directory of ours, or belongs to another user."""


class CatalogUnavailable(KVDriveError):
    """The metadata store does not answer."""
