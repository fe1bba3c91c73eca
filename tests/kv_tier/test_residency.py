"""Residency never changes a number: every placement of the KV gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kv_tier.modes import EVICTIONS, FETCH_MODES, EvictionName, FetchMode
from kv_tier.steps import AppendRule
from kv_tier.window_profile import WindowProfile
from tests.kv_tier.conftest import EngineFactory
from tests.models.read_paths import READ_PATHS
from tests.models.synthetic_engine import GEOMETRY, Session, SyntheticEngine, make_script

SPARSE = AppendRule("sparse", sparse_max_tokens=16)  # chunks of the prompt are longer
PROMPT, ANSWER, APPEND = 70, 9, 11  # none is a multiple of the page size
NUM_TOKENS = PROMPT + 2 * ANSWER + APPEND
SCRIPT = make_script(NUM_TOKENS, seed=1)
NUM_PAGES = 25  # of 4 positions, for NUM_TOKENS

BetweenSteps = Callable[[SyntheticEngine, Session], object]


def two_turns(
    engine: SyntheticEngine,
    between: BetweenSteps = lambda engine, session: None,
    mates: tuple[Session, ...] = (),
) -> torch.Tensor:
    """Prefill, answer, append, answer; [layer, token, kv_head, group, head_dim]."""
    session = engine.start(SCRIPT)
    outs = []

    def step(new_tokens: int) -> None:
        between(engine, session)
        if new_tokens == 1:
            outs.append(engine.decode(*mates, session)[-1])
        else:
            outs.append(engine.extend(*((mate, 3) for mate in mates), (session, new_tokens))[-1])

    for count in (24, 24, 22, *[1] * ANSWER, APPEND, *[1] * ANSWER):
        step(count)
    engine.store.check_integrity()
    assert engine.state(session).failure is None
    return torch.cat(outs, dim=1)


@pytest.fixture(params=[6, 11, None], ids=["small", "medium", "everything"])
def budget_pages(request: pytest.FixtureRequest) -> int | None:
    pages: int | None = request.param
    return pages


@pytest.fixture
def expected(new_engine: EngineFactory, budget_pages: int | None) -> torch.Tensor:
    """The outputs with everything in DRAM, alone, nothing sealed."""
    return two_turns(new_engine(budget_pages=budget_pages, append=SPARSE))


@pytest.mark.parametrize("window_multiple", [1, 2])
@pytest.mark.parametrize("num_frames", [NUM_PAGES // 4 + 2, NUM_PAGES // 2, NUM_PAGES])
def test_frames_and_window_change_nothing(
    new_engine: EngineFactory,
    expected: torch.Tensor,
    budget_pages: int | None,
    num_frames: int,
    window_multiple: int,
) -> None:
    engine = new_engine(
        budget_pages=budget_pages, num_frames=num_frames, window_multiple=window_multiple, append=SPARSE
    )
    assert torch.equal(two_turns(engine), expected)
    assert (engine.store.counters.pages_spilled > 0) == (num_frames < NUM_PAGES)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("num_frames", [NUM_PAGES // 2, NUM_PAGES])
def test_eviction_changes_nothing(
    new_engine: EngineFactory,
    expected: torch.Tensor,
    budget_pages: int | None,
    eviction: EvictionName,
    num_frames: int,
) -> None:
    engine = new_engine(budget_pages=budget_pages, num_frames=num_frames, eviction=eviction, append=SPARSE)
    assert torch.equal(two_turns(engine, seal_and_evict), expected)


def test_windows_of_other_sizes_change_nothing(
    new_engine: EngineFactory, expected: torch.Tensor, budget_pages: int | None
) -> None:
    profile = None
    if budget_pages is not None:
        misses = np.array([[[4.0, 1.0, 0.5], [4.0, 3.9, 3.8]], [[4.0, 4.0, 4.0], [4.0, 2.0, 0.0]]])
        multiples = np.array([1.0, 1.5, 3.0])
        profile = WindowProfile(
            GEOMETRY, budget_pages * GEOMETRY.page_size, multiples, misses, "smoothed", ()
        )
        assert len(np.unique(profile.slots(2))) > 1
    engine = new_engine(budget_pages=budget_pages, window_profile=profile, append=SPARSE)
    assert torch.equal(two_turns(engine, seal_and_evict), expected)


def seal(engine: SyntheticEngine, session: Session) -> None:
    engine.seal(session)


def seal_and_evict(engine: SyntheticEngine, session: Session) -> None:
    engine.seal(session, open_stretch=True)
    engine.evict()


def seal_without_waiting(engine: SyntheticEngine, session: Session) -> None:
    engine.seal(session, wait=False)
    engine.evict()


@pytest.mark.parametrize("between", [seal, seal_and_evict, seal_without_waiting])
@pytest.mark.parametrize("num_frames", [NUM_PAGES // 2, 256])
def test_sealing_and_eviction_change_nothing(
    new_engine: EngineFactory,
    expected: torch.Tensor,
    budget_pages: int | None,
    between: BetweenSteps,
    num_frames: int,
) -> None:
    engine = new_engine(budget_pages=budget_pages, num_frames=num_frames, append=SPARSE)
    assert torch.equal(two_turns(engine, between), expected)
    assert engine.spans.bytes_written > 0


def test_mates_change_nothing(
    new_engine: EngineFactory, expected: torch.Tensor, budget_pages: int | None
) -> None:
    engine = new_engine(budget_pages=budget_pages, append=SPARSE)
    mates = []
    for seed, length in ((2, 5), (3, 61)):
        mates.append(engine.start(make_script(length + 60, seed=seed)))
        engine.prefill(mates[-1], length)
    assert torch.equal(two_turns(engine, seal_and_evict, tuple(mates)), expected)


def test_a_reused_device_memory_changes_nothing(
    new_engine: EngineFactory, expected: torch.Tensor, budget_pages: int | None
) -> None:
    engine = new_engine(budget_pages=budget_pages, append=SPARSE)
    other = engine.start(make_script(100, seed=4))
    engine.prefill(other, 90)
    engine.generate(other, 5)
    engine.end(other)
    assert torch.equal(two_turns(engine), expected)


def test_windows_kept_between_turns_change_nothing(new_engine: EngineFactory) -> None:
    """A request that goes on from another's pages takes over its window caches, and gives the same numbers."""
    once = new_engine(budget_pages=6)
    first = once.start(SCRIPT)
    once.prefill(first, PROMPT)
    once.generate(first, ANSWER)
    alone = once.generate(first, 1)
    for num_device_requests in (1, 2):
        engine = new_engine(budget_pages=6, num_device_requests=num_device_requests)
        session = engine.start(SCRIPT)
        engine.prefill(session, PROMPT)
        engine.generate(session, ANSWER)
        again = engine.carry_on(session)
        assert torch.equal(engine.generate(again, PROMPT + ANSWER + 1 - again.num_tokens)[:, -1:], alone)
        device = engine.store.device
        assert device is not None and device.num_reused == 1
        assert engine.state(again).figures.window_hits > engine.state(again).figures.window_misses
        engine.store.check_integrity()


