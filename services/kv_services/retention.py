"""How much a tenant may keep, and for how long. Nothing here is on by default.

quota   log bytes + pages x bytes per page, over the tenant's sessions and documents; a fork counts in full, so that deleting
        what it came from never takes a tenant over its quota
TTL     sessions whose last change is older are deleted as if their tenant had; a document lives while a session that started
        from it does
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kv_services.conversation import Kind
from kv_services.engine import EngineInfo
from kv_services.errors import (
    EngineUnavailable,
    LogCorrupt,
    QuotaExceeded,
    SessionBusy,
    SessionNotFound,
    StorageFailed,
)
from kv_services.store import SessionStore
from kv_tier.meta.catalog import SessionRow


@dataclass(frozen=True)
class Quota:
    """Holds every tenant to the same number of bytes.

    Args:
        limit_bytes: 0 sets no limit.
    """

    store: SessionStore
    limit_bytes: int

    async def require(self, tenant: str, num_new_tokens: int, info: EngineInfo) -> None:
        """Refuse what would take a tenant over its quota.

        Raises:
            QuotaExceeded: it would.
        """
        if not self.limit_bytes:
            return
        used = await self.used_bytes(tenant, info)
        asked = used + -(-num_new_tokens // info.page_size) * info.page_bytes
        if asked > self.limit_bytes:
            raise QuotaExceeded(
                f"tenant {tenant!r} uses {used} bytes, with {num_new_tokens} more tokens {asked}; the quota is "
                f"{self.limit_bytes}: delete sessions or documents, or raise --tenant-quota-bytes",
                value=asked,
                limit=self.limit_bytes,
            )

    async def used_bytes(self, tenant: str, info: EngineInfo) -> int:
        """Add up what a tenant's sessions and documents take, forks in full."""
        return sum([row.log_bytes + row.num_pages * info.page_bytes async for row in self.store.rows(tenant)])


Delete = Callable[[str, str], Awaitable[object]]


async def sweep(store: SessionStore, ttl_s: int, delete: Delete) -> int:
    """Delete what nobody changed for ``ttl_s`` seconds; what is busy, or cannot be deleted now, waits for the next sweep.

    Args:
        delete: called with tenant and session id.

    Returns:
        How many sessions and documents are gone.

    Raises:
        CatalogUnavailable: Redis does not answer.
    """
    oldest_ms = store.clock() - 1000 * ttl_s
    num_deleted = 0
    for tenant in await store.catalog.tenants():
        rows = [row async for row in store.rows(tenant)]
        expired = [row for row in rows if row.updated_ms < oldest_ms]
        for row in sorted(expired, key=lambda row: row.kind == Kind.DOCUMENT):  # documents last
            if _is_needed(row, rows):
                continue
            try:
                await delete(tenant, row.session_id)
            except EngineUnavailable:
                return num_deleted
            except (SessionBusy, SessionNotFound, LogCorrupt, StorageFailed):
                continue
            rows.remove(row)
            num_deleted += 1
    return num_deleted


def _is_needed(row: SessionRow, rows: list[SessionRow]) -> bool:
    return row.kind == Kind.DOCUMENT and any(other.parent_id == row.session_id for other in rows)
