import asyncio
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kv_services import errors
from kv_services.text import Tokenizer
from kv_services.v1 import session_pb2 as pb
from kv_tier.meta.page_keys import page_keys
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import PAGE, continuation

HELLO = [3, 1, 4, 1, 5, 9, 2, 6]


async def turn(world: World, session: str, ids: list[int], count: int = 3) -> list[int]:
    answer = world.client.generate(session, token_ids=ids, max_new_tokens=count)
    await answer.read()
    return answer.token_ids


async def test_create_get_update_list(world: World) -> None:
    created = await world.client.create_session(title="a", labels={"k": "v"})
    assert created.session_id.startswith("s_") and len(created.session_id) == 28
    assert (created.state, created.kind) == (pb.SESSION_STATE_ACTIVE, pb.SESSION_KIND_SESSION)
    assert (created.title, dict(created.labels), created.num_tokens) == ("a", {"k": "v"}, 0)
    updated = await world.client.update(created.session_id, title="b")
    assert (updated.title, dict(updated.labels)) == ("b", {"k": "v"})
    assert (await world.client.update(created.session_id, labels={})).title == "b"
    assert dict((await world.client.get(created.session_id)).labels) == {}
    with pytest.raises(errors.InvalidRequest, match="limit is 512"):
        await world.client.update(created.session_id, title="x" * 513)


async def test_list_is_paged_newest_first(world: World) -> None:
    ids = [(await world.client.create_session()).session_id for _ in range(5)]
    listed = [session async for session in world.client.list(page_size=2)]
    assert sorted(session.session_id for session in listed) == sorted(ids)
    times = [session.create_time.ToMilliseconds() for session in listed]
    assert times == sorted(times, reverse=True)
    assert [session async for session in world.client.list(page_size=5)] == listed
    for request in (pb.ListSessionsRequest(page_size=1001), pb.ListSessionsRequest(page_token="junk")):
        with pytest.raises(errors.InvalidRequest):
            await world.client._unary("ListSessions", request, lambda page: page, None)


async def test_tenants_share_nothing(world: World) -> None:
    mine, theirs = world.client, world.client_of("them")
    session = (await mine.create_session(request_id="r")).session_id
    assert (await theirs.create_session(request_id="r")).session_id != session
    for call in (theirs.get, theirs.delete, theirs.fork, theirs.suspend, theirs.update):
        with pytest.raises(errors.SessionNotFound):
            await call(session)
    with pytest.raises(errors.SessionNotFound):
        await theirs.generate(session, token_ids=HELLO).read()
    assert session not in [found.session_id async for found in theirs.list()]
    other = (await theirs.create_session()).session_id
    await mine.generate(session, token_ids=HELLO, max_new_tokens=1).read()
    await theirs.generate(other, token_ids=HELLO, max_new_tokens=1).read()
    first, second = (request["cache_salt"] for request in world.engine.requests)
    assert first != second
    keys = [set(page_keys(HELLO, PAGE, cache_salt=salt)) for salt in (first, second)]
    assert not keys[0] & keys[1]
    with pytest.raises(errors.InvalidRequest, match="x-kvdrive-tenant"):
        await world.client_of("../x").create_session()


async def test_repeated_changes_return_the_first_result(world: World) -> None:
    client = world.client
    first = await client.create_session(title="a", request_id="c")
    assert (await client.create_session(title="a", request_id="c")) == first
    with pytest.raises(errors.RequestIdReused):
        await client.create_session(title="b", request_id="c")
    fork = await client.fork(first.session_id, request_id="f")
    assert (await client.fork(first.session_id, request_id="f")).session_id == fork.session_id
    await turn(world, fork.session_id, HELLO)
    gone = await client.delete(fork.session_id, request_id="d")
    assert gone.num_spans == 2
    assert (await client.delete(fork.session_id, request_id="d")) == gone
    with pytest.raises(errors.SessionNotFound):
        await client.delete(fork.session_id, request_id="e")
    assert [session.session_id async for session in client.list()] == [first.session_id]


async def test_creation_is_repeatable_even_when_the_catalog_forgot(world: World) -> None:
    first = await world.client.create_session(title="a", request_id="c")
    await world.server._catalog._redis.flushall()
    assert (await world.client.create_session(title="a", request_id="c")) == first
    assert [session.session_id async for session in world.client.list()] == [first.session_id]


