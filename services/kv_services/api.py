"""gRPC: messages to values, values to messages, errors to statuses. No logic."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kv_services import ids
from kv_services.conversation import Finish, Kind, State, Usage
from kv_services.errors import (
    STATUS_KEY,
    CatalogDown,
    EmptyPrompt,
    InvalidRequest,
    ServiceError,
    StorageFailed,
    to_status,
)
from kv_services.generation import Completion, Generation, Prompt
from kv_services.metrics import Metrics
from kv_services.sessions import Call, Label, Sessions
from kv_services.tasks import Background
from kv_services.turn import Delta, Sampling
from kv_services.v1 import session_pb2 as pb
from kv_services.v1 import session_pb2_grpc
from kv_tier.meta.catalog import SessionRow
from kv_tier.meta.errors import CatalogUnavailable, DataDirError

TENANT_KEY = "x-kvdrive-tenant"
DEFAULT_TENANT = "default"
DEFAULT_PAGE = 50
MAX_PAGE = 1000
_ANSWER_MARGIN_S = 0.25
_PAGE_TOKEN = re.compile(r"\d{13}:s_[a-z2-7]{26}")

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R", bound=Message)

_KINDS = {Kind.SESSION: pb.SESSION_KIND_SESSION, Kind.DOCUMENT: pb.SESSION_KIND_DOCUMENT}
_STATES = {
    State.ACTIVE: pb.SESSION_STATE_ACTIVE,
    State.SUSPENDING: pb.SESSION_STATE_SUSPENDING,
    State.SUSPENDED: pb.SESSION_STATE_SUSPENDED,
    State.CLOSED: pb.SESSION_STATE_CLOSED,
}
_FINISHES = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

Method = Callable[["SessionApi", Any, Context], Awaitable[Any]]


def answered(method: Method) -> Method:
    """Turn the errors of a method into statuses, and count its calls."""

    @functools.wraps(method)
    async def wrapper(self: SessionApi, request: Any, context: Context) -> Any:
        code = grpc.StatusCode.CANCELLED
        try:
            response = await method(self, request, context)
            code = grpc.StatusCode.OK
            return response
        except (ServiceError, CatalogUnavailable, DataDirError) as error:
            known = as_service_error(error)
            code = known.code
            details = ((STATUS_KEY, to_status(known).SerializeToString()),)
            await context.abort(known.code, known.message, details)
        finally:
            self.metrics.called(method.__name__, code.name)

    return wrapper


def as_service_error(error: Exception) -> ServiceError:
    """Translate what the layers below raise."""
    match error:
        case ServiceError():
            return error
        case CatalogUnavailable():
            return CatalogDown(str(error))
        case DataDirError():
            return StorageFailed(str(error))
    raise error


class SessionApi(session_pb2_grpc.SessionServiceServicer):
    """The servicer. A change that began goes on when its caller leaves; a turn is cancelled."""

    def __init__(
        self, sessions: Sessions, generation: Generation, background: Background, metrics: Metrics
    ) -> None:
        self._sessions, self._generation, self._background = sessions, generation, background
        self.metrics = metrics

    @answered
    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Context
    ) -> pb.CreateSessionResponse:
        label = Label(request.title, dict(request.labels))
        work = self._sessions.create(_call(request, context), label, request.document_id)
        return pb.CreateSessionResponse(session=_session(await self._background.finish(work)))

    @answered
    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        tenant = _tenant(context)
        row = await self._sessions.get(tenant, request.session_id)
        response = pb.GetSessionResponse(session=_session(row))
        if request.with_storage:
            storage = await self._sessions.storage(tenant, request.session_id)
            others = {"log_bytes": storage.log_bytes, "num_shared_pages": storage.num_shared_pages}
            response.storage.CopyFrom(pb.Storage(**vars(storage.spans), **others))
        return response

    @answered
    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        size = request.page_size or DEFAULT_PAGE
        if not 1 <= size <= MAX_PAGE:
            raise InvalidRequest(
                f"page_size is {size}; it must be 1 to {MAX_PAGE}", value=size, limit=MAX_PAGE
            )
        if request.page_token and not _PAGE_TOKEN.fullmatch(request.page_token):
            raise InvalidRequest(f"page_token {request.page_token!r} is none of ours; start without one")
        kind = Kind.DOCUMENT if request.kind == pb.SESSION_KIND_DOCUMENT else Kind.SESSION
        rows, after = await self._sessions.list(_tenant(context), kind, request.page_token, size)
        return pb.ListSessionsResponse(sessions=map(_session, rows), next_page_token=after)

    @answered
    async def UpdateSession(
        self, request: pb.UpdateSessionRequest, context: Context
    ) -> pb.UpdateSessionResponse:
        title = request.title if request.HasField("title") else None
        labels = dict(request.labels) if request.set_labels else None
        work = self._sessions.update(_call(request, context), request.session_id, title, labels)
        return pb.UpdateSessionResponse(session=_session(await self._background.finish(work)))

    @answered
    async def DeleteSession(
        self, request: pb.DeleteSessionRequest, context: Context
    ) -> pb.DeleteSessionResponse:
        work = self._sessions.delete(_call(request, context), request.session_id)
        num_spans, freed_bytes = await self._background.finish(work)
        return pb.DeleteSessionResponse(num_spans=num_spans, freed_bytes=freed_bytes)

    @answered
    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:
        num_turns = request.num_turns if request.HasField("num_turns") else None
        label = Label(request.title, dict(request.labels))
        work = self._sessions.fork(_call(request, context), request.session_id, label, num_turns)
        return pb.ForkSessionResponse(session=_session(await self._background.finish(work)))

    @answered
    async def SuspendSession(
        self, request: pb.SuspendSessionRequest, context: Context
    ) -> pb.SuspendSessionResponse:
        left_s = context.time_remaining()
        timeout_s = None if left_s is None else max(left_s - _ANSWER_MARGIN_S, left_s / 2)
        work = self._sessions.suspend(_call(request, context), request.session_id, timeout_s)
        return pb.SuspendSessionResponse(session=_session(await self._background.finish(work)))

    @answered
    async def ResumeSession(
        self, request: pb.ResumeSessionRequest, context: Context
    ) -> pb.ResumeSessionResponse:
        work = self._sessions.resume(_call(request, context), request.session_id)
        return pb.ResumeSessionResponse(session=_session(await self._background.finish(work)))

    @answered
    async def CreateDocument(
        self, request: pb.CreateDocumentRequest, context: Context
    ) -> pb.CreateDocumentResponse:
        if not request.text and not request.tokens.ids:
            raise EmptyPrompt("the document is empty; send text or token ids", value=0, limit=1)
        label = Label(request.title, dict(request.labels))
        work = self._sessions.create_document(
            _call(request, context), label, request.text, list(request.tokens.ids)
        )
        row, usage = await self._background.finish(work)
        return pb.CreateDocumentResponse(document=_session(row), usage=_usage(usage))

    @answered
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        events = self._generation.generate(
            _call(request, context), request.session_id, _prompt(request), _sampling(request.sampling)
        )
        try:
            async for event in events:
                await context.write(_response(event))
        finally:
            await self._ended(events)

    async def _ended(self, events: AsyncGenerator[Delta | Completion, None]) -> None:
        """Close a turn to its end, even when the call is cancelled twice."""

        async def close() -> None:
            await events.aclose()

        closing = self._background.spawn(close())
        await asyncio.shield(closing)


def _tenant(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY:
            return ids.check_tenant(str(value))
    return DEFAULT_TENANT


def _call(request: Any, context: Context) -> Call:
    content = type(request).FromString(request.SerializeToString())
    content.ClearField("request_id")
    digest = hashlib.sha256(
        type(request).__name__.encode() + b"\0" + content.SerializeToString(deterministic=True)
    )
    return Call(_tenant(context), ids.check_request_id(request.request_id), digest.hexdigest())


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            prompt = Prompt(text=request.text)
        case "chat":
            prompt = Prompt(messages=[{"role": m.role, "content": m.content} for m in request.chat.messages])
        case _:
            prompt = Prompt(token_ids=list(request.tokens.ids))
    if not (prompt.text or prompt.messages or prompt.token_ids):
        raise EmptyPrompt("the prompt is empty; send text, messages or token ids", value=0, limit=1)
    return prompt


def _sampling(options: pb.SamplingOptions) -> Sampling:
    named = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    given: dict[str, Any] = {name: getattr(options, name) for name in named if options.HasField(name)}
    return Sampling(
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        **given,
    )


def _response(event: Delta | Completion) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        return pb.GenerateResponse(delta=pb.Delta(text=event.text, token_ids=event.token_ids))
    completion = pb.Completion(
        finish_reason=_FINISHES[event.finish],
        usage=_usage(event.usage),
        turn=event.turn,
        replayed=event.replayed,
    )
    return pb.GenerateResponse(completion=completion)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(**vars(usage))


def _session(row: SessionRow) -> pb.Session:
    return pb.Session(
        session_id=row.session_id,
        kind=_KINDS[Kind(row.kind)],
        state=_STATES[State(row.state)],
        title=row.title,
        labels=row.labels,
        parent_id=row.parent_id,
        create_time=_time(row.created_ms),
        update_time=_time(row.updated_ms),
        num_tokens=row.num_tokens,
        num_turns=row.num_turns,
        num_pages=row.num_pages,
        num_sealed_pages=row.num_sealed,
    )


def _time(ms: int) -> Timestamp:
    return Timestamp(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)
