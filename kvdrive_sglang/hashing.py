"""Page keys without a compiler: SGLang's native hash is built at run time from C++; ours is hashlib, same bytes."""

from __future__ import annotations


def replace_native_hash() -> None:
    """Let every SGLang module that hashes token pages use ``kv_tier.meta.page_keys.hash_str``."""
    from sglang.srt.mem_cache import utils

    from kv_tier.meta.page_keys import hash_str

    utils.get_hash_str = hash_str
