"""Check token logs and the catalog against each other and against the spans; repair; rebuild the catalog.

files are the truth     log + spans  -->  row, page keys, list entry
check_sessions          reads, changes nothing
repair_sessions         carries out what the findings say
rebuild_catalog         writes every entry anew: for a Redis that was emptied, or restored from an older copy
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kv_services import conversation as conversations
from kv_services import ids, token_log
from kv_services.conversation import Conversation, State
from kv_services.errors import LogCorrupt
from kv_services.store import SessionStore, keys_of
from kv_tier.meta.catalog import Catalog, SessionRow
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.embedded_valkey import EmbeddedValkey
from kv_tier.meta.fsck import Finding, Repair, SpanReport

_APPEND_ONLY = "appendonlydir"


@dataclass
class SessionReport:
    """What `check_sessions` found.

    Attributes:
        findings, notes: as in `SpanReport`.
        sessions: the intact logs by session id. num_durable: leading pages of each that spans hold.
        unreferenced: ids of the spans that hold no page of any session.
        compared: whether there was a catalog to compare with.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    sessions: dict[str, Conversation] = field(default_factory=dict)
    num_durable: dict[str, int] = field(default_factory=dict)
    unreferenced: list[int] = field(default_factory=list)
    compared: bool = False


@dataclass(frozen=True)
class Rebuilt:
    """What `rebuild_catalog` did, in sessions and documents; `corrupt` names the damaged logs that it left out."""

    indexed: int
    deleted: int
    forgotten: int
    corrupt: list[str]


@contextlib.contextmanager
def catalog_url(data_dir: DataDir, redis_url: str, *, change: bool) -> Iterator[str | None]:
    """Find the catalog of a data directory; None when there is none to look at.

    Args:
        data_dir: with `change` owned by the caller as the service.
        redis_url: as the service has it; empty for the embedded Valkey, which is started when it does not run: on a copy of
            its files, so that a mere check changes nothing, or with `change` on the files themselves.
    """
    directory = data_dir.catalog_path
    if redis_url:
        yield redis_url
    elif (url := EmbeddedValkey.running(directory)) is not None:
        yield url
    elif change:
        with EmbeddedValkey(directory) as server:
            yield server.url
    elif (directory / _APPEND_ONLY).is_dir():
        with tempfile.TemporaryDirectory(prefix="kvd-") as copy:
            shutil.copytree(directory / _APPEND_ONLY, Path(copy, _APPEND_ONLY))
            with EmbeddedValkey(Path(copy)) as server:
                yield server.url
    else:
        yield None


@contextlib.asynccontextmanager
async def open_catalog(data_dir: DataDir, redis_url: str, *, change: bool) -> AsyncIterator[Catalog | None]:
    """Connect to the catalog that `catalog_url` finds.

    Raises:
        CatalogUnavailable: it does not answer.
    """
    with catalog_url(data_dir, redis_url, change=change) as url:
        if url is None:
            yield None
            return
        async with Catalog(url, ids.catalog_namespace(data_dir.secret())) as catalog:
            await catalog.ping()
            yield catalog


async def check_sessions(
    data_dir: DataDir, catalog: Catalog | None, spans: SpanReport, *, live: bool = False
) -> SessionReport:
    """Read every token log, compare it with the catalog and with the spans.

    Args:
        catalog: None compares logs and spans only.
        spans: what `check_spans` found.
        live: a service runs here: logs grow, and entries lag behind them.

    Raises:
        CatalogUnavailable: the catalog stopped answering.
        DataDirError: the secret or the directory cannot be read.
    """
    report = SessionReport()
    for name in sorted(os.listdir(data_dir.sessions_fd)):
        _check_log_file(data_dir, name, report, live=live)
    referenced = _check_spans_of(data_dir, spans, report)
    report.unreferenced = [
        span_id for span_id, span in spans.spans.items() if referenced.isdisjoint(span.keys)
    ]
    _note_unreferenced(spans, report)
    if catalog is not None and not live:
        report.compared = True
        await _compare(_store(data_dir, catalog), report)
    return report


