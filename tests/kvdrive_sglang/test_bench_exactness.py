"""The tie rule, and how differences are measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_tier.geometry import Geometry
from kvdrive_sglang.bench.exactness import (
    Run,
    first_difference,
    judge,
    largest_difference,
    top_gap,
)
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.sizing import dram_bytes_for, frames_for


def test_the_first_difference_is_found_or_none() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 6]) == 1


def test_answers_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="longer"):
        first_difference([1, 2], [1, 2, 3])


def test_the_gap_is_between_the_two_largest_logits() -> None:
    assert top_gap(np.array([1.0, 7.5, -3.0, 7.0])) == 0.5


@pytest.mark.parametrize(("tolerance", "outcome"), [(0.5, "tie"), (0.49, "mismatch")])
def test_a_difference_is_a_tie_only_up_to_the_tolerance(tolerance: float, outcome: str) -> None:
    logits = np.array([[9.0, 0.0, 0.0], [2.0, 1.5, 0.0]])
    verdict = judge([0, 1], [0, 0], logits, tolerance)
    assert (verdict.at, verdict.gap, verdict.name) == (1, 0.5, outcome)


def test_equal_answers_are_equal_whatever_the_logits() -> None:
    assert judge([4, 4], [4, 4], np.zeros((2, 8)), 0.0).name == "equal"


def test_logits_are_compared_up_to_the_token_where_the_runs_part() -> None:
    first = Run([[1, 2, 3]], [np.array([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])])
    second = Run([[1, 9, 3]], [np.array([[0.0, 0.1], [1.25, 1.0], [0.0, 0.0]])])
    assert largest_difference(first, second) == 0.25


def test_dram_bytes_hold_exactly_the_frames_asked_for() -> None:
    geometry = Geometry(num_layers=2, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    dram = dram_bytes_for(100, 400, geometry)
    config = parse_config({"data_dir": "unused", "dram_bytes": dram})
    assert frames_for(config, geometry, 400) == 100
    fewer = parse_config({"data_dir": "unused", "dram_bytes": dram - 1})
    assert frames_for(fewer, geometry, 400) == 99
