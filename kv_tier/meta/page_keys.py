"""Page keys: SGLang's storage hash of a page, computed without its compiled extension.

    key_i = sha256(key_{i-1} or seed or nothing, tokens of page i as little-endian u32)

A key therefore covers every token before it and the namespace (cache salt, extra key). The bytes equal
those of ``sglang.srt.mem_cache.utils.get_storage_hash_str``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
MAX_TOKEN = 2**32 - 1

_WIDE_TAG = b"\xff"
"""Precedes the u64 words of a page that holds a token above MAX_TOKEN (SGLang's encoding)."""


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Hash the namespace that starts a chain.

    Returns:
        32 bytes, or None when both parts are absent. An empty string differs from an absent part.
    """
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode("utf-8")
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def page_keys(
    token_ids: Sequence[int] | npt.NDArray[Any],
    page_size: int,
    *,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    prior: bytes | None = None,
) -> list[bytes]:
    """Compute the key of every full page.

    Args:
        token_ids: [num_tokens] token ids, each at most 2**32 - 1; a last page that is not full has no key.
        page_size: positions per page.
        cache_salt: salt of the request; an empty one counts as absent, as in SGLang's radix key.
        extra_key: further namespace of the request.
        prior: key of the page before ``token_ids[0]``; the namespace is then already in it.

    Returns:
        num_tokens // page_size keys of 32 bytes.

    Raises:
        ValueError: page_size is not positive, or a token does not fit in 32 bits.
    """
    _check_page_size(page_size)
    units = _as_words(token_ids)
    _check_tokens(units, MAX_TOKEN)
    key = prior if prior is not None else namespace_seed(extra_key, cache_salt or None)
    num_full = len(units) // page_size * page_size
    return chain_keys(units[:num_full].astype("<u4"), page_size, key)


def chain_keys(tokens: npt.NDArray[Any], page_size: int, prior: bytes | None) -> list[bytes]:
    """Chain the keys of consecutive pages.

    Args:
        tokens: [num_pages, page_size] uint32 little-endian, or the same flat. A flat last page may be short.
        page_size: positions per page.
        prior: key before the first page, or the seed, or None.
    """
    data = tokens.tobytes()
    key = prior or b""
    keys = []
    for start in range(0, len(data), 4 * page_size):
        key = hashlib.sha256(key + data[start : start + 4 * page_size]).digest()
        keys.append(key)
    return keys


def hash_str(token_ids: Any, prior_hash: str | None = None, page_size: int | None = None) -> str | list[str]:
    """Stand in for ``sglang.srt.mem_cache.utils.get_hash_str``.

    Args:
        token_ids: ints, tuples of ints, an array, or a RadixKey (bigram views included). Tokens above
            2**32 - 1 take SGLang's wide encoding.
        prior_hash: hex digest that starts the chain.
        page_size: None hashes everything at once.

    Returns:
        One hex digest, or with ``page_size`` one per page; a last page that is not full is hashed too.

    Raises:
        ValueError: a token is negative or above 2**63 - 1, or page_size is not positive.
    """
    units = _as_units(token_ids)
    _check_tokens(units, 2**63 - 1)
    key = bytes.fromhex(prior_hash) if prior_hash else b""
    if page_size is None:
        return hashlib.sha256(key + _encode_units(units)).hexdigest()
    _check_page_size(page_size)
    if _is_narrow(units):
        keys = chain_keys(units.astype("<u4"), page_size * units.shape[1], key)
        return [digest.hex() for digest in keys]
    digests = []
    for start in range(0, len(units), page_size):
        key = hashlib.sha256(key + _encode_units(units[start : start + page_size])).digest()
        digests.append(key.hex())
    return digests


def _check_page_size(page_size: int) -> None:
    if page_size <= 0:
        raise ValueError(f"page_size={page_size}: must be positive")


def _check_tokens(words: npt.NDArray[Any], limit: int) -> None:
    if words.size and (int(words.min()) < 0 or int(words.max()) > limit):
        wrong = next(int(word) for word in words.ravel() if not 0 <= int(word) <= limit)
        raise ValueError(f"token id {wrong}: must be in 0..{limit}")


def _as_words(tokens: Any) -> npt.NDArray[Any]:
    """View or copy ints as an integer array; ints beyond 64 bits stay Python objects for the check."""
    if isinstance(tokens, array):
        return np.frombuffer(tokens, dtype=tokens.typecode) if len(tokens) else np.empty(0, np.int64)
    words = np.asarray(tokens)
    if words.size == 0:
        return words.astype(np.int64)
    return words if words.dtype.kind in "iu" else np.asarray(tokens, dtype=object)


def _as_units(token_ids: Any) -> npt.NDArray[Any]:
    """Return [num_units, width] integers: what SGLang hashes for each logical token."""
    raw_token_ids = getattr(token_ids, "raw_token_ids", None)
    raw = raw_token_ids() if raw_token_ids is not None else getattr(token_ids, "token_ids", token_ids)
    num_units = len(token_ids)
    if getattr(token_ids, "is_bigram", False):
        words = _as_words(raw[: num_units + 1])
        if num_units and len(words) < num_units + 1:
            raise ValueError(f"{num_units} bigrams need {num_units + 1} tokens, got {len(words)}")
        return np.stack([words[:num_units], words[1 : num_units + 1]], axis=1)
    return _as_words(raw[:num_units]).reshape(num_units, -1) if num_units else np.empty((0, 1), np.int64)


def _is_narrow(units: npt.NDArray[Any]) -> bool:
    return not units.size or int(units.max()) <= MAX_TOKEN


def _encode_units(units: npt.NDArray[Any]) -> bytes:
    if _is_narrow(units):
        return units.astype("<u4").tobytes()
    return _WIDE_TAG + units.astype("<u8").tobytes()
