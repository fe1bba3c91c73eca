"""Every index in a real engine: a killed session goes on with the tokens of one that never stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_tier.meta.span_file import SpanFile
from tests.engine.conftest import Engine

pytestmark = [pytest.mark.engine, pytest.mark.soak]

PROMPT, TURN, NEW = 2100, 24, 24  # two closed stretches
# of a closed stretch's span: bytes of a page's sketch, clusters
INDEXED = {"means": (0, 16), "sketch": (128, 16), "two_level": (0, 64)}


@pytest.mark.parametrize("index", ["means", "sketch", "two_level"])
def test_a_resumed_session_selects_as_one_that_never_stopped(
    new_engine: Callable[..., Engine], real_tokens: list[int], index: str
) -> None:
    engine = new_engine(index=index, budget_tokens=256, append="sparse")
    answer = engine.generate(real_tokens[:PROMPT], new=NEW, session="s")
    log = real_tokens[:PROMPT] + answer.tokens
    sealed, full = engine.sealed(log)
    assert sealed == full
    turn = log + real_tokens[PROMPT : PROMPT + TURN]
    expected = engine.generate(turn, new=NEW)
    assert expected.figures["window_hits"] > 0
    engine.kill()
    span = SpanFile.open(next(iter(sorted((engine.data_dir / "spans").iterdir()))))
    span.close()
    assert (span.header.sketch_bytes, span.header.num_clusters) == INDEXED[index]
    engine.start()
    resumed = engine.generate(turn, new=NEW)
    assert resumed.tokens == expected.tokens
    assert resumed.figures["tokens_ssd"] == full * 8
