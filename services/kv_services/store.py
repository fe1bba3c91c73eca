"""Storage of sessions: token logs are the truth, the catalog is their index.

    create, append      log first (fsynced), index later
    open                log; the index is put right when it tells something else
    rebuild             at start: every log is indexed, every index entry without a log goes

Methods may be cancelled at any time: what is written is either whole or repaired by the next `open`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kv_services import conversation as conversations
from kv_services import ids, token_log
from kv_services.conversation import Conversation, State
from kv_services.errors import LogCorrupt, SessionNotFound, StorageFailed
from kv_services.tasks import uninterrupted
from kv_services.token_log import Record
from kv_tier.meta.catalog import Catalog, SessionRow
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.page_keys import page_keys

logger = logging.getLogger(__name__)


@dataclass
class Rebuild:
    """What a start repaired: numbers of sessions, and the ids of those whose logs are damaged."""

    indexed: int = 0
    unlisted: int = 0
    deleted: int = 0
    corrupt: list[str] = field(default_factory=list)


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def keys_of(secret: bytes, conversation: Conversation, page_size: int | None = None) -> list[bytes]:
    """Compute the keys of a session's full pages, for its own page size or another engine's."""
    size = conversation.page_size if page_size is None else page_size
    if size == 0:
        return []
    tokens = conversation.tokens[: conversation.num_computed_tokens]
    return page_keys(tokens, size, cache_salt=ids.cache_salt(secret, conversation.tenant))


class SessionStore:
    """Sessions of one data directory.

    Args:
        data_dir: open in the role "service" (fsck reads through other roles); outlives the store.
        catalog: its index; outlives the store.
        request_ttl_s: how long results of repeated request ids are kept.
        clock: milliseconds since the epoch.
        fs: the system calls of the token logs.
    """

    def __init__(
        self,
        data_dir: DataDir,
        catalog: Catalog,
        request_ttl_s: int,
        clock: Callable[[], int] = now_ms,
        fs: FileSystem = REAL,
    ) -> None:
        self.fs = fs
        self.data_dir, self._request_ttl_s, self.clock = data_dir, request_ttl_s, clock
        self._secret = data_dir.secret()
        self.catalog = catalog
        self._failed_logs: set[str] = set()  # an append failed: the next one writes the file anew

    def salt(self, tenant: str) -> str:
        """Derive the cache salt of a tenant."""
        return ids.cache_salt(self._secret, tenant)

    def salt_id(self, tenant: str) -> str:
        """Name a tenant's salt without telling it; see `ids.salt_id`."""
        return ids.salt_id(self.salt(tenant))

    def new_session_id(self, tenant: str, request_id: str) -> str:
        """Mint a session id; see `ids.new_session_id`."""
        return ids.new_session_id(self._secret, tenant, request_id)

    def exists(self, session_id: str) -> bool:
        """Tell whether there is a log."""
        return self.data_dir.token_log_path(session_id).exists()

    async def create(self, records: Sequence[Record]) -> SessionRow:
        """Create a session from the records of its log, META first.

        Raises:
            StorageFailed: the log cannot be written.
            CatalogUnavailable: the log is there; a repeat of the call finds it, and the next start lists it.
        """
        session_id = str(records[0].head["session_id"])
        path = self.data_dir.token_log_path(session_id)
        size = await asyncio.to_thread(token_log.create, path, records, self.fs)
        return await self.index(conversations.fold(records, size))

    async def read(self, tenant: str, session_id: str) -> tuple[Conversation, SessionRow]:
        """Read a session; may run beside a turn, whose tokens then are not in it.

        Returns:
            The session, and the row that describes it.

        Raises:
            SessionNotFound: the tenant has no such session.
            LogCorrupt: its log is damaged.
            CatalogUnavailable: Redis does not answer.
        """
        found, row = await self._find(tenant, session_id)
        return found, self.row(found, row.num_sealed if row else 0)

    async def open(self, tenant: str, session_id: str) -> Conversation:
        """Read a session that the caller holds, and put its index right.

        Raises:
            As `read`.
        """
        found, row = await self._find(tenant, session_id)
        if row != self.row(found, row.num_sealed if row else 0):
            await self.index(found)
        return found

    async def append(self, conversation: Conversation, record: Record) -> None:
        """Append a record, durably, and add it to `conversation`. The caller holds the session.

        Raises:
            StorageFailed: nothing changed.
        """

        async def whole() -> None:
            session_id = conversation.session_id
            path = self.data_dir.token_log_path(session_id)
            write = token_log.rewrite if session_id in self._failed_logs else token_log.append
            self._failed_logs.add(session_id)
            size = await asyncio.to_thread(write, path, record, conversation.log_bytes, self.fs)
            self._failed_logs.discard(session_id)
            conversation.log_bytes = size
            conversations.apply(conversation, record)

        await uninterrupted(whole())

    async def index(self, conversation: Conversation) -> SessionRow:
        """Bring row and page keys up to the log.

        Raises:
            CatalogUnavailable: the next `open` brings them.
        """
        session_id = conversation.session_id
        keys = await asyncio.to_thread(self.keys, conversation)
        num_written, last = await self.catalog.last_page_key(session_id)
        extends = num_written <= len(keys) and (num_written == 0 or keys[num_written - 1] == last)
        await self.catalog.write_page_keys(
            session_id, keys[num_written:] if extends else keys, num_written if extends else 0
        )
        old = await self.catalog.get(session_id)
        row = self.row(conversation, old.num_sealed if old and extends else 0)
        await self.catalog.put(row)
        return row

    def keys(self, conversation: Conversation, page_size: int | None = None) -> list[bytes]:
        """Compute the keys of a session's full pages; see `keys_of`."""
        return keys_of(self._secret, conversation, page_size)

    async def delete(self, conversation: Conversation) -> None:
        """Remove log and index; the log goes first, so that nothing lists a session that is half gone."""
        path = self.data_dir.token_log_path(conversation.session_id)
        await asyncio.to_thread(token_log.remove, path, self.fs)
        await self.catalog.remove(self.row(conversation, 0))

    async def rows(self, tenant: str) -> AsyncIterator[SessionRow]:
        """Walk through the rows of a tenant's sessions and documents."""
        for kind in conversations.Kind:
            after = ""
            while True:
                rows, after = await self.catalog.list(tenant, kind, after, limit=500)
                for row in rows:
                    yield row
                if not after:
                    break

    async def num_shared(self, conversation: Conversation, keys: Sequence[bytes]) -> int:
        """Count the leading pages of `keys` that some other session or document of the tenant has too."""
        most = 0
        async for row in self.rows(conversation.tenant):
            if row.session_id != conversation.session_id:
                most = max(most, await self.catalog.num_shared(row.session_id, keys))
        return most

    async def unowned(self, conversation: Conversation, places: Sequence[tuple[int, bytes]]) -> list[bytes]:
        """Pick the page keys among `places` (ordinal, key) that no other session or document of the tenant has."""
        left = list(places)
        async for row in self.rows(conversation.tenant):
            if left and row.session_id != conversation.session_id:
                held = await self.catalog.holds(row.session_id, left)
                left = [place for place, taken in zip(left, held, strict=True) if not taken]
        return [key for _, key in left]

    async def rebuild(self) -> Rebuild:
        """Make the catalog tell what the logs tell, and end deletions that a crash cut short.

        Raises:
            CatalogUnavailable: Redis does not answer.
        """
        report = Rebuild()
        for unfinished in (self.data_dir.path / "sessions").glob(f"*{token_log.TEMPORARY_SUFFIX}"):
            unfinished.unlink()
        logged, listed = set(self.data_dir.session_ids()), set()
        async for tenant, kind, member in self.catalog.all_members():
            session_id = member.partition(":")[2]
            listed.add(session_id)
            if session_id not in logged:
                await self.catalog.unlist(tenant, kind, member)
                report.unlisted += 1
        for session_id in sorted(logged):
            if not ids.is_session_id(session_id) or await self._is_indexed(session_id, listed):
                continue
            try:
                found = await self.load(session_id)
            except (LogCorrupt, StorageFailed) as error:
                logger.error("session %s is not served: %s", session_id, error)
                report.corrupt.append(session_id)
                continue
            assert found is not None, session_id
            if found.state is State.CLOSED:
                await self.delete(found)
                report.deleted += 1
            else:
                await self.index(found)
                report.indexed += 1
        return report

    async def recall(self, tenant: str, what: str, request_id: str) -> dict[str, object] | None:
        """Find the stored result of a call; see `remember`."""
        return await self.catalog.recall(tenant, what, request_id)

    async def remember(self, tenant: str, what: str, request_id: str, result: dict[str, object]) -> None:
        """Store the result of a call for repeats of its request id."""
        await self.catalog.remember(tenant, what, request_id, result, self._request_ttl_s)

    async def _find(self, tenant: str, session_id: str) -> tuple[Conversation, SessionRow | None]:
        known = ids.is_session_id(session_id)
        row = await self.catalog.get(session_id) if known else None
        found = await self.load(session_id) if known else None
        if found is None or found.tenant != tenant:
            raise SessionNotFound(
                f"tenant {tenant!r} has no session or document {session_id!r}; list them to see which there are",
                value=session_id,
            )
        return found, row

    async def _is_indexed(self, session_id: str, listed: set[str]) -> bool:
        row = await self.catalog.get(session_id)
        if row is None or session_id not in listed or row.state not in (State.ACTIVE, State.SUSPENDED):
            return False
        return row.log_bytes == self.data_dir.token_log_path(session_id).stat().st_size

    async def load(self, session_id: str) -> Conversation | None:
        """Read a log, whoever's it is; None when there is none.

        Raises:
            LogCorrupt: it is damaged.
            StorageFailed: it cannot be read.
        """
        path = self.data_dir.token_log_path(session_id)
        try:
            records, size = await asyncio.to_thread(token_log.load, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise token_log.storage_failed("read", path, error) from error
        return conversations.of_log(records, size, path)

    def row(self, found: Conversation, num_sealed: int) -> SessionRow:
        """Describe a session as the catalog should."""
        return SessionRow(
            session_id=found.session_id,
            tenant=found.tenant,
            kind=found.kind,
            state=found.state,
            title=found.title,
            labels=found.labels,
            parent_id=found.parent_id,
            created_ms=found.created_ms,
            updated_ms=found.updated_ms,
            num_tokens=len(found.tokens),
            num_turns=len(found.finished_turns),
            page_size=found.page_size,
            num_pages=found.num_pages,
            num_sealed=min(num_sealed, found.num_pages),
            log_bytes=found.log_bytes,
        )