def test_appending_sparsely_reads_within_the_budget(new_engine: EngineFactory) -> None:
    exact = two_turns(new_engine(budget_pages=6))
    sparse = two_turns(new_engine(budget_pages=6, append=SPARSE))
    appended = PROMPT + ANSWER
    assert torch.equal(exact[:, :appended], sparse[:, :appended])
    assert not torch.equal(exact[:, appended : appended + APPEND], sparse[:, appended : appended + APPEND])


@pytest.mark.parametrize("fetch_mode", FETCH_MODES)
@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("num_frames", [NUM_PAGES // 3, NUM_PAGES // 2, 256])
def test_fetch_modes_change_nothing(
    new_engine: EngineFactory,
    expected: torch.Tensor,
    budget_pages: int | None,
    fetch_mode: FetchMode,
    warm_up: bool,
    num_frames: int,
) -> None:
    engine = new_engine(
        budget_pages=budget_pages,
        num_frames=num_frames,
        append=SPARSE,
        fetch_mode=fetch_mode,
        warm_up=warm_up,
    )
    assert torch.equal(two_turns(engine, seal_and_evict), expected)


@pytest.mark.parametrize("read_path", READ_PATHS)
def test_read_paths_change_nothing(
    new_engine: EngineFactory, expected: torch.Tensor, budget_pages: int | None, read_path: str
) -> None:
    engine = new_engine(budget_pages=budget_pages, append=SPARSE, read_path=read_path)
    assert torch.equal(two_turns(engine, seal_and_evict), expected)


def test_mates_that_share_pages_change_nothing(
    new_engine: EngineFactory, expected: torch.Tensor, budget_pages: int | None
) -> None:
    """A batch whose requests ask for the same pages of the same span reads them once."""
    engine = new_engine(budget_pages=budget_pages, append=SPARSE, fetch_mode="blockwise")
    first = engine.start(SCRIPT)
    engine.prefill(first, PROMPT)
    engine.seal(first, open_stretch=True)
    engine.evict()
    num_pages = PROMPT // 4
    mates = [engine.resume(SCRIPT, num_pages) for _ in range(2)]
    for mate in mates:
        assert mate is not None
        engine.extend((mate, PROMPT - mate.num_tokens))
    engine.evict()
    outs = engine.decode(*(mate for mate in mates if mate is not None))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], expected[:, PROMPT : PROMPT + 1])
