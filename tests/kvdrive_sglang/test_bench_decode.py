"""Fidelity figures, the summary's ratios, and the dense formulation against plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvdrive_sglang.bench import dense_backend
from kvdrive_sglang.bench.decode import (
    BATCH_CONTEXT,
    CONTEXTS,
    SUMMARY_KEYS,
    UNATTENDED,
    compare,
    divergence,
    summary_of,
)
from kvdrive_sglang.bench.dense_backend import attend_dense


def test_equal_logits_agree_and_do_not_diverge() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32)
    agreement, kl = compare(logits, logits + 3.0)
    assert agreement == 1.0
    assert kl == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_kullback_leibler_in_nats() -> None:
    p, q = np.array([0.75, 0.25]), np.array([0.5, 0.5])
    expected = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    assert divergence(np.log(p), np.log(q)) == pytest.approx(expected)


def test_agreement_counts_the_most_likely_token() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert compare(reference, np.array([[2.0, 0.0], [3.0, 0.0]]))[0] == 0.5


def test_the_summary_takes_ratios_at_the_longest_context() -> None:
    timing: list[dict[str, Any]] = [
        {"context": context, "backend": backend, "ms_per_token": ms * (1 + i), "attention_us": us}
        for i, context in enumerate([*CONTEXTS, *UNATTENDED, BATCH_CONTEXT])
        for backend, ms, us in (
            ("torch_native", 40.0, 900.0),
            ("dense", 24.0, 400.0),
            ("sparse", 20.0, 200.0),
        )
    ]
    fidelity: list[dict[str, Any]] = [
        {"text": "prose", "backend": "sparse", "agreement": 1.0, "kl": 0.01},
        {"text": "copy", "backend": "dense", "agreement": 0.0, "kl": 9.0},
        {"text": "copy", "backend": "sparse", "agreement": 0.9, "kl": 0.03},
    ]
    summary = summary_of(timing, fidelity)
    assert set(SUMMARY_KEYS) <= set(summary)
    assert summary["native_over_sparse"] == 2.0
    assert summary["dense_over_sparse"] == 1.2
    assert summary["attention_native_over_sparse"] == 4.5
    assert summary["growth_1k_7k5"] == 3.0
    assert summary["growth_1k_32k"] == 5.0
    assert summary["native_over_sparse_32k"] == summary["batch8_over_native"] == 2.0
    assert summary["dense_over_sparse_32k"] == summary["batch8_over_dense"] == 1.2
    assert summary["agreement"] == pytest.approx(0.95)
    assert summary["kl"] == pytest.approx(0.02)


@pytest.mark.parametrize("length", [1, 7, 16, 17, 62])
def test_dense_attention_is_attention_whole_and_in_halves(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_backend, "SPLIT_FROM_TOKENS", 16)
    torch.manual_seed(0)
    query, k, v = torch.randn(3, 2, 8), torch.randn(3, 64, 8), torch.randn(3, 64, 8)
    weights = torch.softmax(query @ k[:, :length].transpose(1, 2) * 0.25, -1)
    torch.testing.assert_close(attend_dense(query, k, v, length, 0.25), weights @ v[:, :length])
