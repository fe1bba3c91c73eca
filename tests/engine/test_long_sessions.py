"""Sessions of 7,000 tokens that lose their engine, and damaged files under them: minutes each, run by `make soak-engine`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.span_file import SpanFile
from kv_tier.meta.span_format import SectionType, plan_sections
from kvdrive_sglang.bench.texts import ModelTokenizer, prompts
from tests.engine.conftest import Answer, Engine, Scored, ask, assert_same
from tests.engine.test_resume import retry

pytestmark = [pytest.mark.engine, pytest.mark.soak]

NUM_SESSIONS = 5
NUM_TOKENS = 7000
TURN = 20
NEW = 16
SECTIONS = [
    "header",
    "TOKENS",
    "KEYS",
    "LAYOUT",
    "CHECKSUMS",
]  # one per session; damage there is found at start
FORK = 3  # the session that is forked


def salt(number: int) -> str:
    return f"tenant-{number}"


def first_span(engine: Engine, tokens: list[int], number: int) -> Path:
    """Return the file of the first stretch of a session."""
    key = page_keys(tokens[:8], 8, cache_salt=salt(number))[0]
    for path in sorted((engine.data_dir / "spans").iterdir()):
        span = SpanFile.open(path)
        span.close()
        if span.keys[0] == key:
            return path
    raise AssertionError(f"no span holds session {number}")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def offset_of(path: Path, section: str) -> int:
    """Return the offset of a byte in the middle of a section."""
    span = SpanFile.open(path)
    span.close()
    if section == "header":
        return 160
    entry = plan_sections(span.header)[SectionType[section]]
    return entry.offset + entry.length // 2


@pytest.mark.parametrize("budget", [512, "all"])
def test_long_sessions_survive_kills_and_damage(
    budget: int | str, new_engine: Callable[..., Engine], model_path: Path
) -> None:
    texts = prompts(ModelTokenizer(model_path), [NUM_TOKENS] * NUM_SESSIONS + [TURN] * (NUM_SESSIONS + 1))
    documents, turns = texts[:NUM_SESSIONS], texts[NUM_SESSIONS:]
    engine = new_engine(budget_tokens=budget, dram_bytes=3 << 30)
    logs, expected, recomputed = [], [], []
    for number, document in enumerate(documents):
        first = engine.generate(document, session=f"session-{number}", salt=salt(number))
        assert first.meta["cached_tokens"] == 0
        logs.append(document + first.tokens)
        sealed, full = engine.sealed(logs[-1], salt=salt(number))
        assert sealed == full
        # without a session nothing of this turn is kept: it answers on what never left the engine
        expected.append(ask(engine, logs[-1] + turns[number], new=NEW, salt=salt(number)))
    fork = logs[FORK] + turns[NUM_SESSIONS]
    fork_expected = engine.generate(fork, salt=salt(FORK)).tokens
    for number, log in enumerate(logs):
        recomputed.append(ask(engine, log + turns[number], new=NEW, salt=f"fresh-{number}"))

    engine.kill()
    engine.start()
    for number, log in enumerate(logs):
        resumed = engine.generate(log + turns[number], salt=salt(number))
        assert resumed.tokens == expected[number].tokens
        assert resumed.figures["tokens_ssd"] == (len(log) - 1) // 8 * 8
    assert engine.generate(fork, salt=salt(FORK)).tokens == fork_expected
    assert engine.generate(logs[0] + turns[0], new=1, salt="another").meta["cached_tokens"] == 0

    engine.kill()
    paths = [first_span(engine, log, number) for number, log in enumerate(logs)]
    for path, section in zip(paths, SECTIONS, strict=True):
        flip(path, offset_of(path, section))
    engine.start()
    assert engine.counters()["pages_quarantined"] >= NUM_SESSIONS
    for number, log in enumerate(logs):
        answer = engine.generate(log + turns[number], session=f"session-{number}", salt=salt(number))
        assert answer.tokens == recomputed[number].tokens, SECTIONS[number]
        if budget == "all":  # the turn appended to what was there and computed with it: ties apart, the same
            assert_same(expected[number], recomputed[number])
        assert (
            answer.figures["tokens_computed"] > NUM_TOKENS // 2
        )  # the first page is gone: all is recomputed
        assert engine.sealed(log, salt=salt(number))[0] == (len(log) - 1) // 8

    for section in ("MEANS", "KV"):  # found when read, in the middle of service, beside batch-mates
        httpx.post(f"{engine.url}/flush_cache", timeout=60).raise_for_status()
        path = first_span(engine, logs[0], 0)
        flip(path, offset_of(path, section))
        before = engine.counters()

        def go_on(number: int) -> Answer:
            tokens = logs[number] + turns[number]
            return retry(engine, tokens, salt=salt(number), session=f"session-{number}")

        with ThreadPoolExecutor(3) as pool:
            answers = list(
                pool.map(go_on, range(3))
            )  # in a batch products round apart: ties may end otherwise
        for alone, answer in zip(recomputed, answers, strict=False):
            assert_same(alone, Scored(answer.tokens, []))
        after = engine.counters()
        assert (
            after["pages_lost"] + after["pages_quarantined"]
            > before["pages_lost"] + before["pages_quarantined"]
        )
        assert engine.sealed(logs[0], salt=salt(0))[0] == (len(logs[0]) - 1) // 8
