"""How fidelity is compared and summed up."""

from __future__ import annotations

import math

import pytest
import torch

from kvdrive_sglang.bench import fidelity
from kvdrive_sglang.bench.fidelity import Outcome, compare, mean_and_error, result_of


def test_equal_logits_agree_and_a_shift_is_no_difference() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    agreement, kl = compare(logits, logits + 3)
    assert agreement == 1.0
    assert abs(kl) < 1e-6


def test_kl_is_that_of_full_attention_against_sparse() -> None:
    full, sparse = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75]]).log()
    agreement, kl = compare(full, sparse)
    assert agreement == 0.0
    assert kl == pytest.approx(0.5 * math.log(3), rel=1e-5)


def test_the_standard_error_is_over_texts() -> None:
    assert mean_and_error([1.0, 3.0]) == pytest.approx((2.0, 1.0))
    assert mean_and_error([1.0]) == (1.0, 0.0)


def test_ratios_are_geometric_means_over_texts() -> None:
    outcomes = [
        Outcome(text, case, 1024, 1.0, kl)
        for case, kls in {
            fidelity.BASE: (0.1, 0.4),
            fidelity.SKETCH: (0.01, 0.01),
            fidelity.TWO_LEVEL: (0.1, 0.4),
            fidelity.QUARTER: (0.2, 0.2),
        }.items()
        for text, kl in zip(("a", "b"), kls, strict=True)
    ]
    result = result_of({fidelity.BASE: 16}, outcomes)
    assert result.summary["kl_sketch_over_means8"] == pytest.approx(0.05)
    assert result.summary["kl_two_level_over_means8"] == pytest.approx(1)
    assert result.summary["kl_quarter_bytes_over_means8"] == pytest.approx(1)
    assert result.summary["num_texts"] == 2
    assert [row["index_bytes"] for row in result.rows] == [16, None, None, None]
    assert len(result.details) == 8
    assert set(fidelity.SUMMARY_KEYS) == set(result.summary)
