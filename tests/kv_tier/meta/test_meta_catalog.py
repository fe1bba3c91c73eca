import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kv_tier.meta.catalog import Catalog, SessionRow
from kv_tier.meta.embedded_valkey import EmbeddedValkey
from kv_tier.meta.errors import CatalogUnavailable, ConfigError

pytestmark = pytest.mark.redis

ROW = SessionRow(
    session_id="s1", tenant="t", kind="session", state="active", title="títle", labels={"a": "b"}, parent_id="",
    created_ms=5, updated_ms=6, num_tokens=9, num_turns=1, page_size=4, num_pages=2, num_sealed=1, log_bytes=99,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    with EmbeddedValkey(path) as server:
        yield server
    shutil.rmtree(path)


@pytest.fixture
async def catalog(server: EmbeddedValkey) -> AsyncIterator[Catalog]:
    async with Catalog(server.url, "n1") as catalog:
        await catalog._redis.flushall()
        yield catalog


def row(number: int, **values: object) -> SessionRow:
    return replace(ROW, session_id=f"s{number}", created_ms=number, **values)  # type: ignore[arg-type]  # test values


def key(*path: int) -> bytes:
    return bytes(path).ljust(32, b"\0")


async def test_row_round_trip_update_remove(catalog: Catalog) -> None:
    assert await catalog.get("s1") is None
    await catalog.put(ROW)
    assert await catalog.get("s1") == ROW
    await catalog.update("s1", num_sealed=2, state="suspended")
    assert await catalog.get("s1") == replace(ROW, num_sealed=2, state="suspended")
    await catalog.update("s2", num_sealed=2)  # no row: nothing to change
    assert await catalog.get("s2") is None
    await catalog.write_page_keys("s1", [key(1)], 0)
    await catalog.remove(ROW)
    assert await catalog.get("s1") is None and await catalog.page_keys("s1") == []
    assert await catalog.list("t", "session") == ([], "")


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
async def test_pages_cover_everything_once_newest_first(catalog: Catalog, limit: int) -> None:
    for number in (3, 1, 5, 2, 4):
        await catalog.put(row(number))
    await catalog.put(row(9, tenant="u"))
    await catalog.put(row(8, kind="document"))
    seen, after, num_pages = [], "", 0
    while num_pages == 0 or after:
        rows, after = await catalog.list("t", "session", after, limit)
        seen += [found.session_id for found in rows]
        num_pages += 1
    assert seen == ["s5", "s4", "s3", "s2", "s1"]
    assert num_pages == -(-5 // limit)


async def test_listing_survives_changes_between_pages(catalog: Catalog) -> None:
    for number in range(6):
        await catalog.put(row(number))
    first, after = await catalog.list("t", "session", limit=2)
    await catalog.remove(row(4))
    await catalog.put(row(7))
    second, _ = await catalog.list("t", "session", after, limit=10)
    assert [found.session_id for found in [*first, *second]] == ["s5", "s4", "s3", "s2", "s1", "s0"]


async def test_all_members_and_unlist(catalog: Catalog) -> None:
    for made in (row(1), row(2, tenant="u"), row(3, kind="document")):
        await catalog.put(made)
    members = [member async for member in catalog.all_members()]
    assert members == [
        ("t", "session", row(1).member), ("t", "document", row(3).member), ("u", "session", row(2).member)
    ]  # fmt: skip
    await catalog.unlist(*members[0])
    assert await catalog.get("s1") is None
    assert len([member async for member in catalog.all_members()]) == 2


async def test_page_keys_are_appended_and_replaced(catalog: Catalog) -> None:
    keys = [key(n) for n in range(1, 6)]
    assert await catalog.last_page_key("s1") == (0, None)
    await catalog.write_page_keys("s1", keys[:2], 0)
    await catalog.write_page_keys("s1", keys[2:], 2)
    await catalog.write_page_keys("s1", [], 5)
    assert await catalog.page_keys("s1") == keys
    assert await catalog.last_page_key("s1") == (5, keys[4])
    await catalog.write_page_keys("s1", keys[:1], 0)
    assert await catalog.page_keys("s1") == keys[:1]


@pytest.mark.parametrize("num_shared", range(6))
async def test_num_shared_finds_the_first_difference(catalog: Catalog, num_shared: int) -> None:
    mine = [key(n) for n in range(5)]
    theirs = [*mine[:num_shared], *(key(9, n) for n in range(7))]
    await catalog.write_page_keys("s2", theirs, 0)
    assert await catalog.num_shared("s2", mine) == num_shared
    assert await catalog.num_shared("s2", []) == 0
    assert await catalog.num_shared("absent", mine) == 0


async def test_results_are_remembered_for_a_while(catalog: Catalog) -> None:
    await catalog.remember("t", "create", "r", {"session_id": "s"}, 60)
    assert await catalog.recall("t", "create", "r") == {"session_id": "s"}
    for where in (("u", "create", "r"), ("t", "delete", "r"), ("t", "create", "q")):
        assert await catalog.recall(*where) is None
    assert 0 < await catalog._redis.ttl(catalog._once_key("t", "create", "r")) <= 60


async def test_one_hash_tag_per_session_and_namespaces_apart(
    catalog: Catalog, server: EmbeddedValkey
) -> None:
    await catalog.put(ROW)
    await catalog.write_page_keys("s1", [key(1)], 0)
    names = sorted(name.decode() for name in await catalog._redis.keys("*s1*"))
    assert names == ["kvd:n1:{s1}:keys", "kvd:n1:{s1}:row"]
    async with Catalog(server.url, "n2") as other:
        assert await other.get("s1") is None
        assert [member async for member in other.all_members()] == []


async def test_unreachable_server_is_named(tmp_path: Path) -> None:
    async with Catalog(f"unix://user:secret@{tmp_path}/none.sock", "n") as catalog:
        for call in (catalog.ping(), catalog.get("s"), catalog.list("t", "session"), catalog.page_keys("s")):
            with pytest.raises(CatalogUnavailable, match=r"none\.sock") as caught:
                await call
            assert "secret" not in str(caught.value)


async def test_answers_with_errors_are_unavailable_too(catalog: Catalog) -> None:
    await catalog._redis.set(catalog._row_key("s1"), "not a hash")
    with pytest.raises(CatalogUnavailable, match="WRONGTYPE"):
        await catalog.get("s1")


@pytest.mark.parametrize("num_steps", range(12))
async def test_cancelled_calls_end_wherever_they_are(catalog: Catalog, num_steps: int) -> None:
    async def forever() -> None:
        while True:
            await catalog.ping()

    calling = asyncio.create_task(forever())
    for _ in range(num_steps):
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling], timeout=5)
    assert calling.cancelled()
    await catalog.ping()


