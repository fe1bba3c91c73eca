"""Extend and decode steps against the definitions of full and of sparse attention."""

from __future__ import annotations

import functools

import pytest
import torch

from kv_tier import steps
from kv_tier.attention import ExactAttention
from kv_tier.geometry import Geometry
from kv_tier.index import page_means
from kv_tier.steps import AppendRule
from tests.kv_tier.conftest import EngineFactory
from tests.models.attention_model import full_attention, sparse_decode
from tests.models.synthetic_engine import GEOMETRY, SyntheticEngine, make_script

SCALE = GEOMETRY.head_dim**-0.5
WIDE = Geometry(num_layers=3, num_kv_heads=2, head_dim=16, page_size=8, stretch_tokens=64)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bf16 outputs with a float32 definition."""
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.02)


def tiles_of(monkeypatch: pytest.MonkeyPatch, tile_tokens: int) -> None:
    monkeypatch.setattr(steps, "ExactAttention", functools.partial(ExactAttention, tile_tokens=tile_tokens))


@pytest.mark.parametrize("geometry", [GEOMETRY, WIDE], ids=["page4", "page8"])
@pytest.mark.parametrize("budget_pages", [40, None])
def test_a_budget_that_covers_the_context_is_full_attention(
    new_engine: EngineFactory, geometry: Geometry, budget_pages: int | None
) -> None:
    script = make_script(150, group=3, geometry=geometry)
    engine = new_engine(geometry=geometry, budget_pages=budget_pages)
    session = engine.start(script)
    out = torch.cat([engine.prefill(session, 133, chunk=40), engine.generate(session, 17)], dim=1)
    assert_near(out, full_attention(script.query, script.k, script.v, engine.scale))


@pytest.mark.parametrize("tile_tokens", [8, 32])
@pytest.mark.parametrize("chunk", [7, 8, 31, 32, 33, 100])
def test_chunks_and_tiles_add_up_to_one_prefill(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, tile_tokens: int, chunk: int
) -> None:
    tiles_of(monkeypatch, tile_tokens)
    script = make_script(100, seed=chunk)
    engine = new_engine(budget_pages=None)
    session = engine.start(script)
    out = torch.cat([engine.prefill(session, 97, chunk=chunk), engine.generate(session, 3)], dim=1)
    assert_near(out, full_attention(script.query, script.k, script.v, SCALE))


def test_tiles_read_from_spans_give_the_same_bits(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles_of(monkeypatch, 16)
    script = make_script(110)
    outs = []
    for evict in (False, True):
        engine = new_engine(budget_pages=None)
        session = engine.start(script)
        engine.prefill(session, 67)
        engine.seal(session)
        if evict:
            assert engine.evict() == 16
        outs.append(torch.cat([engine.prefill(session, 100), engine.generate(session, 2)], dim=1))
    assert torch.equal(*outs)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_sparse_decode_follows_its_definition(new_engine: EngineFactory, group: int) -> None:
    script = make_script(60, group=group, seed=group)
    engine = new_engine(budget_pages=7)
    session = engine.start(script)
    engine.prefill(session, 22)  # six pages: the budget covers the first steps
    for position in range(22, 60):
        out = engine.generate(session, 1)[:, 0]
        expected = sparse_decode(
            script.query,
            script.k,
            script.v,
            position,
            SCALE,
            budget_pages=7,
            num_sink_tokens=4,
            local_window_tokens=8,
            page_size=4,
        )
        assert_near(out, expected)


def test_each_row_of_a_batch_gets_its_own_result(new_engine: EngineFactory) -> None:
    engine = new_engine()
    scripts = [make_script(80, seed=seed) for seed in range(3)]
    sessions = [engine.start(script) for script in scripts]
    first = engine.extend((sessions[0], 9), (sessions[1], 1), (sessions[2], 33))
    second = engine.extend((sessions[2], 8), (sessions[0], 20))
    third = engine.decode(sessions[1], sessions[0])
    full = [full_attention(script.query, script.k, script.v, SCALE) for script in scripts]
    for out, expected in zip(first, (full[0][:, :9], full[1][:, :1], full[2][:, :33]), strict=True):
        assert_near(out, expected)
    assert_near(second[0], full[2][:, 33:41])
    assert_near(second[1], full[0][:, 9:29])
    assert_near(third[0], full[1][:, 1:2])


def test_a_long_append_after_sparse_decode_is_exact_attention(new_engine: EngineFactory) -> None:
    script = make_script(120, seed=5)
    engine = new_engine(append=AppendRule("auto"))
    session = engine.start(script)
    engine.prefill(session, 64)
    engine.generate(session, 10)
    assert_near(engine.prefill(session, 120), full_attention(script.query, script.k, script.v, SCALE)[:, 74:])


def test_steps_without_requests_do_nothing(new_engine: EngineFactory) -> None:
    engine = new_engine()
    empty = torch.zeros(0, dtype=torch.int64)
    none = torch.zeros(0, 2, 2, 16, dtype=torch.bfloat16)
    for step in (
        steps.ExtendStep(engine.store, [], empty, engine.append),
        steps.DecodeStep(engine.store, [], empty),
    ):
        for layer in range(GEOMETRY.num_layers):
            assert step.attend(layer, none, none[:, :, 0], none[:, :, 0], SCALE).shape == none.shape


# ---- append rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "prefix_tokens", "new_tokens", "sparse"),
    [
        ("exact", 10**6, 1, False),
        ("sparse", 0, 8, True),
        ("sparse", 0, 9, False),
        ("auto", 100, 8, False),
        ("auto", 101, 8, True),
        ("auto", 101, 9, False),
    ],
)
def test_token_counts_decide_how_to_append(
    mode: str, prefix_tokens: int, new_tokens: int, sparse: bool
) -> None:
    rule = AppendRule(mode, sparse_max_tokens=8, exact_max_prefix_tokens=100)
    assert rule.is_sparse(prefix_tokens, new_tokens) is sparse


# ---- page means ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16])
def test_page_means_are_means(size: int) -> None:
    torch.manual_seed(size)
    keys = torch.randn(2, 5, size, 16)
    torch.testing.assert_close(page_means(keys), keys.mean(2))
    half = keys.to(torch.bfloat16)
    assert torch.equal(page_means(half)[:, 2:3], page_means(half[:, 2:3]))  # no other page takes part


def test_a_mean_is_there_when_the_last_position_of_its_page_is_written(new_engine: EngineFactory) -> None:
    script = make_script(30)
    engine = new_engine()
    session = engine.start(script)
    engine.prefill(session, 6)
    engine.generate(session, 3)
    table = engine.store.table
    assert table.filled[session.pages].tolist() == [4, 4, 1]
    for layer in range(GEOMETRY.num_layers):
        for ordinal in (0, 1):
            keys = script.k[layer, 4 * ordinal : 4 * ordinal + 4].float()
            mean = table.means[layer][session.pages[ordinal]].float()
            torch.testing.assert_close(mean, keys.mean(0), atol=0.02, rtol=0.01)


# ---- exact and approximate pages ----------------------------------------------------------------------------


def exact_pages(engine: SyntheticEngine, pages: list[int]) -> list[bool]:
    flags: list[bool] = engine.store.table.exact[pages].tolist()
    return flags


def test_pages_written_by_prefill_are_exact(new_engine: EngineFactory) -> None:
    engine = new_engine()
    session = engine.start(make_script(60))
    engine.prefill(session, 53, chunk=10)
    assert all(exact_pages(engine, session.pages))


@pytest.mark.parametrize("sparse_tokens", [1, 3, 7])
def test_exact_attention_over_approximate_pages_stays_approximate(
    new_engine: EngineFactory, sparse_tokens: int
) -> None:
    """Whether sparse decode ended inside a page or at its end."""
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(90))
    engine.prefill(session, 41)
    engine.generate(session, sparse_tokens)
    engine.prefill(session, 60)
    assert exact_pages(engine, session.pages) == [True] * 10 + [False] * 5


def test_sparse_decode_makes_its_pages_approximate_and_all_after_them(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(90))
    engine.prefill(session, 41)  # page 10 is begun exactly and continued sparsely
    engine.generate(session, 5)
    assert exact_pages(engine, session.pages) == [True] * 10 + [False] * 2
    engine.prefill(session, 60)  # exact attention over approximate KV
    assert exact_pages(engine, session.pages) == [True] * 10 + [False] * 5


def test_decode_within_the_budget_is_exact(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(60))
    engine.prefill(session, 10)
    engine.generate(session, 14)
    assert exact_pages(engine, session.pages) == [True] * 6
    engine.generate(session, 1)
    assert exact_pages(engine, session.pages) == [True] * 6 + [False]


def test_sparse_appends_are_approximate(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6, append=AppendRule("sparse", sparse_max_tokens=8))
    session = engine.start(make_script(60))
    engine.prefill(session, 40, chunk=40)
    engine.extend((session, 8))
    assert exact_pages(engine, session.pages) == [True] * 10 + [False] * 2


def test_spans_say_how_many_pages_are_exact(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(110))
    engine.prefill(session, 44)
    engine.generate(session, 60)
    engine.seal(session, open_stretch=True)
    headers = [span.header for span in engine.spans.spans.values()]
    assert [header.num_pages for header in headers] == [8, 8, 8, 2]
    assert [header.num_exact_pages for header in headers] == [8, 3, 0, 0]
    assert [header.selection for header in headers] == [bytes(32), *[b"s" * 32] * 3]


def test_figures_tell_where_the_prefix_was(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    script = make_script(100)
    first = engine.start(script)
    engine.prefill(first, 64, chunk=64)
    engine.seal(first)
    engine.end(first)
    session = engine.resume(script, 16)
    assert session is not None
    engine.extend((session, 5))
    figures = engine.state(session).figures
    assert (figures.tokens_dram, figures.tokens_ssd, figures.tokens_computed) == (0, 64, 5)
    assert figures.bytes_read == 16 * GEOMETRY.page_bytes
    engine.generate(session, 2)
    assert figures.window_misses >= 6 * GEOMETRY.num_layers * GEOMETRY.num_kv_heads
    assert figures.window_hits > 0
