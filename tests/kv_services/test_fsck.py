"""`kvdrive fsck` over token logs, catalog and spans: what it names, what it repairs, what it rebuilds."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kv_services import ids, token_log
from kv_services.conversation import State, fold
from kv_services.store import keys_of
from kv_services.token_log import Record, RecordType
from kv_services.v1 import session_pb2 as pb
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.span_file import write_span
from kv_tier.meta.span_format import Shape
from kvdrive_sglang.cli.main import build_app
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import PAGE
from tests.kv_tier.meta.span_samples import sample_header, sample_parts

pytestmark = pytest.mark.redis

HELLO = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE = Shape(num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE, stretch_tokens=1024, dtype_code=1)


async def fsck(world: World, *arguments: str) -> Result:
    options = ["fsck", "--data-dir", str(world.data_dir), *arguments]
    return await asyncio.to_thread(CliRunner().invoke, build_app(), options, env={"COLUMNS": "300"})


def write_spans(world: World, session_id: str, *, span_id: int) -> list[bytes]:
    """Stand in for the engine: put a session's full pages into one span; returns its page keys."""
    records, size = token_log.load(world.log_path(session_id))
    found = fold(records, size)
    with DataDir.inspect(world.data_dir) as data_dir:
        salt = ids.cache_salt(data_dir.secret(), found.tenant)
        keys = keys_of(data_dir.secret(), found)
        header = sample_header(SHAPE, sequence=span_id, num_pages=len(keys))
        parts = sample_parts(header)
        tokens = np.array(found.tokens[: len(keys) * PAGE], np.uint32).reshape(-1, PAGE)
        assert page_keys(tokens.ravel(), PAGE, cache_salt=salt) == keys
        parts = type(parts)(**(vars(parts) | {"tokens": tokens, "keys": keys}))
        write_span(data_dir, span_id, header, parts).close()
    return keys


async def listing(world: World) -> list[pb.Session]:
    """List everything of two tenants, as a client sees it."""
    rows = []
    for tenant in ("", "other"):
        client = world.client_of(tenant)
        for documents in (False, True):
            rows += [row async for row in client.list(documents=documents)]
    return rows


async def populate(world: World) -> list[str]:
    """Create sessions of every kind; returns their ids. Three spans hold every full page of theirs."""
    client = world.client
    first = (await client.create_session(title="títle", labels={"a": "b"})).session_id
    await client.generate(first, token_ids=HELLO, max_new_tokens=9).read()
    document = (await client.create_document(token_ids=HELLO * 3)).document.session_id
    forked = (await client.create_session(document_id=document)).session_id
    await client.generate(forked, token_ids=[7, 7], max_new_tokens=5).read()
    branch = (await client.fork(first)).session_id
    await client.suspend(branch)
    stranger = (await world.client_of("other").create_session()).session_id
    await world.client_of("other").generate(stranger, token_ids=HELLO, max_new_tokens=3).read()
    empty = (await client.create_session()).session_id
    sessions = [first, document, forked, branch, stranger]
    for session_id in (first, forked):
        await world.idle(session_id)
    for number, session_id in enumerate((first, forked, stranger), start=1):
        write_spans(world, session_id, span_id=number)
    return [*sessions, empty]


async def test_a_sound_directory_is_clean_and_stays_as_it_is(world: World) -> None:
    sessions = await populate(world)
    await world.stop()
    before = {path: path.stat().st_mtime_ns for path in world.data_dir.rglob("*")}
    result = await fsck(world)
    assert result.exit_code == 0, result.output
    assert "0 found; 3 intact spans, " in result.output
    assert (
        f"{len(sessions)} intact token logs, 23 of 23 pages durable; compared with the catalog"
        in result.output
    )
    assert {path: path.stat().st_mtime_ns for path in world.data_dir.rglob("*")} == before


async def test_an_emptied_redis_is_rebuilt_to_the_same_listing(world: World) -> None:
    sessions = await populate(world)
    before = await listing(world)
    assert len(before) == len(sessions)
    await world.server._catalog._redis.flushall()
    await world.stop()
    found = await fsck(world)
    assert found.exit_code == 1 and found.output.count("catalog-missing") == len(sessions)
    rebuilt = await fsck(world, "--rebuild-catalog")
    assert rebuilt.exit_code == 0, rebuilt.output
    assert f"{len(sessions)} sessions and documents indexed" in rebuilt.output
    await world.start()
    assert world.server.rebuilt.indexed == 0  # nothing was left for the start to do
    after = await listing(world)
    for row in before:  # what an engine last said; the rebuild counted on disk
        row.num_sealed_pages = row.num_pages
    assert after == before


