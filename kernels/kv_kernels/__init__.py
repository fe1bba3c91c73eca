"""Kernels of the tiered sparse store: plain-torch definitions, Triton twins and the dispatch between them."""
