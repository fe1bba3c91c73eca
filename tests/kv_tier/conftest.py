"""Engines over a store in a temporary directory, closed at the end of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.synthetic_engine import SyntheticEngine

EngineFactory = Callable[..., SyntheticEngine]


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[EngineFactory]:
    """Open engines, each in a directory of its own unless ``path`` names one."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(path: Path | None = None, **settings: Any) -> SyntheticEngine:
            nonlocal count
            count += 1
            return stack.enter_context(SyntheticEngine(path or tmp_path / f"data{count}", **settings))

        yield make
