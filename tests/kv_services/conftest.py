"""A service over loopback with a fake engine and a real embedded Valkey."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kv_services.client import AsyncClient
from kv_services.config import ServiceConfig
from kv_services.errors import SessionBusy
from kv_services.server import SessionServer
from kv_tier.meta.data_dir import DataDir
from tests.kv_services.fake_engine import FakeEngine, write_tokenizer


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path fits into a Unix socket address."""
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield path
    shutil.rmtree(path)


@dataclass
class World:
    """One engine, one service that can be restarted, and clients."""

    root: Path
    engine: FakeEngine
    options: dict[str, Any] = field(default_factory=dict)
    _server: SessionServer | None = None
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def data_dir(self) -> Path:
        return self.root / "data"

    @property
    def server(self) -> SessionServer:
        assert self._server is not None
        return self._server

    async def start(self, **options: Any) -> None:
        self.options |= options
        settings: dict[str, Any] = {"port": 0, "stop_grace_s": 0.0, "health_interval_s": 0.05} | self.options
        self._server = await SessionServer(ServiceConfig(self.data_dir, **settings)).__aenter__()
        self.client = self.client_of("")

    def client_of(self, tenant: str) -> AsyncClient:
        client = AsyncClient(f"127.0.0.1:{self.server.port}", tenant=tenant)
        self._exits.push_async_callback(client.close)
        return client

    async def stop(self) -> None:
        await self._exits.aclose()
        if self._server is not None:
            server, self._server = self._server, None
            await server.__aexit__()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def idle(self, session_id: str) -> None:
        """Wait until no turn of the session runs."""
        while True:
            with contextlib.suppress(SessionBusy):
                await self.client.update(session_id)
                return

    def log_path(self, session_id: str) -> Path:
        return self.data_dir / "sessions" / f"{session_id}.log"


@pytest.fixture
async def world(short_dir: Path) -> AsyncIterator[World]:
    (short_dir / "data").mkdir(mode=0o700)
    DataDir.open(short_dir / "data", role="engine").close()
    async with FakeEngine(short_dir / "data", write_tokenizer(short_dir / "model")) as engine:
        world = World(short_dir, engine)
        await world.start()
        yield world
        await world.stop()
