"""A suspended session in int8, encrypted, in real engines: half of the bytes, the same tokens before and after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kv_tier.meta.page_keys import page_keys
from tests.engine.conftest import Engine

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.crash]


def test_a_transcoded_session_goes_on_alike_live_and_after_a_kill(
    new_engine: Callable[..., Engine], real_tokens: list[int], tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    engine = new_engine(budget_tokens=512, cold_encoding="int8", encryption_key_file=str(key_file))
    assert engine.control("info")["cold_encoding"] == "int8"
    prompt = real_tokens[:1500]
    history = prompt + engine.generate(prompt, session="s").tokens
    num_sealed, num_pages = engine.sealed(history)
    assert num_sealed == num_pages
    keys = [key.hex() for key in page_keys(history[:-1], 8)]
    before = engine.control("usage", keys=keys)
    done = engine.control("transcode", keys=keys, wait_s=30.0)
    assert (done["num_spans"], done["num_left"]) == (2, 0), done
    after = engine.control("usage", keys=keys)
    assert after["kv_bytes"] == pytest.approx((1152 + 16) / (2048 + 16) * before["kv_bytes"])
    assert engine.control("stats")["gauges"]["ssd_retired_bytes"] == 0, "the old files are still held"

    turn = history + real_tokens[2000:2020]
    live = engine.generate(turn, session="s", new=24)
    assert live.figures["tokens_ssd"] > 1400, "frames still hold what was not rounded"
    engine.kill()
    engine.start()
    resumed = engine.generate(turn, session="s", new=24)
    assert resumed.tokens == live.tokens
    assert resumed.figures["tokens_ssd"] > 1400 and resumed.figures["tokens_computed"] < 64
    assert engine.counters()["pages_lost"] == 0
    sealed, full = engine.sealed(turn + resumed.tokens)
    assert sealed == full
    spans = {path.stem for path in (engine.data_dir / "spans").glob("*.span")}
    assert spans == {path.stem for path in (engine.data_dir / "keys").iterdir()}
