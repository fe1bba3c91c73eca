"""Indexes beside page means: they select by their definition, the same live and resumed, wherever the KV is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_kernels import ref
from kv_tier.clusters import cluster_pages
from kv_tier.geometry import Geometry
from kv_tier.index import MEANS, IndexPlan, page_means
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.errors import ConfigError
from kv_tier.modes import INDEXES, IndexName
from kv_tier.page_table import PageTable
from kv_tier.selection import Scope
from kv_tier.sketch_index import SketchIndex, SketchPlan
from kv_tier.two_level_index import CANDIDATES, DeviceTwoLevel, TwoLevelIndex, TwoLevelPlan
from tests.kv_tier.conftest import EngineFactory
from tests.kv_tier.test_residency import seal_and_evict, two_turns
from tests.kv_tier.test_resume import (
    NUM_PAGES,
    SCRIPT,
    SPARSE,
    first_turn,
    never_stopped,
    second_turn,
)
from tests.models.index_plans import plan_of, sketch_maps
from tests.models.synthetic_engine import GEOMETRY, Session, SyntheticEngine, make_script

PER_STRETCH = GEOMETRY.pages_per_stretch  # 8
OTHERS: tuple[IndexName, ...] = ("sketch", "two_level")


@pytest.fixture(params=OTHERS)
def plan(request: pytest.FixtureRequest) -> IndexPlan:
    return plan_of(request.param)


def stop_after_first_turn(path: Path, **settings: Any) -> None:
    with SyntheticEngine(path, append=SPARSE, **settings) as engine:
        engine.seal(first_turn(engine), open_stretch=True)


# ---- contracts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_pages", [6, 11, None])
@pytest.mark.parametrize("num_frames", [9, 256])
def test_a_resumed_session_continues_as_if_it_had_never_stopped(
    new_engine: EngineFactory, tmp_path: Path, plan: IndexPlan, budget_pages: int | None, num_frames: int
) -> None:
    settings: dict[str, Any] = {"budget_pages": budget_pages, "index": plan, "append": SPARSE}
    expected = never_stopped(new_engine(**settings))
    stop_after_first_turn(tmp_path / "stopped", budget_pages=budget_pages, index=plan)
    engine = new_engine(tmp_path / "stopped", num_frames=num_frames, **settings)
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    assert torch.equal(second_turn(engine, session), expected)
    engine.store.check_integrity()


@pytest.mark.parametrize("num_frames", [8, 12, 25])
@pytest.mark.parametrize("budget_pages", [6, 11])
def test_residency_and_mates_change_nothing(
    new_engine: EngineFactory, plan: IndexPlan, budget_pages: int, num_frames: int
) -> None:
    settings: dict[str, Any] = {"budget_pages": budget_pages, "index": plan, "append": SPARSE}
    expected = two_turns(new_engine(**settings))
    engine = new_engine(num_frames=num_frames, **settings)
    assert torch.equal(two_turns(engine), expected)
    assert (engine.store.counters.pages_spilled > 0) == (num_frames < 25)
    engine = new_engine(num_frames=num_frames + 40, window_multiple=1, **settings)
    mates = []
    for seed, length in ((2, 5), (3, 61)):
        mates.append(engine.start(make_script(length + 60, seed=seed)))
        engine.prefill(mates[-1], length)
    assert torch.equal(two_turns(engine, seal_and_evict, tuple(mates)), expected)


def test_a_budget_that_covers_the_context_is_full_attention(
    new_engine: EngineFactory, plan: IndexPlan
) -> None:
    outs = [two_turns(new_engine(budget_pages=25, index=index)) for index in (MEANS, plan)]
    assert torch.equal(*outs)


def test_the_index_decides_what_is_attended(new_engine: EngineFactory) -> None:
    outs = [two_turns(new_engine(budget_pages=6, index=plan_of(name))) for name in INDEXES]
    assert not any(torch.equal(outs[i], outs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_page_replaced_in_a_running_row_is_ranked_anew(new_engine: EngineFactory, plan: IndexPlan) -> None:
    engine = new_engine(budget_pages=6, index=plan)
    copy, session = engine.start(SCRIPT), engine.start(SCRIPT)
    for one in (copy, session):
        engine.prefill(one, 90)
    expected = engine.generate(copy, 12)
    first = engine.generate(session, 3)
    own = session.pages[:10]
    session.pages[:10] = copy.pages[:10]
    engine.store.release_pages(np.array(own))
    assert torch.equal(torch.cat([first, engine.generate(session, 9)], dim=1), expected)


def test_an_adopted_page_is_ranked_by_what_it_adopted(new_engine: EngineFactory) -> None:
    engine = new_engine(index=plan_of("sketch"))
    session = engine.start(SCRIPT)
    engine.prefill(session, 40)
    index, (source, target) = engine.store.index, session.pages[:2]
    assert isinstance(index, SketchIndex)
    before = [codes[source].clone() for codes in index.codes]
    engine.store.table.lost[target] = True
    engine.store.adopt(source, target)
    assert all(torch.equal(codes[target], old) for codes, old in zip(index.codes, before, strict=True))


# ---- definitions --------------------------------------------------------------------------------------------


def ranked(engine: SyntheticEngine, session: Session, layer: int, num_pages: int) -> torch.Tensor:
    """Rank the first full pages as a step after them would; only sinks and the last two pages are forced."""
    _, index = engine.store.device_memory(engine.state(session))
    scope = Scope(num_pages, num_pages, num_pages - 2, engine.store.budget)
    query = session.script.query[layer, num_pages]
    return index.rank(layer, query, torch.tensor(session.pages), scope, engine.scale)


@pytest.mark.parametrize("entry_tokens", [1, 2])
def test_the_sketch_scores_as_its_definition(new_engine: EngineFactory, entry_tokens: int) -> None:
    maps = sketch_maps(entry_tokens=entry_tokens)
    engine = new_engine(index=SketchPlan(maps))
    session = engine.start(SCRIPT)
    engine.prefill(session, 94)
    engine.generate(session, 8)
    for layer in range(GEOMETRY.num_layers):
        for num_pages in (24, 17, 25):
            keys = session.script.k[layer, : num_pages * 4].transpose(0, 1)
            entries = page_means(keys.unflatten(1, (-1, entry_tokens)))
            sketch = ref.sketch_build(entries, maps.key_map[layer], maps.offset[layer])
            query = session.script.query[layer, num_pages]
            expected = ref.sketch_score(query, sketch, maps.query_map[layer], engine.scale, 4 // entry_tokens)
            scores = ranked(engine, session, layer, num_pages)
            torch.testing.assert_close(scores[:, 1:-2], expected[:, 1:-2], rtol=1e-4, atol=1e-6)
            assert scores[:, [0, -2, -1]].isposinf().all()


def test_two_levels_score_as_their_definition(new_engine: EngineFactory) -> None:
    engine = new_engine(index=TwoLevelPlan(), budget_pages=5)
    session = engine.start(make_script(200, seed=3))
    engine.prefill(session, 190)
    for layer in range(GEOMETRY.num_layers):
        for num_pages in (47, 30, 32, 33, 40):
            keys = session.script.k[layer, : num_pages * 4].transpose(0, 1)
            means = page_means(keys.unflatten(1, (-1, 4)))
            closed = num_pages // PER_STRETCH * PER_STRETCH
            summaries = means.float()
            for begin in range(0, closed, PER_STRETCH):
                part = means[:, begin : begin + PER_STRETCH]
                assignment, centroids = cluster_pages(part, PER_STRETCH // 2)
                index = assignment[:, :, None].expand(-1, -1, 16)
                summaries[:, begin : begin + PER_STRETCH] = centroids.bfloat16().float().gather(1, index)
            query = session.script.query[layer, num_pages]
            coarse = ref.page_score(query, summaries, engine.scale)
            coarse[:, [0, -2, -1]] = float("inf")
            candidates = ref.topk_pages(coarse, CANDIDATES * 5)
            expected = ref.candidate_score(query[None], means[None], candidates[None], engine.scale)[0]
            scores = ranked(engine, session, layer, num_pages)
            torch.testing.assert_close(scores[:, 1:-2], expected[:, 1:-2], rtol=1e-4, atol=1e-6)


# ---- where it lies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEXES)
def test_bytes_are_those_that_were_planned(new_engine: EngineFactory, name: IndexName) -> None:
    plan = plan_of(name)
    table = PageTable(GEOMETRY, 100)
    index = plan.build(GEOMETRY, table)
    assert index.num_bytes == 100 * plan.table_bytes(GEOMETRY)
    for max_pages in (3, 7, 8, 16, 33):
        assert index.device(max_pages).num_bytes == plan.device_bytes(GEOMETRY, max_pages)
    engine = new_engine(index=plan)
    assert engine.store.gauges()["dram_bytes"] - new_engine().store.gauges()["dram_bytes"] == 256 * (
        plan.table_bytes(GEOMETRY)
    )


def test_attaching_reads_the_sketch_and_no_kv(new_engine: EngineFactory, tmp_path: Path) -> None:
    plan = plan_of("sketch")
    stop_after_first_turn(tmp_path / "stopped", index=plan)
    engine = new_engine(tmp_path / "stopped", append=SPARSE, index=plan)
    assert engine.resume(SCRIPT, NUM_PAGES) is not None
    per_page = GEOMETRY.mean_bytes + plan.table_bytes(GEOMETRY)
    assert engine.store.counters.bytes_read == NUM_PAGES * per_page and engine.store.counters.reads == 0


def test_spans_without_a_sketch_are_a_clean_miss(
    new_engine: EngineFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recomputed pages are written again and replace the spans that could not serve."""
    stop_after_first_turn(tmp_path / "stopped")
    with caplog.at_level(logging.WARNING):
        engine = new_engine(tmp_path / "stopped", append=SPARSE, index=plan_of("sketch"))
    assert "3 spans" in caplog.text and "index=sketch" in caplog.text
    gauges = engine.store.gauges()
    assert gauges["unindexed_spans"] == 3 and gauges["foreign_spans"] == 0
    assert engine.num_restorable(SCRIPT) == 0 and engine.resume(SCRIPT, NUM_PAGES) is None
    before = engine.span_paths()
    engine.seal(first_turn(engine), open_stretch=True)
    assert len(engine.span_paths()) == 3 and not set(before) & set(engine.span_paths())
    engine.close()
    again = new_engine(tmp_path / "stopped", append=SPARSE, index=plan_of("sketch"))
    assert again.num_restorable(SCRIPT) == NUM_PAGES


