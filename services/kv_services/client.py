"""Clients of the session service, sync and async. They need grpcio and protobuf only.

    with Client("127.0.0.1:50051") as client:
        session = client.create_session(title="notes")
        with client.chat(session.session_id, "What is a radix tree?") as answer:
            for delta in answer:
                print(delta.text, end="")
        print(answer.completion.usage.ttft_ms)

Errors are the classes of `kv_services.errors`. Every change sends a request_id, minted here unless given: pass your own
to repeat a call that may have gone through. Leaving an answer's `with` block before its end cancels the turn.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from kv_services import errors
from kv_services.v1 import session_pb2 as pb
from kv_services.v1 import session_pb2_grpc

TENANT_KEY = "x-kvdrive-tenant"
_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]

Messages = Sequence[Mapping[str, str]]
R = TypeVar("R")


class _Collected:
    """What an answer has brought so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.completion: pb.Completion | None = None

    @property
    def usage(self) -> pb.Usage:
        """The cost; only after the last delta."""
        assert self.completion is not None, "the answer has not ended: iterate to its end first"
        return self.completion.usage

    def _take(self, response: pb.GenerateResponse) -> pb.Delta | None:
        if response.WhichOneof("event") == "completion":
            self.completion = response.completion
            return None
        self.text += response.delta.text
        self.token_ids.extend(response.delta.token_ids)
        return response.delta


class Answer(_Collected):
    """A turn's answer: iterate over its deltas. Then `completion`, `usage`, `text` and `token_ids` are whole."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def __iter__(self) -> Iterator[pb.Delta]:
        try:
            for response in self._call:
                if (delta := self._take(response)) is not None:
                    yield delta
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from error

    def read(self) -> str:
        """Wait for the whole answer and return its text."""
        for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Stop the turn; what was delivered stays in the session."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()


class AsyncAnswer(_Collected):
    """The same for `async for`."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    async def __aiter__(self) -> AsyncIterator[pb.Delta]:
        try:
            async for response in self._call:
                if (delta := self._take(response)) is not None:
                    yield delta
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from error

    async def read(self) -> str:
        """Wait for the whole answer and return its text."""
        async for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Stop the turn; what was delivered stays in the session."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()


C = TypeVar("C", bound=_Collected)


