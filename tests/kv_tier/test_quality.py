"""The quality monitor: probes change nothing, and budgets follow a request's own figures."""

from __future__ import annotations

import pytest
import torch

from kv_tier.quality import SPAN_STEPS, QualityMonitor, ShadowStep, divergence
from kv_tier.steps import DecodeStep
from tests.kv_tier.conftest import EngineFactory
from tests.models.synthetic_engine import Session, SyntheticEngine, make_script

SCRIPT = make_script(200, seed=5)


def layer_inputs(session: Session, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    at = session.num_tokens - 1
    script = session.script
    return script.query[layer, at : at + 1], script.k[layer, at : at + 1], script.v[layer, at : at + 1]


def shadow(engine: SyntheticEngine, session: Session) -> torch.Tensor:
    """Repeat the last decode step at twice the budget; [layer, 1, kv_head, group, head_dim]."""
    rows, _ = engine._grow([(session, 0)])
    row = type(rows[0])(rows[0].state, rows[0].pages, session.num_tokens - 1, session.num_tokens)
    step = ShadowStep(engine.store, [row])
    outs = []
    for layer in range(engine.geometry.num_layers):
        query, k, v = layer_inputs(session, layer)
        step.write(layer, k, v)
        outs.append(step.attend(layer, query, k, v, engine.scale))
    return torch.stack(outs)


@pytest.mark.parametrize("length", [90, 40])  # beyond twice the budget of 24, and within it
def test_a_shadow_is_the_same_step_at_twice_the_budget(new_engine: EngineFactory, length: int) -> None:
    narrow, wide = new_engine(budget_pages=6), new_engine(budget_pages=12)
    sessions = []
    for engine in (narrow, wide):
        sessions.append(engine.start(SCRIPT))
        engine.prefill(sessions[-1], length)
        engine.decode(sessions[-1])
    expected = wide.store
    sessions[1].num_tokens -= 1
    [out] = wide.decode(sessions[1])
    assert expected is wide.store
    torch.testing.assert_close(shadow(narrow, sessions[0]), out, atol=0.02, rtol=0.02)


def test_shadows_change_no_bit_of_what_follows(new_engine: EngineFactory) -> None:
    plain, watched = new_engine(budget_pages=6), new_engine(budget_pages=6)
    outs = []
    for engine in (plain, watched):
        session = engine.start(SCRIPT)
        engine.prefill(session, 90)
        parts = []
        for _ in range(12):
            parts += engine.decode(session)
            if engine is watched:
                shadow(engine, session)
        outs.append(torch.cat(parts, dim=1))
        engine.store.check_integrity()
    assert torch.equal(*outs)


def test_divergence_is_zero_for_equals_and_exact_for_two_words() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
    assert divergence(logits, logits).tolist() == [0.0, 0.0]
    p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    expected = 0.75 * torch.log(torch.tensor(1.5)) + 0.25 * torch.log(torch.tensor(0.5))
    torch.testing.assert_close(divergence(p.log(), q.log())[0], expected)


def decode_with(engine: SyntheticEngine, kl: float, max_kl: float | None, steps: int) -> Session:
    """Decode ``steps`` tokens with a monitor that is told ``kl`` at every probe."""
    monitor = QualityMonitor(4, max_kl, largest_factor=2)
    session = engine.start(SCRIPT)
    engine.prefill(session, 90)
    for _ in range(steps):
        rows, slots = engine._grow([(session, 1)])
        engine._run(DecodeStep(engine.store, rows, slots), [(session, 1)])
        for row in rows:
            if monitor.is_due(row, engine.store.budget):
                monitor.record(row, kl)
        monitor.end_step(rows)
    return session


@pytest.mark.parametrize(
    ("kl", "max_kl", "steps", "factor"),
    [
        (0.2, 0.1, SPAN_STEPS - 1, 1),
        (0.2, 0.1, SPAN_STEPS, 2),
        (0.2, 0.1, 3 * SPAN_STEPS, 2),  # never beyond what the window caches hold
        (0.1, 0.1, 2 * SPAN_STEPS, 1),
        (0.2, None, 2 * SPAN_STEPS, 1),
    ],
)
def test_a_budget_is_raised_after_a_span_above_the_limit(
    new_engine: EngineFactory, kl: float, max_kl: float | None, steps: int, factor: int
) -> None:
    engine = new_engine(budget_pages=6)
    state = engine.state(decode_with(engine, kl, max_kl, steps))
    assert state.budget_factor == factor
    assert state.figures.budget_raises == (factor > 1)
    assert state.figures.num_probes == (90 + steps) // 4 - 90 // 4
    assert state.figures.kl_sum == pytest.approx(kl * state.figures.num_probes)


def test_a_raised_request_leaves_its_batch_mates_alone(new_engine: EngineFactory) -> None:
    engine = new_engine(budget_pages=6)
    raised, mate, alone = (engine.start(make_script(200, seed=s)) for s in (1, 2, 2))
    for session in (raised, mate, alone):
        engine.prefill(session, 90)
    engine.state(raised).budget_factor = 2
    for _ in range(6):
        _, out = engine.decode(raised, mate)
        assert torch.equal(out, engine.decode(alone)[0])