def test_a_sketch_of_other_constants_is_no_sketch(new_engine: EngineFactory, tmp_path: Path) -> None:
    stop_after_first_turn(tmp_path / "stopped", index=SketchPlan(sketch_maps(1)))
    engine = new_engine(tmp_path / "stopped", append=SPARSE, index=SketchPlan(sketch_maps(2)))
    assert engine.num_restorable(SCRIPT) == 0


@pytest.mark.parametrize("reader", ["means", "two_level"])
@pytest.mark.parametrize("writer", INDEXES)
def test_means_and_clusters_serve_from_any_span(
    new_engine: EngineFactory, tmp_path: Path, writer: IndexName, reader: IndexName
) -> None:
    """Clusters that a span lacks are computed from its means; exact pages do not depend on who selected."""
    with SyntheticEngine(tmp_path / "stopped", index=plan_of(writer)) as engine:
        session = engine.start(SCRIPT)
        engine.prefill(session, 76)
        engine.seal(session, open_stretch=True)
    engine = new_engine(tmp_path / "stopped", index=plan_of(reader))
    resumed = engine.resume(SCRIPT, NUM_PAGES)
    assert resumed is not None
    live = new_engine(index=plan_of(reader))
    session = live.start(SCRIPT)
    live.prefill(session, 76)
    assert torch.equal(engine.generate(resumed, 30), live.generate(session, 30))


