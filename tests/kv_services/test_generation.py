import asyncio
import functools
import gc
from typing import Any

import grpc
import pytest

from kv_services import conversation, errors, token_log
from kv_services.text import Tokenizer
from kv_services.v1 import session_pb2 as pb
from tests.kv_services.conftest import World
from tests.kv_services.fake_engine import CONTEXT, IM_END, continuation

HELLO = [3, 1, 4, 1, 5, 9, 2, 6]


def logged(world: World, session_id: str) -> conversation.Conversation:
    return conversation.fold(*token_log.load(world.log_path(session_id)))


def tokenizer(world: World) -> Tokenizer:
    return Tokenizer(str(world.engine.tokenizer))


async def new(world: World) -> str:
    return (await world.client.create_session()).session_id


async def test_turns_continue_the_log_and_are_durable_before_the_last_message(world: World) -> None:
    session = await new(world)
    first = world.client.generate(session, token_ids=HELLO, max_new_tokens=5)
    seen_before_end: list[int] = []
    async for delta in first:
        seen_before_end.append(len(logged(world, session).finished_turns))
        assert delta.token_ids
    assert first.token_ids == continuation(HELLO, 5)
    assert first.completion is not None and first.completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert seen_before_end[0] == 0
    history = HELLO + first.token_ids
    assert list(logged(world, session).tokens) == history

    second = world.client.generate(session, token_ids=[7], max_new_tokens=3)
    text = await second.read()
    assert second.token_ids == continuation([*history, 7], 3)
    assert text == tokenizer(world).decode(second.token_ids)
    assert second.usage.prompt_tokens == len(history) + 1
    assert second.completion is not None and second.completion.turn == 1
    row = await world.client.get(session)
    assert (row.num_tokens, row.num_turns) == (len(history) + 4, 2)
    assert row.num_pages == (len(history) + 3) // 4  # the last sampled token has no KV


async def test_usage_comes_from_the_engine(world: World) -> None:
    answer = world.client.generate(await new(world), token_ids=HELLO, max_new_tokens=2)
    await answer.read()
    usage = answer.usage
    assert (usage.restored_device_tokens, usage.restored_dram_tokens, usage.restored_ssd_tokens) == (1, 2, 3)
    assert (usage.computed_tokens, usage.read_bytes, usage.retries) == (len(HELLO) - 6, 10, 0)
    assert (usage.recomputed_tokens, usage.restore_estimate_ms) == (4, 250.0)
    assert not usage.HasField("recompute_estimate_ms")
    assert usage.completion_tokens == 2
    assert 0 < usage.ttft_ms <= usage.total_ms


async def test_engine_gets_salt_session_and_sampling(world: World) -> None:
    session = await new(world)
    sampling: dict[str, Any] = {
        "max_new_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop": ["~~"], "stop_token_ids": [9],
        "ignore_eos": True, "seed": 11,
    }  # fmt: skip
    await world.client.generate(session, token_ids=HELLO, **sampling).read()
    request = world.engine.requests[0]
    assert request["session_id"] == session
    assert len(request["rid"]) == 32 and len(request["cache_salt"]) == 64
    assert request["sampling_params"] == {
        "max_new_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "sampling_seed": 11, "stop": ["~~"],
        "stop_token_ids": [9], "ignore_eos": True,
    }  # fmt: skip


