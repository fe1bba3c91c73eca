"""What a tenant may keep: quota, expiry, the audit of a session's bytes, deletion of files that were shared."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kv_services import errors
from kv_services.retention import sweep
from kv_services.sessions import Call
from kv_tier.meta.page_keys import page_keys
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import PAGE
from tests.kv_services.test_session_commands import kvdrive

HELLO = [3, 1, 4, 1, 5, 9, 2, 6]


async def grown(world: World, session_id: str, tokens: list[int] = HELLO, answer: int = 5) -> None:
    await world.client.generate(session_id, token_ids=tokens, max_new_tokens=answer).read()


# ---- quota --------------------------------------------------------------------------------------------------


async def test_a_tenant_at_its_quota_is_refused_and_others_go_on(world: World) -> None:
    await world.stop()
    await world.start(tenant_quota_bytes=6000)
    session = (await world.client.create_session()).session_id
    await grown(world, session, list(range(1, 81)))
    log = world.log_path(session).read_bytes()
    with pytest.raises(errors.QuotaExceeded, match="the quota is 6000: delete sessions") as caught:
        await grown(world, session, list(range(1, 181)))
    assert int(caught.value.metadata["value"]) > int(caught.value.metadata["limit"]) == 6000
    assert world.log_path(session).read_bytes() == log  # nothing was begun
    with pytest.raises(errors.QuotaExceeded):
        await world.client.create_document(token_ids=list(range(1, 200)))
    other = world.client_of("other")
    theirs = (await other.create_session()).session_id
    await other.generate(theirs, token_ids=list(range(1, 181)), max_new_tokens=2).read()
    await world.client.delete(session)
    fresh = (await world.client.create_session()).session_id
    await grown(world, fresh, list(range(1, 181)))


async def test_a_fork_counts_in_full(world: World) -> None:
    await world.stop()
    await world.start(tenant_quota_bytes=11_000)
    session = (await world.client.create_session()).session_id
    await grown(world, session, list(range(1, 161)))  # 41 pages of 100 bytes, and a log
    fork = (await world.client.fork(session)).session_id
    with pytest.raises(errors.QuotaExceeded):
        await grown(world, fork, list(range(1, 41)))
    await world.client.delete(session)
    await grown(world, fork, list(range(1, 41)))


# ---- expiry -------------------------------------------------------------------------------------------------


async def swept(world: World, clock_ms: int) -> int:
    """Sweep with a TTL of 1000 s at a given time."""
    sessions = world.server._sessions
    store = sessions._store
    before, store.clock = store.clock, lambda: clock_ms

    async def delete(tenant: str, session_id: str) -> None:
        await sessions.delete(Call(tenant, "", ""), session_id)

    try:
        return await sweep(store, 1000, delete)
    finally:
        store.clock = before


async def test_sessions_expire_and_documents_after_their_last_session(world: World) -> None:
    document = (await world.client.create_document(token_ids=HELLO * 2)).document.session_id
    session = (await world.client.create_session(document_id=document)).session_id
    await grown(world, session)
    made_ms = (await world.client.get(session)).update_time.ToMilliseconds()
    assert await swept(world, made_ms + 999_000) == 0
    fresh = (await world.client.create_session(document_id=document)).session_id
    catalog = world.server._catalog
    await catalog.update(fresh, updated_ms=made_ms + 500_000)
    assert await swept(world, made_ms + 1_001_000) == 1
    with pytest.raises(errors.SessionNotFound):
        await world.client.get(session)
    assert not world.log_path(session).exists()
    await world.client.get(document)  # still the start of a session
    assert await swept(world, made_ms + 9_000_000) == 2
    assert list((world.data_dir / "sessions").iterdir()) == []
    assert world.engine.sealed == set()


async def test_nothing_expires_while_the_engine_is_gone(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await grown(world, session)
    made_ms = (await world.client.get(session)).update_time.ToMilliseconds()
    await world.engine.stop()
    assert await swept(world, made_ms + 9_000_000) == 0
    await world.engine.start()
    assert await swept(world, made_ms + 9_000_000) == 1


async def test_the_service_sweeps_by_itself(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await world.server._catalog.update(session, updated_ms=1)
    await world.stop()
    await world.start(session_ttl_s=1000, sweep_interval_s=0.01)
    while world.server.num_expired < 1:
        await asyncio.sleep(0)
    assert not world.log_path(session).exists()


@pytest.mark.parametrize(
    "options", [{"tenant_quota_bytes": -1}, {"session_ttl_s": -1}, {"sweep_interval_s": 0.0}]
)
async def test_bad_limits_are_named(world: World, options: dict[str, Any]) -> None:
    await world.stop()
    with pytest.raises(Exception, match=f"{next(iter(options))} is"):
        await world.start(**options)


# ---- what deletion leaves, and the audit --------------------------------------------------------------------


async def test_what_deletion_leaves_beside_goes_when_nobody_has_it(world: World) -> None:
    """The engine names the first other page of each file; the service says which of them nobody owns."""
    session = (await world.client.create_session()).session_id
    await grown(world, session)
    fork = (await world.client.fork(session)).session_id
    await grown(world, fork, [7] * 8)
    salt = world.engine.requests[0]["cache_salt"]
    keys = page_keys(world.engine.requests[1]["input_ids"], PAGE, cache_salt=salt)
    world.engine.left = [(3, keys[3].hex()), (3, "ab" * 32), (9, keys[3].hex())]
    world.engine.drops.clear()
    await world.client.delete(session)
    assert world.engine.drops == []  # every page of it is the fork's as well
    second = (await world.client.fork(fork)).session_id
    await grown(world, second, [9] * 8)
    await grown(world, fork, [8] * 8)
    await world.client.delete(fork)
    assert len(world.engine.drops) == 2
    # the second fork has page 3 at its place; nobody has the others
    assert world.engine.drops[1][1] == ["ab" * 32, keys[3].hex()]


async def test_show_audits_the_bytes_of_a_session(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await grown(world, session)
    fork = (await world.client.fork(session)).session_id
    found = await world.client.storage(fork)
    assert (found.num_spans, found.kv_bytes, found.index_bytes, found.num_shared_pages) == (3, 270, 30, 3)
    assert found.log_bytes == world.log_path(fork).stat().st_size
    shown = await kvdrive(world, "session", "show", fork)
    assert shown.exit_code == 0 and "300 bytes in 3 files" in shown.output
    assert f"{300 + found.log_bytes:,} bytes" in shown.output and "the first 3 with other" in shown.output
    await world.engine.stop()
    shown = await kvdrive(world, "session", "show", fork)
    assert shown.exit_code == 0 and "span files" not in shown.output
    await world.engine.start()
