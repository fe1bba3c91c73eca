"""Make the shared test helpers importable however pytest is started."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_tier.meta.data_dir import DataDir

sys.path.insert(0, str(Path(__file__).parents[3]))


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[DataDir]:
    with DataDir.open(tmp_path / "data", role="engine") as opened:
        yield opened