async def test_chat_is_rendered_once_and_eos_is_in_the_log_once(world: World) -> None:
    session = await new(world)
    encode = tokenizer(world).encode
    world.engine.script(answer=[*encode("fine"), IM_END])
    first = world.client.chat(session, "how?", system="S")
    assert await first.read() == "fine"
    assert first.completion is not None and first.completion.finish_reason == pb.FINISH_REASON_STOP
    start = encode(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert world.engine.requests[0]["input_ids"] == start

    world.engine.script(answer=encode("cut"))  # ends without end of turn: the next delta brings it
    await world.client.chat(session, "and?").read()
    history = [*start, *encode("fine<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")]
    assert world.engine.requests[1]["input_ids"] == history

    await world.client.chat(session, "so?", max_new_tokens=1).read()
    history += encode("cut<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")
    assert world.engine.requests[2]["input_ids"] == history
    assert list(logged(world, session).tokens) == history + continuation(history, 1)


async def test_text_streams_in_whole_characters(world: World) -> None:
    words = "a\u00e9\u6f22\U0001f600b"
    world.engine.script(answer=[*tokenizer(world).encode(words), IM_END], incremental=True)
    pieces = [delta.text async for delta in world.client.generate(await new(world), text="x")]
    assert [piece for piece in pieces if piece] == list(words)
    assert len(pieces) == len(words.encode()) + 1


async def test_stop_string_cuts_the_text_and_stops_the_engine(world: World) -> None:
    session = await new(world)
    ids = tokenizer(world).encode("one END two")
    script = world.engine.script(answer=ids, hold_after=8)
    answer = world.client.generate(session, text="x", stop=["END"])
    assert await answer.read() == "one "
    assert answer.completion is not None and answer.completion.finish_reason == pb.FINISH_REASON_STOP
    assert answer.token_ids == ids[:7]
    assert await world.engine.aborted.get() == world.engine.requests[0]["rid"]
    assert not script.release.is_set()


@pytest.mark.parametrize("delivered", [0, 1, 4])
async def test_lost_page_continues_from_the_tokens(world: World, delivered: int) -> None:
    world.engine.script(lose_page_after=delivered)
    answer = world.client.generate(await new(world), token_ids=HELLO, max_new_tokens=5)
    await answer.read()
    assert answer.token_ids == continuation(HELLO, 5)
    assert (answer.usage.retries, answer.usage.completion_tokens) == (1, 5)
    retry = world.engine.requests[1]
    assert retry["input_ids"] == HELLO + answer.token_ids[:delivered]
    assert retry["sampling_params"]["max_new_tokens"] == 5 - delivered
    assert retry["rid"] != world.engine.requests[0]["rid"]


async def test_page_lost_too_often_leaves_the_turn_open(world: World) -> None:
    session = await new(world)
    for _ in range(4):
        world.engine.script(lose_page_after=0)
    with pytest.raises(errors.PageLost, match="4 times") as caught:
        await world.client.generate(session, token_ids=HELLO, request_id="r", max_new_tokens=2).read()
    assert caught.value.retry_after_s
    assert logged(world, session).open_turn is not None
    again = world.client.generate(session, token_ids=HELLO, request_id="r", max_new_tokens=2)
    await again.read()
    assert again.token_ids == continuation(HELLO, 2)


async def test_lost_page_before_the_stream_is_retried_too(world: World) -> None:
    world.engine.script(status=(503, "LOST_PAGE page 0"))
    answer = world.client.generate(await new(world), token_ids=HELLO, max_new_tokens=2)
    await answer.read()
    assert answer.usage.retries == 1


async def test_repeated_request_id_returns_the_first_answer(world: World) -> None:
    session = await new(world)
    first = world.client.generate(session, token_ids=HELLO, request_id="same", max_new_tokens=3)
    await first.read()
    await world.restart()
    again = world.client.generate(session, token_ids=HELLO, request_id="same", max_new_tokens=3)
    assert await again.read() == first.text
    assert (again.token_ids, again.usage) == (first.token_ids, first.usage)
    assert again.completion is not None and again.completion.replayed
    assert len(world.engine.requests) == 1
    with pytest.raises(errors.RequestIdReused):
        await world.client.generate(session, token_ids=[1], request_id="same").read()
    assert len(logged(world, session).turns) == 1


async def test_second_turn_is_aborted_and_the_first_goes_on(world: World) -> None:
    session = await new(world)
    script = world.engine.script(hold_after=1)
    first = world.client.generate(session, token_ids=HELLO, max_new_tokens=3)
    await asyncio.ensure_future(anext(aiter(first)))
    for second in (
        world.client.generate(session, token_ids=[1]).read(),
        world.client.suspend(session),
        world.client.delete(session),
    ):
        with pytest.raises(errors.SessionBusy) as caught:
            await second
        assert caught.value.code is grpc.StatusCode.ABORTED
    fork = await world.client.fork(session)  # sees finished turns only
    assert fork.num_tokens == 0
    script.release.set()
    await first.read()
    assert first.token_ids == continuation(HELLO, 3)


async def test_cancel_keeps_what_was_delivered(world: World) -> None:
    session = await new(world)
    world.engine.script(hold_after=2)
    async with world.client.generate(session, token_ids=HELLO, request_id="c", max_new_tokens=9) as answer:
        async for _ in answer:
            if len(answer.token_ids) == 2:
                break
    assert await world.engine.aborted.get() == world.engine.requests[0]["rid"]
    await world.idle(session)
    turn = logged(world, session).turns[0]
    assert (turn.finish, list(turn.answer)) == (conversation.Finish.CANCELLED, continuation(HELLO, 2))

    after = world.client.generate(session, token_ids=[8], max_new_tokens=2)
    await after.read()
    assert after.token_ids == continuation([*HELLO, *turn.answer, 8], 2)
    again = world.client.generate(session, token_ids=HELLO, request_id="c", max_new_tokens=9)
    await again.read()
    assert again.completion is not None and again.completion.finish_reason == pb.FINISH_REASON_CANCELLED
    gc.collect()


async def test_deadline_before_the_first_token_leaves_the_turn_open(world: World) -> None:
    session = await new(world)
    script = world.engine.script(hold_after=0)
    call = world.client.generate(session, token_ids=HELLO, request_id="d", timeout_s=0.5, max_new_tokens=2)
    with pytest.raises(errors.DeadlineExceeded):
        await call.read()
    assert script.held.is_set()
    await world.engine.aborted.get()
    await world.idle(session)
    found = logged(world, session)
    assert found.open_turn is not None and not found.tokens
    again = world.client.generate(session, token_ids=HELLO, request_id="d", max_new_tokens=2)
    await again.read()
    assert again.token_ids == continuation(HELLO, 2)
    assert again.completion is not None and not again.completion.replayed


async def test_open_turn_is_withdrawn_by_another(world: World) -> None:
    session = await new(world)
    world.engine.script(break_after=1)
    with pytest.raises(errors.EngineUnavailable, match="early"):
        await world.client.generate(session, token_ids=HELLO, max_new_tokens=4).read()
    assert logged(world, session).open_turn is not None
    answer = world.client.generate(session, token_ids=[5, 5], max_new_tokens=2)
    await answer.read()
    assert answer.token_ids == continuation([5, 5], 2)
    found = logged(world, session)
    assert list(found.tokens) == [5, 5, *answer.token_ids]
    assert [turn.number for turn in found.turns] == [0]


async def test_engine_down_is_unavailable_and_loses_nothing(world: World) -> None:
    session = await new(world)
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=2).read()
    before = world.log_path(session).read_bytes()
    await world.engine.stop()
    with pytest.raises(errors.EngineUnavailable) as caught:
        await world.client.generate(session, token_ids=[1]).read()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.retry_after_s
    assert world.log_path(session).read_bytes() == before
    with pytest.raises(errors.EngineUnavailable):
        await world.client.delete(session)
    await world.engine.start()
    await world.client.generate(session, token_ids=[1], max_new_tokens=1).read()


