"""Requests that come, go and share: everyone gets the tokens it would get alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.conftest import Engine, ask, assert_same

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_SESSIONS = 16
SHARED_TOKENS = 700
OWN_TOKENS = 24
NEW = 20


@pytest.fixture(scope="module")
def engine(new_engine: Callable[..., Engine]) -> Engine:
    return new_engine(budget_tokens=512)


def test_sixteen_sessions_with_a_shared_prefix(engine: Engine, real_tokens: list[int]) -> None:
    """Joins and leaves in mid-decode, a long prefill and two aborts among them."""
    shared = real_tokens[:SHARED_TOKENS]
    prompts = [
        shared + real_tokens[1000 + i * OWN_TOKENS : 1000 + (i + 1) * OWN_TOKENS] for i in range(NUM_SESSIONS)
    ]
    lengths = [NEW + 3 * (i % 4) for i in range(NUM_SESSIONS)]  # they leave at different steps
    alone = [ask(engine, prompt, new=n) for prompt, n in zip(prompts, lengths, strict=True)]
    long_prompt = real_tokens[2000:5000]
    alone_long = ask(engine, long_prompt, new=8)
    httpx.post(f"{engine.url}/flush_cache", timeout=60).raise_for_status()

    def aborted(number: int) -> None:
        rid = f"aborted-{number:04d}"
        body = {
            "rid": rid,
            "input_ids": prompts[number],
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
        begun = threading.Event()

        def read() -> None:
            with httpx.stream(
                "POST", f"{engine.url}/generate", json={**body, "stream": True}, timeout=300
            ) as answer:
                for _ in answer.iter_lines():
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(120)
        httpx.post(f"{engine.url}/abort_request", json={"rid": rid}, timeout=60).raise_for_status()
        reader.join(120)
        assert not reader.is_alive()

    with ThreadPoolExecutor(NUM_SESSIONS + 3) as pool:
        answers = []
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
            answers.append(pool.submit(ask, engine, prompt, new=n))
            if i in (3, 9):
                aborts = pool.submit(aborted, i)
            if i == 7:
                answers[0].result()  # the rest joins while the first ones decode or have left
                late_long = pool.submit(ask, engine, long_prompt, new=8)
        together = [answer.result() for answer in answers]
        assert_same(alone_long, late_long.result())
        aborts.result()
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
    gauges = engine.control("stats")["gauges"]
    assert gauges["requests"] == 0, gauges


def test_retracted_requests_finish(new_engine: Callable[..., Engine], real_tokens: list[int]) -> None:
    """Four requests outgrow the logical capacity: some are retracted, and end as a re-prefill ends."""
    engine = new_engine(
        budget_tokens="all",
        logical_tokens=2400,
        flags={
            "context_length": 1200,
            "chunked_prefill_size": 512,
            "max_running_requests": 4,
            "schedule_conservativeness": 0.1,
        },
    )
    prompts = [real_tokens[i * 500 : i * 500 + 480] for i in range(4)]
    # with ignore_eos SGLang reserves the whole answer and never has to retract
    alone = [ask(engine, prompt, new=180, ignore_eos=False) for prompt in prompts]
    httpx.post(f"{engine.url}/flush_cache", timeout=60).raise_for_status()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: ask(engine, prompt, new=180, ignore_eos=False), prompts))
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
    deadline = time.monotonic() + 30
    while engine.control("stats")["gauges"]["requests"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "KV cache pool is full" in engine.log_path.read_text(), (
        "nothing was retracted: the test tests nothing"
    )
