"""Triton twins of the definitions in `ref`; importing this package imports Triton."""

from kv_kernels.triton_kernels.attention import merge_states, sparse_decode_attention
from kv_kernels.triton_kernels.clusters import cluster_assign, cluster_sums
from kv_kernels.triton_kernels.page_score import candidate_score, cluster_score, page_score, two_level_score
from kv_kernels.triton_kernels.pages import append_tokens, fetch_pages
from kv_kernels.triton_kernels.sketch import sketch_build, sketch_score
from kv_kernels.triton_kernels.topk_pages import topk_pages
from kv_kernels.triton_kernels.window import window_admit

__all__ = [
    "append_tokens",
    "candidate_score",
    "cluster_assign",
    "cluster_score",
    "cluster_sums",
    "fetch_pages",
    "merge_states",
    "page_score",
    "sketch_build",
    "sketch_score",
    "sparse_decode_attention",
    "topk_pages",
    "two_level_score",
    "window_admit",
]
