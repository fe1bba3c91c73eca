"""What the summaries of the benchmarks are held against: one table, read by the report page."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "≤": operator.le,
    "≥": operator.ge,
}


@dataclass(frozen=True)
class Limit:
    """Say what a figure of a summary has to be.

    Args:
        key: the figure.
        comparison: one of ``COMPARISONS``.
        bound: what it is compared with.
    """

    key: str
    comparison: str
    bound: float | bool

    def holds(self, value: Any) -> bool:
        """Compare; what is no number holds nothing."""
        return isinstance(value, int | float) and COMPARISONS[self.comparison](value, self.bound)


LIMITS: Final[dict[str, tuple[Limit, ...]]] = {
    "exactness": (
        Limit("mismatches", "=", 0),
        Limit("residency_mismatches", "=", 0),
    ),
    "decode": (
        Limit("native_over_sparse", "≥", 1.8),
        Limit("dense_over_sparse", "≥", 1.0),
        Limit("attention_native_over_sparse", "≥", 3.5),
        Limit("growth_1k_7k5", "≤", 1.3),
        Limit("growth_1k_32k", "≤", 1.3),
        Limit("native_over_sparse_32k", "≥", 4.0),
        Limit("dense_over_sparse_32k", "≥", 1.6),
        Limit("batch8_over_native", "≥", 3.0),
        Limit("batch8_over_dense", "≥", 1.5),
    ),
    "resume": (
        Limit("reprefill_over_resumed", "≥", 15),
        Limit("resume_excess_s", "≤", 0.05),
        Limit("tokens_equal", "=", True),
    ),
    "prefill": (Limit("prefill_sealed_over_bare", "≤", 1.1),),
    "fidelity": (
        Limit("kl_two_level_over_means8", "≤", 1.3),
        Limit("kl_sketch_over_means8", "≤", 0.2),
        Limit("kl_quarter_bytes_over_means8", "≤", 1.1),
        Limit("num_texts", "≥", 8),
    ),
    "cache": (
        Limit("lookahead_minus_lru_points", "≥", 0.0),
        Limit("own_share_of_belady_gap", "≥", 0.28),
        Limit("uniform_over_2d_bytes", "≥", 1.0),
    ),
    "tiers": (
        Limit("layerwise_over_blockwise_bytes", "≥", 20),
        Limit("ssd_over_dram_ms", "≤", 1.4),
        Limit("read_over_raw", "≥", 0.7),
        Limit("write_over_raw", "≥", 0.7),
        Limit("append_read_over_selected", "≤", 1.5),
        Limit("outputs_equal", "=", True),
    ),
    "cold": (
        Limit("int8_kv_over_bf16", "≤", 0.57),
        Limit("int8_agreement", "≥", 0.97),
        Limit("int8_kl", "≤", 0.002),
        Limit("num_texts", "≥", 8),
    ),
    "pipeline": (Limit("sequential_over_pipelined", "≥", 1.3),),
}
