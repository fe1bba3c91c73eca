"""The engine as the service sees it: its control socket in the data directory, and SGLang's HTTP server.

The endpoint is asked for before each use (`info`), so that a restarted engine is found at once. Nothing here retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kv_services.errors import EngineRejected, EngineUnavailable

_LINE_LIMIT_BYTES = 64 << 20
_LOST_PAGE = "LOST_PAGE"


class LostPage(Exception):
    """The engine lost a page of the request; it continues from its tokens. Never leaves the service."""


@dataclass(frozen=True)
class EngineInfo:
    """What the control socket's `info` answers.

    Args:
        fingerprint: hex; two engines with equal ones read each other's spans.
        page_bytes: KV of one page, all layers and heads.
        context_length: most positions of a sequence.
        cold_encoding: what suspended sessions are transcoded to; "none" leaves them.
    """

    pid: int
    http_host: str
    http_port: int
    model_path: str
    tokenizer_path: str
    page_size: int
    page_bytes: int
    context_length: int
    fingerprint: str
    cold_encoding: str

    @property
    def url(self) -> str:
        """Base URL of the HTTP server."""
        host = f"[{self.http_host}]" if ":" in self.http_host else self.http_host
        return f"http://{host}:{self.http_port}"


@dataclass(frozen=True)
class Dropped:
    """What a drop deleted, and what it left beside: (ordinal in the sequence, page key) of each file's first other page."""

    num_spans: int
    num_bytes: int
    left: list[tuple[int, bytes]]


@dataclass(frozen=True)
class SpanUsage:
    """What files are made of, in bytes; see the message Storage."""

    num_spans: int
    kv_bytes: int
    other_kv_bytes: int
    index_bytes: int


@dataclass(frozen=True)
class Restored:
    """Where the KV of a request's prompt came from; the fields of `Usage` of the same names."""

    restored_device_tokens: int = 0
    restored_dram_tokens: int = 0
    restored_ssd_tokens: int = 0
    computed_tokens: int = 0
    read_bytes: int = 0
    recomputed_tokens: int = 0
    restore_estimate_ms: float | None = None
    recompute_estimate_ms: float | None = None


@dataclass(frozen=True)
class EngineEvent:
    """One server-sent event.

    Args:
        token_ids: generated since the previous event.
        finish: None while running, else "stop" or "length".
    """

    token_ids: list[int]
    finish: str | None = None
    restored: Restored = field(default_factory=Restored)


@dataclass(frozen=True)
class EngineRequest:
    """One `/generate` call.

    Args:
        rid: fixed length, unique.
        input_ids: [num_tokens] the whole prompt, history included.
        sampling: SGLang's sampling parameters.
    """

    rid: str
    session_id: str
    cache_salt: str
    input_ids: Sequence[int]
    sampling: dict[str, Any]


