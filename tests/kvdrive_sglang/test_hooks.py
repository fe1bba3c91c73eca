"""Hooks on SGLang's own tree: what happens to pages of it that are lost."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvdrive_sglang import hooks
from kvdrive_sglang.linker import KVDriveLinker

PAGE_SIZE, NUM_PAGES = 8, 40
IN_TREE = [10, 11, 12, 13]


class Tree:
    """SGLang's tree over four pages, run by a linker whose store only has a page table."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.rows = torch.zeros(2, 64, dtype=torch.int32)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows, device="cpu"),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE_SIZE, device=torch.device("cpu")),
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
        )
        self.cache: Any = UnifiedRadixCache(params)
        self.tokens = array("q", range(len(IN_TREE) * PAGE_SIZE))
        self.cache.insert(InsertParams(key=RadixKey(self.tokens, None), value=slots_of(IN_TREE)))
        self.adopted: list[tuple[int, int]] = []
        self.lost = np.zeros(NUM_PAGES, bool)
        table = SimpleNamespace(lost=self.lost, frames=np.full(NUM_PAGES, 5))
        linker: Any = object.__new__(KVDriveLinker)
        linker.page_size = PAGE_SIZE
        linker.store = SimpleNamespace(table=table, adopt=lambda *pages: self.adopted.append(pages))
        self.linker = linker
        self.cache.linker = SimpleNamespace(cache_linker=linker, hit_markers={})

    def match(self) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        plain = type(self.cache).match_prefix
        plain = getattr(plain, "__wrapped__", plain)
        params = MatchPrefixParams(key=RadixKey(self.tokens, None))
        return int(hooks.match_prefix(plain, self.cache, params).device_prefix_len)


def slots_of(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(-1)


@pytest.mark.parametrize(("lost", "found"), [([], 4), ([30], 4), ([13], 3), ([12, 13], 2), ([10], 0)])
def test_a_match_ends_before_the_first_lost_page(lost: list[int], found: int) -> None:
    tree = Tree()
    tree.lost[lost] = True
    assert tree.match() == found * PAGE_SIZE


def test_recomputed_pages_go_where_the_tree_lost_them() -> None:
    tree = Tree()
    tree.rows[1, : 4 * PAGE_SIZE] = slots_of([10, 21, 22, 23])
    req = SimpleNamespace(
        full_untruncated_fill_ids=tree.tokens,
        extra_key=None,
        cache_salt=None,
        kv=SimpleNamespace(req_pool_idx=1),
    )
    tree.lost[[11, 13, 23]] = True  # the request's own last page is lost too
    hooks.adopt_recomputed(tree.cache, tree.linker, req, 4 * PAGE_SIZE)
    assert tree.adopted == [(21, 11)]
    tree.adopted.clear()
    tree.lost[:] = False
    hooks.adopt_recomputed(tree.cache, tree.linker, req, 4 * PAGE_SIZE)
    assert tree.adopted == []
