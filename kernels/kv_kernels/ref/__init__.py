"""Definitions in plain torch: short enough to check by eye; every kernel is tested against them."""

from kv_kernels.ref.attention import merge_states, sparse_decode_attention
from kv_kernels.ref.gather_pages import gather_pages
from kv_kernels.ref.page_score import page_score
from kv_kernels.ref.topk_pages import topk_pages

__all__ = ["gather_pages", "merge_states", "page_score", "sparse_decode_attention", "topk_pages"]
