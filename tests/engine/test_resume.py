"""A session that is resumed by another process answers as one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.span_file import SpanFile
from tests.engine.conftest import Answer, Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_TOKENS = 1300
TURN = 20


def span_of(engine: Engine, tokens: list[int], salt: str) -> Path:
    """Return the file that holds the first page of a sequence."""
    key = page_keys(tokens[:8], 8, cache_salt=salt)[0]
    for path in sorted((engine.data_dir / "spans").iterdir()):
        span = SpanFile.open(path)
        try:
            if span.keys[0] == key:
                return path
        finally:
            span.close()
    raise AssertionError("no span holds the session's first page")


def play(
    engine: Engine, start: list[int], turns: list[list[int]], salt: str
) -> tuple[list[int], list[Answer]]:
    """Play turns of a session; returns its tokens and the answers."""
    log, answers = list(start), []
    for turn in turns:
        log += turn
        answers.append(engine.generate(log, session=f"session-{salt}", salt=salt))
        log += answers[-1].tokens
    return log, answers


@pytest.mark.parametrize("budget", [512, "all"])
def test_resumed_after_kill_equals_never_stopped(
    budget: int | str, new_engine: Callable[..., Engine], real_tokens: list[int]
) -> None:
    engine = new_engine(budget_tokens=budget)
    document = real_tokens[:NUM_TOKENS]
    turns = [real_tokens[2000 + i * TURN : 2000 + (i + 1) * TURN] for i in range(3)]

    never, expected = play(engine, document, turns, "never-stopped")
    log, first = play(engine, document, turns[:2], "resumed")
    assert [a.tokens for a in first] == [a.tokens for a in expected[:2]]
    assert first[0].meta["cached_tokens"] == 0, "tenants must share no page"
    sealed, full = engine.sealed(log, salt="resumed")
    assert sealed == full

    fork = log + real_tokens[2500 : 2500 + TURN]
    fork_expected = engine.generate(fork, session="fork-never", salt="resumed")

    engine.kill()
    engine.start()
    resumed = engine.generate(log + turns[2], session="session-resumed", salt="resumed")
    assert resumed.tokens == expected[2].tokens
    figures = resumed.figures
    assert figures["tokens_ssd"] == full * 8
    assert figures["tokens_computed"] == len(log) + TURN - full * 8
    forked = engine.generate(fork, session="fork", salt="resumed")
    assert forked.tokens == fork_expected.tokens

    other = engine.generate(log + turns[2], salt="somebody-else")
    assert other.meta["cached_tokens"] == 0

    # a flipped bit in the KV of the first span: that request fails or is recomputed, the server lives
    engine.kill()
    span = span_of(engine, log, "resumed")
    data = bytearray(span.read_bytes())
    data[len(data) - 8192] ^= 1
    span.write_bytes(bytes(data))
    engine.start()
    retried = retry(engine, log + turns[2], salt="resumed", session="session-resumed")
    assert engine.counters()["pages_lost"] + engine.counters()["pages_quarantined"] > 0
    if budget == "all":
        assert retried.tokens == expected[2].tokens
    again = engine.generate(log + turns[2], session="session-resumed", salt="resumed")
    assert again.tokens == retried.tokens
    assert engine.generate(never + turns[0], salt="never-stopped").tokens


def retry(engine: Engine, tokens: list[int], *, salt: str, session: str, tries: int = 5) -> Answer:
    """Repeat a request while it ends on a lost page, as the session service does."""
    for _ in range(tries):
        try:
            return engine.generate(tokens, session=session, salt=salt)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503 or "LOST_PAGE" not in error.response.text:
                raise AssertionError(error.response.text) from error
    raise AssertionError(
        f"still failing after {tries} tries:\n{engine.process and engine.process.log_tail()}"
    )
