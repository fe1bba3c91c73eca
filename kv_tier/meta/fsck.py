"""Check the span files of a data directory, byte by byte, and repair what can be repaired.

    check_spans     reads everything, changes nothing
    repair_spans    one rename or unlink per finding, so that a crash between two of them is harmless

A damaged span is set aside, never mended: its pages are computed again from tokens. `kv_services.fsck` does the same for
token logs and the catalog.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kv_tier.meta.data_dir import DataDir, is_temporary, key_name, parse_span_name
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError, FingerprintMismatch
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.span_format import SpanHeader
from kv_tier.meta.span_reader import SpanFile
from kv_tier.meta.span_scan import keys_without_span, quarantine_file, supersedes


class Repair(enum.Enum):
    """What `--repair` does about a finding; the value says it in the table."""

    NONE = "-"
    REMOVE = "remove the file"
    SET_ASIDE = "move to quarantine/"
    CUT_TAIL = "cut off the torn tail"
    FINISH_DELETE = "end the deletion"
    INDEX = "index the log again"
    UNLIST = "forget the entry"


@dataclass(frozen=True)
class Finding:
    """Report one thing that is not as it should be, or, as a note, that is worth knowing.

    Attributes:
        kind: a stable word.
        where: file or session.
        detail: what was found; with the remedy where no repair helps.
        repair: what `--repair` does about it.
    """

    kind: str
    where: str
    detail: str
    repair: Repair = Repair.NONE


@dataclass(frozen=True)
class SpanSummary:
    """Remember what an intact span holds, without keeping it open."""

    header: SpanHeader
    keys: tuple[bytes, ...]


@dataclass
class SpanReport:
    """What `check_spans` found.

    Attributes:
        findings: damage and leftovers. notes: what is fine and still worth a line.
        spans: intact spans by id. num_bytes: bytes of all files in ``spans/``.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    spans: dict[int, SpanSummary] = field(default_factory=dict)
    num_bytes: int = 0

    def num_durable(self, keys: Sequence[bytes]) -> int:
        """Return the longest leading run of ``keys`` that the spans of one engine hold."""
        return max((_leading_run(keys, held) for held in self.keys_by_engine().values()), default=0)

    def keys_by_engine(self) -> dict[bytes, set[bytes]]:
        """Return the page keys that each fingerprint's spans hold."""
        held: dict[bytes, set[bytes]] = {}
        for span in self.spans.values():
            held.setdefault(span.header.fingerprint, set()).update(span.keys)
        return held

    def holders(self, keys: Iterable[bytes]) -> list[int]:
        """Return the ids of the spans that hold any of ``keys``."""
        wanted = set(keys)
        return [span_id for span_id, span in self.spans.items() if not wanted.isdisjoint(span.keys)]


