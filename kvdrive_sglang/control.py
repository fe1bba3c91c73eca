"""The control socket: what the session service asks the engine, as JSON lines over a Unix socket."""

from __future__ import annotations

import json
import logging
import os
import socketserver
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_server_args

if TYPE_CHECKING:
    from kvdrive_sglang.pool import KVDrivePool

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0


class BadRequest(Exception):
    """The request is not one we know; ``reason`` is stable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ControlServer:
    """Serve requests on ``engine.sock`` (0600) in the data directory, each connection on its own thread.

    Everything answered here is safe beside the scheduler's thread: the span store's key map, and counters.
    """

    def __init__(self, pool: KVDrivePool) -> None:
        self.pool = pool
        self.path = pool.store.spans.data_dir.engine_socket_path
        model = get_server_args()
        self._info = {
            "pid": os.getpid(),
            "http_host": pool.config.http_host,
            "http_port": pool.config.http_port,
            "model_path": model.model_path,
            "tokenizer_path": model.tokenizer_path or model.model_path,
            "page_size": pool.page_size,
            "context_length": (pool.store.limits.max_pages_per_request - 2) * pool.page_size,
            "page_bytes": pool.geometry.page_bytes,
            "fingerprint": pool.store.spans.identity.fingerprint.hex(),
            "budget_tokens": pool.config.budget_tokens,
            "append": pool.config.append,
            "eviction": pool.config.eviction,
            "window_profile": pool.config.window_profile,
            "cold_encoding": pool.config.cold_encoding,
        }
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "info": lambda _: self._info,
            "sealed": self._sealed,
            "transcode": self._transcode,
            "drop": self._drop,
            "pin": self._pin,
            "usage": self._usage,
            "stats": lambda _: self._stats(),
        }

    def start(self) -> None:
        """Bind the socket; a stale one of a dead engine is replaced (the directory's lock is ours)."""
        if self.path.exists():
            self.path.unlink()
        answer = self.answer

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    self.wfile.write(json.dumps(answer(line)).encode() + b"\n")

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                logger.debug("a control connection broke off", exc_info=True)

        mask = os.umask(0o177)
        try:
            self._server = Server(str(self.path), Handler)
        finally:
            os.umask(mask)
        threading.Thread(target=self._server.serve_forever, name="kvdrive-control", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink(missing_ok=True)

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one request line; what is wrong with it comes back as reason and message."""
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("op") not in self._operations:
                known = ", ".join(self._operations)
                raise BadRequest("UNKNOWN_OPERATION", f"expected a JSON object with op, one of {known}")
            return {"ok": True, **self._operations[request["op"]](request)}
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return {"ok": False, "reason": "NO_JSON", "message": str(error)}
        except BadRequest as error:
            return {"ok": False, "reason": error.reason, "message": str(error)}

    @staticmethod
    def _keys(request: dict[str, Any], name: str = "keys") -> list[bytes]:
        if name == "unowned" and name not in request:
            return []
        try:
            keys = [bytes.fromhex(key) for key in request[name]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequest("BAD_KEYS", f"{name} must be a list of hex page keys: {error!r}") from error
        if any(len(key) != 32 for key in keys):
            raise BadRequest("BAD_KEYS", "a page key has 32 bytes (64 hex digits)")
        return keys

    @staticmethod
    def _wait_s(request: dict[str, Any]) -> float:
        wait_s = request.get("wait_s", 0.0)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise BadRequest("BAD_WAIT", f"wait_s={wait_s!r}: must be a number from 0 to {MAX_WAIT_S:.0f}")
        return float(wait_s)

    def _sealed(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"num_sealed": self.pool.store.spans.wait_sealed(self._keys(request), self._wait_s(request))}

    def _transcode(self, request: dict[str, Any]) -> dict[str, Any]:
        return asdict(self.pool.store.transcoder.request(self._keys(request), self._wait_s(request)))

    def _drop(self, request: dict[str, Any]) -> dict[str, Any]:
        spans, keys = self.pool.store.spans, self._keys(request)
        left = spans.left_beside(keys)
        num_spans, num_bytes = spans.drop(keys, self._keys(request, "unowned"))
        return {"num_spans": num_spans, "bytes": num_bytes, "left": [[n, key.hex()] for n, key in left]}

    def _pin(self, request: dict[str, Any]) -> dict[str, Any]:
        self.pool.store.spans.pin(self._keys(request), pinned=bool(request.get("pinned", True)))
        return {}

    def _usage(self, request: dict[str, Any]) -> dict[str, Any]:
        return asdict(self.pool.store.spans.usage(self._keys(request)))

    def _stats(self) -> dict[str, Any]:
        spans = self.pool.store.spans
        counters = asdict(self.pool.store.counters) | spans.counters()
        return {"counters": counters, "gauges": self.pool.store.gauges(), "windows": self._windows()}

    def _windows(self) -> dict[str, Any] | None:
        """Return slots, hits, misses and fetched bytes, each [layer][kv_head]; requests add theirs after every step."""
        windows = self.pool.store.windows
        if windows is None:
            return None
        return {
            "slots": windows.num_slots.tolist(),
            "hits": windows.total_hits.tolist(),
            "misses": windows.total_misses.tolist(),
            "fetched_bytes": (windows.total_misses * self.pool.geometry.page_head_bytes).tolist(),
        }
