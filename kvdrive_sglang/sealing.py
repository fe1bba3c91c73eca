"""When pages become durable: at SGLang's checkpoints (a chunk or an answer enters the tree)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kv_tier.meta.page_keys import namespace_seed, page_keys

if TYPE_CHECKING:
    from kvdrive_sglang.pool import KVDrivePool


class Sealer:
    """Write the closed stretches of a request's prefix, and the open one when its turn ends.

    A stretch that ended up in a span before (shared prefix, restored session) is not written again.
    """

    def __init__(self, pool: KVDrivePool, req_to_token_pool: Any) -> None:
        self.pool = pool
        self.req_to_token_pool = req_to_token_pool
        self._submitted: set[bytes] = set()

    def checkpoint(self, req: Any, up_to: int) -> None:
        """Seal what the first ``up_to`` tokens of ``req`` complete; the row points to the tree's pages already."""
        if not self._is_durable(req):
            return
        geometry = self.pool.geometry
        size, per_stretch = geometry.page_size, geometry.pages_per_stretch
        num_pages = up_to // size
        if num_pages == 0:
            return
        tokens = np.array(req.full_untruncated_fill_ids[: num_pages * size], dtype=np.uint32).reshape(
            -1, size
        )
        keys = self._keys(req, tokens)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : num_pages * size : size]
        pages = (row.to(dtype=row.dtype) // size).numpy().astype(np.int64)
        ends = [*range(per_stretch, num_pages + 1, per_stretch)]
        if num_pages % per_stretch and req.finished():
            ends.append(num_pages)
        done = getattr(req, "kvdrive_sealed_pages", 0)
        for end in ends:
            begin = (end - 1) // per_stretch * per_stretch
            if end > done:
                self._seal(pages[begin:end], tokens[begin:end], keys, begin, end)
                req.kvdrive_sealed_pages = end

    def _is_durable(self, req: Any) -> bool:
        return self.pool.config.persist == "all" or req.session_id is not None

    @staticmethod
    def _keys(req: Any, tokens: np.ndarray) -> list[bytes]:
        """Return the page keys so far, hashing only what is new."""
        known: list[bytes] = getattr(req, "kvdrive_keys", [])
        if len(known) < len(tokens):
            prior = known[-1] if known else namespace_seed(req.extra_key, req.cache_salt)
            fresh = tokens[len(known) :].reshape(-1).tolist()
            known = known + page_keys(fresh, tokens.shape[1], prior=prior)
            req.kvdrive_keys = known
        return known[: len(tokens)]

    def _seal(self, pages: np.ndarray, tokens: np.ndarray, keys: list[bytes], begin: int, end: int) -> None:
        spans = self.pool.store.spans
        if keys[end - 1] in self._submitted and spans.num_outstanding:
            return
        if spans.num_restorable(keys[begin:end]) == end - begin:
            return
        self._submitted = {keys[end - 1]} if not spans.num_outstanding else self._submitted | {keys[end - 1]}
        parent = keys[begin - 1] if begin else bytes(32)
        self.pool.store.seal(
            pages, tokens.copy(), keys[begin:end], first_page=begin, parent_key=parent, durable=True
        )
