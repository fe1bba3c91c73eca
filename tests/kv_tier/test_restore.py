"""Restore or recompute: estimates from observations, and the choice between the two."""

import pytest

from kv_tier.restore import LEAST_BYTES, LEAST_TOKENS, Costs, choose
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import GEOMETRY, SyntheticEngine, make_script

CHUNKS = [(0, 512), (512, 512), (1024, 512), (1536, 200)]


def prefill_s(prefix: int, new: int) -> float:
    return 1e-4 * new + 1e-7 * new * (prefix + new / 2)


def measured(*, bytes_per_s: float, prefill_scale: float = 1.0) -> Costs:
    costs = Costs()
    costs.observe_read(8 * LEAST_BYTES, 8 * LEAST_BYTES / bytes_per_s)
    for chunk in CHUNKS:
        costs.observe_prefill([chunk], prefill_scale * prefill_s(*chunk))
    return costs


def test_nothing_is_estimated_before_it_was_measured() -> None:
    costs = Costs()
    costs.observe_read(LEAST_BYTES - 1, 1.0)
    costs.observe_prefill([(0, LEAST_TOKENS - 1)], 1.0)
    assert costs.read_s(1000) is None and costs.prefill_s(0, 1000) is None


def test_both_terms_of_a_prefill_are_found_and_extrapolated() -> None:
    costs = measured(bytes_per_s=1e9)
    assert costs.prefill_s(0, 7000) == pytest.approx(prefill_s(0, 7000))
    assert costs.prefill_s(4000, 3000) == pytest.approx(prefill_s(4000, 3000))
    assert costs.read_s(10**9) == pytest.approx(1.0)


def test_a_batch_counts_as_the_sum_of_its_requests() -> None:
    costs = Costs()
    for chunk in CHUNKS:
        costs.observe_prefill([chunk, (0, 300)], prefill_s(*chunk) + prefill_s(0, 300))
    assert costs.prefill_s(0, 7000) == pytest.approx(prefill_s(0, 7000))


@pytest.mark.parametrize(
    "observed",
    [
        [((0, 512), 0.5)],  # one point: a rate per token
        [((0, 512), 0.5), ((0, 512), 0.7)],
        [
            ((0, 512), 0.5),
            ((512, 512), 0.2),
            ((1024, 512), 0.1),
        ],  # faster with more before it: no cost of attention
        [((0, 512), 0.0), ((4096, 512), 9.0)],  # all attention
    ],
)
def test_no_estimate_is_below_zero(observed: list[tuple[tuple[int, int], float]]) -> None:
    costs = Costs()
    for chunk, seconds in observed:
        costs.observe_prefill([chunk], seconds)
    for prefix, new in ((0, 1), (0, 512), (8192, 512), (0, 32768)):
        estimate = costs.prefill_s(prefix, new)
        assert estimate is not None and estimate >= 0


def test_new_measurements_outweigh_old_ones() -> None:
    costs = measured(bytes_per_s=1e9)
    for _ in range(60):
        costs.observe_read(8 * LEAST_BYTES, 8 * LEAST_BYTES / 1e6)
    assert costs.read_s(10**6) == pytest.approx(1.0, rel=0.01)


@pytest.fixture
def sealed(new_engine: EngineFactory) -> tuple[SyntheticEngine, list[bytes]]:
    """An engine that keeps 64 exact positions on SSD, then 32 that sparse steps generated; and their keys."""
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(120))
    engine.prefill(session, 64)
    engine.generate(session, 40)
    engine.seal(session)
    return engine, engine.keys(session.script, 96 // GEOMETRY.page_size)


def test_the_cheaper_way_is_chosen(sealed: tuple[SyntheticEngine, list[bytes]]) -> None:
    engine, keys = sealed
    places = engine.spans.restorable(keys)[: 64 // GEOMETRY.page_size]
    assert len(places) == 16
    fast, slow = measured(bytes_per_s=1e9), measured(bytes_per_s=1e5)
    assert choose("auto", fast, places, GEOMETRY).restore
    assert not choose("auto", slow, places, GEOMETRY).restore
    assert choose("always", slow, places, GEOMETRY).restore
    choice = choose("auto", slow, places, GEOMETRY)
    assert choice.restore_s == pytest.approx(16 * GEOMETRY.page_bytes / 1e5)
    assert choice.recompute_s == pytest.approx(prefill_s(0, 64))


def test_the_place_in_the_sequence_counts(sealed: tuple[SyntheticEngine, list[bytes]]) -> None:
    engine, keys = sealed
    places = engine.spans.restorable(keys[10:16])
    assert choose("auto", measured(bytes_per_s=1e9), places, GEOMETRY).recompute_s == pytest.approx(
        prefill_s(40, 24)
    )


def test_what_sparse_steps_made_is_always_restored(sealed: tuple[SyntheticEngine, list[bytes]]) -> None:
    engine, keys = sealed
    places = engine.spans.restorable(keys)
    assert len(places) == 24
    assert choose("auto", measured(bytes_per_s=1e5), places, GEOMETRY).restore


def test_without_measurements_everything_is_restored(sealed: tuple[SyntheticEngine, list[bytes]]) -> None:
    engine, keys = sealed
    places = engine.spans.restorable(keys)
    choice = choose("auto", Costs(), places, GEOMETRY)
    assert (choice.restore, choice.restore_s, choice.recompute_s) == (True, None, None)
    assert choose("auto", Costs(), [], GEOMETRY).restore


def test_steps_observe_exact_prefill(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    session = engine.start(make_script(100))
    engine.prefill(session, 96, chunk=96)
    assert (engine.store.costs.prefill_s(0, 96) or 0) > 0
