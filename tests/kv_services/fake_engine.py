"""An engine that speaks the engine's two protocols and computes nothing.

The next token is a hash of all tokens before it, so that answers tell whether a prompt was complete. Tests script
answers, hold them at a token, lose pages, break connections, and look at what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kv_tier.meta.page_keys import page_keys

PAGE = 4
CONTEXT = 4096
IM_START, IM_END = 256, 257
_PASSES_TO_CONNECT = 4  # of the event loop, from an accepted socket to the first line of its handler
TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\nBe brief.<|im_end|>\n' }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def write_tokenizer(directory: Path) -> Path:
    """Write a byte-level tokenizer (256 bytes, two markers) with a ChatML template."""
    vocabulary = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def next_token(tokens: Sequence[int]) -> int:
    """The definition of the fake model: a printable ASCII byte's id from a hash of everything before."""
    return 1 + hashlib.sha256(array("I", tokens).tobytes()).digest()[0] % 90


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """What the fake model answers to `tokens`."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


@dataclass
class Script:
    """How one `/generate` goes.

    Args:
        answer: ids to answer with, ending by "stop"; None: the model's, ending by "length".
        hold_after: tokens sent before the answer waits for `release`; None never waits.
        lose_page_after, break_after: tokens sent before a lost page, or a broken connection.
        status: HTTP status to refuse with, and the message.
        incremental: send new ids only.
    """

    answer: list[int] | None = None
    hold_after: int | None = None
    lose_page_after: int | None = None
    break_after: int | None = None
    status: tuple[int, str] | None = None
    incremental: bool = False
    held: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """Serves `<data_dir>/engine.sock` and an HTTP port in the running loop. An async context manager."""

    def __init__(self, data_dir: Path, tokenizer: Path) -> None:
        self.data_dir, self.tokenizer = data_dir, tokenizer
        self.scripts: list[Script] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.dropped: list[str] = []
        self.drops: list[tuple[list[str], list[str]]] = []
        self.left: list[tuple[int, str]] = []
        self.sealed: set[str] = set()
        self.sealing = True
        self.cold_encoding = "none"
        self.transcoded: list[list[str]] = []
        self.page_size, self.context_length = PAGE, CONTEXT
        self._running: dict[str, asyncio.Event] = {}
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._http = await asyncio.start_server(self._serve_http, "127.0.0.1", 0)
        self.port = self._http.sockets[0].getsockname()[1]
        self.data_dir.mkdir(parents=True, exist_ok=True)
        path = self.data_dir / "engine.sock"
        path.unlink(missing_ok=True)
        self._control = await asyncio.start_unix_server(self._serve_control, str(path), limit=1 << 26)

    async def stop(self) -> None:
        """Go away as a killed engine does: connections break, the socket file stays."""
        # A server closed between accepting a connection and making its transport never closes that transport
        # (asyncio of Python 3.11), so: accept no more, let those accepted reach `_connection`, then close.
        servers = (self._http, self._control)
        for listener in (listener for server in servers for listener in server.sockets):
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(_PASSES_TO_CONNECT):
            await asyncio.sleep(0)
        for server in servers:
            server.close()
            await server.wait_closed()
        for writer in set(self._connections.values()):
            writer.transport.abort()
        for stop in self._running.values():
            stop.set()
        if self._connections:
            await asyncio.wait(set(self._connections))

    @contextlib.contextmanager
    def _connection(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                yield
        finally:
            del self._connections[task]

    def script(self, **values: Any) -> Script:
        """Say how the next `/generate` without a script goes."""
        self.scripts.append(Script(**values))
        return self.scripts[-1]

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._connection(writer):
            while line := await reader.readline():
                request = json.loads(line)
                answer = getattr(self, f"_op_{request.pop('op')}")(**request)
                writer.write(json.dumps({"ok": True} | answer).encode() + b"\n")

    def _op_info(self) -> dict[str, Any]:
        return {
            "pid": 1,
            "http_host": "127.0.0.1",
            "http_port": self.port,
            "model_path": str(self.tokenizer),
            "tokenizer_path": str(self.tokenizer),
            "page_size": self.page_size,
            "page_bytes": 100,
            "context_length": self.context_length,
            "fingerprint": "00" * 32,
            "budget_tokens": "all",
            "append": "auto",
            "cold_encoding": self.cold_encoding,
        }

    def _op_sealed(self, keys: list[str], wait_s: float) -> dict[str, Any]:
        run = next((n for n, key in enumerate(keys) if key not in self.sealed), len(keys))
        return {"num_sealed": run}

    def _op_transcode(self, keys: list[str], wait_s: float) -> dict[str, Any]:
        assert 0 < wait_s <= 60
        self.transcoded.append(keys)
        return {"num_spans": 1, "num_left": 0, "freed_bytes": 100}

    def _op_drop(self, keys: list[str], unowned: list[str]) -> dict[str, Any]:
        self.dropped += keys
        self.drops.append((keys, unowned))
        gone = self.sealed & {*keys, *unowned}
        self.sealed -= gone
        return {"num_spans": len(gone), "bytes": 100 * len(gone), "left": self.left}

    def _op_usage(self, keys: list[str]) -> dict[str, Any]:
        num_spans = len(self.sealed & set(keys))
        return {
            "num_spans": num_spans,
            "kv_bytes": 90 * num_spans,
            "other_kv_bytes": 0,
            "index_bytes": 10 * num_spans,
        }

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._connection(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [
                line.partition(":")[2]
                for line in head.splitlines()
                if line.lower().startswith("content-length:")
            ]
            body = json.loads(await reader.readexactly(int(sizes[0])) if sizes else b"{}")
            path = head.split()[1]
            if path == "/generate":
                await self._generate(body, writer)
            else:
                if path == "/abort_request":
                    self._abort(body["rid"])
                writer.write(_head(200))
            await writer.drain()

    def _abort(self, rid: str) -> None:
        if rid in self._running:
            self._running[rid].set()
        self.aborted.put_nowait(rid)

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        script = self.scripts.pop(0) if self.scripts else Script()
        if script.status is not None:
            writer.write(
                _head(script.status[0]) + json.dumps({"error": {"message": script.status[1]}}).encode()
            )
            return
        writer.write(_head(200, "text/event-stream"))
        self._running[body["rid"]] = stop = asyncio.Event()
        sent: list[int] = []
        with contextlib.suppress(ConnectionError):
            async for event in self._events(body, script, stop, sent):
                writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await writer.drain()
                if script.break_after is not None and len(sent) >= script.break_after:
                    return
            writer.write(b"data: [DONE]\n\n")
        if self.sealing:
            self.seal([*body["input_ids"], *sent[:-1]], body["cache_salt"])

    async def _events(
        self, body: dict[str, Any], script: Script, stop: asyncio.Event, sent: list[int]
    ) -> AsyncIterator[dict[str, Any]]:
        inputs, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        answer = continuation(inputs, limit) if script.answer is None else script.answer[:limit]
        event = _eventer(body, script, sent)
        for token in answer:
            if script.hold_after is not None and len(sent) == script.hold_after:
                script.held.set()
                await _first(script.release.wait(), stop.wait())
            if stop.is_set():
                yield event({"type": "abort", "message": "aborted"})
                return
            sent.append(token)
            if script.lose_page_after is not None and len(sent) > script.lose_page_after:
                yield event({"type": "abort", "message": "LOST_PAGE page 3", "status_code": 503})
                return
            last = len(sent) == len(answer)
            kind = "length" if script.answer is None or len(sent) == limit < len(script.answer) else "stop"
            yield event({"type": kind} if last else None)

    def seal(self, tokens: Sequence[int], salt: str) -> None:
        """Make the full pages of tokens durable."""
        self.sealed |= {key.hex() for key in page_keys(tokens, self.page_size, cache_salt=salt)}


def _eventer(body: dict[str, Any], script: Script, sent: list[int]) -> Callable[[Any], dict[str, Any]]:
    def event(finish: dict[str, Any] | None) -> dict[str, Any]:
        num_prompt = len(body["input_ids"])
        figures = {
            "tokens_device": 1,
            "tokens_dram": 2,
            "tokens_ssd": 3,
            "tokens_computed": max(0, num_prompt - 6),
            "bytes_read": 10,
            "tokens_recomputed": 4,
            "restore_s": 0.25,
            "recompute_s": None,
        }
        return {
            "text": "",
            "output_ids": sent[-1:] if script.incremental else list(sent),
            "meta_info": {
                "id": body["rid"],
                "finish_reason": finish,
                "prompt_tokens": num_prompt,
                "completion_tokens": len(sent),
                "cached_tokens": 6,
                "kvdrive": [figures],
            },
        }

    return event


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _head(status: int, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()
