"""A profile becomes window sizes; a file that is not of this engine is refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_tier.geometry import Geometry
from kv_tier.meta.errors import ConfigError
from kv_tier.window_profile import WindowProfile, load_profile

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4)
BUDGET_TOKENS = 32
GREEDY_HEAD, OTHER = [6.0, 3.0, 0.0, 0.0], [6.0, 5.5, 5.0, 4.5]
PROFILE = WindowProfile(
    GEOMETRY,
    BUDGET_TOKENS,
    np.array([1.0, 2.0, 3.0, 4.0]),
    np.array([[GREEDY_HEAD, OTHER], [OTHER, OTHER]]),
    "smoothed",
    ("a text",),
)


def test_memory_goes_where_it_saves_most() -> None:
    assert PROFILE.slots(1).tolist() == [[8, 8], [8, 8]]
    assert PROFILE.slots(1.25).tolist() == [[16, 8], [8, 8]]
    assert PROFILE.slots(1.5).tolist() == [[24, 8], [8, 8]]
    two = PROFILE.slots(2)
    assert two[0, 0] == 24 and two.sum() == 2 * 8 * 4
    assert PROFILE.slots(9).tolist() == [[24, 32], [32, 32]]  # a fourth size would save nothing there


def test_what_sizes_fetch_is_read_off_the_profile() -> None:
    assert PROFILE.fetched(np.array([[16, 8], [8, 8]])) == 3.0 + 3 * 6.0
    assert PROFILE.fetched(np.array([[15, 8], [8, 40]])) == 6.0 + 2 * 6.0 + 4.5


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    again = load_profile(path, GEOMETRY, BUDGET_TOKENS)
    assert (again.misses == PROFILE.misses).all() and (again.multiples == PROFILE.multiples).all()
    assert (again.geometry, again.budget_tokens, again.eviction, again.texts) == (
        PROFILE.geometry,
        PROFILE.budget_tokens,
        PROFILE.eviction,
        PROFILE.texts,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, expected .* version 1"),
        ({"format": "other"}, "is other version 1"),
        ({"num_layers": 3}, "num_layers=3, this engine has 2"),
        ({"page_size": 8}, "page_size=8, this engine has 4"),
        ({"budget_tokens": 64}, "budget_tokens=64, this engine has 32"),
        ({"window_multiples": [1.0, 3.0, 2.0, 4.0]}, "must rise from 1"),
        ({"window_multiples": [1.0, 2.0]}, "has the shape"),
        ({"misses_per_step": "none"}, "no window profile"),
        ({"texts": None}, "no window profile"),
    ],
)
def test_another_engines_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"(?s)window_profile=.*{message}.*kvdrive profile"):
        load_profile(path, GEOMETRY, BUDGET_TOKENS)


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_no_profile_at_all_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="window_profile="):
        load_profile(path, GEOMETRY, BUDGET_TOKENS)


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the window profile"):
        PROFILE.write(tmp_path / "none" / "profile.json")
