"""Sessions in fewer bits: where a decoded page lives changes nothing, and whoever needs the old bytes keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_tier.geometry import Geometry, bits
from kv_tier.meta.fsck import check_spans
from kv_tier.meta.kv_codec import KvEncoding, decode_pages, encode_pages
from kv_tier.modes import ColdEncoding
from kv_tier.spans import Identity
from kv_tier.steps import AppendRule
from kv_tier.transcode import ENCODINGS, Outcome
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import GEOMETRY, IDENTITY, Script, Session, SyntheticEngine, make_script

SPARSE = AppendRule("sparse", sparse_max_tokens=12)
SCRIPT = make_script(130, seed=7)
LARGER = Geometry(
    num_layers=2, num_kv_heads=2, head_dim=64, page_size=4, stretch_tokens=32
)  # than its padding
FIRST_TURN, NUM_PAGES = 76, 19  # two closed stretches of 8 pages, 3 pages of the open one


def first_turn(engine: SyntheticEngine, script: Script = SCRIPT) -> Session:
    """Prefill 64 positions, decode 12, seal."""
    session = engine.start(script)
    engine.prefill(session, 64)
    engine.generate(session, FIRST_TURN - 64)
    engine.seal(session, open_stretch=True)
    return session


def second_turn(engine: SyntheticEngine, session: Session) -> torch.Tensor:
    """Append sparsely, decode, append exactly, decode: every way to use a page."""
    parts = [*engine.extend((session, 9)), engine.generate(session, 6)]
    parts += [*engine.extend((session, 20)), engine.generate(session, 6)]
    assert engine.state(session).failure is None
    engine.store.check_integrity()
    return torch.cat(parts, dim=1)


def suspend(engine: SyntheticEngine, session: Session) -> Session:
    """End the turn, and transcode the session; its pages stay in the tree."""
    again = engine.carry_on(session)
    outcome = engine.transcode(engine.keys(SCRIPT, NUM_PAGES))
    assert (outcome.num_spans, outcome.num_left) == (3, 0)
    engine.store.check_integrity()
    return again


def round_frames(engine: SyntheticEngine, session: Session, encoding: KvEncoding) -> None:
    """Do to a session's frames what decoding its transcoded pages must give: the definition."""
    frames, table = engine.store.frames, engine.store.table
    for page in session.pages:
        at = int(table.frames[page])
        for layer in range(GEOMETRY.num_layers):
            kv = torch.stack([frames.k[layer][:, at], frames.v[layer][:, at]], dim=1).contiguous()
            stored = encode_pages(bits(kv), encoding, 1)
            decoded = decode_pages(stored, encoding, GEOMETRY.page_size, GEOMETRY.head_dim, 1)
            rounded = torch.from_numpy(decoded.view(np.int16)).view(torch.bfloat16).view(kv.shape)
            frames.k[layer][:, at], frames.v[layer][:, at] = rounded[:, 0], rounded[:, 1]
    table.exact[session.pages] = False


def all_in_memory(engine: SyntheticEngine, encoding: KvEncoding) -> torch.Tensor:
    session = engine.carry_on(first_turn(engine))
    round_frames(engine, session, encoding)
    if engine.store.device is not None:
        engine.store.device.clear()
    return second_turn(engine, session)


@pytest.mark.parametrize("cold", ["int8", "fp8"])
@pytest.mark.parametrize("budget_pages", [6, 11, None])
@pytest.mark.parametrize("num_frames", [20, 256])
def test_a_transcoded_session_is_its_rounded_self(
    new_engine: EngineFactory, tmp_path: Path, cold: ColdEncoding, budget_pages: int | None, num_frames: int
) -> None:
    """In the process that transcoded it, and in the next one, bit for bit what everything in memory gives."""
    expected = all_in_memory(new_engine(budget_pages=budget_pages, append=SPARSE), ENCODINGS[cold])
    settings: dict[str, Any] = {
        "budget_pages": budget_pages,
        "append": SPARSE,
        "cold_encoding": cold,
        "num_frames": num_frames,
    }
    with SyntheticEngine(tmp_path / "first", **settings) as engine:
        session = suspend(engine, first_turn(engine))
        assert torch.equal(second_turn(engine, session), expected)
    with SyntheticEngine(tmp_path / "second", **settings) as engine:
        suspend(engine, first_turn(engine))
    again = new_engine(tmp_path / "second", **settings)
    resumed = again.resume(SCRIPT, NUM_PAGES)
    assert resumed is not None
    assert torch.equal(second_turn(again, resumed), expected)


