"""A gRPC client in this process, the service in another, the engine in a third: stream, cancel, crash, resume."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kv_services.client import Client
from kv_services.errors import ServiceError
from tests.engine.conftest import Engine

pytestmark = [pytest.mark.engine, pytest.mark.redis, pytest.mark.slow, pytest.mark.crash]


@dataclass
class Stack:
    engine: Engine
    address: str


@pytest.fixture(scope="module")
def stack(new_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    engine = new_engine(budget_tokens=512)
    log = (tmp_path_factory.mktemp("service") / "service.log").open("wb")
    service = subprocess.Popen(
        [sys.executable, "-m", "kv_services.server", "--data-dir", str(engine.data_dir), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert service.stdout is not None
    port = service.stdout.readline().decode().strip().rsplit(" ", 1)[-1]
    try:
        yield Stack(engine, f"127.0.0.1:{port}")
    finally:
        service.terminate()
        service.wait(30)
        service.stdout.close()
        log.close()


def text_of(model_path: Path, tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(model_path / "tokenizer.json")).decode(tokens))


def test_session_outlives_the_engine(stack: Stack, model_path: Path, real_tokens: list[int]) -> None:
    document = text_of(model_path, real_tokens[:1200])
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    with (
        Client(stack.address, timeout_s=240) as client,
        Client(stack.address, tenant="other", timeout_s=240) as other,
    ):
        session = client.create_session(title="licence").session_id
        first = client.generate(session, text=document + "\n\nSummary:", **sampling)
        deltas = [delta.text for delta in first]
        assert len(deltas) > 1 and "".join(deltas)
        warm = client.generate(session, text=" And then:", **sampling)
        warm.read()
        assert warm.usage.restored_dram_tokens > 1000

        # cancel in mid-answer: the engine stops, the session goes on from what was delivered
        cancelled = client.generate(
            session, text=" More:", temperature=0.0, max_new_tokens=1500, ignore_eos=True
        )
        for _ in zip(cancelled, range(2), strict=False):
            pass
        cancelled.cancel()
        with pytest.raises(ServiceError) as late:
            client.generate(
                session, text=" Late:", timeout_s=1.5, max_new_tokens=1500, ignore_eos=True
            ).read()
        assert late.value.reason == "DEADLINE_EXCEEDED"
        client.generate(session, text=" Go on:", **sampling).read()

        twin = client.fork(session).session_id
        expected = client.generate(twin, text=" Finally:", **sampling).read()
        with pytest.raises(ServiceError) as hidden:
            other.get(session)
        assert hidden.value.reason == "SESSION_NOT_FOUND"

        client.suspend(session)
        stack.engine.kill()
        with pytest.raises(ServiceError) as down:
            client.generate(twin, text=" Anyone?", **sampling).read()
        assert down.value.reason == "ENGINE_UNAVAILABLE", down.value
        stack.engine.start()

        client.resume(session)
        resumed = client.generate(session, text=" Finally:", **sampling)
        assert resumed.read() == expected
        usage = resumed.usage
        assert usage.restored_ssd_tokens > 1000
        assert usage.computed_tokens < 64
        assert usage.read_bytes > 0

        stranger = other.create_session().session_id
        alone = other.generate(stranger, text=document, **sampling)
        alone.read()
        assert alone.usage.restored_ssd_tokens + alone.usage.restored_dram_tokens == 0


def test_bad_input_changes_nothing(stack: Stack) -> None:
    with Client(stack.address, timeout_s=120) as client:
        session = client.create_session().session_id
        for text, reason in (("", "EMPTY_PROMPT"), ("word " * 9000, "PROMPT_TOO_LONG")):
            with pytest.raises(ServiceError) as refused:
                client.generate(session, text=text).read()
            assert refused.value.reason == reason, refused.value
        assert client.get(session).num_tokens == 0
        with pytest.raises(ServiceError) as unknown:
            client.get("s_" + "a" * 26)
        assert unknown.value.reason == "SESSION_NOT_FOUND"