async def test_fork_copies_a_prefix_and_both_go_on(world: World) -> None:
    session = (await world.client.create_session()).session_id
    one = await turn(world, session, HELLO)
    two = await turn(world, session, [7])
    whole = await world.client.fork(session, title="copy")
    half = await world.client.fork(session, num_turns=1)
    none = await world.client.fork(session, num_turns=0)
    assert (whole.parent_id, whole.title, whole.num_turns, half.num_turns) == (session, "copy", 2, 1)
    assert none.num_tokens == 0
    history = [*HELLO, *one]
    assert await turn(world, half.session_id, [9]) == continuation([*history, 9], 3)
    assert await turn(world, whole.session_id, [9]) == continuation([*history, 7, *two, 9], 3)
    assert (await world.client.get(session)).num_turns == 2
    with pytest.raises(errors.InvalidRequest, match="2 finished turns"):
        await world.client.fork(session, num_turns=3)


async def test_a_fork_repeats_no_call_of_its_parent(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await world.client.generate(session, token_ids=HELLO, request_id="r", max_new_tokens=1).read()
    fork = (await world.client.fork(session)).session_id
    answer = world.client.generate(fork, token_ids=[1], request_id="r", max_new_tokens=1)
    await answer.read()
    assert answer.completion is not None and not answer.completion.replayed


async def test_document_starts_sessions(world: World) -> None:
    made = await world.client.create_document(token_ids=HELLO, title="doc", request_id="r")
    document = made.document.session_id
    assert (made.document.kind, made.document.num_tokens) == (pb.SESSION_KIND_DOCUMENT, len(HELLO))
    assert made.usage.prompt_tokens == len(HELLO)
    assert made.document.num_pages == 2
    again = await world.client.create_document(token_ids=HELLO, title="doc", request_id="r")
    assert (again, len(world.engine.requests)) == (made, 1)
    assert [found.session_id async for found in world.client.list(documents=True)] == [document]
    assert [found async for found in world.client.list()] == []
    session = await world.client.create_session(document_id=document)
    assert (session.parent_id, session.num_tokens) == (document, len(HELLO))
    assert await turn(world, session.session_id, [5]) == continuation([*HELLO, 5], 3)
    fork = await world.client.fork(document)
    assert await turn(world, fork.session_id, [5]) == continuation([*HELLO, 5], 3)
    for call in (
        world.client.generate(document, token_ids=[1]).read(),
        world.client.suspend(document),
        world.client.resume(document),
    ):
        with pytest.raises(errors.DocumentHasNoTurns):
            await call
    with pytest.raises(errors.SessionNotFound, match="not a document"):
        await world.client.create_session(document_id=fork.session_id)
    with pytest.raises(errors.EmptyPrompt):
        await world.client.create_document("")


async def test_text_document_then_chat(world: World) -> None:
    document = (await world.client.create_document("A text.")).document.session_id
    session = (await world.client.create_session(document_id=document)).session_id
    await world.client.chat(session, "about?", max_new_tokens=1).read()
    asked = bytes_of(world, world.engine.requests[-1]["input_ids"])
    assert asked == "A text.system\nBe brief.\nuser\nabout?\nassistant\n"


def bytes_of(world: World, ids: list[int]) -> str:
    return Tokenizer(str(world.engine.tokenizer)).decode(ids)


async def test_suspend_needs_every_full_page(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)  # 13 tokens, the last one without KV: 3 full pages
    suspended = await world.client.suspend(session)
    assert (suspended.state, suspended.num_pages, suspended.num_sealed_pages) == (
        pb.SESSION_STATE_SUSPENDED,
        3,
        3,
    )
    with pytest.raises(errors.SessionSuspended, match="resume it first"):
        await world.client.generate(session, token_ids=[1]).read()
    assert (await world.client.suspend(session)).state == pb.SESSION_STATE_SUSPENDED
    await world.restart()
    assert (await world.client.get(session)).state == pb.SESSION_STATE_SUSPENDED
    resumed = await world.client.resume(session)
    assert resumed.state == pb.SESSION_STATE_ACTIVE
    await turn(world, session, [1])


async def test_suspend_computes_pages_the_engine_forgot(world: World) -> None:
    session = (await world.client.create_session()).session_id
    answer = await turn(world, session, HELLO, 5)
    world.engine.sealed.clear()
    suspended = await world.client.suspend(session)
    assert suspended.num_sealed_pages == 3
    assert world.engine.requests[-1]["input_ids"] == [*HELLO, *answer[:-1]]
    assert suspended.num_tokens == len(HELLO) + 5


async def test_suspend_stores_what_is_its_own_in_fewer_bits(world: World) -> None:
    def keys() -> list[str]:
        request = world.engine.requests[-1]
        tokens = [*request["input_ids"], *answer[:-1]]
        return [key.hex() for key in page_keys(tokens, PAGE, cache_salt=request["cache_salt"])]

    session = (await world.client.create_session()).session_id
    answer = await turn(world, session, HELLO, 5)
    shared = keys()
    await world.client.suspend(session)
    assert world.engine.transcoded == [], "the engine is configured to leave sessions as they are"
    await world.client.resume(session)
    world.engine.cold_encoding = "int8"
    fork = (await world.client.fork(session)).session_id
    answer = await turn(world, session, HELLO, 5)
    await world.client.suspend(session)
    assert len(shared) == 3 and keys()[:3] == shared
    assert world.engine.transcoded == [keys()[3:]], "the fork has the first three pages too"
    await world.client.delete(fork)
    await world.client.resume(session)
    await world.client.suspend(session)
    assert world.engine.transcoded[1:] == [keys()]


async def test_suspend_says_what_is_missing(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)
    missing = sorted(world.engine.sealed)[:1]
    world.engine.sealing = False
    world.engine.sealed -= set(missing)
    with pytest.raises(errors.NotSealed, match="of 3 pages") as caught:
        await world.client.suspend(session, timeout_s=1.0)
    assert int(caught.value.metadata["value"]) < int(caught.value.metadata["limit"]) == 3
    assert (await world.client.get(session)).state == pb.SESSION_STATE_ACTIVE
    await turn(world, session, [1])


async def test_suspend_ends_in_time_when_the_engine_does_not(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)
    world.engine.sealed.clear()  # evicted: the pages must be computed once more
    script = world.engine.script(hold_after=0)
    with pytest.raises(errors.NotSealed, match="3 of 3 pages"):
        await world.client.suspend(session, timeout_s=2.0)
    script.release.set()
    await turn(world, session, [1])  # not busy


async def test_delete_drops_only_what_nobody_else_uses(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)
    fork = (await world.client.fork(session)).session_id
    await turn(world, fork, [7] * 8, 5)
    await world.client.delete(fork)
    salt = world.engine.requests[0]["cache_salt"]
    shared = [
        key.hex() for key in page_keys(world.engine.requests[1]["input_ids"][:12], PAGE, cache_salt=salt)
    ]
    assert world.engine.dropped and not set(world.engine.dropped) & set(shared)
    assert set(shared) <= world.engine.sealed
    assert not world.log_path(fork).exists()
    gone = await world.client.delete(session)
    assert gone.num_spans == 3 and gone.freed_bytes == 300
    assert world.engine.sealed == set()
    with pytest.raises(errors.SessionNotFound):
        await world.client.get(session)


async def test_sealed_pages_are_noted_behind_the_answer(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)
    while (await world.client.get(session)).num_sealed_pages < 3:
        await asyncio.sleep(0)


async def test_another_page_size_is_taken_from_the_engine(world: World) -> None:
    session = (await world.client.create_session()).session_id
    await turn(world, session, HELLO, 5)
    world.engine.page_size = 2
    await turn(world, session, [1], 1)
    found = await world.client.get(session)
    assert found.num_pages == 7
    keys = await world.server._catalog.page_keys(session)
    tokens = world.engine.requests[-1]["input_ids"]
    assert keys == page_keys(tokens, 2, cache_salt=world.engine.requests[0]["cache_salt"])


async def test_reflection_names_the_service(world: World) -> None:
    channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{world.server.port}")
    async with channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"kvdrive.session.v1.SessionService", "grpc.health.v1.Health"} <= names
