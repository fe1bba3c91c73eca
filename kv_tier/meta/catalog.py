"""Catalog: the index of sessions in Redis. Everything in it can be rebuilt from the token logs.

Keys, behind the prefix `kvd:<namespace>:` (one namespace per data directory); `{}` is Redis' hash tag:

    {<session id>}:row      hash      SessionRow
    {<session id>}:keys     string    page keys, 32 bytes each, in order
    {<tenant>}:list:<kind>  sorted set, all scores 0, members `<created_ms, 13 digits>:<session id>`
    {<tenant>}:once:<what>:<request id>   string, expires: the stored result of a call
    tenants                 set       tenants that ever had a session

A page key covers all tokens before it. So two sessions share exactly the pages before their first different key.
A row is written before its list entry and removed after it, so that a listed session has a row or is passed over.

Downside: keys of different hash tags change in more than one step; a crash between two steps leaves what the next
start of the service repairs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kv_tier.meta.errors import CatalogUnavailable

KEY_BYTES = 32


@dataclass(frozen=True)
class SessionRow:
    """What the catalog knows of a session.

    Args:
        created_ms, updated_ms: milliseconds since the epoch.
        num_tokens: tokens of finished turns.
        num_pages: full pages of page_size positions; page_size is 0 before an engine served the session.
        num_sealed: leading pages that were durable when last asked.
        log_bytes: length of the token log that this row reflects.
    """

    session_id: str
    tenant: str
    kind: str
    state: str
    title: str
    labels: dict[str, str]
    parent_id: str
    created_ms: int
    updated_ms: int
    num_tokens: int
    num_turns: int
    page_size: int
    num_pages: int
    num_sealed: int
    log_bytes: int

    @property
    def member(self) -> str:
        """The list entry; entries sort by creation."""
        return f"{self.created_ms:013d}:{self.session_id}"


class Catalog:
    """Speaks to one data directory's part of a Redis (7 or later) or Valkey. Close it.

    Args:
        url: redis://, rediss:// or unix:// URL.
        namespace: unique to the data directory.
        timeout_s: for connecting, and for all of one method's answers.

    Every method raises CatalogUnavailable when the server does not answer, or answers with an error.
    """

    def __init__(self, url: str, namespace: str, timeout_s: float = 5.0) -> None:
        # RESP2 keeps the answers alike on every server version; the one retry replaces a connection that went stale.
        # socket_timeout is off: redis-py would send under asyncio.wait_for, which on Python 3.11 loses cancellations.
        self._redis: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 1),
        )
        self._timeout_s = timeout_s
        self._url = url.rpartition("@")[2]
        self._prefix = f"kvd:{namespace}:"

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def ping(self) -> None:
        """Ask whether the server answers."""
        async with self._reached():
            await self._redis.ping()

    async def put(self, row: SessionRow) -> None:
        """Write a row and list it."""
        values = asdict(row) | {"labels": json.dumps(row.labels, ensure_ascii=False)}
        async with self._reached():
            await self._redis.hset(self._row_key(row.session_id), mapping=values)
            await self._redis.sadd(f"{self._prefix}tenants", row.tenant)
            await self._redis.zadd(self._list_key(row.tenant, row.kind), {row.member: 0})

    async def get(self, session_id: str) -> SessionRow | None:
        """Read a row, None when there is none."""
        async with self._reached():
            return _row(await self._redis.hgetall(self._row_key(session_id)))

    async def update(self, session_id: str, **values: int | str) -> None:
        """Change single fields of an existing row."""
        assert values.keys() <= {field.name for field in fields(SessionRow)}, values
        key = self._row_key(session_id)
        async with self._reached():
            if await self._redis.exists(key):
                await self._redis.hset(key, mapping=values)

    async def remove(self, row: SessionRow) -> None:
        """Forget a session: its list entry, row and page keys."""
        async with self._reached():
            await self._redis.zrem(self._list_key(row.tenant, row.kind), row.member)
            await self._redis.delete(self._row_key(row.session_id), self._keys_key(row.session_id))

    async def list(
        self, tenant: str, kind: str, after: str = "", limit: int = 50
    ) -> tuple[list[SessionRow], str]:
        """List a page of rows, newest first.

        Args:
            after: what the previous page returned; empty for the first.
            limit: most rows of the page.

        Returns:
            Rows, and where the next page starts; empty on the last.
        """
        start = f"({after}" if after else "+"
        async with self._reached():
            found = await self._redis.zrange(
                self._list_key(tenant, kind), start, "-", desc=True, bylex=True, offset=0, num=limit + 1
            )
            members = [member.decode() for member in found]
            pipe = self._redis.pipeline(transaction=False)
            for member in members[:limit]:
                pipe.hgetall(self._row_key(member.partition(":")[2]))
            rows = [_row(values) for values in await pipe.execute()]
        return [row for row in rows if row is not None], members[limit - 1] if len(members) > limit else ""

    async def tenants(self) -> Sequence[str]:
        """List the tenants that ever had a session, sorted."""
        async with self._reached():
            return sorted(tenant.decode() for tenant in await self._redis.smembers(f"{self._prefix}tenants"))

    async def all_members(self) -> AsyncIterator[tuple[str, str, str]]:
        """Walk through every list entry of the data directory: tenant, kind, member."""
        for tenant in await self.tenants():
            for kind in ("session", "document"):
                async with self._reached():
                    members = await self._redis.zrange(self._list_key(tenant, kind), 0, -1)
                for member in members:
                    yield tenant, kind, member.decode()

    async def unlist(self, tenant: str, kind: str, member: str) -> None:
        """Forget a list entry and what it names."""
        session_id = member.partition(":")[2]
        async with self._reached():
            await self._redis.zrem(self._list_key(tenant, kind), member)
            await self._redis.delete(self._row_key(session_id), self._keys_key(session_id))

    async def stored_ids(self) -> set[str]:
        """Walk through all keys of the data directory; return the sessions that have a row or page keys, listed or not."""
        found: set[str] = set()
        async with self._reached():
            async for key in self._redis.scan_iter(match=f"{self._prefix}{{*", count=1000):
                name, _, what = key.decode().removeprefix(self._prefix).partition("}:")
                if what in ("row", "keys"):
                    found.add(name.removeprefix("{"))
        return found

    async def forget(self, session_id: str) -> None:
        """Forget the row and page keys of a session that no list names."""
        async with self._reached():
            await self._redis.delete(self._row_key(session_id), self._keys_key(session_id))

    async def page_keys(self, session_id: str) -> Sequence[bytes]:
        """Read a session's page keys, 32 bytes each."""
        async with self._reached():
            blob = cast(bytes, await self._redis.get(self._keys_key(session_id)) or b"")
        return [blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES)]

    async def last_page_key(self, session_id: str) -> tuple[int, bytes | None]:
        """Read how many page keys a session has, and the last one."""
        key = self._keys_key(session_id)
        async with self._reached():
            num_keys = int(await self._redis.strlen(key)) // KEY_BYTES
            last = await self._redis.getrange(key, (num_keys - 1) * KEY_BYTES, num_keys * KEY_BYTES - 1)
        return num_keys, last if num_keys else None

    async def write_page_keys(self, session_id: str, keys: Sequence[bytes], first: int) -> None:
        """Write page keys from ordinal `first` on; `first` 0 replaces the list."""
        assert all(len(key) == KEY_BYTES for key in keys)
        key = self._keys_key(session_id)
        async with self._reached():
            if first == 0:
                await self._redis.set(key, b"".join(keys))
            elif keys:
                await self._redis.setrange(key, first * KEY_BYTES, b"".join(keys))

    async def num_shared(self, session_id: str, keys: Sequence[bytes]) -> int:
        """Count the leading pages of `keys` that another session has too.

        Bisects: pages before a shared one are shared.
        """
        key = self._keys_key(session_id)
        low, high = 0, len(keys)
        async with self._reached():
            while low < high:
                middle = (low + high) // 2
                theirs = await self._redis.getrange(key, middle * KEY_BYTES, (middle + 1) * KEY_BYTES - 1)
                low, high = (middle + 1, high) if theirs == keys[middle] else (low, middle)
        return low

    async def holds(self, session_id: str, places: Sequence[tuple[int, bytes]]) -> Sequence[bool]:
        """Tell for each (ordinal, page key) whether a session has that page."""
        key = self._keys_key(session_id)
        async with self._reached():
            pipe = self._redis.pipeline(transaction=False)
            for ordinal, _ in places:
                pipe.getrange(key, ordinal * KEY_BYTES, (ordinal + 1) * KEY_BYTES - 1)
            found = await pipe.execute()
        return [theirs == wanted for theirs, (_, wanted) in zip(found, places, strict=True)]

    async def remember(
        self, tenant: str, what: str, request_id: str, result: dict[str, Any], ttl_s: int
    ) -> None:
        """Store the result of a call for repeats of its request_id."""
        async with self._reached():
            await self._redis.set(self._once_key(tenant, what, request_id), json.dumps(result), ex=ttl_s)

    async def recall(self, tenant: str, what: str, request_id: str) -> dict[str, Any] | None:
        """Find the stored result of a call."""
        async with self._reached():
            found = await self._redis.get(self._once_key(tenant, what, request_id))
        return json.loads(found) if found is not None else None

    def _row_key(self, session_id: str) -> str:
        return f"{self._prefix}{{{session_id}}}:row"

    def _keys_key(self, session_id: str) -> str:
        return f"{self._prefix}{{{session_id}}}:keys"

    def _list_key(self, tenant: str, kind: str) -> str:
        return f"{self._prefix}{{{tenant}}}:list:{kind}"

    def _once_key(self, tenant: str, what: str, request_id: str) -> str:
        return f"{self._prefix}{{{tenant}}}:once:{what}:{request_id}"

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (RedisError, OSError) as error:
            detail = str(error) or f"no answer in {self._timeout_s:g} s"
            raise CatalogUnavailable(
                f"Redis at {self._url} does not answer ({type(error).__name__}: {detail}); start it, then repeat the call"
            ) from error


def _row(values: dict[bytes, bytes]) -> SessionRow | None:
    if not values:
        return None
    texts = {name.decode(): value.decode() for name, value in values.items()}
    kinds = {field.name: field.type for field in fields(SessionRow)}
    if not kinds.keys() <= texts.keys():
        return None
    parsed: dict[str, Any] = {
        name: int(texts[name]) if kind == "int" else texts[name] for name, kind in kinds.items()
    }
    return SessionRow(**parsed | {"labels": json.loads(texts["labels"])})