async def test_an_older_redis_is_brought_up_to_date(world: World) -> None:
    sessions = await populate(world)
    await world.stop()
    copy = world.root / "older"
    shutil.copytree(world.data_dir / "catalog" / "appendonlydir", copy)
    await world.start()
    await world.client.generate(sessions[0], token_ids=[1], max_new_tokens=12).read()
    await world.client.delete(sessions[2])
    late = (await world.client.create_session(title="late")).session_id
    before = await listing(world)
    await world.stop()
    shutil.rmtree(world.data_dir / "catalog" / "appendonlydir")
    shutil.copytree(copy, world.data_dir / "catalog" / "appendonlydir")
    found = await fsck(world)
    assert found.exit_code == 1
    for kind, session_id in (
        ("catalog-stale", sessions[0]),
        ("catalog-dangling", sessions[2]),
        ("catalog-missing", late),
    ):
        assert any(kind in line and session_id in line for line in found.output.splitlines()), found.output
    assert (await fsck(world, "--rebuild-catalog")).exit_code == 0
    await world.start()
    after = await listing(world)
    for row in (*before, *after):
        row.num_sealed_pages = 0
    assert after == before


async def test_a_repair_leaves_a_clean_directory(world: World) -> None:
    sessions = await populate(world)
    await world.stop()
    with open(world.log_path(sessions[0]), "ab") as log:
        log.write(b"torn record")
    world.log_path(sessions[0]).with_name("x.log.tmp").touch()
    _, size = token_log.load(world.log_path(sessions[2]))
    token_log.append(world.log_path(sessions[2]), Record(RecordType.STATE, {"state": State.CLOSED}), size)
    span = next(iter(sorted((world.data_dir / "spans").glob("*.span"))))
    data = bytearray(span.read_bytes())
    data[5000] ^= 4
    span.write_bytes(data)
    found = await fsck(world)
    assert found.exit_code == 1
    kinds = ("leftover", "log-torn", "delete-unfinished", "span-damaged", "catalog-sealed")
    assert all(kind in found.output for kind in kinds), found.output
    assert (await fsck(world)).output == found.output  # it changed nothing
    repaired = await fsck(world, "--repair")
    assert repaired.exit_code == 0, repaired.output
    assert "0 left" in repaired.output
    clean = await fsck(world)
    assert clean.exit_code == 0 and "0 found" in clean.output, clean.output
    await world.start()
    assert {row.session_id for row in await listing(world)} == set(sessions) - {sessions[2]}


async def test_spans_of_no_session_are_told_and_removed_on_demand(world: World) -> None:
    sessions = await populate(world)
    await world.client_of("other").delete(sessions[4])
    await world.stop()
    found = await fsck(world)
    assert found.exit_code == 0 and "1 spans" in found.output and "unreferenced" in found.output, found.output
    assert (await fsck(world, "--repair", "--unreferenced")).exit_code == 0
    assert len(list((world.data_dir / "spans").glob("*.span"))) == 2


async def test_a_live_service_is_looked_at_and_not_repaired(world: World) -> None:
    await populate(world)
    looked = await fsck(world)
    assert looked.exit_code == 0 and "a live service may change files" in looked.output, looked.output
    for option in ("--repair", "--rebuild-catalog"):
        refused = await fsck(world, option)
        assert refused.exit_code == 2 and "owns it" in refused.output, refused.output
    await world.stop()
    with DataDir.open(world.data_dir, role="engine"):
        refused = await fsck(world, "--repair")
        assert refused.exit_code == 2 and "the engine with pid" in refused.output
        assert (await fsck(world, "--rebuild-catalog")).exit_code == 0


async def test_what_no_repair_mends_says_what_to_do(world: World) -> None:
    sessions = await populate(world)
    await world.stop()
    path = world.log_path(sessions[0])
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    shutil.copy(world.log_path(sessions[1]), world.log_path("s_" + "a" * 26))
    result = await fsck(world, "--repair")
    assert result.exit_code == 1
    assert "log-damaged" in result.output and "restore it from a backup" in result.output
    assert "log-misnamed" in result.output
    assert path.read_bytes() == data


async def test_another_secret_is_noticed(world: World) -> None:
    sessions = await populate(world)
    await world.stop()
    shutil.rmtree(world.data_dir / "catalog" / "appendonlydir")
    (world.data_dir / "secret").write_bytes(b"n" * 32)
    result = await fsck(world)
    assert result.exit_code == 1 and result.output.count("log-secret") == len(sessions), result.output
    assert "not compared with a catalog" in result.output


def test_no_data_directory_is_status_2(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        result = CliRunner().invoke(build_app(), ["fsck", "--data-dir", str(path)])
        assert result.exit_code == 2 and "error:" in result.output
    assert list(tmp_path.iterdir()) == []