def test_an_encrypted_span_hides_its_sketch(new_engine: EngineFactory, tmp_path: Path) -> None:
    plan = plan_of("sketch")
    settings: dict[str, Any] = {"index": plan, "keyring": Keyring(b"k" * 32)}
    with SyntheticEngine(tmp_path / "stopped", append=SPARSE, **settings) as engine:
        session = first_turn(engine)
        engine.seal(session, open_stretch=True)
        codes = engine.store.index.sketch_of(torch.tensor(session.pages[:PER_STRETCH]))
        assert codes is not None
        file = engine.span_paths()[0].read_bytes()
        assert plan.sketch_digest in file and codes.tobytes() not in file
    engine = new_engine(tmp_path / "stopped", append=SPARSE, **settings)
    resumed = engine.resume(SCRIPT, NUM_PAGES)
    assert resumed is not None
    expected = never_stopped(new_engine(append=SPARSE, index=plan))
    assert torch.equal(second_turn(engine, resumed), expected)


def test_a_session_in_fewer_bits_keeps_its_index(
    new_engine: EngineFactory, tmp_path: Path, plan: IndexPlan
) -> None:
    """The index stays that of the keys as they were, in the process that transcoded and in the next one."""
    settings: dict[str, Any] = {"index": plan, "append": SPARSE, "cold_encoding": "int8"}
    with SyntheticEngine(tmp_path / "stopped", **settings) as engine:
        session = first_turn(engine)
        engine.seal(session, open_stretch=True)
        engine.carry_on(session)
        assert engine.transcode(engine.keys(SCRIPT, NUM_PAGES)).num_spans == 3
    live = new_engine(**settings)
    session = first_turn(live)
    live.seal(session, open_stretch=True)
    again = live.carry_on(session)
    live.transcode(live.keys(SCRIPT, NUM_PAGES))
    expected = second_turn(live, again)
    engine = new_engine(tmp_path / "stopped", **settings)
    resumed = engine.resume(SCRIPT, NUM_PAGES)
    assert resumed is not None
    assert torch.equal(second_turn(engine, resumed), expected)