def check_spans(
    data_dir: DataDir,
    *,
    live: bool = False,
    fs: FileSystem = REAL,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SpanReport:
    """Read and verify every byte in ``spans/``; changes nothing.

    Args:
        data_dir: open in any role.
        live: an engine runs on it: files may come and go, and temporary ones are being written.
        progress: called with (bytes read, bytes in all) after each file.

    Raises:
        ExtentIoError: a directory cannot be listed.
    """
    report = SpanReport()
    names = _list(fs, data_dir, data_dir.spans_fd, "spans")
    sizes = {name: _size(data_dir, name) for name in names}
    report.num_bytes = sum(sizes.values())
    done = 0
    for name in names:
        if is_temporary(name):
            if not live:
                detail = "an engine stopped while it wrote this file"
                report.findings.append(Finding("leftover", f"spans/{name}", detail, Repair.REMOVE))
        else:
            _check_one(data_dir, name, fs, report)
        done += sizes[name]
        progress(done, report.num_bytes)
    if not live:
        _find_superseded(report)
        for name in keys_without_span(data_dir, fs):
            detail = "the wrapped key of a span that is not there"
            report.findings.append(Finding("leftover", f"keys/{name}", detail, Repair.REMOVE))
    kept = _list(fs, data_dir, data_dir.quarantine_fd, "quarantine")
    if kept:
        detail = f"{len(kept)} files: damaged, their pages are recomputed; delete them after a look"
        report.notes.append(Finding("quarantine", "quarantine/", detail))
    _note_engines(report)
    return report


def repair_spans(data_dir: DataDir, findings: Iterable[Finding], *, fs: FileSystem = REAL) -> None:
    """Carry out the repairs of ``check_spans``' findings, durably.

    Args:
        data_dir: owned by the caller as the engine.

    Raises:
        ExtentIoError: a file cannot be moved or removed.
    """
    for finding in findings:
        directory, _, name = finding.where.partition("/")
        try:
            if finding.repair is Repair.REMOVE:
                _remove(data_dir, directory, name, fs)
            elif finding.repair is Repair.SET_ASIDE:
                quarantine_file(data_dir, name, fs=fs)
        except OSError as error:
            raise ExtentIoError.of(error, "repair", data_dir.path / finding.where) from error
    for dir_fd in (data_dir.keys_fd, data_dir.quarantine_fd, data_dir.spans_fd):
        try:
            fs.fsync_dir(dir_fd)
        except OSError as error:
            raise ExtentIoError.of(error, "fsync the directory of", data_dir.span_path(0)) from error


def _remove(data_dir: DataDir, directory: str, name: str, fs: FileSystem) -> None:
    """Remove a file of ``keys/`` or ``spans/``, a span's wrapped key before it."""
    if directory == "keys":
        fs.unlink(name, dir_fd=data_dir.keys_fd)
        return
    if (span_id := parse_span_name(name)) is not None:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(key_name(span_id), dir_fd=data_dir.keys_fd)
    fs.unlink(name, dir_fd=data_dir.spans_fd)


def _list(fs: FileSystem, data_dir: DataDir, dir_fd: int, name: str) -> list[str]:
    try:
        return fs.names(dir_fd)
    except OSError as error:
        raise ExtentIoError.of(error, "list", data_dir.path / name) from error


def _size(data_dir: DataDir, name: str) -> int:
    try:
        return (data_dir.path / "spans" / name).lstat().st_size
    except OSError:
        return 0  # gone since it was listed; whatever else is wrong, opening it tells


def _check_one(data_dir: DataDir, name: str, fs: FileSystem, report: SpanReport) -> None:
    where = f"spans/{name}"
    span_id = parse_span_name(name)
    if span_id is None:
        report.notes.append(Finding("foreign-file", where, "not the name of a span; engines pass it over"))
        return
    try:
        span = SpanFile.open(data_dir.span_path(span_id), dir_fd=data_dir.spans_fd, fs=fs)  # needs no key
    except FingerprintMismatch as error:
        report.notes.append(Finding("other-version", where, str(error)))
        return
    except CorruptExtentError as error:
        report.findings.append(Finding("span-damaged", where, str(error), Repair.SET_ASIDE))
        return
    except ExtentIoError as error:
        if fs.exists(name, dir_fd=data_dir.spans_fd):
            report.findings.append(Finding("span-unreadable", where, str(error), Repair.SET_ASIDE))
        return
    try:
        if span.header.encrypted and not _has_key(data_dir, span_id, fs):
            if fs.exists(name, dir_fd=data_dir.spans_fd):  # else a live engine has just deleted both
                detail = "its wrapped key is gone: nobody can read it"
                report.findings.append(Finding("key-missing", where, detail, Repair.REMOVE))
            return
        _check_open_span(span, span_id, where, report)
    finally:
        span.close()


def _has_key(data_dir: DataDir, span_id: int, fs: FileSystem) -> bool:
    return data_dir.keys_fd >= 0 and fs.exists(key_name(span_id), dir_fd=data_dir.keys_fd)


def _check_open_span(span: SpanFile, span_id: int, where: str, report: SpanReport) -> None:
    if span.span_id != span_id:
        detail = f"holds span {span.span_id}, its name says {span_id}"
        report.findings.append(Finding("span-misnamed", where, detail, Repair.SET_ASIDE))
    elif problems := span.verify():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        report.findings.append(Finding("span-damaged", where, problems[0] + more, Repair.SET_ASIDE))
    else:
        report.spans[span_id] = SpanSummary(span.header, tuple(span.keys))


def _find_superseded(report: SpanReport) -> None:
    """Find spans that a later one replaces: a crash came between publishing the one and removing the other."""
    by_first: dict[bytes, list[int]] = {}
    for span_id, span in sorted(report.spans.items()):
        by_first.setdefault(span.keys[0], []).append(span_id)
    for ids in by_first.values():
        for position, old in enumerate(ids):
            newer = next(
                (new for new in ids[position + 1 :] if _replaces(report.spans[new], report.spans[old])), None
            )
            if newer is not None:
                where, detail = f"spans/{old:016x}.span", f"span {newer} holds all of its pages"
                report.findings.append(Finding("superseded", where, detail, Repair.REMOVE))
                del report.spans[old]


def _replaces(new: SpanSummary, old: SpanSummary) -> bool:
    same_engine = new.header.fingerprint == old.header.fingerprint
    return same_engine and supersedes(new.header, new.keys, old.header, old.keys)


def _note_engines(report: SpanReport) -> None:
    engines = {span.header.fingerprint for span in report.spans.values()}
    if len(engines) > 1:
        detail = f"spans of {len(engines)} models or layouts; an engine reads its own only"
        report.notes.append(Finding("engines", "spans/", detail))


def _leading_run(keys: Sequence[bytes], held: set[bytes]) -> int:
    return next((n for n, key in enumerate(keys) if key not in held), len(keys))
