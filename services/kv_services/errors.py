"""The errors of the session service, in one tree, and their one mapping to gRPC.

    ServiceError
    |- InvalidRequest          INVALID_ARGUMENT
    |  |- EmptyPrompt
    |  |- PromptTooLong
    |  |- RequestIdReused
    |  `- EngineRejected       the engine refused what the service let through
    |- SessionNotFound         NOT_FOUND (also for another tenant's)
    |- SessionBusy             ABORTED: a turn or another change is running
    |- WrongState              FAILED_PRECONDITION
    |  |- SessionSuspended
    |  |- NotSealed            a suspend could not make every page durable in time
    |  |- DocumentHasNoTurns
    |  `- TokenizerMissing
    |- Exhausted               RESOURCE_EXHAUSTED
    |  |- TooManyTurns
    |  |- QuotaExceeded        the tenant keeps as much as it may
    |  `- StorageFailed        the token log cannot be written
    |- Unavailable             UNAVAILABLE, with RetryInfo
    |  |- EngineUnavailable
    |  |- CatalogDown
    |  `- PageLost             the engine lost a page more often than a turn is continued
    |- LogCorrupt              DATA_LOSS
    `- DeadlineExceeded        DEADLINE_EXCEEDED (made by gRPC, seen by clients)

The service raises them, and the client raises the same classes again: `to_status` and `from_status` are inverse.
Every message names the value, the limit and what to do; `metadata` holds value and limit for programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "kvdrive"
STATUS_KEY = "grpc-status-details-bin"


class ServiceError(Exception):
    """Root of what the service answers instead of a result.

    Args:
        message: value, limit and what to do, for people.
        metadata: the same for programs; stringified.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"
    retry_after_s: float | None = None

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(ServiceError):
    """The request itself is wrong; repeating it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class EmptyPrompt(InvalidRequest):
    """The turn brings no tokens."""

    reason = "EMPTY_PROMPT"


class PromptTooLong(InvalidRequest):
    """History and prompt leave no room for an answer in the context length."""

    reason = "PROMPT_TOO_LONG"


class RequestIdReused(InvalidRequest):
    """The request_id belongs to an earlier, different request."""

    reason = "REQUEST_ID_REUSED"


class EngineRejected(InvalidRequest):
    """The engine refused the request."""

    reason = "ENGINE_REJECTED"


class SessionNotFound(ServiceError):
    """The tenant has no such session or document."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SESSION_NOT_FOUND"


class SessionBusy(ServiceError):
    """Another call is changing the session."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_BUSY"


class WrongState(ServiceError):
    """The session is in a state that forbids the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_STATE"


class SessionSuspended(WrongState):
    """The session must be resumed first."""

    reason = "SESSION_SUSPENDED"


class NotSealed(WrongState):
    """Some pages of the session are not durable yet."""

    reason = "NOT_SEALED"


class DocumentHasNoTurns(WrongState):
    """Documents only serve as a start of sessions."""

    reason = "DOCUMENT_HAS_NO_TURNS"


class TokenizerMissing(WrongState):
    """The model's tokenizer or chat template cannot be loaded."""

    reason = "TOKENIZER_MISSING"


class Exhausted(ServiceError):
    """Something is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "EXHAUSTED"


class TooManyTurns(Exhausted):
    """The service runs as many turns as it may."""

    reason = "TOO_MANY_TURNS"
    retry_after_s = 1.0


class QuotaExceeded(Exhausted):
    """The tenant keeps as much as it may."""

    reason = "QUOTA_EXCEEDED"


class StorageFailed(Exhausted):
    """The operating system failed a write to the token log."""

    reason = "STORAGE_FAILED"


class Unavailable(ServiceError):
    """Something the service needs does not answer; nothing is lost, repeat the call."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    retry_after_s = 2.0


class EngineUnavailable(Unavailable):
    """The engine does not answer."""

    reason = "ENGINE_UNAVAILABLE"


class CatalogDown(Unavailable):
    """Redis does not answer."""

    reason = "CATALOG_UNAVAILABLE"


class PageLost(Unavailable):
    """The engine lost pages of the turn again and again."""

    reason = "LOST_PAGE"


class LogCorrupt(ServiceError):
    """A token log holds bytes that were not written to it."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "LOG_CORRUPT"


class DeadlineExceeded(ServiceError):
    """The client's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


def _tree(root: type[ServiceError]) -> Iterator[type[ServiceError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


BY_REASON: dict[str, type[ServiceError]] = {cls.reason: cls for cls in _tree(ServiceError)}
_BY_CODE: dict[grpc.StatusCode, type[ServiceError]] = {
    cls.code: cls for cls in reversed(list(_tree(ServiceError)))
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: ServiceError) -> status_pb2.Status:
    """Describe an error as google.rpc.Status with one ErrorInfo, and RetryInfo where waiting helps."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(
            nanos=int(error.retry_after_s * 1e9) % 10**9, seconds=int(error.retry_after_s)
        )
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


def from_status(status: status_pb2.Status) -> ServiceError:
    """Rebuild the error a status describes; an unknown reason gives the class of its code."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    error = BY_REASON.get(info.reason, _BY_CODE.get(code, ServiceError))(
        status.message, **dict(info.metadata)
    )
    error.code = code
    error.reason = info.reason or code.name
    if retry.HasField("retry_delay"):
        error.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return error


def from_rpc(error: grpc.RpcError) -> ServiceError:
    """Rebuild the error behind a failed call of a sync or an async stub."""
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == STATUS_KEY:
            return from_status(status_pb2.Status.FromString(value))
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    return from_status(status_pb2.Status(code=code.value[0], message=f"{code.name}: {details}"))


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
