"""Definitions in plain torch: short enough to check by eye; every kernel is tested against them."""

from kv_kernels.ref.attention import merge_states, sparse_decode_attention
from kv_kernels.ref.clusters import cluster_assign, cluster_sums
from kv_kernels.ref.page_score import page_score
from kv_kernels.ref.pages import append_tokens, fetch_pages
from kv_kernels.ref.sketch import CODE_CENTRE, CODE_MAX, pack_codes, sketch_build, sketch_score, unpack_codes
from kv_kernels.ref.topk_pages import topk_pages
from kv_kernels.ref.two_level import candidate_score, cluster_score, spread, two_level_score
from kv_kernels.ref.window import window_admit

__all__ = [
    "CODE_CENTRE",
    "CODE_MAX",
    "append_tokens",
    "candidate_score",
    "cluster_assign",
    "cluster_score",
    "cluster_sums",
    "fetch_pages",
    "merge_states",
    "pack_codes",
    "page_score",
    "sketch_build",
    "sketch_score",
    "sparse_decode_attention",
    "spread",
    "topk_pages",
    "two_level_score",
    "unpack_codes",
    "window_admit",
]