def test_a_damaged_sketch_is_quarantined(new_engine: EngineFactory, tmp_path: Path) -> None:
    plan = plan_of("sketch")
    stop_after_first_turn(tmp_path / "stopped", index=plan)
    engine = new_engine(tmp_path / "stopped", append=SPARSE, index=plan)
    span = next(iter(engine.spans.spans.values()))
    section = span.sections[8]
    for offset in (0, 31, 32, section.length - 1):
        raw = bytearray(engine.span_paths()[0].read_bytes())
        raw[section.offset + offset] ^= 1
        engine.span_paths()[0].write_bytes(bytes(raw))
    assert engine.resume(SCRIPT, NUM_PAGES) is None
    assert engine.spans.num_quarantined == 1 and engine.num_restorable(SCRIPT) == 0
    engine.store.check_integrity()


def test_constants_of_another_model_are_refused() -> None:
    for geometry in (Geometry(3, 2, 16, 4, 32), Geometry(2, 2, 32, 4, 32), Geometry(2, 2, 16, 3, 30)):
        with pytest.raises(ConfigError, match="kvdrive calibrate"):
            SketchPlan(sketch_maps(entry_tokens=2)).build(geometry, PageTable(geometry, 4))


# ---- clusters -----------------------------------------------------------------------------------------------


