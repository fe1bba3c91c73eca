"""Page keys: golden vectors, and SGLang's own compiled hash wherever it can be built."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path

import numpy as np
import pytest

from kv_tier.meta.page_keys import hash_str, namespace_seed, page_keys

PRIOR = "ab" * 32
WIDE = 2**32

# (tokens, is_bigram, prior, page_size) -> digests, computed once with SGLang's compiled extension.
GOLDEN: list[tuple[list[int], bool, str | None, int | None, str | list[str]]] = json.loads(
    (Path(__file__).parent / "data" / "page_keys.json").read_text()
)


class KeyView:
    """Look like SGLang's RadixKey: raw tokens, an optional cap, an optional bigram view."""

    def __init__(self, token_ids: "array[int]", is_bigram: bool = False, limit: int | None = None) -> None:
        self.token_ids, self.is_bigram, self.limit = token_ids, is_bigram, limit

    def raw_token_ids(self) -> "array[int]":
        return self.token_ids[: self.limit]

    def __len__(self) -> int:
        return max(0, len(self.raw_token_ids()) - self.is_bigram)


def definition(tokens: list[int], page_size: int, start: bytes) -> list[bytes]:
    keys = []
    for i in range(0, len(tokens) // page_size * page_size, page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[i : i + page_size])
        start = hashlib.sha256(start + page).digest()
        keys.append(start)
    return keys


def golden_input(tokens: list[int], is_bigram: bool) -> "array[int] | KeyView":
    raw = array("q", tokens)
    return KeyView(raw, is_bigram=True) if is_bigram else raw


@pytest.mark.parametrize(("tokens", "is_bigram", "prior", "page_size", "expected"), GOLDEN)
def test_hash_str_golden(
    tokens: list[int], is_bigram: bool, prior: str | None, page_size: int | None, expected: str | list[str]
) -> None:
    assert hash_str(golden_input(tokens, is_bigram), prior, page_size) == expected


@pytest.mark.slow
def test_native_hash_agrees_where_it_builds() -> None:
    """Run SGLang's extension over the golden inputs; without compiler or headers the vectors stand alone."""
    headers = [Path(root) / "openssl" / "sha.h" for root in ("/usr/include", sysconfig.get_path("include"))]
    if not (importlib.util.find_spec("sglang") and shutil.which("g++") and any(h.exists() for h in headers)):
        return
    script = (
        "import json, sys\n"
        "from array import array\n"
        "from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash\n"
        "class Key:\n"
        "    def __init__(self, tokens, is_bigram):\n"
        "        self.token_ids, self.is_bigram = array('q', tokens), is_bigram\n"
        "    def __len__(self):\n"
        "        return max(0, len(self.token_ids) - self.is_bigram)\n"
        "for tokens, is_bigram, prior, page_size, _ in json.load(sys.stdin):\n"
        "    key = Key(tokens, is_bigram)\n"
        "    digest = get_native_hash(key, bytes.fromhex(prior) if prior else None, page_size)\n"
        "    print('digest', json.dumps(digest))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(GOLDEN), capture_output=True, text=True, check=True
    )
    native = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("digest ")]
    assert native == [case[-1] for case in GOLDEN]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 16, 17])
def test_page_keys_follow_the_definition(num_tokens: int) -> None:
    tokens = [(i * 2654435761) % 2**32 for i in range(num_tokens)]
    assert page_keys(tokens, 8) == definition(tokens, 8, b"")
    assert page_keys(array("I", tokens), 8) == page_keys(np.array(tokens, dtype=np.uint32), 8)
    assert page_keys(tokens, 8, prior=b"p" * 32) == definition(tokens, 8, b"p" * 32)


def test_page_keys_chain() -> None:
    tokens = list(range(24))
    keys = page_keys(tokens, 8, cache_salt="salt")
    assert page_keys(tokens[8:], 8, cache_salt="ignored once chained", prior=keys[0]) == keys[1:]
    assert [key.hex() for key in page_keys(tokens, 8)] == hash_str(tokens, None, 8)


def test_namespace_seed_vectors() -> None:
    prefix = b"sglang-cache-namespace-v1"
    one = b"\x01" + (1).to_bytes(8, "little")
    empty = b"\x01" + bytes(8)
    assert namespace_seed(None, None) is None
    assert namespace_seed(None, "s") == hashlib.sha256(prefix + b"\x00" + one + b"s").digest()
    assert namespace_seed("x", None) == hashlib.sha256(prefix + one + b"x" + b"\x00").digest()
    assert namespace_seed("", "") == hashlib.sha256(prefix + empty + empty).digest()
    seeds = {namespace_seed(e, s) for e in (None, "", "a", "ab") for s in (None, "", "b", "ab")}
    assert len(seeds) == 16


def test_salts_separate_and_an_empty_salt_is_none() -> None:
    tokens = list(range(8))
    keys = {page_keys(tokens, 8, cache_salt=salt)[0] for salt in (None, "a", "b")}
    assert len(keys) == 3
    assert page_keys(tokens, 8, cache_salt="") == page_keys(tokens, 8)


def test_limit_and_tuples() -> None:
    raw = array("q", range(20))
    assert hash_str(KeyView(raw, limit=9), None, 4) == hash_str(list(range(9)), None, 4)
    pairs = [(i, i + 1) for i in range(19)]
    assert hash_str(pairs, None, 4) == hash_str(KeyView(raw, is_bigram=True), None, 4)


@pytest.mark.parametrize("token", [-1, WIDE, 2**63, 2**70])
def test_page_keys_refuse_wide_tokens(token: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token}: must be in 0\.\.4294967295"):
        page_keys([1, 2, token, 3], 2)


@pytest.mark.parametrize("token", [-1, 2**63, 2**70])
def test_hash_str_refuses_what_sglang_refuses(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token}"):
        hash_str([1, token], None, 2)


@pytest.mark.parametrize("page_size", [0, -8])
def test_page_size_must_be_positive(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size={page_size}"):
        page_keys([1], page_size)
    with pytest.raises(ValueError, match=f"page_size={page_size}"):
        hash_str([1], None, page_size)
