"""Definitions in plain torch: short enough to check by eye; every kernel is tested against them."""

from kv_kernels.ref.attention import merge_states, sparse_decode_attention
from kv_kernels.ref.gather_pages import gather_pages
from kv_kernels.ref.page_score import page_score
from kv_kernels.ref.sketch import CODE_CENTRE, CODE_MAX, pack_codes, sketch_build, sketch_score, unpack_codes
from kv_kernels.ref.topk_pages import topk_pages

__all__ = [
    "CODE_CENTRE",
    "CODE_MAX",
    "gather_pages",
    "merge_states",
    "pack_codes",
    "page_score",
    "sketch_build",
    "sketch_score",
    "sparse_decode_attention",
    "topk_pages",
    "unpack_codes",
]
