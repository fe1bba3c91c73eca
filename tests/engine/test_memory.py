"""Several long sessions whose KV together is many times ``dram_bytes`` decode at once, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.engine.conftest import Engine, ask, assert_same

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIB = 1 << 20
NUM_SESSIONS = 8
TOKENS = 2150
DRAM, DEVICE = 92 * MIB, 256 * MIB


def peak_bytes(process: Path) -> int:
    """Return the most memory that was resident since the peak was reset."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_memory_stays_within_its_limits(new_engine: Callable[..., Engine], real_tokens: list[int]) -> None:
    engine = new_engine(
        budget_tokens=256,
        dram_bytes=DRAM,
        device_bytes=DEVICE,
        logical_tokens=NUM_SESSIONS * (TOKENS + 100),
        flags={"context_length": 2304, "chunked_prefill_size": 256, "max_running_requests": NUM_SESSIONS},
    )
    process = Path("/proc") / str(engine.control("info")["pid"])  # the scheduler, which holds the store
    (process / "clear_refs").write_text("5")  # the peak counts from here
    ready = peak_bytes(process)
    prompts = [real_tokens[i * 300 : i * 300 + TOKENS] for i in range(NUM_SESSIONS)]
    kv_bytes = NUM_SESSIONS * TOKENS * int(engine.control("info")["page_bytes"]) // 8
    assert kv_bytes > 4 * DRAM

    with ThreadPoolExecutor(NUM_SESSIONS) as pool:
        together = list(pool.map(lambda prompt: ask(engine, prompt, new=48), prompts))
    gauges = engine.control("stats")["gauges"]
    assert gauges["dram_bytes"] <= DRAM and gauges["device_bytes"] <= DEVICE
    assert engine.counters()["bytes_read"] > 0  # most of it was on SSD meanwhile
    assert peak_bytes(process) <= 1.1 * (ready + DRAM + DEVICE)

    for prompt, answer in zip(prompts[:2], together, strict=False):
        assert_same(ask(engine, prompt, new=48), answer)


@pytest.mark.soak
def test_requests_wait_for_device_memory(new_engine: Callable[..., Engine], real_tokens: list[int]) -> None:
    engine = new_engine(
        budget_tokens=256, device_bytes=50 * MIB, flags={"context_length": 1200, "chunked_prefill_size": 512}
    )
    prompts = [real_tokens[i * 400 : i * 400 + 700] for i in range(6)]
    lent = []
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, engine, prompt, new=24) for prompt in prompts]
        while not all(answer.done() for answer in answers):
            lent.append(engine.control("stats")["gauges"]["windows_lent"])
            wait(answers, timeout=0.1)
    sets = engine.control("stats")["gauges"]["windows_total"]
    assert 1 < sets < len(prompts), sets
    assert 1 < max(lent) <= sets
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(ask(engine, prompt, new=24), answer.result())
