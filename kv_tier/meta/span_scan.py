"""Find the spans of a data directory at start, and set aside what is none."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kv_tier.meta.data_dir import (
    DataDir,
    is_temporary,
    key_name,
    parse_key_name,
    parse_span_name,
    span_name,
)
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError, FingerprintMismatch
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.kv_codec import KvEncoding
from kv_tier.meta.span_format import SpanHeader
from kv_tier.meta.span_reader import SpanFile


@dataclass(frozen=True)
class BadSpan:
    """Report a file that gave no span.

    Attributes:
        name: file name in ``spans/``.
        reason: what is wrong with it.
        quarantined: it now lies in ``quarantine/``; False when it was left in place (unreadable just
            now, of another format version, or not a span's name) or could not be moved.
    """

    name: str
    reason: str
    quarantined: bool


def scan_spans(
    data_dir: DataDir, *, keyring: Keyring | None = None, fs: FileSystem = REAL
) -> tuple[list[SpanFile], list[BadSpan]]:
    """Open every span, quarantine the invalid ones, remove what an earlier process left half written.

    No bad file stops the scan. Fingerprints are the caller's to compare. One file stays open for each
    span, so the process' limit on open files bounds how many can be found. Moves are not made durable:
    after a crash the next scan makes them again.

    Args:
        data_dir: owned by the caller as the engine.
        keyring: opens encrypted spans; without it they come back closed.

    Returns:
        The spans by ascending id, and the files that gave none.

    Raises:
        ExtentIoError: the directory itself cannot be listed.
    """
    try:
        names = fs.names(data_dir.spans_fd)
    except OSError as error:
        raise ExtentIoError.of(error, "list", data_dir.path / "spans") from error
    spans: list[SpanFile] = []
    bad: list[BadSpan] = []
    for name in names:
        if is_temporary(name):
            found: SpanFile | BadSpan | None = _remove_leftover(data_dir, name, fs)
        else:
            found = _open_one(data_dir, name, keyring, fs)
        if isinstance(found, SpanFile):
            spans.append(found)
        elif found is not None:
            bad.append(found)
    for name in keys_without_span(data_dir, fs):
        with contextlib.suppress(OSError):  # the next start tries again
            fs.unlink(name, dir_fd=data_dir.keys_fd)
    return spans, bad


def keys_without_span(data_dir: DataDir, fs: FileSystem = REAL) -> list[str]:
    """List the wrapped keys whose span is not in ``spans/``: a write or a removal was cut short.

    Raises:
        OSError: the directory cannot be listed.
    """
    if data_dir.keys_fd < 0:
        return []
    names = [(name, parse_key_name(name)) for name in fs.names(data_dir.keys_fd)]
    return [
        name
        for name, span_id in names
        if span_id is not None and not fs.exists(span_name(span_id), dir_fd=data_dir.spans_fd)
    ]


def _remove_leftover(data_dir: DataDir, name: str, fs: FileSystem) -> BadSpan | None:
    try:
        fs.unlink(name, dir_fd=data_dir.spans_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        return BadSpan(name, f"cannot be removed: {error.strerror}", quarantined=False)
    return None


def _open_one(data_dir: DataDir, name: str, keyring: Keyring | None, fs: FileSystem) -> SpanFile | BadSpan:
    span_id = parse_span_name(name)
    if span_id is None:
        return BadSpan(name, "not the name of a span", quarantined=False)
    try:
        span = SpanFile.open(
            data_dir.span_path(span_id),
            dir_fd=data_dir.spans_fd,
            keys_fd=data_dir.keys_fd,
            keyring=keyring,
            fs=fs,
        )
    except CorruptExtentError as error:
        return _quarantine(data_dir, name, str(error), fs)
    except (ExtentIoError, FingerprintMismatch) as error:
        return BadSpan(name, str(error), quarantined=False)
    if span.span_id != span_id:
        span.close()
        return _quarantine(data_dir, name, f"holds span {span.span_id}, its name says {span_id}", fs)
    return span


def quarantine_span(data_dir: DataDir, span: SpanFile, reason: str, *, fs: FileSystem = REAL) -> BadSpan:
    """Move a span found bad while in use out of ``spans/``; it stays open until its owner closes it."""
    return _quarantine(data_dir, span.path.name, reason, fs)


def _quarantine(data_dir: DataDir, name: str, reason: str, fs: FileSystem) -> BadSpan:
    try:
        quarantine_file(data_dir, name, fs=fs)
    except OSError as error:
        return BadSpan(name, f"{reason}; cannot be moved to quarantine: {error.strerror}", quarantined=False)
    return BadSpan(name, reason, quarantined=True)


def quarantine_file(data_dir: DataDir, name: str, *, fs: FileSystem = REAL) -> str:
    """Move a file from ``spans/`` to ``quarantine/`` under a name that no earlier one has; returns that name.

    Its wrapped key, if it has one, is removed: nobody reads it again.

    Raises:
        OSError: it cannot be moved.
    """
    taken, target, number = set(fs.names(data_dir.quarantine_fd)), name, 1
    while target in taken:
        target, number = f"{name}-{number}", number + 1
    fs.rename(name, target, source_dir_fd=data_dir.spans_fd, target_dir_fd=data_dir.quarantine_fd)
    if (span_id := parse_span_name(name)) is not None and data_dir.keys_fd >= 0:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(key_name(span_id), dir_fd=data_dir.keys_fd)
    return target


def supersedes(
    new: SpanHeader, new_keys: Sequence[bytes], old: SpanHeader, old_keys: Sequence[bytes]
) -> bool:
    """Tell whether a later span of the same engine holds every page of an earlier one, no less exact or in fewer bits."""
    return (
        old.sequence < new.sequence
        and old.first_page == new.first_page
        and len(old_keys) <= len(new_keys)
        and list(old_keys) == list(new_keys[: len(old_keys)])
        and (old.num_exact_pages <= new.num_exact_pages or new.encoding != KvEncoding.RAW)
    )
