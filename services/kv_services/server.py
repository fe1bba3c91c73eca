"""Wiring: builds the service from its configuration, starts it, stops it.

python -m kv_services.server --data-dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from kv_services.api import SessionApi
from kv_services.config import ServiceConfig
from kv_services.engine import Engine
from kv_services.generation import Generation
from kv_services.ids import catalog_namespace
from kv_services.metrics import Metrics
from kv_services.retention import Quota, sweep
from kv_services.sessions import Call, Sessions, Tokenizers
from kv_services.store import Rebuild, SessionStore
from kv_services.tasks import Background, Leases
from kv_services.v1 import session_pb2, session_pb2_grpc
from kv_tier.meta.catalog import Catalog
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.embedded_valkey import EmbeddedValkey
from kv_tier.meta.errors import CatalogUnavailable, ConfigError, KVDriveError

logger = logging.getLogger(__name__)

SERVICE_NAME = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
_MAX_MESSAGE_BYTES = 64 << 20
_FINISH_S = 5.0  # for logging turns that were cut off


class SessionServer:
    """A running service, as an async context manager.

    Attributes:
        port: where gRPC listens. metrics_port: where `/metrics` is, or None.
        rebuilt: what the start repaired. num_expired: sessions and documents deleted for their age.

    Raises (on entering):
        ConfigError: a port is taken.
        DataDirError: another service owns the data directory, or it cannot be used.
        CatalogUnavailable: Redis does not answer.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._exits = contextlib.AsyncExitStack()
        self.port = 0
        self.metrics_port: int | None = None
        self.rebuilt = Rebuild()
        self.num_expired = 0

    async def __aenter__(self) -> SessionServer:
        async with contextlib.AsyncExitStack() as exits:
            await self._start(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Refuse new calls, let turns end for a while, cancel the rest, close everything."""
        await self._exits.aclose()

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        await self._server.wait_for_termination()

    async def _start(self, exits: contextlib.AsyncExitStack) -> None:
        config = self._config
        data_dir = exits.enter_context(DataDir.open(config.data_dir, role="service"))
        self._catalog = await exits.enter_async_context(_catalog(config, data_dir, exits))
        await self._catalog.ping()
        self._engine = Engine(data_dir.engine_socket_path)
        exits.push_async_callback(self._engine.close)
        self._metrics = Metrics()
        store = SessionStore(data_dir, self._catalog, config.request_ttl_s)
        self.rebuilt = await store.rebuild()
        self._metrics.corrupt_logs(len(self.rebuilt.corrupt))
        background, watchers = Background(), Background()
        exits.push_async_callback(background.close, max(config.stop_grace_s, _FINISH_S))
        exits.push_async_callback(watchers.close)
        leases, tokenizers = Leases(), Tokenizers()
        quota = Quota(store, config.tenant_quota_bytes)
        sessions = self._sessions = Sessions(
            store, self._engine, leases, tokenizers, config.suspend_timeout_s, quota
        )
        generation = Generation(
            store,
            self._engine,
            leases,
            tokenizers,
            watchers,
            self._metrics,
            max_concurrent_turns=config.max_concurrent_turns,
            default_max_new_tokens=config.default_max_new_tokens,
            quota=quota,
        )
        exits.push_async_callback(generation.drained, _FINISH_S)
        self._server = self._serve(SessionApi(sessions, generation, background, self._metrics))
        await self._server.start()
        exits.push_async_callback(self._server.stop, config.stop_grace_s)
        self._start_metrics(exits)
        await self._look()
        watch = asyncio.create_task(self._watch())
        exits.push_async_callback(_cancel, watch)
        if config.session_ttl_s:
            sweeper = asyncio.create_task(self._sweep(store, sessions))
            exits.push_async_callback(_cancel, sweeper)

    def _serve(self, api: SessionApi) -> grpc.aio.Server:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ]
        server = grpc.aio.server(options=options)
        session_pb2_grpc.add_SessionServiceServicer_to_server(api, server)  # type: ignore[no-untyped-call]  # generated
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError as error:
            raise _port_taken("port", config.host, config.port, error) from error
        return server

    def _start_metrics(self, exits: contextlib.AsyncExitStack) -> None:
        config = self._config
        if config.metrics_port is None:
            return
        try:
            server, thread = start_http_server(config.metrics_port, config.host, self._metrics.registry)
        except OSError as error:
            raise _port_taken("metrics_port", config.host, config.metrics_port, error) from error
        self.metrics_port = server.server_port
        exits.callback(_stop_http, server, thread)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self._look()

    async def _sweep(self, store: SessionStore, sessions: Sessions) -> None:
        """Delete expired sessions now and then; Redis may be down meanwhile."""

        async def delete(tenant: str, session_id: str) -> None:
            await sessions.delete(Call(tenant, "", ""), session_id)

        while True:
            try:
                self.num_expired += await sweep(store, self._config.session_ttl_s, delete)
            except CatalogUnavailable:
                pass
            except Exception:
                logger.exception("expired sessions were not all deleted; tried again in a while")
            await asyncio.sleep(self._config.sweep_interval_s)

    async def _look(self) -> None:
        """Tell the health service whether engine and catalog answer."""
        healthy = await self._engine.healthy() and await _answers(self._catalog)
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)
        self._metrics.healthy(healthy)


async def serve(
    config: ServiceConfig, started: Callable[[SessionServer], None] = lambda server: None
) -> None:
    """Run the service until SIGINT or SIGTERM.

    Args:
        started: called once it listens.

    Raises:
        As `SessionServer`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with SessionServer(config) as server:
            started(server)
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def main(arguments: list[str] | None = None) -> int:
    """Run the service from a shell; every field of ServiceConfig is an option."""
    parser = argparse.ArgumentParser(
        prog="kv_services.server", description="Serve durable sessions over gRPC."
    )
    for field in dataclasses.fields(ServiceConfig):
        kind = {"Path": Path, "str": str, "float": float}.get(str(field.type), int)
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            required=required,
            default=None if required else field.default,
            help="required" if required else f"default {field.default!r}",
        )
    try:
        asyncio.run(serve(ServiceConfig(**vars(parser.parse_args(arguments))), _announce))
    except KVDriveError as error:
        print(f"kv_services: {error}", file=sys.stderr)
        return 1
    return 0


def _announce(server: SessionServer) -> None:
    for session_id in server.rebuilt.corrupt:
        print(
            f"kv_services: the token log of {session_id} is damaged; restore it from a backup",
            file=sys.stderr,
        )
    print(f"kv_services: listening on port {server.port}", flush=True)


def _catalog(config: ServiceConfig, data_dir: DataDir, exits: contextlib.AsyncExitStack) -> Catalog:
    url = config.redis_url or exits.enter_context(EmbeddedValkey(data_dir.catalog_path)).url
    return Catalog(url, catalog_namespace(data_dir.secret()))


async def _answers(catalog: Catalog) -> bool:
    try:
        await catalog.ping()
    except CatalogUnavailable:
        return False
    return True


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _stop_http(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def _port_taken(name: str, host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{name} {port} on {host} cannot be opened ({error}); stop what listens there, or change --{name.replace('_', '-')}"
    )


if __name__ == "__main__":
    sys.exit(main())