class Engine:
    """Client of one data directory's engine. Owned by the service; close it.

    Args:
        socket_path: the control socket.
        connect_timeout_s: for both the socket and HTTP.
    """

    def __init__(self, socket_path: Path, connect_timeout_s: float = 5.0) -> None:
        self._socket_path = socket_path
        self._connect_timeout_s = connect_timeout_s
        timeout = httpx.Timeout(None, connect=connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def info(self) -> EngineInfo:
        """Ask who serves this data directory.

        Raises:
            EngineUnavailable: no engine answers.
        """
        answer = await self._control({"op": "info"}, self._connect_timeout_s)
        fields = EngineInfo.__dataclass_fields__
        try:
            return EngineInfo(**{name: answer[name] for name in fields})
        except KeyError as error:
            raise EngineUnavailable(
                f"the engine's info lacks {error}; start an engine of this version"
            ) from error

    async def num_sealed(self, keys: Sequence[bytes], wait_s: float) -> int:
        """Count the leading pages that are durable on SSD, waiting up to `wait_s` seconds for all.

        Raises:
            EngineUnavailable: no engine answers.
        """
        request = {"op": "sealed", "keys": [key.hex() for key in keys], "wait_s": wait_s}
        return int((await self._control(request, wait_s + self._connect_timeout_s))["num_sealed"])

    async def transcode(self, keys: Sequence[bytes], wait_s: float) -> int:
        """Have the spans all of whose pages are among `keys` stored in fewer bits, waiting up to `wait_s` seconds.

        Returns:
            How many spans stay as they are: not done in time, damaged, or no room on SSD. A repeat tries again.

        Raises:
            EngineUnavailable: no engine answers.
        """
        request = {"op": "transcode", "keys": [key.hex() for key in keys], "wait_s": wait_s}
        return int((await self._control(request, wait_s + self._connect_timeout_s))["num_left"])

    async def drop(self, keys: Sequence[bytes], unowned: Sequence[bytes] = ()) -> Dropped:
        """Delete the spans all of whose pages are among `keys`, or whose first page that is not is among `unowned`.

        Raises:
            EngineUnavailable: no engine answers.
        """
        request = {
            "op": "drop",
            "keys": [key.hex() for key in keys],
            "unowned": [key.hex() for key in unowned],
        }
        answer = await self._control(request, 60.0)
        left = [(int(ordinal), bytes.fromhex(key)) for ordinal, key in answer["left"]]
        return Dropped(int(answer["num_spans"]), int(answer["bytes"]), left)

    async def usage(self, keys: Sequence[bytes]) -> SpanUsage:
        """Measure the files that hold any of `keys`.

        Raises:
            EngineUnavailable: no engine answers.
        """
        answer = await self._control(
            {"op": "usage", "keys": [key.hex() for key in keys]}, self._connect_timeout_s
        )
        return SpanUsage(**{name: int(answer[name]) for name in SpanUsage.__dataclass_fields__})

    async def generate(self, info: EngineInfo, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request; the last event has a finish. Closing the iterator early stops the engine's work.

        Raises:
            LostPage: the request continues from its tokens.
            EngineRejected: the engine refuses the request.
            EngineUnavailable: the connection or the engine failed.
        """
        payload = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "stream": True,
            "session_id": request.session_id,
            "cache_salt": request.cache_salt,
            "sampling_params": request.sampling,
        }
        finished = False
        try:
            async with self._http.stream("POST", f"{info.url}/generate", json=payload) as response:
                if response.status_code != httpx.codes.OK:
                    body = (await response.aread()).decode("utf-8", "replace")
                    raise _failure(response.status_code, body)
                async for event in _events(response):
                    finished = event.finish is not None
                    yield event
            if not finished:
                raise EngineUnavailable("the engine ended its answer early; repeat the call")
        except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
            finished = True
            raise EngineUnavailable(
                f"the engine at {info.url} failed: {type(error).__name__}: {error}; repeat the call",
                value=info.url,
            ) from error
        except (LostPage, EngineRejected, EngineUnavailable):
            finished = True
            raise
        finally:
            if not finished:
                await self.abort(info, request.rid)

    async def abort(self, info: EngineInfo, rid: str) -> None:
        """Stop the engine's work on a request; an engine that is gone works on nothing."""
        with contextlib.suppress(httpx.HTTPError):
            await self._http.post(
                f"{info.url}/abort_request", json={"rid": rid}, timeout=self._connect_timeout_s
            )

    async def healthy(self) -> bool:
        """Tell whether the control socket and the HTTP server answer."""
        try:
            info = await self.info()
            response = await self._http.get(f"{info.url}/health", timeout=self._connect_timeout_s)
        except (EngineUnavailable, httpx.HTTPError):
            return False
        return response.status_code == httpx.codes.OK

    async def _control(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(request)
        except (OSError, ValueError, TimeoutError) as error:
            detail = f"{type(error).__name__}: {error}" if str(error) else f"no answer in {timeout_s:g} s"
            raise EngineUnavailable(
                f"no engine answers {request['op']!r} at {self._socket_path} ({detail}); start one on this data directory",
                value=self._socket_path,
            ) from error
        if not answer.get("ok"):
            raise EngineUnavailable(
                f"the engine answers {request['op']!r} with {answer.get('reason')}: {answer.get('message')}",
                engine_reason=answer.get("reason", ""),
            )
        return answer

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(str(self._socket_path), limit=_LINE_LIMIT_BYTES)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection closed before the answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _events(response: httpx.Response) -> AsyncGenerator[EngineEvent, None]:
    num_seen = 0
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        message = json.loads(data)
        if "error" in message:
            raise _failure(int(message["error"].get("code") or 500), str(message["error"].get("message")))
        meta = message["meta_info"]
        finish = meta.get("finish_reason")
        if finish is not None and finish["type"] == "abort":
            raise _failure(int(finish.get("status_code") or 503), str(finish.get("message")))
        ids = _new_ids(message.get("output_ids") or [], num_seen, int(meta.get("completion_tokens", 0)))
        num_seen += len(ids)
        yield EngineEvent(ids, finish["type"] if finish else None, _restored(meta))


def _new_ids(output_ids: list[int], num_seen: int, num_generated: int) -> list[int]:
    """Pick what an event adds, whether it repeats all ids so far or brings the new ones only."""
    cumulative = len(output_ids) == num_generated or len(output_ids) + num_seen > num_generated
    return output_ids[num_seen:] if cumulative else output_ids


def _restored(meta: dict[str, Any]) -> Restored:
    figures = meta.get("kvdrive")
    if isinstance(figures, list):
        figures = figures[-1] if figures else None
    if not figures:
        cached = int(meta.get("cached_tokens", 0))
        computed = max(0, int(meta.get("prompt_tokens", 0)) - cached)
        return Restored(restored_device_tokens=cached, computed_tokens=computed)
    return Restored(
        int(figures["tokens_device"]),
        int(figures["tokens_dram"]),
        int(figures["tokens_ssd"]),
        int(figures["tokens_computed"]),
        int(figures["bytes_read"]),
        int(figures["tokens_recomputed"]),
        _milliseconds(figures["restore_s"]),
        _milliseconds(figures["recompute_s"]),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _failure(status: int, message: str) -> Exception:
    """Choose the exception for an HTTP status, or one inside an event."""
    if message.startswith(_LOST_PAGE) or (
        status == httpx.codes.SERVICE_UNAVAILABLE and _LOST_PAGE in message
    ):
        return LostPage(message)
    if 400 <= status < 500:
        return EngineRejected(f"the engine refuses the request: {message[:500]}", status=status)
    return EngineUnavailable(
        f"the engine failed with status {status}: {message[:500]}; repeat the call", status=status
    )