class _Calls(abc.ABC, Generic[C]):
    """What both clients call; the sync one gets results, the async one awaitables of them.

    Args:
        timeout_s: deadline of each call but Generate and Suspend, which take their own.
    """

    def __init__(self, stub: Any, answer: Callable[[Any], C], tenant: str, timeout_s: float | None) -> None:
        self._stub, self._answer, self._timeout_s = stub, answer, timeout_s
        self._metadata = ((TENANT_KEY, tenant),) if tenant else ()

    @abc.abstractmethod
    def _unary(self, method: str, request: Any, pick: Callable[[Any], Any], timeout_s: float | None) -> Any:
        """Call a method and pick the result out of its response."""

    def generate(
        self,
        session_id: str,
        *,
        text: str = "",
        messages: Messages = (),
        token_ids: Sequence[int] = (),
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> C:
        """Run a turn with exactly one kind of input.

        Args:
            sampling: fields of SamplingOptions (max_new_tokens, temperature, top_p, top_k, stop, ...).
            timeout_s: deadline of the whole turn.
        """
        request = pb.GenerateRequest(
            request_id=request_id or new_request_id(),
            session_id=session_id,
            sampling=pb.SamplingOptions(**sampling),
        )
        if messages:
            request.chat.messages.extend(pb.ChatMessage(**message) for message in messages)
        elif token_ids:
            request.tokens.ids.extend(token_ids)
        else:
            request.text = text
        return self._answer(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def chat(self, session_id: str, content: str, *, system: str = "", **options: Any) -> C:
        """Say something as the user; `system` may come with a session's first turn. Options as in `generate`."""
        first = [{"role": "system", "content": system}] if system else []
        return self.generate(session_id, messages=[*first, {"role": "user", "content": content}], **options)

    def _create_session(
        self, title: str, labels: Mapping[str, str], document_id: str, request_id: str
    ) -> Any:
        request = pb.CreateSessionRequest(
            request_id=request_id or new_request_id(), title=title, labels=labels, document_id=document_id
        )
        return self._unary("CreateSession", request, _session, self._timeout_s)

    def _create_document(
        self, text: str, token_ids: Sequence[int], title: str, labels: Mapping[str, str], request_id: str
    ) -> Any:
        request = pb.CreateDocumentRequest(
            request_id=request_id or new_request_id(), title=title, labels=labels
        )
        if token_ids:
            request.tokens.ids.extend(token_ids)
        else:
            request.text = text
        return self._unary("CreateDocument", request, _itself, None)

    def _fork(
        self, session_id: str, num_turns: int | None, title: str, labels: Mapping[str, str], request_id: str
    ) -> Any:
        request = pb.ForkSessionRequest(
            request_id=request_id or new_request_id(),
            session_id=session_id,
            title=title,
            labels=labels,
            num_turns=num_turns,
        )
        return self._unary("ForkSession", request, _session, self._timeout_s)

    def _update(
        self, session_id: str, title: str | None, labels: Mapping[str, str] | None, request_id: str
    ) -> Any:
        request = pb.UpdateSessionRequest(
            request_id=request_id or new_request_id(),
            session_id=session_id,
            title=title,
            labels=labels or {},
            set_labels=labels is not None,
        )
        return self._unary("UpdateSession", request, _session, self._timeout_s)

    def _list(self, documents: bool, page_size: int, page_token: str) -> Any:
        kind = pb.SESSION_KIND_DOCUMENT if documents else pb.SESSION_KIND_SESSION
        request = pb.ListSessionsRequest(page_size=page_size, page_token=page_token, kind=kind)
        return self._unary("ListSessions", request, _itself, self._timeout_s)

    def _get(self, session_id: str, *, with_storage: bool = False) -> Any:
        request = pb.GetSessionRequest(session_id=session_id, with_storage=with_storage)
        return self._unary("GetSession", request, _itself, self._timeout_s)

    def _suspend(self, session_id: str, request_id: str, timeout_s: float | None) -> Any:
        request = pb.SuspendSessionRequest(request_id=request_id or new_request_id(), session_id=session_id)
        return self._unary("SuspendSession", request, _session, timeout_s)

    def _resume(self, session_id: str, request_id: str) -> Any:
        request = pb.ResumeSessionRequest(request_id=request_id or new_request_id(), session_id=session_id)
        return self._unary("ResumeSession", request, _session, self._timeout_s)

    def _delete(self, session_id: str, request_id: str) -> Any:
        request = pb.DeleteSessionRequest(request_id=request_id or new_request_id(), session_id=session_id)
        return self._unary("DeleteSession", request, _itself, self._timeout_s)


class Client(_Calls[Answer]):
    """Blocking client; a context manager. Safe to share between threads.

    Args:
        address: host:port.
        tenant: whose sessions; empty for the default tenant.
        timeout_s: deadline of calls that take none of their own.
    """

    def __init__(self, address: str, *, tenant: str = "", timeout_s: float | None = 30.0) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        super().__init__(_stub(self._channel), Answer, tenant, timeout_s)

    def close(self) -> None:
        """Close the connection; running answers end with an error."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_session(
        self,
        *,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        document_id: str = "",
        request_id: str = "",
    ) -> pb.Session:
        """Create an empty session, or one that starts from a document."""
        created: pb.Session = self._create_session(title, labels or {}, document_id, request_id)
        return created

    def create_document(
        self,
        text: str = "",
        *,
        token_ids: Sequence[int] = (),
        title: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.CreateDocumentResponse:
        """Ingest a long text; the answer's `document.session_id` starts sessions."""
        created: pb.CreateDocumentResponse = self._create_document(
            text, token_ids, title, labels or {}, request_id
        )
        return created

    def get(self, session_id: str) -> pb.Session:
        """Describe a session or document."""
        found: pb.GetSessionResponse = self._get(session_id)
        return found.session

    def storage(self, session_id: str) -> pb.Storage:
        """Measure what a session or document takes on SSD; the engine must be running."""
        found: pb.GetSessionResponse = self._get(session_id, with_storage=True)
        return found.storage

    def list(self, *, documents: bool = False, page_size: int = 0) -> Iterator[pb.Session]:
        """Walk through all sessions (or documents), newest first, a page at a time."""
        token = ""
        while True:
            page: pb.ListSessionsResponse = self._list(documents, page_size, token)
            yield from page.sessions
            token = page.next_page_token
            if not token:
                return

    def update(
        self,
        session_id: str,
        *,
        title: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.Session:
        """Change title or labels; None leaves them."""
        updated: pb.Session = self._update(session_id, title, labels, request_id)
        return updated

    def fork(
        self,
        session_id: str,
        *,
        num_turns: int | None = None,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.Session:
        """Create a session that continues another one after `num_turns` turns (None: all)."""
        forked: pb.Session = self._fork(session_id, num_turns, title, labels or {}, request_id)
        return forked

    def suspend(self, session_id: str, *, request_id: str = "", timeout_s: float | None = None) -> pb.Session:
        """Wait until the session is durable on SSD."""
        suspended: pb.Session = self._suspend(session_id, request_id, timeout_s)
        return suspended

    def resume(self, session_id: str, *, request_id: str = "") -> pb.Session:
        """Make a suspended session accept turns again."""
        resumed: pb.Session = self._resume(session_id, request_id)
        return resumed

    def delete(self, session_id: str, *, request_id: str = "") -> pb.DeleteSessionResponse:
        """Delete a session or document, and the KV only it uses."""
        deleted: pb.DeleteSessionResponse = self._delete(session_id, request_id)
        return deleted

    def _unary(self, method: str, request: Any, pick: Callable[[Any], R], timeout_s: float | None) -> R:
        try:
            return pick(getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from error


class AsyncClient(_Calls[AsyncAnswer]):
    """The same for asyncio; an async context manager.

    Args:
        address: host:port.
        tenant: whose sessions; empty for the default tenant.
        timeout_s: deadline of calls that take none of their own.
    """

    def __init__(self, address: str, *, tenant: str = "", timeout_s: float | None = 30.0) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        super().__init__(_stub(self._channel), AsyncAnswer, tenant, timeout_s)

    async def close(self) -> None:
        """Close the connection; running answers end with an error."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create_session(
        self,
        *,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        document_id: str = "",
        request_id: str = "",
    ) -> pb.Session:
        """Create an empty session, or one that starts from a document."""
        created: pb.Session = await self._create_session(title, labels or {}, document_id, request_id)
        return created

    async def create_document(
        self,
        text: str = "",
        *,
        token_ids: Sequence[int] = (),
        title: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.CreateDocumentResponse:
        """Ingest a long text; the answer's `document.session_id` starts sessions."""
        created: pb.CreateDocumentResponse = await self._create_document(
            text, token_ids, title, labels or {}, request_id
        )
        return created

    async def get(self, session_id: str) -> pb.Session:
        """Describe a session or document."""
        found: pb.GetSessionResponse = await self._get(session_id)
        return found.session

    async def storage(self, session_id: str) -> pb.Storage:
        """Measure what a session or document takes on SSD; the engine must be running."""
        found: pb.GetSessionResponse = await self._get(session_id, with_storage=True)
        return found.storage

    async def list(self, *, documents: bool = False, page_size: int = 0) -> AsyncIterator[pb.Session]:
        """Walk through all sessions (or documents), newest first, a page at a time."""
        token = ""
        while True:
            page: pb.ListSessionsResponse = await self._list(documents, page_size, token)
            for session in page.sessions:
                yield session
            token = page.next_page_token
            if not token:
                return

    async def update(
        self,
        session_id: str,
        *,
        title: str | None = None,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.Session:
        """Change title or labels; None leaves them."""
        updated: pb.Session = await self._update(session_id, title, labels, request_id)
        return updated

    async def fork(
        self,
        session_id: str,
        *,
        num_turns: int | None = None,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.Session:
        """Create a session that continues another one after `num_turns` turns (None: all)."""
        forked: pb.Session = await self._fork(session_id, num_turns, title, labels or {}, request_id)
        return forked

    async def suspend(
        self, session_id: str, *, request_id: str = "", timeout_s: float | None = None
    ) -> pb.Session:
        """Wait until the session is durable on SSD."""
        suspended: pb.Session = await self._suspend(session_id, request_id, timeout_s)
        return suspended

    async def resume(self, session_id: str, *, request_id: str = "") -> pb.Session:
        """Make a suspended session accept turns again."""
        resumed: pb.Session = await self._resume(session_id, request_id)
        return resumed

    async def delete(self, session_id: str, *, request_id: str = "") -> pb.DeleteSessionResponse:
        """Delete a session or document, and the KV only it uses."""
        deleted: pb.DeleteSessionResponse = await self._delete(session_id, request_id)
        return deleted

    async def _unary(self, method: str, request: Any, pick: Callable[[Any], R], timeout_s: float | None) -> R:
        try:
            return pick(
                await getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
            )
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from error


def new_request_id() -> str:
    """Mint a request id."""
    return uuid.uuid4().hex


def _session(response: Any) -> Any:
    return response.session


def _itself(response: Any) -> Any:
    return response


def _stub(channel: Any) -> Any:
    return session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
