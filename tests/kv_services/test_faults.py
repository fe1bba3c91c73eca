import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kv_services import conversation, errors, token_log
from kv_services.client import AsyncClient
from kv_services.config import ServiceConfig
from kv_services.server import SERVICE_NAME, SessionServer
from kv_tier.meta.embedded_valkey import EmbeddedValkey
from kv_tier.meta.errors import CatalogUnavailable, ConfigError, DataDirBusy
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import FakeEngine, continuation, write_tokenizer

HELLO = [3, 1, 4, 1, 5, 9, 2, 6]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_emptied_redis_is_rebuilt_from_the_logs(world: World) -> None:
    session = (await world.client.create_session(title="t", labels={"a": "b"})).session_id
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=5).read()
    await world.client.create_document(token_ids=HELLO)
    catalog = world.server._catalog
    before, keys = await world.client.get(session), await catalog.page_keys(session)
    await catalog._redis.flushall()
    await world.restart()
    assert world.server.rebuilt.indexed == 2
    catalog = world.server._catalog
    after = await world.client.get(session)
    before.num_sealed_pages = after.num_sealed_pages  # nobody asked the engine again yet
    assert (after, await catalog.page_keys(session)) == (before, keys)
    assert [found.session_id async for found in world.client.list()] == [session]
    await world.restart()
    assert world.server.rebuilt.indexed == 0


async def test_emptied_redis_is_repaired_by_use(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await world.server._catalog._redis.flushall()
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=5).read()
    assert [found.session_id async for found in world.client.list()] == [session]


async def test_entries_without_a_log_and_unfinished_logs_go(world: World) -> None:
    session = (await world.client.create_session()).session_id
    world.log_path(session).unlink()
    unfinished = world.log_path(session).with_name("x.log.tmp")
    unfinished.touch()
    with pytest.raises(errors.SessionNotFound):
        await world.client.get(session)
    await world.restart()
    assert world.server.rebuilt.unlisted == 1
    assert not unfinished.exists()
    assert [found async for found in world.client.list()] == []


async def test_damaged_log_answers_data_loss_and_others_work(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=5).read()
    path = world.log_path(session)
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.LogCorrupt, match="backup"):
        await world.client.generate(session, token_ids=[1]).read()
    await world.server._catalog._redis.flushall()
    await world.restart()
    assert world.server.rebuilt.corrupt == [session]
    assert path.read_bytes() == data
    await world.client.create_session()


async def test_a_log_that_cannot_be_read_harms_no_other(world: World) -> None:
    session = (await world.client.create_session()).session_id
    path = world.log_path(session)
    path.unlink()
    path.mkdir()  # every read fails
    with pytest.raises(errors.StorageFailed, match="read"):
        await world.client.generate(session, token_ids=HELLO).read()
    await world.server._catalog._redis.flushall()
    await world.restart()
    assert world.server.rebuilt.corrupt == [session]
    await world.client.create_session()


async def test_redis_down_is_unavailable_and_loses_nothing(world: World) -> None:
    await world.stop()
    (world.root / "redis").mkdir()
    redis = EmbeddedValkey(world.root / "redis")
    await world.start(redis_url=redis.url)
    session = (await world.client.create_session()).session_id
    script = world.engine.script(hold_after=1)
    running = world.client.generate(session, token_ids=HELLO, max_new_tokens=3)
    await asyncio.ensure_future(anext(aiter(running)))
    await asyncio.to_thread(redis.stop)
    script.release.set()
    await running.read()  # Redis went away mid-turn: the log has the turn
    assert running.token_ids == continuation(HELLO, 3)
    for call in (
        world.client.get(session),
        world.client.create_session(),
        world.client.generate(session, token_ids=[1]).read(),
        world.client.delete(session),
    ):
        with pytest.raises(errors.CatalogDown) as caught:
            await call
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.retry_after_s
    with EmbeddedValkey(world.root / "redis"):
        answer = world.client.generate(session, token_ids=[1], max_new_tokens=2)
        await answer.read()
        assert answer.token_ids == continuation([*HELLO, *running.token_ids, 1], 2)
        assert (await world.client.get(session)).num_turns == 2
        await world.stop()


async def test_redis_unreachable_at_start(short_dir: Path) -> None:
    config = ServiceConfig(short_dir / "data", port=0, redis_url=f"unix://{short_dir}/nobody.sock")
    with pytest.raises(CatalogUnavailable, match=r"nobody\.sock"):
        async with SessionServer(config):
            pass


