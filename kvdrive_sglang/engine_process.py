"""An engine in a process of its own: start, wait until it answers, stop, kill."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from kv_tier.meta.errors import KVDriveError
from kvdrive_sglang.launch import ENVIRONMENT

TAIL_LINES = 15
FIRST_PORT = 20000
LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EngineFailed(KVDriveError):
    """The engine ended before it answered; the message holds the end of its log."""


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now and stays so while an engine loads.

    An engine listens half a minute after its start, and opens dozens of ports of the kernel's choice in the
    meantime: the port is therefore one below the range that the kernel chooses from (ip(7),
    ``ip_local_port_range``).

    Raises:
        EngineFailed: none of the ports tried is free.
    """
    first_of_kernel = int(LOCAL_PORT_RANGE.read_text().split()[0]) if LOCAL_PORT_RANGE.exists() else 32768
    for port in random.SystemRandom().sample(range(FIRST_PORT, max(first_of_kernel, FIRST_PORT + 1000)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineFailed(f"no port of 100 tried from {FIRST_PORT} up is free: give one with --port")


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Turn keyword arguments of ``sglang.Engine`` into the flags of its server."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, dict):
            flags += [flag, json.dumps(value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


SERVER_MODULE = "sglang.launch_server"


def server_command(
    arguments: Mapping[str, Any], *, host: str, port: int, module: str = SERVER_MODULE
) -> list[str]:
    """Return the command line of SGLang's HTTP server with ``arguments`` (see ``launch.server_arguments``)."""
    return [sys.executable, "-m", module, *flags_of({**arguments, "host": host, "port": port})]


class EngineProcess:
    """Run SGLang's HTTP server as a process group that this object started and ends.

    Args:
        arguments: keyword arguments of the server, from ``launch.server_arguments`` or plain SGLang ones.
        port: port on 127.0.0.1.
        log_path: receives stdout and stderr.
        env: added to the environment.
        module: what ``python -m`` runs; takes the flags of SGLang's server.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        port: int,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        module: str = SERVER_MODULE,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        quiet = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                server_command(arguments, host="127.0.0.1", port=port, module=module),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **quiet, **(env or {})},
            )

    def wait_ready(self, timeout_s: float = 600.0, on_wait: Callable[[], None] | None = None) -> Self:
        """Wait until the server answers; ``on_wait`` is called about twice a second.

        Raises:
            EngineFailed: the process ended, or ``timeout_s`` passed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise EngineFailed(
                    f"the engine ended with status {self.process.returncode}:\n{self.log_tail()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            if on_wait is not None:
                on_wait()
            time.sleep(0.5)
        raise EngineFailed(f"the engine did not answer within {timeout_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def kill(self) -> None:
        """End the whole group with SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the server politely, then the rest of its group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
