"""Triton twins of the definitions in `ref`; importing this package imports Triton."""

from kv_kernels.triton_kernels.attention import merge_states, sparse_decode_attention
from kv_kernels.triton_kernels.gather_pages import gather_pages
from kv_kernels.triton_kernels.page_score import page_score

__all__ = ["gather_pages", "merge_states", "page_score", "sparse_decode_attention"]
