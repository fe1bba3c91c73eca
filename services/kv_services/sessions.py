"""What the service does with sessions, but for turns (`generation`). No gRPC, no file formats here.

Every method takes the tenant first. A change holds its session, so that one that meets another raises SessionBusy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kv_services import conversation as conversations
from kv_services.conversation import Conversation, Kind, State, Usage
from kv_services.engine import Dropped, Engine, EngineInfo, EngineRequest, LostPage, SpanUsage
from kv_services.errors import (
    DocumentHasNoTurns,
    EmptyPrompt,
    InvalidRequest,
    NotSealed,
    PageLost,
    PromptTooLong,
    RequestIdReused,
    SessionNotFound,
    WrongState,
)
from kv_services.retention import Quota
from kv_services.store import SessionStore
from kv_services.tasks import Leases
from kv_services.text import Tokenizer
from kv_services.token_log import Record, RecordType
from kv_services.turn import MAX_RETRIES
from kv_tier.meta.catalog import SessionRow

MAX_TITLE_CHARACTERS = 512
MAX_LABELS = 64
_FIRST_LOOK_S = 1.0
_LOOK_S = 5.0
_TRANSCODE_S = 60.0

Work = Callable[[], Awaitable[dict[str, object]]]


@dataclass(frozen=True)
class Call:
    """Who asks for a change, and which call it is.

    Args:
        request_id: empty, or the same for repeats of the call.
        digest: sha256 (hex) of method and content.
    """

    tenant: str
    request_id: str
    digest: str


@dataclass(frozen=True)
class Label:
    """What people call a session.

    Raises:
        InvalidRequest: title or labels are too large.
    """

    title: str
    labels: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(self.title) > MAX_TITLE_CHARACTERS:
            raise InvalidRequest(
                f"title has {len(self.title)} characters, the limit is {MAX_TITLE_CHARACTERS}; shorten it",
                value=len(self.title),
                limit=MAX_TITLE_CHARACTERS,
            )
        longest = max((len(text) for pair in self.labels.items() for text in pair), default=0)
        if len(self.labels) > MAX_LABELS or longest > MAX_TITLE_CHARACTERS:
            raise InvalidRequest(
                f"{len(self.labels)} labels of up to {longest} characters, the limits are {MAX_LABELS} and "
                f"{MAX_TITLE_CHARACTERS}; use fewer or shorter ones",
                value=len(self.labels),
                limit=MAX_LABELS,
            )


@dataclass(frozen=True)
class Storage:
    """What a session takes on SSD; ``num_shared_pages`` of its leading pages another one has too."""

    log_bytes: int
    spans: SpanUsage
    num_shared_pages: int


class Tokenizers:
    """Keeps the engine's tokenizer loaded."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str], Tokenizer] = {}

    async def of(self, info: EngineInfo) -> Tokenizer:
        """Load the tokenizer of an engine, if it is not loaded.

        Raises:
            TokenizerMissing: see `Tokenizer`.
        """
        model = info.tokenizer_path, info.fingerprint
        if model not in self._loaded:
            self._loaded = {model: await asyncio.to_thread(Tokenizer, info.tokenizer_path)}
        return self._loaded[model]


