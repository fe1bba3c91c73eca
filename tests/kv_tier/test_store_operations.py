"""Random histories of the store: it always agrees with itself, leaks nothing, and computes the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kv_tier.steps import AppendRule
from tests.models.synthetic_engine import Session, SyntheticEngine, fork_script, make_script

SPARSE = AppendRule("sparse", sparse_max_tokens=6)
NUM_STEPS = 120
BASE = make_script(120, seed=50)
SCRIPTS = [BASE, fork_script(BASE, 37, seed=51), fork_script(BASE, 64, seed=52), make_script(120, seed=53)]


class History:
    """Apply random operations to an engine, and remember every output by what it may depend on.

    Keys and values are scripted, so the output of a step depends on the script, the position and the size of the step;
    whatever else happened around it, it must come out the same.
    """

    def __init__(
        self, engine: SyntheticEngine, chance: random.Random, known: dict[object, torch.Tensor]
    ) -> None:
        self.engine = engine
        self.chance = chance
        self.known = known

    def run(self) -> None:
        weights: dict[str, float] = {
            "extend": 6,
            "decode": 6,
            "seal": 3,
            "resume": 3,
            "start": 2,
            "evict": 2,
            "settle": 2,
        }
        weights |= {"end": 1, "spill": 1, "drop": 0.5, "clear": 0.1}
        for name in self.chance.choices([*weights], [*weights.values()], k=NUM_STEPS):
            getattr(self, name)()
            self.engine.store.check_integrity()

    def pick(self, most: int = 1) -> list[Session]:
        ready = [s for s in self.engine.sessions if s.num_tokens <= len(s.script.tokens) - 20]
        return self.chance.sample(ready, min(len(ready), self.chance.randint(1, most)))

    def has_room(self) -> bool:
        return self.engine.num_free_rows > 0 and self.engine.num_free_pages > 64

    def start(self) -> None:
        if self.has_room():
            self.engine.start(self.chance.choice(SCRIPTS))

    def resume(self) -> None:
        script = self.chance.choice(SCRIPTS)
        num_pages = min(self.engine.num_restorable(script), self.chance.randint(1, 24))
        if self.has_room() and num_pages:
            assert self.engine.resume(script, num_pages) is not None

    def extend(self) -> None:
        parts = [(session, self.chance.choice([1, 6, 20])) for session in self.pick(3)]
        if parts:
            self.check(parts, self.engine.extend(*parts), "extend")

    def decode(self) -> None:
        sessions = [session for session in self.pick(3) if session.num_tokens]
        if sessions:
            self.check([(session, 1) for session in sessions], self.engine.decode(*sessions), "decode")

    def check(self, parts: list[tuple[Session, int]], outs: list[torch.Tensor], kind: str) -> None:
        for (session, count), out in zip(parts, outs, strict=True):
            assert self.engine.state(session).failure is None
            which = next(i for i, script in enumerate(SCRIPTS) if script is session.script)
            key = (which, session.num_tokens, kind, count)
            assert torch.equal(self.known.setdefault(key, out), out), key

    def seal(self) -> None:
        for session in self.pick():
            self.engine.seal(session, open_stretch=self.chance.random() < 0.5, wait=False)

    def settle(self) -> None:
        self.engine.settle()

    def evict(self) -> None:
        self.engine.store._evict_frames(self.chance.randint(1, 30))

    def spill(self) -> None:
        self.engine.settle()
        self.engine.store._spill()

    def drop(self) -> None:
        self.engine.spans.drop(self.engine.keys(self.chance.choice(SCRIPTS), self.chance.randint(1, 30)))

    def end(self) -> None:
        for session in self.pick():
            self.engine.end(session)

    def clear(self) -> None:
        """SGLang flushes its cache when nothing runs."""
        for session in list(self.engine.sessions):
            self.engine.end(session)
        self.engine.store.clear()


@pytest.fixture(scope="module")
def known() -> dict[object, torch.Tensor]:
    """Outputs of all histories of this module, by script, position and step."""
    return {}


@pytest.mark.parametrize("seed", range(10))
def test_random_histories(tmp_path: Path, seed: int, known: dict[object, torch.Tensor]) -> None:
    for num_frames, window_multiple in ((1000, 2), (70, 1)):
        with SyntheticEngine(
            tmp_path / str(num_frames),
            num_frames=num_frames,
            num_pages=300,
            window_multiple=window_multiple,
            append=SPARSE,
        ) as engine:
            history = History(engine, random.Random(seed), known)
            history.run()
            for session in list(engine.sessions):
                engine.end(session)
            engine.settle()
            engine.store.check_integrity()
            idle = engine.store.frames.num_free + len(engine.store.staging.frames)
            assert idle == engine.store.frames.num_usable
            assert engine.spans.used_bytes == sum(path.stat().st_size for path in engine.span_paths())
            assert engine.store.counters.requests_failed == 0