async def test_silent_server_is_unavailable(tmp_path: Path) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    silent = await asyncio.start_unix_server(accept, str(path / "s"))
    async with silent, Catalog(f"unix://{path}/s", "n", timeout_s=0.05) as catalog:
        with pytest.raises(CatalogUnavailable, match=r"no answer in 0\.05 s"):
            await catalog.get("s1")
    shutil.rmtree(path)


@pytest.mark.crash
async def test_embedded_server_keeps_its_data_and_is_found_again() -> None:
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    first = EmbeddedValkey(path)
    async with Catalog(first.url, "n") as catalog:
        await catalog.put(ROW)
    second = EmbeddedValkey(path)  # the first one's owner is gone, its server is not
    assert second.adopted and second.pid == first.pid
    second.stop()
    second.stop()
    assert second.pid is None
    first.stop()
    with EmbeddedValkey(path) as third:
        assert not third.adopted and third.pid is not None
        async with Catalog(third.url, "n") as catalog:
            assert await catalog.get("s1") == ROW
        os.kill(third.pid, signal.SIGSTOP)  # alive but silent
        with EmbeddedValkey(path, timeout_s=0.2) as fourth:
            assert not fourth.adopted
            async with Catalog(fourth.url, "n") as catalog:
                assert await catalog.get("s1") == ROW
    shutil.rmtree(path)


def test_foreign_pid_in_the_pid_file_is_left_alone(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    (path / "valkey.pid").write_text(str(os.getpid()))
    with EmbeddedValkey(path) as server:
        assert server.pid not in (None, os.getpid())
    shutil.rmtree(path)


def test_path_beyond_a_socket_address_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)
    path.mkdir()
    with pytest.raises(ConfigError, match="a Unix socket path holds 107"):
        EmbeddedValkey(path)


def test_failed_start_quotes_the_log() -> None:
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    (path / "appendonlydir").mkdir()
    (path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(CatalogUnavailable, match="manifest"):
        EmbeddedValkey(path)
    shutil.rmtree(path)