class Sessions:
    """Creates, lists, changes, forks, suspends, resumes and deletes sessions and documents.

    Args:
        suspend_timeout_s: how long a suspend waits at most.
        quota: what tenants may keep.
    """

    def __init__(
        self,
        store: SessionStore,
        engine: Engine,
        leases: Leases,
        tokenizers: Tokenizers,
        suspend_timeout_s: float,
        quota: Quota,
    ) -> None:
        self._store, self._engine, self._leases, self._tokenizers = store, engine, leases, tokenizers
        self._suspend_timeout_s = suspend_timeout_s
        self._quota = quota

    async def create(self, call: Call, label: Label, document_id: str) -> SessionRow:
        """Create a session, empty or from a document.

        Raises:
            SessionNotFound: no such document.
        """

        async def work() -> dict[str, object]:
            source = None
            if document_id:
                source, _ = await self._store.read(call.tenant, document_id)
                if source.kind is not Kind.DOCUMENT:
                    raise SessionNotFound(
                        f"{document_id} is a session, not a document; fork it", value=document_id
                    )
            return await self._create(call, label, source, None)

        return await self._created(call, work)

    async def fork(self, call: Call, session_id: str, label: Label, num_turns: int | None) -> SessionRow:
        """Create a session that continues another one after its first `num_turns` finished turns (None: all).

        Raises:
            InvalidRequest: there are fewer turns.
        """

        async def work() -> dict[str, object]:
            source, _ = await self._store.read(call.tenant, session_id)
            num_finished = len(source.finished_turns)
            if num_turns is not None and num_turns > num_finished:
                raise InvalidRequest(
                    f"num_turns is {num_turns}, {session_id} has {num_finished} finished turns",
                    value=num_turns,
                    limit=num_finished,
                )
            return await self._create(call, label, source, num_turns)

        return await self._created(call, work)

    async def create_document(
        self, call: Call, label: Label, text: str, token_ids: Sequence[int]
    ) -> tuple[SessionRow, Usage]:
        """Ingest a document: the engine computes its KV, then its tokens are logged.

        Args:
            text: used when `token_ids` is empty.

        Raises:
            EmptyPrompt, PromptTooLong, QuotaExceeded, EngineUnavailable
        """

        async def work() -> dict[str, object]:
            info = await self._engine.info()
            tokenizer = await self._tokenizers.of(info)
            tokens = array("I", token_ids or tokenizer.encode(text, first=True))
            check_prompt(0, tokens, info, tokenizer)
            await self._quota.require(call.tenant, len(tokens), info)
            session_id = self._store.new_session_id(call.tenant, call.request_id)
            usage = await self._prefill(info, session_id, self._store.salt(call.tenant), tokens)
            meta = self._meta(call, label, session_id, Kind.DOCUMENT, "")
            base = Record(RecordType.BASE, {"page_size": info.page_size, "ms": self._store.clock()}, tokens)
            await self._store.create([meta, base])
            return {"session_id": session_id, "usage": vars(usage)}

        result = await self._once(call, "create", lambda: self._existing(call, work))
        _, row = await self._store.read(call.tenant, str(result["session_id"]))
        usage = result.get("usage", {})
        assert isinstance(usage, dict)
        return row, Usage(**usage)

    async def get(self, tenant: str, session_id: str) -> SessionRow:
        """Describe a session or document."""
        return (await self._store.read(tenant, session_id))[1]

    async def list(self, tenant: str, kind: Kind, after: str, limit: int) -> tuple[list[SessionRow], str]:
        """List a page of sessions or documents, newest first; see `Catalog.list`."""
        return await self._store.catalog.list(tenant, kind, after, limit)

    async def update(
        self, call: Call, session_id: str, title: str | None, labels: Mapping[str, str] | None
    ) -> SessionRow:
        """Change title or labels; None leaves them."""

        async def work() -> dict[str, object]:
            async with self._leases.hold(session_id, "an update"):
                found = await self._store.open(call.tenant, session_id)
                new = Label(
                    found.title if title is None else title, found.labels if labels is None else labels
                )
                head = {"title": new.title, "labels": dict(new.labels), "ms": self._store.clock()}
                await self._store.append(found, Record(RecordType.UPDATE, head))
                await self._store.index(found)
            return {}

        await self._once(call, "update", work)
        return await self.get(call.tenant, session_id)

    async def suspend(self, call: Call, session_id: str, timeout_s: float | None) -> SessionRow:
        """Wait until every full page is durable, then mark the session suspended.

        An engine with a `cold_encoding` stores the pages that no other session has in fewer bits then, as far as time allows.

        Args:
            timeout_s: what the caller can wait; None leaves the service's limit.

        Raises:
            NotSealed: some pages are not durable in time; the session stays active.
        """
        limit_s = self._suspend_timeout_s if timeout_s is None else min(timeout_s, self._suspend_timeout_s)

        async def work() -> dict[str, object]:
            async with self._leases.hold(session_id, "a suspend"):
                found = await self._open_session(call.tenant, session_id)
                if found.state is State.ACTIVE:
                    await self._suspend(found, limit_s)
            return {}

        await self._once(call, "suspend", work)
        return await self.get(call.tenant, session_id)

    async def resume(self, call: Call, session_id: str) -> SessionRow:
        """Make a suspended session accept turns; an active one stays as it is."""

        async def work() -> dict[str, object]:
            async with self._leases.hold(session_id, "a resume"):
                found = await self._open_session(call.tenant, session_id)
                if found.state is State.SUSPENDED:
                    await self._mark(found, State.ACTIVE)
            return {}

        await self._once(call, "resume", work)
        return await self.get(call.tenant, session_id)

    async def delete(self, call: Call, session_id: str) -> tuple[int, int]:
        """Delete a session or document, with the KV that no other one of the tenant uses.

        Returns:
            Spans deleted, and their bytes.

        Raises:
            EngineUnavailable: nothing is deleted.
        """

        async def work() -> dict[str, object]:
            async with self._leases.hold(session_id, "a delete"):
                found = await self._store.open(call.tenant, session_id)
                info = await self._engine.info()
                if found.state is not State.CLOSED:
                    await self._mark(found, State.CLOSED)
                keys = await asyncio.to_thread(self._store.keys, found, info.page_size)
                num_spans, num_bytes = await self._drop(found, keys)
                await self._store.delete(found)
            return {"num_spans": num_spans, "freed_bytes": num_bytes}

        result = await self._once(call, "delete", work)
        return int(str(result["num_spans"])), int(str(result["freed_bytes"]))

    async def _drop(self, found: Conversation, keys: Sequence[bytes]) -> tuple[int, int]:
        """Delete the files whose pages no other session has: its own, and those that shared with sessions gone before it."""
        own = keys[await self._store.num_shared(found, keys) :]
        if not own:
            return 0, 0
        first = await self._engine.drop(own)
        unowned = await self._store.unowned(found, first.left)
        second = await self._engine.drop(own, unowned) if unowned else Dropped(0, 0, [])
        return first.num_spans + second.num_spans, first.num_bytes + second.num_bytes

    async def storage(self, tenant: str, session_id: str) -> Storage:
        """Measure what a session or document takes on SSD.

        Raises:
            SessionNotFound, EngineUnavailable
        """
        found, _ = await self._store.read(tenant, session_id)
        keys = await asyncio.to_thread(self._store.keys, found)
        usage = await self._engine.usage(keys)
        return Storage(found.log_bytes, usage, await self._store.num_shared(found, keys))

    async def _once(self, call: Call, what: str, work: Work) -> dict[str, object]:
        """Do `work`, or return what it returned for an earlier call with this request id."""
        if not call.request_id:
            await self._store.catalog.ping()
            return await work()
        async with self._leases.hold(f"request {call.tenant}/{what}/{call.request_id}", "the same request"):
            result = await self._store.recall(call.tenant, what, call.request_id)
            if result is None:
                result = {"digest": call.digest} | await work()
                await self._store.remember(call.tenant, what, call.request_id, result)
        if result["digest"] != call.digest:
            raise reused(call.request_id)
        return result

    async def _created(self, call: Call, work: Work) -> SessionRow:
        result = await self._once(call, "create", lambda: self._existing(call, work))
        return await self.get(call.tenant, str(result["session_id"]))

    async def _existing(self, call: Call, work: Work) -> dict[str, object]:
        """Find what an earlier call created before it broke off, else do `work`."""
        session_id = self._store.new_session_id(call.tenant, call.request_id)
        if not self._store.exists(session_id):
            return await work()
        found = await self._store.open(call.tenant, session_id)
        if found.digest != call.digest:
            raise reused(call.request_id)
        return {"session_id": session_id}

    async def _create(
        self, call: Call, label: Label, source: Conversation | None, num_turns: int | None
    ) -> dict[str, object]:
        session_id = self._store.new_session_id(call.tenant, call.request_id)
        meta = self._meta(call, label, session_id, Kind.SESSION, source.session_id if source else "")
        await self._store.create(conversations.fork_records(source, meta, num_turns) if source else [meta])
        return {"session_id": session_id}

    def _meta(self, call: Call, label: Label, session_id: str, kind: Kind, parent_id: str) -> Record:
        return conversations.meta_record(
            session_id,
            call.tenant,
            kind,
            parent_id,
            call.request_id,
            call.digest,
            self._store.clock(),
            label.title,
            dict(label.labels),
            self._store.salt_id(call.tenant),
        )

    async def _open_session(self, tenant: str, session_id: str) -> Conversation:
        found = await self._store.open(tenant, session_id)
        check_takes_turns(found)
        return found

    async def _mark(self, found: Conversation, state: State) -> None:
        record = Record(RecordType.STATE, {"state": state, "ms": self._store.clock()})
        await self._store.append(found, record)
        await self._store.index(found)

    async def _suspend(self, found: Conversation, timeout_s: float) -> None:
        catalog, deadline = self._store.catalog, time.monotonic() + timeout_s
        info = await self._engine.info()
        keys = await asyncio.to_thread(self._store.keys, found, info.page_size)
        await catalog.update(found.session_id, state=State.SUSPENDING)
        try:
            num_sealed = await self._seal(found, info, keys, timeout_s)
            if num_sealed < len(keys):
                raise NotSealed(
                    f"{len(keys) - num_sealed} of {len(keys)} pages of {found.session_id} are not on SSD after "
                    f"{timeout_s:g} s; see the engine's disk space and errors, then repeat",
                    value=num_sealed,
                    limit=len(keys),
                )
            left_s = min(_TRANSCODE_S, deadline - time.monotonic())
            if info.cold_encoding != "none" and left_s > 0:
                await self._engine.transcode(keys[await self._store.num_shared(found, keys) :], left_s)
        except BaseException:
            await catalog.update(found.session_id, state=State.ACTIVE)
            raise
        await self._mark(found, State.SUSPENDED)
        await catalog.update(found.session_id, num_sealed=min(num_sealed, found.num_pages))

    async def _seal(
        self, found: Conversation, info: EngineInfo, keys: Sequence[bytes], timeout_s: float
    ) -> int:
        """Wait until all pages are durable; pages that the engine no longer knows are computed once more."""
        deadline = time.monotonic() + timeout_s
        num_sealed = await self._engine.num_sealed(keys, min(_FIRST_LOOK_S, timeout_s)) if keys else 0
        if num_sealed < len(keys):
            tokens = found.tokens[: found.num_computed_tokens]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._prefill(info, found.session_id, self._store.salt(found.tenant), tokens)
        while num_sealed < len(keys) and (left_s := deadline - time.monotonic()) > 0:
            num_sealed = await self._engine.num_sealed(keys, min(_LOOK_S, left_s))
        return num_sealed

    async def _prefill(self, info: EngineInfo, session_id: str, salt: str, tokens: Sequence[int]) -> Usage:
        """Have the engine compute the KV of tokens; what it then generates is of no use."""
        for _ in range(MAX_RETRIES + 1):
            started_s = time.monotonic()
            request = EngineRequest(
                uuid.uuid4().hex, session_id, salt, tokens, {"max_new_tokens": 1, "temperature": 0.0}
            )
            try:
                events = [event async for event in self._engine.generate(info, request)]
            except LostPage:
                continue
            took_ms, restored = (time.monotonic() - started_s) * 1e3, events[-1].restored
            return Usage(prompt_tokens=len(tokens), ttft_ms=took_ms, total_ms=took_ms, **vars(restored))
        raise PageLost(
            f"the engine lost pages of {session_id} {MAX_RETRIES + 1} times; check the disk, then repeat"
        )