async def repair_sessions(
    data_dir: DataDir, catalog: Catalog | None, report: SessionReport, *, spans: SpanReport
) -> None:
    """Carry out the repairs of `check_sessions`' findings.

    Args:
        data_dir: owned by the caller as the service.
        catalog: None repairs logs only.
        spans: the spans that are left after their own repair.
    """
    directory = data_dir.path / "sessions"
    for finding in report.findings:
        if finding.repair is Repair.REMOVE:
            token_log.remove(directory / finding.where.partition("/")[2])
        elif finding.repair is Repair.CUT_TAIL:
            session = report.sessions[Path(finding.where).stem]
            token_log.cut_tail(data_dir.token_log_path(session.session_id), session.log_bytes)
        elif finding.repair is Repair.FINISH_DELETE and catalog is None:
            token_log.remove(data_dir.token_log_path(Path(finding.where).stem))
    if catalog is None:
        return
    store = _store(data_dir, catalog)
    for finding in report.findings:
        if finding.repair is Repair.FINISH_DELETE:
            await store.delete(report.sessions[Path(finding.where).stem])
        elif finding.repair is Repair.INDEX:
            await _index(store, report.sessions[finding.where], spans)
        elif finding.repair is Repair.UNLIST:
            await _forget(catalog, finding.where)


async def rebuild_catalog(data_dir: DataDir, catalog: Catalog, spans: SpanReport) -> Rebuilt:
    """Write every entry of the catalog anew, from the token logs and the spans; forget entries without a log.

    Args:
        data_dir: owned by the caller as the service.

    Raises:
        CatalogUnavailable: the catalog stopped answering; repeat.
    """
    store = _store(data_dir, catalog)
    logged = set(data_dir.session_ids())
    gone = [entry async for entry in catalog.all_members() if entry[2].partition(":")[2] not in logged]
    for tenant, kind, member in gone:
        await catalog.unlist(tenant, kind, member)
    stray = await catalog.stored_ids() - logged
    for session_id in stray:
        await catalog.forget(session_id)
    indexed, deleted, corrupt = 0, 0, []
    for session_id in sorted(logged):
        try:
            found = await store.load(session_id)
        except LogCorrupt:
            corrupt.append(session_id)
            continue
        assert found is not None, session_id
        if found.state is State.CLOSED:
            await store.delete(found)
            deleted += 1
        else:
            await _index(store, found, spans)
            indexed += 1
    return Rebuilt(indexed, deleted, len(gone) + len(stray), corrupt)


def _store(data_dir: DataDir, catalog: Catalog) -> SessionStore:
    return SessionStore(data_dir, catalog, request_ttl_s=1)


async def _index(store: SessionStore, found: Conversation, spans: SpanReport) -> None:
    keys = store.keys(found)
    await store.catalog.write_page_keys(found.session_id, keys, 0)
    await store.catalog.put(store.row(found, spans.num_durable(keys)))


async def _forget(catalog: Catalog, session_id: str) -> None:
    async for tenant, kind, member in catalog.all_members():
        if member.partition(":")[2] == session_id:
            await catalog.unlist(tenant, kind, member)
    await catalog.forget(session_id)


# ---- logs ---------------------------------------------------------------------------------------------------


def _check_log_file(data_dir: DataDir, name: str, report: SessionReport, *, live: bool) -> None:
    where = f"sessions/{name}"
    if name.endswith(token_log.TEMPORARY_SUFFIX):
        if not live:
            report.findings.append(
                Finding("leftover", where, "a service stopped while it created this log", Repair.REMOVE)
            )
        return
    if not name.endswith(".log"):
        report.notes.append(Finding("foreign-file", where, "not the name of a token log"))
        return
    path = data_dir.path / "sessions" / name
    try:
        records, size = token_log.load(path)
        found = conversations.of_log(records, size, path)
    except FileNotFoundError:
        return  # deleted while we look
    except (LogCorrupt, OSError) as error:
        report.findings.append(Finding("log-damaged", where, str(error)))
        return
    _check_log(data_dir, found, path, report, live=live)


def _check_log(
    data_dir: DataDir, found: Conversation, path: Path, report: SessionReport, *, live: bool
) -> None:
    where, salt = f"sessions/{path.name}", ids.cache_salt(data_dir.secret(), found.tenant)
    if path.stem != found.session_id:
        detail = f"holds session {found.session_id}: give the file that name"
        report.findings.append(Finding("log-misnamed", where, detail))
        return
    report.sessions[found.session_id] = found
    if found.salt_id not in ("", ids.salt_id(salt)):
        detail = "was written under another secret, so that its pages are not found: restore `secret` from a backup"
        report.findings.append(Finding("log-secret", where, detail))
    if live:
        return
    if (num_torn := path.stat().st_size - found.log_bytes) > 0:
        detail = f"{num_torn} bytes of a record that was never acknowledged"
        report.findings.append(Finding("log-torn", where, detail, Repair.CUT_TAIL))
    if found.state is State.CLOSED:
        detail = "a deletion was cut short"
        report.findings.append(Finding("delete-unfinished", where, detail, Repair.FINISH_DELETE))