def test_live_clusters_are_those_of_the_span(new_engine: EngineFactory, tmp_path: Path) -> None:
    engine = new_engine(tmp_path / "stopped", index=TwoLevelPlan())
    session = engine.start(SCRIPT)
    engine.prefill(session, 76)
    engine.seal(session)
    live = engine.store.index
    assert isinstance(live, TwoLevelIndex)
    found = [live.stretch(layer, torch.tensor(session.pages[:PER_STRETCH])) for layer in range(2)]
    engine.close()
    again = new_engine(tmp_path / "stopped", index=TwoLevelPlan())
    resumed = again.resume(SCRIPT, 2 * PER_STRETCH)
    index = again.store.index
    assert resumed is not None and isinstance(index, TwoLevelIndex)
    assert len(index._stretches) == 2 and all(all(s.done) for s in index._stretches.values())
    for layer in range(2):
        for mine, stored in zip(
            found[layer], index.stretch(layer, torch.tensor(resumed.pages[:PER_STRETCH])), strict=True
        ):
            assert torch.equal(mine, stored)


def test_a_stretch_attached_in_parts_is_clustered_anew(new_engine: EngineFactory, tmp_path: Path) -> None:
    stop_after_first_turn(tmp_path / "stopped", index=TwoLevelPlan())
    engine = new_engine(tmp_path / "stopped", index=TwoLevelPlan(), append=SPARSE)
    keys = engine.keys(SCRIPT, NUM_PAGES)
    session = engine.start(SCRIPT)
    session.pages = [engine._free_pages.pop() for _ in range(NUM_PAGES)]
    for begin, end in ((0, 3), (3, NUM_PAGES)):
        assert engine.store.attach(np.array(session.pages[begin:end]), keys[begin:end])
    session.num_tokens = NUM_PAGES * 4
    assert torch.equal(
        second_turn(engine, session), never_stopped(new_engine(index=TwoLevelPlan(), append=SPARSE))
    )


def test_a_page_in_another_life_is_another_stretch() -> None:
    table = PageTable(GEOMETRY, 40)
    index = TwoLevelPlan().build(GEOMETRY, table)
    assert isinstance(index, TwoLevelIndex) and index.max_stretches == 5
    pages = torch.arange(10, 18)
    for means in table.means:
        means[:] = torch.randn(means.shape)
    before = index.stretch(0, pages)[1].clone()
    table.reset(np.array([12]))
    table.means[0][12] = 3.0
    assert not torch.equal(index.stretch(0, pages)[1], before)
    for begin in range(1, 20):  # more stretches than are kept
        index.stretch(1, torch.arange(begin, begin + 8))
        assert len(index._stretches) <= 5
    table.means[0][12] = 0.0
    again, _ = index.stretch(0, pages), index.stretch(0, pages)
    assert torch.equal(again[1], index.stretch(0, pages)[1])


@pytest.mark.parametrize("count", [15, 16, 17, 23, 24])
@pytest.mark.parametrize("cut", [1, 7, 8, 9, 15, 16, 20])
def test_a_cut_device_index_ranks_as_a_fresh_one(count: int, cut: int) -> None:
    table = PageTable(GEOMETRY, 60)
    for means in table.means:
        means[:] = torch.randn(means.shape)
    index = TwoLevelPlan().build(GEOMETRY, table)
    used, fresh = index.device(32), index.device(32)
    pages, other = torch.arange(1, 33), torch.cat([torch.arange(1, cut + 1), torch.arange(33 + cut, 65)[:27]])
    other = other[other < 60]
    query = torch.randn(2, 3, 16).bfloat16()

    def rank(device: Any, of: torch.Tensor, num_pages: int) -> torch.Tensor:
        engine_budget = new_budget()
        scope = Scope(num_pages, num_pages, max(1, num_pages - 2), engine_budget)
        assert isinstance(device, DeviceTwoLevel)
        out: torch.Tensor = device.rank(0, query, of, scope, 0.25)
        return out

    rank(used, pages, count)
    used.truncate(cut)
    num_pages = min(len(other), 24)
    assert torch.equal(rank(used, other, num_pages), rank(fresh, other, num_pages))
    assert torch.equal(rank(used, other, num_pages - 9), rank(index.device(32), other, num_pages - 9))


def new_budget() -> Any:
    from kv_tier.selection import Budget

    return Budget(5, 4, 8, GEOMETRY.page_size)
