"""How the cost of fewer bits is measured and summed up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_tier.meta.kv_codec import KvEncoding
from kv_tier.meta.span_format import Shape, SpanHeader
from kvdrive_sglang.bench import cold
from kvdrive_sglang.bench.cold import NOISE, Outcome, check_file, result_of, rounded
from kvdrive_sglang.bench.engines import BenchFailed
from kvdrive_sglang.bench.lab import LabModel, Prefix


def prefix(num_tokens: int = 1024) -> Prefix:
    """Return made-up KV of 2 layers, 1 KV head, 8 elements."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        [torch.randn(1, num_tokens, 8, generator=generator).bfloat16() for _ in range(2)] for _ in range(2)
    ]
    return Prefix(layers[0], layers[1], [])


@pytest.fixture
def model() -> LabModel:
    """A model's sizes alone."""
    made = LabModel.__new__(LabModel)
    made.num_layers, made.num_kv_heads, made.head_dim = 2, 1, 8
    return made


@pytest.mark.parametrize("encoding", cold.ENCODINGS)
def test_rounding_is_small_and_once(encoding: KvEncoding) -> None:
    exact = prefix()
    once = rounded(exact, encoding)
    twice = rounded(once, encoding)
    for plain, coded, again in zip(exact.keys, once.keys, twice.keys, strict=True):
        assert coded.shape == plain.shape and coded.dtype == torch.bfloat16
        assert not torch.equal(coded, plain)
        assert (coded.float() - plain.float()).abs().max() < 0.3
        assert torch.equal(coded, again)


def test_the_file_is_checked_before_anything_is_measured(
    tmp_path: Path, model: LabModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_file(tmp_path / "good", model, prefix(), KvEncoding.INT8)
    right = cold.decoded
    monkeypatch.setattr(cold, "decoded", lambda pages, encoding: right(pages, KvEncoding.FP8))
    with pytest.raises(BenchFailed, match="INT8 gives back other KV"):
        check_file(tmp_path / "bad", model, prefix(), KvEncoding.INT8)


def test_means_over_texts_and_bytes_of_files() -> None:
    shape = Shape(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8, stretch_tokens=1024, dtype_code=1)
    raw = SpanHeader.plan(
        shape, sequence=1, fingerprint=bytes(32), first_page=0, num_pages=128, num_exact_pages=128
    )
    coded = replace(raw, encoding=KvEncoding.INT8, num_exact_pages=0, selection=b"s" * 32)
    outcomes = [
        Outcome(text, name, agreement, kl)
        for text, kl, agreement in (("a", 0.1, 1.0), ("b", 0.3, 0.5))
        for name in (NOISE, "int8", "fp8")
    ]
    result = result_of(
        {"raw": raw, "int8": coded, "fp8": coded}, {"int8": {"decode_mib_per_s": 7.0}}, outcomes
    )
    assert set(result.summary) == set(cold.SUMMARY_KEYS)
    assert result.summary["int8_kv_over_bf16"] == pytest.approx(0.5625)
    assert 0.5625 < result.summary["int8_file_over_bf16"] < 0.65
    assert result.summary["int8_kl"] == pytest.approx(0.2)
    assert result.summary["fp8_agreement"] == pytest.approx(0.75)
    noise, int8, _ = result.rows
    assert noise["kv_over_bf16"] == 1.0 and int8["decode_mib_per_s"] == 7.0
    assert len(result.details) == 6
