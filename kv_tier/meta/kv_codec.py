"""KV in fewer bits: a page's keys and values as codes of one byte, with a scale for each channel.

    page of one (layer, KV head)   codes [2 (keys, values), P, D] uint8 | exponents [2, D] uint8

A channel is one of the D elements of a key, or of a value, over the P positions of its page. Its scale is a power of two, the
smallest that lets the channel's largest magnitude be coded, so that a decoded value is exact in the model's dtype and coding it
again gives the same bytes: a page that is decoded, packed anew and encoded any number of times loses once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_tier.meta.errors import CannotEncode

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[Any]

EXPONENT_BIAS = 120
MAX_MAGNITUDE = 32768.0  # nothing decoded leaves the range of float16


class KvEncoding(IntEnum):
    """How a span holds KV; the version of its KV section."""

    RAW = 1
    INT8 = 2
    FP8 = 3


def _e4m3_values() -> Floats:
    """Return the value of every e4m3 code (4 bits of exponent, 3 of mantissa, no infinities); 127 and 255 are no number."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    positive = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), normal)
    positive[127] = np.nan
    values: Floats = np.concatenate([positive, -positive]).astype(np.float32)
    return values


E4M3 = _e4m3_values()
SCALES: Floats = np.ldexp(1.0, np.minimum(np.arange(256) - EXPONENT_BIAS, 127)).astype(np.float32)

# the largest magnitude that codes hold, as fraction and exponent of numpy.frexp
_LARGEST = {KvEncoding.INT8: (127 / 128, 7), KvEncoding.FP8: (448 / 512, 9)}


def stored_page_bytes(encoding: int, page_size: int, head_dim: int, element_bytes: int) -> int:
    """Return the bytes of one page of one (layer, KV head) in a file."""
    if encoding == KvEncoding.RAW:
        return 2 * page_size * head_dim * element_bytes
    return 2 * page_size * head_dim + 2 * head_dim


def encode_pages(kv: Raw, encoding: int, dtype_code: int) -> Bytes:
    """Encode whole pages.

    Args:
        kv: [..., 2 (keys, values), page_size, head_dim] raw bits of the KV dtype.
        encoding: INT8 or FP8.
        dtype_code: a DtypeCode.

    Returns:
        [..., stored_page_bytes] uint8.

    Raises:
        CannotEncode: a value is no number or too large.
    """
    values = _widen(kv, dtype_code)
    largest = np.abs(values).max(axis=-2)
    if not (largest <= MAX_MAGNITUDE).all():
        raise CannotEncode(
            f"a key or value is no number, or larger than {MAX_MAGNITUDE:.0f}: such KV stays in the model's dtype"
        )
    fraction, top = _LARGEST[KvEncoding(encoding)]
    fractions, exponents = np.frexp(largest)
    exponents = exponents - top + (fractions > fraction) + EXPONENT_BIAS
    stored = np.maximum(exponents, 0).astype(np.uint8)
    scaled = values / SCALES[stored][..., None, :]
    if encoding == KvEncoding.INT8:
        codes = np.rint(scaled).astype(np.int8).view(np.uint8)
    else:
        codes = _e4m3_codes(scaled)
    pages = kv.shape[:-3]
    return np.concatenate([codes.reshape(*pages, -1), stored.reshape(*pages, -1)], axis=-1)


def decode_pages(
    rows: Bytes, encoding: int, page_size: int, head_dim: int, dtype_code: int
) -> npt.NDArray[np.uint8]:
    """Decode whole pages; a pure function of their bytes.

    Args:
        rows: [n, stored_page_bytes] uint8.

    Returns:
        [n, page_head_bytes] uint8: keys, then values, in the KV dtype.
    """
    count, num_codes = len(rows), 2 * page_size * head_dim
    codes = rows[:, :num_codes].reshape(count, 2, page_size, head_dim)
    exponents = rows[:, num_codes:].reshape(count, 2, 1, head_dim)
    values = codes.view(np.int8).astype(np.float32) if encoding == KvEncoding.INT8 else E4M3[codes]
    values *= SCALES[exponents]
    return _narrow(values, dtype_code).reshape(count, num_codes).view(np.uint8)


def _e4m3_codes(values: Floats) -> Bytes:
    """Round to the nearest e4m3 value, ties to even; magnitudes are at most 448."""
    _, exponents = np.frexp(values)
    exponents = np.where(values == 0, -5, np.maximum(exponents, -5))  # below 2 ** -6 steps stay the same
    rounded = np.rint(np.ldexp(np.abs(values), 4 - exponents)).astype(np.int32)  # 8 to 16, or less below
    codes: Bytes = ((exponents + 5) * 8 + rounded).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes


def _widen(kv: Raw, dtype_code: int) -> Floats:
    if dtype_code == 1:  # bfloat16: the upper half of a float32
        return (kv.astype(np.uint32) << 16).view(np.float32)
    return kv.view(np.float16 if dtype_code == 2 else np.float32).astype(np.float32)


def _narrow(values: Floats, dtype_code: int) -> Raw:
    """Return the bits in the KV dtype; every decoded value has at most eight significant bits, which bfloat16 holds."""
    if dtype_code == 1:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype_code == 2 else values
