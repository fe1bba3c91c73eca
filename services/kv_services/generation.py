"""Turns: the log before the engine, the engine's answer to the client, the answer to the log, then the last message.

    finished        INPUT, OUTPUT(stop | length), indexed, Completion sent
    client left     after a delivered token: INPUT, OUTPUT(cancelled, delivered tokens)
                    before one: INPUT; the turn is open
    failure         INPUT; the turn is open (the engine refused the prompt: withdrawn)

An open turn goes on when its request_id comes again, and is withdrawn when another turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from kv_services import conversation as conversations
from kv_services.conversation import Conversation, Finish, State, Turn, Usage
from kv_services.engine import Engine, EngineInfo
from kv_services.errors import EmptyPrompt, EngineRejected, EngineUnavailable, SessionSuspended, TooManyTurns
from kv_services.metrics import Metrics
from kv_services.retention import Quota
from kv_services.sessions import Call, Tokenizers, check_prompt, check_takes_turns, reused
from kv_services.store import SessionStore
from kv_services.tasks import Background, Leases, uninterrupted
from kv_services.text import Message, Tokenizer
from kv_services.token_log import Record, RecordType
from kv_services.turn import Answer, Delta, Sampling
from kv_tier.meta.errors import CatalogUnavailable

_TAIL_IDS = 64
_SEAL_WATCH_S = 30.0


@dataclass(frozen=True)
class Prompt:
    """What a turn brings: exactly one of the three."""

    text: str = ""
    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()

    @property
    def mode(self) -> str:
        """ "chat", "tokens" or "text"."""
        return "chat" if self.messages else "tokens" if self.token_ids else "text"


@dataclass(frozen=True)
class Completion:
    """The end of an answer, durable when it is seen."""

    finish: Finish
    usage: Usage
    turn: int
    replayed: bool = False


class Generation:
    """Runs turns.

    Args:
        watchers: runs what nobody waits for.
        max_concurrent_turns: more raise TooManyTurns.
        default_max_new_tokens: for samplings that name none.
        quota: what tenants may keep.
    """

    def __init__(
        self,
        store: SessionStore,
        engine: Engine,
        leases: Leases,
        tokenizers: Tokenizers,
        watchers: Background,
        metrics: Metrics,
        *,
        max_concurrent_turns: int,
        default_max_new_tokens: int,
        quota: Quota,
    ) -> None:
        self._store, self._engine, self._leases, self._tokenizers = store, engine, leases, tokenizers
        self._watchers, self._metrics = watchers, metrics
        self._max_concurrent_turns, self._default_max_new_tokens = (
            max_concurrent_turns,
            default_max_new_tokens,
        )
        self._quota = quota
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait until no turn runs, cancelled ones included, but no longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def generate(
        self, call: Call, session_id: str, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Run one turn: deltas, then a Completion. Closing the iterator cancels the turn.

        Raises:
            SessionNotFound, SessionBusy, SessionSuspended, DocumentHasNoTurns, TooManyTurns, EmptyPrompt,
            PromptTooLong, QuotaExceeded, RequestIdReused, EngineRejected: nothing changed.
            EngineUnavailable, PageLost, StorageFailed: the turn is open.
        """
        completion = None
        holder = f"turn {call.request_id}".strip()
        with self._slot():
            async with (
                self._leases.hold(session_id, holder),
                contextlib.aclosing(self._events(call, session_id, prompt, sampling)) as events,
            ):
                async for event in events:
                    if isinstance(event, Completion):
                        completion = event
                    else:
                        yield event
        assert completion is not None
        yield completion  # with the session free again: the client may send its next turn at once

    async def _events(
        self, call: Call, session_id: str, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Delta | Completion, None]:
        found = await self._store.open(call.tenant, session_id)
        check_takes_turns(found)
        if (turn := _answered(found, call)) is not None:
            yield Delta(turn.text, list(turn.answer))
            yield Completion(turn.finish or Finish.STOP, turn.usage, turn.number, replayed=True)
            return
        if found.state is not State.ACTIVE:
            raise SessionSuspended(f"{session_id} is {found.state}; resume it first", value=found.state)
        async with contextlib.aclosing(self._run(call, found, prompt, sampling)) as events:
            async for event in events:
                yield event

    async def _run(
        self, call: Call, found: Conversation, prompt: Prompt, sampling: Sampling
    ) -> AsyncGenerator[Delta | Completion, None]:
        info = await self._engine.info()
        tokenizer = await self._tokenizers.of(info)
        history = found.tokens
        turn = await self._open_turn(call, found, prompt, info, tokenizer)
        room = info.context_length - len(history) - len(turn.prompt)
        answer = Answer(
            self._engine,
            info,
            tokenizer,
            session_id=found.session_id,
            cache_salt=self._store.salt(call.tenant),
            prompt=history + turn.prompt,
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens or self._default_max_new_tokens, room),
        )
        try:
            async with contextlib.aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            assert answer.finish is not None
            await self._end(found, turn, answer, answer.finish, info)
        except (asyncio.CancelledError, GeneratorExit):
            if answer.token_ids and turn.finish is None:
                await uninterrupted(self._end(found, turn, answer, Finish.CANCELLED, info))
            raise
        except EngineRejected:
            await self._withdraw(found, turn)
            raise
        yield Completion(answer.finish, turn.usage, turn.number)

    async def _open_turn(
        self, call: Call, found: Conversation, prompt: Prompt, info: EngineInfo, tokenizer: Tokenizer
    ) -> Turn:
        """Log the prompt, or find it in the log when the call is a repeat of one that broke off."""
        turn = found.open_turn
        history = found.tokens
        if turn is not None and call.request_id and turn.request_id == call.request_id:
            if turn.digest != call.digest:
                raise reused(call.request_id)
            check_prompt(len(history), turn.prompt, info, tokenizer)
            return turn
        ids = _encode(found, prompt, history, tokenizer)
        check_prompt(len(history), ids, info, tokenizer)
        await self._quota.require(call.tenant, len(ids), info)
        if turn is not None:
            await self._withdraw(found, turn)
        number = len(found.finished_turns)
        record = conversations.input_record(
            number, call.request_id, call.digest, prompt.mode, array("I", ids), self._store.clock()
        )
        await self._store.append(found, record)
        return found.turns[-1]

    async def _end(
        self, found: Conversation, turn: Turn, answer: Answer, finish: Finish, info: EngineInfo
    ) -> None:
        """Log the answer; the index may lag behind when Redis is down."""
        ended = dataclasses.replace(
            turn, answer=answer.token_ids, text=answer.text, finish=finish, usage=answer.usage
        )
        await self._store.append(
            found, conversations.output_record(ended, info.page_size, self._store.clock())
        )
        self._metrics.turn_ended(finish, turn.usage)
        with contextlib.suppress(CatalogUnavailable):  # the log has the turn; the next open indexes it
            await self._store.index(found)
            self._watchers.spawn(self._watch_sealing(found))

    async def _withdraw(self, found: Conversation, turn: Turn) -> None:
        record = Record(RecordType.WITHDRAW, {"turn": turn.number, "ms": self._store.clock()})
        await self._store.append(found, record)

    async def _watch_sealing(self, found: Conversation) -> None:
        """Note in the catalog how many pages are durable, without delaying the answer."""
        keys = await asyncio.to_thread(self._store.keys, found)
        if keys:
            with contextlib.suppress(CatalogUnavailable, EngineUnavailable):  # only a figure for people
                num_sealed = await self._engine.num_sealed(keys, _SEAL_WATCH_S)
                await self._store.catalog.update(found.session_id, num_sealed=num_sealed)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        if self._num_running >= self._max_concurrent_turns:
            raise TooManyTurns(
                f"{self._num_running} turns are running, the limit is {self._max_concurrent_turns}; repeat later",
                value=self._num_running,
                limit=self._max_concurrent_turns,
            )
        self._num_running += 1
        self._idle.clear()
        self._metrics.turns_running(self._num_running)
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()
            self._metrics.turns_running(self._num_running)


def _answered(found: Conversation, call: Call) -> Turn | None:
    """Find the finished turn of an earlier call with the same request id."""
    for turn in found.finished_turns if call.request_id else ():
        if turn.request_id == call.request_id:
            if turn.digest != call.digest:
                raise reused(call.request_id)
            return turn
    return None


def _encode(found: Conversation, prompt: Prompt, history: array[int], tokenizer: Tokenizer) -> Sequence[int]:
    """Encode a prompt as it continues the conversation; see `Tokenizer.chat_delta`."""
    if prompt.mode == "tokens":
        return prompt.token_ids
    if prompt.mode == "text":
        if not prompt.text:
            raise EmptyPrompt("the prompt has no tokens; send text, messages or token ids", value=0, limit=1)
        return tokenizer.encode(prompt.text, first=not history)
    finished = found.finished_turns
    if finished and finished[-1].mode == "chat":
        return tokenizer.chat_delta(prompt.messages, history[-_TAIL_IDS:])
    return tokenizer.chat(prompt.messages)
