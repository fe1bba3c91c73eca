"""Engines over a store in a temporary directory, closed at the end of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_tier.meta.data_dir import DataDir
from tests.models.synthetic_engine import SyntheticEngine

EngineFactory = Callable[..., SyntheticEngine]


def opening_engines(tmp_path: Path, **defaults: Any) -> Iterator[EngineFactory]:
    """Yield a function that opens engines, each in a directory of its own unless ``path`` names one; close them all."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(path: Path | None = None, **settings: Any) -> SyntheticEngine:
            nonlocal count
            count += 1
            engine = SyntheticEngine(path or tmp_path / f"data{count}", **{**defaults, **settings})
            return stack.enter_context(engine)

        yield make


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[DataDir]:
    with DataDir.open(tmp_path / "data", role="engine") as opened:
        yield opened


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[EngineFactory]:
    yield from opening_engines(tmp_path)