async def test_bad_input_changes_nothing(world: World) -> None:
    session = await new(world)
    await world.client.generate(session, token_ids=HELLO, max_new_tokens=2).read()
    before = world.log_path(session).read_bytes()
    generate = functools.partial(functools.partial, world.client.generate)
    for call, expected, parts in [
        (generate(session, text=""), errors.EmptyPrompt, {"value": "0", "limit": "1"}),
        (generate(session, token_ids=[1] * CONTEXT), errors.PromptTooLong, {"limit": str(CONTEXT - 1)}),
        (generate(session, token_ids=[258]), errors.InvalidRequest, {"value": "258", "limit": "257"}),
        (generate(session, text="x", top_p=1.5), errors.InvalidRequest, {"value": "1.5"}),
        (generate(session, text="x", max_new_tokens=0), errors.InvalidRequest, {"limit": "at least 1"}),
        (generate(session, text="x", stop=[""]), errors.InvalidRequest, {}),
        (generate(session, text="x", request_id="x" * 129), errors.InvalidRequest, {"limit": "128"}),
        (
            generate(session, messages=[{"role": "tool", "content": ""}]),
            errors.InvalidRequest,
            {"roles": "tool"},
        ),
        (generate("s_nope", text="x"), errors.SessionNotFound, {"value": "s_nope"}),
        (generate("../../etc/passwd", text="x"), errors.SessionNotFound, {}),
    ]:
        with pytest.raises(expected) as caught:
            await call().read()
        assert caught.value.metadata.items() >= parts.items(), caught.value.metadata
        assert type(caught.value) is expected
    assert world.log_path(session).read_bytes() == before
    assert len(world.engine.requests) == 1


async def test_prompt_the_engine_refuses_is_withdrawn(world: World) -> None:
    session = await new(world)
    world.engine.script(status=(400, "too long for me"))
    with pytest.raises(errors.EngineRejected, match="too long for me"):
        await world.client.generate(session, token_ids=HELLO).read()
    found = logged(world, session)
    assert not found.turns and not found.tokens


async def test_answer_ends_at_the_context_length(world: World) -> None:
    answer = world.client.generate(await new(world), token_ids=[1] * (CONTEXT - 2), max_new_tokens=50)
    await answer.read()
    assert len(answer.token_ids) == 2
    assert answer.completion is not None and answer.completion.finish_reason == pb.FINISH_REASON_LENGTH


async def test_too_many_turns(world: World) -> None:
    await world.stop()
    await world.start(max_concurrent_turns=1)
    one, two = await new(world), await new(world)
    script = world.engine.script(hold_after=1)
    first = world.client.generate(one, token_ids=HELLO, max_new_tokens=2)
    await asyncio.ensure_future(anext(aiter(first)))
    with pytest.raises(errors.TooManyTurns, match="limit is 1"):
        await world.client.generate(two, token_ids=HELLO).read()
    script.release.set()
    await first.read()
    await world.client.generate(two, token_ids=HELLO, max_new_tokens=1).read()
