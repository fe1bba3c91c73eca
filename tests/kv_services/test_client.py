"""The sync client and its sugar; everything else goes through the async one."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from kv_services import errors
from kv_services.client import Client
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import IM_END, continuation

T = TypeVar("T")


async def in_thread(world: World, work: Callable[[Client], T]) -> T:
    def run() -> T:
        with Client(f"127.0.0.1:{world.server.port}") as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_whole_life_of_a_session(world: World) -> None:
    def work(client: Client) -> None:
        document = client.create_document(token_ids=[1, 2, 3], title="d").document
        session = client.create_session(title="a", document_id=document.session_id)
        with client.generate(session.session_id, token_ids=[4], max_new_tokens=3) as answer:
            lengths = [len(delta.token_ids) for delta in answer]
        assert lengths == [1, 1, 1]
        assert answer.token_ids == continuation([1, 2, 3, 4], 3)
        assert answer.usage.completion_tokens == 3
        fork = client.fork(session.session_id, num_turns=0)
        assert fork.num_tokens == 3
        assert client.update(session.session_id, title="b").title == "b"
        assert client.suspend(session.session_id).num_sealed_pages == 1
        assert client.resume(session.session_id) == client.get(session.session_id)
        assert [found.session_id for found in client.list(page_size=1)] == [
            fork.session_id,
            session.session_id,
        ]
        assert [found.session_id for found in client.list(documents=True)] == [document.session_id]
        client.delete(session.session_id)
        with pytest.raises(errors.SessionNotFound) as caught:
            client.get(session.session_id)
        assert caught.value.metadata["value"] == session.session_id

    await in_thread(world, work)


async def test_chat_and_cancel(world: World) -> None:
    world.engine.script(answer=[20, 21, IM_END])
    world.engine.script(hold_after=1)

    def work(client: Client) -> str:
        session = client.create_session().session_id
        with client.chat(session, "hi", system="s") as answer:
            assert len(answer.read()) == 2
        with client.chat(session, "more") as answer:
            next(iter(answer))
        with pytest.raises(AssertionError, match="not ended"):
            answer.usage  # noqa: B018  # the access is the test
        return session

    session = await in_thread(world, work)
    assert await world.engine.aborted.get() == world.engine.requests[1]["rid"]
    await world.idle(session)
    assert (await world.client.get(session)).num_turns == 2


async def test_nobody_listens() -> None:
    def work() -> None:
        with Client("127.0.0.1:1", timeout_s=2.0) as client, pytest.raises(errors.Unavailable):
            client.get("s")

    await asyncio.to_thread(work)