def check_prompt(num_history: int, prompt: Sequence[int], info: EngineInfo, tokenizer: Tokenizer) -> None:
    """Refuse a prompt the engine cannot take.

    Raises:
        EmptyPrompt, PromptTooLong
        InvalidRequest: a token outside the vocabulary.
    """
    if not prompt:
        raise EmptyPrompt("the prompt has no tokens; send text, messages or token ids", value=0, limit=1)
    num_tokens, limit = num_history + len(prompt), info.context_length - 1
    if num_tokens > limit:
        raise PromptTooLong(
            f"{num_history} tokens of history and {len(prompt)} of prompt make {num_tokens}, the limit is {limit} "
            f"(context length {info.context_length} less one for the answer); shorten it or start a new session",
            value=num_tokens,
            limit=limit,
        )
    if max(prompt) >= tokenizer.vocabulary_size:
        raise InvalidRequest(
            f"token id {max(prompt)} is outside the vocabulary of {tokenizer.vocabulary_size}",
            value=max(prompt),
            limit=tokenizer.vocabulary_size - 1,
        )


def check_takes_turns(found: Conversation) -> None:
    """Refuse documents and sessions that are being deleted.

    Raises:
        DocumentHasNoTurns, WrongState
    """
    if found.kind is Kind.DOCUMENT:
        raise DocumentHasNoTurns(
            f"{found.session_id} is a document; create a session from it", value=found.session_id
        )
    if found.state is State.CLOSED:
        raise WrongState(f"{found.session_id} is being deleted; repeat the delete", value=found.state)


def reused(request_id: str) -> RequestIdReused:
    """Make the error for a request id that came with another request."""
    return RequestIdReused(
        f"request_id {request_id!r} belongs to an earlier, different request; mint a new one",
        value=request_id,
    )