@pytest.mark.parametrize("fetch_mode", ["layerwise", "hierarchical", "balanced"])
def test_fetch_modes_read_it_alike(new_engine: EngineFactory, fetch_mode: str) -> None:
    expected = all_in_memory(new_engine(append=SPARSE), KvEncoding.INT8)
    engine = new_engine(append=SPARSE, cold_encoding="int8", fetch_mode=fetch_mode, num_frames=24)
    assert torch.equal(second_turn(engine, suspend(engine, first_turn(engine))), expected)


def test_bytes_shrink_and_add_up(new_engine: EngineFactory) -> None:
    engine = new_engine(cold_encoding="int8", geometry=LARGER)
    session = engine.carry_on(first_turn(engine, make_script(FIRST_TURN, geometry=LARGER)))
    keys = engine.keys(session.script, NUM_PAGES)
    before, used = engine.spans.usage(keys), engine.spans.used_bytes
    outcome = engine.transcode(keys)
    after = engine.spans.usage(keys)
    assert after.kv_bytes / before.kv_bytes == pytest.approx(0.5 + 1 / (2 * LARGER.page_size))
    assert outcome.freed_bytes > 0
    assert before.ssd_bytes - after.ssd_bytes == outcome.freed_bytes == used - engine.spans.used_bytes
    assert engine.spans.used_bytes == sum(path.stat().st_size for path in engine.span_paths())
    assert engine.spans.bytes_of["writing"] == engine.spans.bytes_of["retired"] == 0
    assert engine.spans.counters()["spans_transcoded"] == 3
    assert check_spans(engine.data_dir).findings == []
    assert (engine.store.table.frames[session.pages] == -1).all(), "unrounded pages are still in frames"
    assert engine.transcode(keys) == Outcome(), "nothing is left to do"


def test_suspending_again_loses_nothing_more(new_engine: EngineFactory) -> None:
    """The open stretch is rewritten by the next turn, and transcoded with it once more: the same codes."""
    engine = new_engine(cold_encoding="int8")
    session = suspend(engine, first_turn(engine))
    keys = engine.keys(SCRIPT, NUM_PAGES)
    once = [stored_page(engine, key) for key in keys]
    engine.extend((session, 20))
    engine.seal(session, open_stretch=True)
    raw = engine.spans.locate(keys[-1])
    assert raw is not None and raw[0].header.encoding == KvEncoding.RAW and raw[0].header.num_exact_pages == 0
    session = engine.carry_on(session)
    assert engine.transcode(engine.keys(SCRIPT, 24)).num_spans == 1
    for key, page in zip(keys, once, strict=True):
        np.testing.assert_array_equal(stored_page(engine, key), page)


def stored_page(engine: SyntheticEngine, key: bytes) -> np.ndarray:
    """Return the first layer's decoded bytes of a page that is in fewer bits: [kv_head, ...]."""
    place = engine.spans.locate(key)
    assert place is not None and place[0].header.encoding == KvEncoding.INT8
    span, ordinal = place
    heads = np.arange(GEOMETRY.num_kv_heads)
    page: np.ndarray = span.read_layer(0)[heads, span.place_of[0, heads, ordinal]]
    return page


def test_pages_behind_transcoded_ones_are_not_exact(new_engine: EngineFactory) -> None:
    """Whatever stays as it was: a page is exact only if all before it are."""
    engine = new_engine(cold_encoding="int8")
    session = engine.start(SCRIPT)
    engine.prefill(session, 64)
    engine.seal(session)
    session = engine.carry_on(session)
    keys = engine.keys(SCRIPT, 16)
    assert engine.transcode(keys[:8]).num_spans == 1
    table = engine.store.table
    assert table.exact[session.pages].tolist() == [False] * 8 + [True] * 8
    engine.prefill(session, 96)
    assert table.exact[session.pages].tolist() == [False] * 8 + [True] * 8 + [False] * 8
    engine.seal(session)
    found = engine.spans.locate(engine.keys(SCRIPT, 24)[-1])
    assert found is not None and found[0].header.num_exact_pages == 0


