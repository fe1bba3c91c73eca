"""Small helpers for work that cancellation must not tear apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kv_services.errors import SessionBusy

T = TypeVar("T")


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, and only then let a cancellation that came meanwhile through."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise


class Background:
    """Tasks that outlive the call that began them; `close` ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` on its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even if the caller leaves; its result or error is the caller's."""
        return await asyncio.shield(self.spawn(work))

    async def close(self, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` seconds, then cancel what still runs."""
        if self._tasks and grace_s > 0:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass
class _Holder:
    what: str
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Leases:
    """At most one change of a session (or of what else has a name) at a time, in this process.

    The data directory's lock makes this process the only one.

    Args:
        patience_s: how long a change waits for the one before it: a cancelled turn needs a moment to end.
    """

    def __init__(self, patience_s: float = 0.5) -> None:
        self._patience_s = patience_s
        self._holders: dict[str, _Holder] = {}

    @asynccontextmanager
    async def hold(self, name: str, what: str) -> AsyncGenerator[None, None]:
        """Hold `name` for `what`.

        Raises:
            SessionBusy: somebody holds it.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while (holder := self._holders.get(name)) is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    await holder.released.wait()
            except TimeoutError:
                raise SessionBusy(
                    f"{name} is busy with {holder.what}; wait for it or cancel it, then repeat",
                    value=holder.what,
                ) from None
        self._holders[name] = _Holder(what)
        try:
            yield
        finally:
            self._holders.pop(name).released.set()