async def test_health_follows_the_engine(world: World) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen = aiter(watch)
        assert (await anext(seen)).status == SERVING
        await world.engine.stop()
        assert (await anext(seen)).status == NOT_SERVING
        await world.engine.start()
        assert (await anext(seen)).status == SERVING
        watch.cancel()


async def test_taken_ports_and_directories_are_named(world: World, short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1"):
            async with SessionServer(ServiceConfig(short_dir / "other", port=port)):
                pass
        with pytest.raises(ConfigError, match=f"metrics_port {port}"):
            async with SessionServer(ServiceConfig(short_dir / "other", port=0, metrics_port=port)):
                pass
    with pytest.raises(DataDirBusy, match=str(os.getpid())):
        async with SessionServer(ServiceConfig(world.data_dir, port=0)):
            pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("host", ""),
        ("redis_url", "http://x"),
        ("max_concurrent_turns", 0),
        ("stop_grace_s", -1.0),
    ],
)
def test_config_names_value_and_limit(field: str, value: object) -> None:
    options: dict[str, object] = {field: value}
    with pytest.raises(ConfigError, match=f"{field} is {value!r}; it must be"):
        ServiceConfig(Path("x"), **options)  # type: ignore[arg-type]  # the point of the test


async def test_metrics_are_served(world: World) -> None:
    await world.stop()
    await world.start(metrics_port=0)
    session = (await world.client.create_session()).session_id
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=5).read()
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{world.server.metrics_port}/metrics")).text
    assert 'kvdrive_service_turns_total{finish="length"} 1.0' in text
    assert 'kvdrive_service_calls_total{code="OK",method="CreateSession"} 1.0' in text
    assert "kvdrive_service_answer_tokens_total 5.0" in text


async def test_stopping_the_service_cancels_turns_consistently(world: World) -> None:
    session = (await world.client.create_session()).session_id
    world.engine.script(hold_after=2)
    answer = world.client.generate(session, token_ids=HELLO, max_new_tokens=5)
    deltas = aiter(answer)
    for _ in range(2):
        await anext(deltas)
    await world.server.__aexit__()
    with pytest.raises(errors.ServiceError):
        await anext(deltas)
    world._server = None
    found = conversation.fold(*token_log.load(world.log_path(session)))
    assert found.turns[0].finish is conversation.Finish.CANCELLED
    assert list(found.tokens) == [*HELLO, *continuation(HELLO, 2)]


def runs(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Process:
    """The service in a process of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    async def start(self) -> AsyncClient:
        command = (
            sys.executable,
            "-m",
            "kv_services.server",
            "--data-dir",
            str(self.data_dir),
            "--port",
            "0",
        )
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        return AsyncClient(f"127.0.0.1:{int(line.split()[-1])}")

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


@pytest.mark.crash
async def test_killed_mid_turn_the_log_is_consistent_and_the_valkey_is_found_again(short_dir: Path) -> None:
    data_dir = short_dir / "data"
    service = Process(data_dir)
    async with (
        await service.start() as client,
        FakeEngine(data_dir, write_tokenizer(short_dir / "model")) as engine,
    ):
        session = (await client.create_session()).session_id
        await client.generate(session, token_ids=HELLO, max_new_tokens=3).read()
        engine.script(hold_after=2)
        running = client.generate(session, token_ids=[7], request_id="r", max_new_tokens=4)
        deltas = aiter(running)
        for _ in range(2):
            await anext(deltas)
        assert await service.end(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(errors.Unavailable):
            await anext(deltas)
        valkey = int((data_dir / "catalog" / "valkey.pid").read_text())
        assert runs(valkey)  # outlived its service
        history = [*HELLO, *continuation(HELLO, 3)]
        found = conversation.fold(*token_log.load(data_dir / "sessions" / f"{session}.log"))
        assert list(found.tokens) == history
        assert found.open_turn is not None and list(found.open_turn.prompt) == [7]

        async with await service.start() as next_client:
            assert int((data_dir / "catalog" / "valkey.pid").read_text()) == valkey
            again = next_client.generate(session, token_ids=[7], request_id="r", max_new_tokens=4)
            await again.read()
            assert again.token_ids == continuation([*history, 7], 4)
            assert (await next_client.get(session)).num_turns == 2
        assert await service.end(signal.SIGTERM) == 0
        assert not (data_dir / "catalog" / "valkey.pid").exists()
        assert not runs(valkey)