def test_whole_spans_of_the_session_only(new_engine: EngineFactory) -> None:
    engine = new_engine(cold_encoding="int8")
    engine.carry_on(first_turn(engine))
    keys = engine.keys(SCRIPT, NUM_PAGES)
    outcome = engine.transcode(keys[1:])
    assert (outcome.num_spans, outcome.num_left) == (2, 0)
    first = engine.spans.locate(keys[0])
    assert first is not None and first[0].header.encoding == KvEncoding.RAW
    assert first[0].header.num_exact_pages == 8


def test_a_running_request_keeps_its_pages(new_engine: EngineFactory) -> None:
    expected = new_engine(append=SPARSE)
    undisturbed = second_turn(expected, expected.carry_on(first_turn(expected)))
    engine = new_engine(append=SPARSE, cold_encoding="int8")
    session = engine.carry_on(first_turn(engine))
    parts = [*engine.extend((session, 9))]
    names = engine.span_paths()
    assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)) == Outcome(0, 3, 0)
    assert engine.span_paths() == names, "a file nobody reads was left behind"
    assert engine.spans.used_bytes == sum(path.stat().st_size for path in names)
    parts += [engine.generate(session, 6), *engine.extend((session, 20)), engine.generate(session, 6)]
    assert torch.equal(torch.cat(parts, dim=1), undisturbed)
    engine.store.check_integrity()
    engine.carry_on(session)
    assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)).num_spans == 3


def test_what_was_given_up_changes_nothing_later(new_engine: EngineFactory) -> None:
    engine = new_engine(cold_encoding="int8")
    engine.carry_on(first_turn(engine))
    keys = engine.keys(SCRIPT, NUM_PAGES)
    assert engine.store.transcoder.request(keys, 0.0).num_left == 3
    engine.store.transcoder.close()  # waits for the file under way
    assert all(span.header.encoding == KvEncoding.RAW for span in engine.spans.spans.values())
    assert engine.spans.used_bytes == sum(path.stat().st_size for path in engine.span_paths())
    engine.store.check_integrity()


def test_off_is_off(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.carry_on(first_turn(engine))
    assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)) == Outcome()


def test_damage_found_on_the_way_leaves_the_span(new_engine: EngineFactory) -> None:
    engine = new_engine(cold_encoding="int8")
    engine.carry_on(first_turn(engine))
    span = engine.spans.locate(engine.keys(SCRIPT, 1)[0])
    assert span is not None
    kv = span[0].sections[7].offset
    with engine.data_dir.span_path(span[0].span_id).open("r+b") as file:
        file.seek(kv + 5)
        file.write(b"\xff\xff")
    assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)).num_left == 1
    assert span[0].header.encoding == KvEncoding.RAW and not span[0].retired


def test_no_room_leaves_the_spans(new_engine: EngineFactory) -> None:
    engine = new_engine(cold_encoding="int8")
    engine.carry_on(first_turn(engine))
    engine.spans.limits = type(engine.spans.limits)(engine.spans.used_bytes)
    assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)).num_left == 3
    engine.store.check_integrity()


def test_numbers_too_large_leave_the_span(new_engine: EngineFactory) -> None:
    script = make_script(40, seed=1)
    script.k[0, 3, 0, 0] = float("inf")
    engine = new_engine(cold_encoding="int8")
    session = engine.start(script)
    engine.prefill(session, 32)
    engine.seal(session)
    engine.carry_on(session)
    assert engine.transcode(engine.keys(script, 8)) == Outcome(0, 1, 0)


def test_another_configuration_reads_none_of_it(new_engine: EngineFactory, tmp_path: Path) -> None:
    """Nor does it let it replace an exact span whose end a crash left beside it."""
    with SyntheticEngine(tmp_path / "data", cold_encoding="int8") as engine:
        engine.carry_on(first_turn(engine))
        exact = {path: path.read_bytes() for path in engine.span_paths()[:1]}
        engine.transcode(engine.keys(SCRIPT, NUM_PAGES))
    other = Identity(IDENTITY.fingerprint, b"o" * 32)
    with SyntheticEngine(tmp_path / "data", identity=other) as engine:
        assert engine.num_restorable(SCRIPT) == 0
    for path, data in exact.items():
        path.write_bytes(data)
    with SyntheticEngine(tmp_path / "data", identity=other) as engine:
        assert engine.num_restorable(SCRIPT) == 8
    again = new_engine(tmp_path / "data", cold_encoding="int8")
    assert again.num_restorable(SCRIPT) == NUM_PAGES
    assert all(span.header.encoding == KvEncoding.INT8 for span in again.spans.spans.values())
