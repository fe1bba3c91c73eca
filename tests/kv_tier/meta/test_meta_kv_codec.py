"""KV in one byte a value: how far it is off, that coding again changes nothing, and that it is what a page says it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tier.meta.errors import CannotEncode
from kv_tier.meta.kv_codec import (
    E4M3,
    EXPONENT_BIAS,
    MAX_MAGNITUDE,
    KvEncoding,
    decode_pages,
    encode_pages,
    stored_page_bytes,
)

DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
ENCODINGS = (KvEncoding.INT8, KvEncoding.FP8)

Raw = npt.NDArray[Any]


def to_bits(values: npt.NDArray[np.float32], dtype_code: int) -> Raw:
    """Round float32 to a KV dtype and return its bits."""
    tensor = torch.from_numpy(values).to(DTYPES[dtype_code])
    if dtype_code == 3:
        return tensor.numpy().view(np.uint32)
    return tensor.view(torch.int16).numpy().view(np.uint16)


def to_floats(bits: Raw, dtype_code: int) -> npt.NDArray[np.float32]:
    """Return the values of bits: the definition that the codec's own widening must agree with."""
    signed = torch.from_numpy(np.ascontiguousarray(bits).view(np.int32 if dtype_code == 3 else np.int16))
    values: npt.NDArray[np.float32] = signed.view(DTYPES[dtype_code]).float().numpy()
    return values


def there_and_back(kv: Raw, encoding: KvEncoding, dtype_code: int) -> tuple[Raw, Raw]:
    """Encode pages [n, 2, P, D] and decode them: (stored bytes, decoded bits of the same shape)."""
    stored = encode_pages(kv, encoding, dtype_code)
    size, dim = kv.shape[2:]
    decoded = decode_pages(stored, encoding, size, dim, dtype_code)
    return stored, decoded.view(kv.dtype).reshape(kv.shape)


@st.composite
def pages(draw: st.DrawFn) -> tuple[Raw, int]:
    """Draw pages [n, 2, P, D] of channels whose magnitudes differ by many powers of two, some of them zero."""
    count, size, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, 9))
    dtype_code = draw(st.sampled_from([1, 2, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lowest = draw(st.sampled_from([-140, -20, -3]))
    magnitudes = np.exp2(rng.uniform(lowest, 13, (count, 2, 1, dim)))
    values = rng.standard_normal((count, 2, size, dim)) * magnitudes * (rng.random((count, 2, 1, dim)) < 0.9)
    return to_bits(values.clip(-MAX_MAGNITUDE, MAX_MAGNITUDE).astype(np.float32), dtype_code), dtype_code


@settings(max_examples=200, deadline=None)
@given(pages())
def test_int8_is_off_by_half_a_step_at_most(drawn: tuple[Raw, int]) -> None:
    kv, dtype_code = drawn
    stored, decoded = there_and_back(kv, KvEncoding.INT8, dtype_code)
    values, found = to_floats(kv, dtype_code), to_floats(decoded, dtype_code)
    exponents = stored[:, -2 * kv.shape[3] :].reshape(len(kv), 2, 1, -1).astype(int) - EXPONENT_BIAS
    steps = np.exp2(exponents.astype(float))
    assert (np.abs(found - values) <= steps / 2).all()
    largest = np.abs(values).max(axis=2, keepdims=True)
    assert (largest <= 127 * steps).all()
    assert ((largest > 127 * steps / 2) | (largest < 2.0**-110)).all(), "a smaller step would do"


@settings(max_examples=200, deadline=None)
@given(pages())
def test_fp8_is_off_by_a_sixteenth_at_most(drawn: tuple[Raw, int]) -> None:
    kv, dtype_code = drawn
    _, decoded = there_and_back(kv, KvEncoding.FP8, dtype_code)
    values, found = to_floats(kv, dtype_code), to_floats(decoded, dtype_code)
    largest = np.abs(values).max(axis=2, keepdims=True)
    assert (np.abs(found - values) <= np.abs(values) / 16 + largest * 2.0**-17 + 2.0**-120).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=200, deadline=None)
@given(pages())
def test_coding_what_was_decoded_changes_nothing(encoding: KvEncoding, drawn: tuple[Raw, int]) -> None:
    """Turns that rewrite a stretch, and suspends that transcode it again, lose once."""
    kv, dtype_code = drawn
    _, once = there_and_back(kv, encoding, dtype_code)
    _, twice = there_and_back(once, encoding, dtype_code)
    np.testing.assert_array_equal(once, twice)


def test_e4m3_is_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)
    values = np.random.default_rng(0).uniform(-448, 448, (1, 2, 64, 300)).astype(np.float32)
    values[0, :, 0] = 448  # a scale of one
    values[0, :, 1:8, 0] = [
        17,
        19,
        0.0009765625,
        0.0029296875,
        -0.001953125,
        0,
        431.9,
    ]  # ties, and the smallest
    stored = encode_pages(values.view(np.uint32), KvEncoding.FP8, 3)
    assert (stored[0, -600:] == EXPONENT_BIAS).all()
    rounded = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(stored[0, :-600], rounded.reshape(-1))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_page_takes_what_its_header_says(encoding: KvEncoding) -> None:
    kv = np.zeros((3, 5, 2, 8, 64), np.uint16)
    assert encode_pages(kv, encoding, 1).shape == (3, 5, stored_page_bytes(encoding, 8, 64, 2))
    assert stored_page_bytes(KvEncoding.RAW, 8, 64, 2) == 2048
    assert stored_page_bytes(encoding, 8, 64, 2) == 1152
    assert decode_pages(np.zeros((0, 1152), np.uint8), encoding, 8, 64, 1).shape == (0, 2048)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2 * MAX_MAGNITUDE])
def test_what_cannot_be_coded_is_refused(value: float) -> None:
    values = np.ones((1, 2, 2, 4), np.float32)
    values[0, 1, 1, 2] = value
    with pytest.raises(CannotEncode, match="32768"):
        encode_pages(to_bits(values, 1), KvEncoding.INT8, 1)