# ---- spans --------------------------------------------------------------------------------------------------


def _check_spans_of(data_dir: DataDir, spans: SpanReport, report: SessionReport) -> set[bytes]:
    """Count the durable pages of every session; return all page keys of all sessions."""
    secret = data_dir.secret()
    referenced: set[bytes] = set()
    short = []
    for session_id, found in report.sessions.items():
        keys = keys_of(secret, found)
        referenced.update(keys)
        report.num_durable[session_id] = spans.num_durable(keys)
        if found.state is State.SUSPENDED and report.num_durable[session_id] < len(keys):
            short.append(session_id)
    if short:
        detail = f"{len(short)} suspended sessions whose pages are not all here; their next turn computes them again"
        report.notes.append(Finding("pages-gone", short[0], detail))
    return referenced


def _note_unreferenced(spans: SpanReport, report: SessionReport) -> None:
    if report.unreferenced:
        num_bytes = sum(spans.spans[span_id].header.file_bytes for span_id in report.unreferenced)
        detail = (
            f"{len(report.unreferenced)} spans, {num_bytes:,} bytes, of no session of the service: plain clients', withdrawn "
            "turns', or a crash's; the engine evicts them when it needs room, --repair --unreferenced removes them"
        )
        report.notes.append(Finding("unreferenced", "spans/", detail))


# ---- catalog ------------------------------------------------------------------------------------------------


async def _compare(store: SessionStore, report: SessionReport) -> None:
    catalog = store.catalog
    listed: dict[str, tuple[str, str, str]] = {}
    async for entry in catalog.all_members():
        listed[entry[2].partition(":")[2]] = entry
    logged = {Path(name).stem for name in os.listdir(store.data_dir.sessions_fd) if name.endswith(".log")}
    for session_id in sorted((listed.keys() | await catalog.stored_ids()) - logged):
        detail = "the catalog has an entry and there is no token log"
        report.findings.append(Finding("catalog-dangling", session_id, detail, Repair.UNLIST))
    for session_id, found in sorted(report.sessions.items()):
        if found.state is State.CLOSED:
            continue
        problem = await _entry_problem(store, found, listed.get(session_id), report.num_durable[session_id])
        if problem is not None:
            report.findings.append(Finding(*problem, Repair.INDEX))


async def _entry_problem(
    store: SessionStore, found: Conversation, entry: tuple[str, str, str] | None, num_durable: int
) -> tuple[str, str, str] | None:
    """Compare the catalog's entry of a session with what it should be; returns kind, session and detail."""
    session_id = found.session_id
    row = await store.catalog.get(session_id)
    if row is None or entry is None:
        return "catalog-missing", session_id, "the catalog does not list this session"
    expected = store.row(found, row.num_sealed)
    if row.num_sealed > num_durable:
        detail = f"the catalog says that {row.num_sealed} pages are durable, {num_durable} are"
        return "catalog-sealed", session_id, detail
    if row != expected or entry != (row.tenant, row.kind, row.member):
        return "catalog-stale", session_id, _difference(row, expected)
    if list(await store.catalog.page_keys(session_id)) != store.keys(found):
        return "catalog-stale", session_id, "the catalog's page keys are not those of the log"
    return None


def _difference(row: SessionRow, expected: SessionRow) -> str:
    names = [name for name, value in vars(expected).items() if vars(row)[name] != value]
    shown = ", ".join(f"{name} {vars(row)[name]!r} for {vars(expected)[name]!r}" for name in names[:3])
    return f"the catalog's entry is older than the log: {shown or 'listed under another name'}"


def check_unreferenced(report: SessionReport, spans: SpanReport) -> Iterable[Finding]:
    """Turn the spans of no session into findings whose repair removes them."""
    for span_id in report.unreferenced:
        detail = f"{spans.spans[span_id].header.file_bytes:,} bytes of no session"
        yield Finding("unreferenced", f"spans/{span_id:016x}.span", detail, Repair.REMOVE)
