"""What this machine could do at best: the roofs over decode attention (the paper's figure 11)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READ_BYTES = 512 << 20  # far more than a processor's caches hold
PRODUCT_SIZE = 1024
REPEATS = 10


def roof_row() -> dict[str, Any]:
    """Measure, within a few seconds, how fast memory is read and how fast bf16 products are computed.

    Returns:
        a row with ``memory_gb_per_s`` and ``product_gflop_per_s``, each the best of a few tries, on all cores.
    """
    import torch

    data = torch.ones(READ_BYTES // 4)
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16)
    return {
        "roof": "this machine",
        "memory_gb_per_s": READ_BYTES / fastest_s(data.sum) / 1e9,
        "product_gflop_per_s": 2 * PRODUCT_SIZE**3 / fastest_s(lambda: square @ square) / 1e9,
    }


def fastest_s(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls; the first one warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def attention_work(model: Path, num_tokens: int) -> dict[str, int]:
    """Count what one layer must do for one new token that attends ``num_tokens``: bytes of bf16 KV, and operations.

    Args:
        model: a directory with ``config.json``.
    """
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "kv_bytes": num_tokens * kv_heads * head_dim * 2 * 2,
        "attention_flop": num_tokens * heads * head_dim * 2 * 2,
    }
