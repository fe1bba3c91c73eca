"""Small made-up results of every benchmark, with the keys and the sizes of real ones."""

from typing import Any

ENVIRONMENT = {
    "measured": "2026-01-02 03:04 UTC",
    "cpu": "Made-up CPU <3 GHz>",
    "cores": 2,
    "memory_bytes": 16 << 30,
    "versions": {"kvdrive-sglang": "0.1.0", "triton": None},
}


def exactness() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case in ("budget all, alone", "budget all, batch", "budget 8192, batch"):
        for tokens in (20, 777, 7000):
            outcome = "tie" if (case, tokens) == ("budget all, batch", 777) else "equal"
            rows.append({"case": case, "prompt_tokens": tokens, "outcome": outcome})
    for budget in (256, "all"):
        for share, window in (("25%", 1), ("50%", 2)):
            case = f"budget {budget}, window x{window}, frames {share}"
            outcome = "mismatch" if (budget, window) == (256, 2) else "equal"
            rows.append({"case": case, "outcome": outcome, "pages_spilled": 7})
    return rows, {"mismatches": 0, "ties": 1, "residency_mismatches": 1}


def decode() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    measured = {
        "torch_native": ((84.7, 1020), (155.5, 3213), (248.0, 5921), (700.0, 21000)),
        "dense": ((65.5, 349), (69.1, 699), (82.7, 1123), (160.0, 3900)),
        "sparse": ((89.8, 1092), (74.1, 832), (81.1, 899), (90.0, 1200)),
    }
    for backend, figures in measured.items():
        for (context, tokens), (ms, us) in zip(
            {"1K": 1000, "4K": 4000, "7.5K": 7500, "32K": 32000}.items(), figures, strict=True
        ):
            attended = min(tokens, 1024) if backend == "sparse" else tokens
            work = {"kv_bytes": 768 * attended, "attention_flop": 2304 * attended}
            row = {"context": context, "backend": backend, "ms_per_token": ms, "attention_us": us, **work}
            rows.append(row)
        rows.append({"context": "7.5K x 8", "backend": backend, "ms_per_token": figures[2][0] / 2})
    for text in ("prose", "copy"):
        rows.append({"text": text, "backend": "dense", "agreement": 0.97, "kl": 0.002})
        rows.append({"text": text, "backend": "sparse", "agreement": 0.9, "kl": 0.03})
    rows.append({"roof": "this machine", "memory_gb_per_s": 11.0, "product_gflop_per_s": 250.0})
    return rows, {"native_over_sparse": 3.06, "dense_over_sparse": 0.97, "growth_1k_7k5": 0.9}


def resume() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [
        {
            "repeat": i,
            "warm_ttft_s": 0.2 + i / 50,
            "resumed_ttft_s": 0.4 + i / 50,
            "reprefill_ttft_s": 9.1 + i / 10,
            "reprefill_native_ttft_s": None if i == 3 else 12.5 + i / 10,
            "tokens_equal": True,
        }
        for i in range(4)
    ]
    return rows, {"reprefill_over_resumed": 22.0, "resume_excess_s": 0.01, "tokens_equal": True}


def fidelity() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    selections = {
        "means 4": (32, 0.014),
        "means 8": (16, 0.025),
        "means 16": (8, 0.057),
        "clusters, pages/4": (4.1, 0.059),
        "two-level, pages/4": (4.1, 0.03),
        "sketch 32x4, page 8": (16, 0.003),
        "sketch 16x4": (8, 0.006),
        "Quest bounds 16": (16, 0.077),
        "sinks + local": (0, 0.1),
        "random": (0, 0.4),
        "oracle 8": (256, 0.002),
        "bfloat16": (None, 0.0015),
    }
    rows = []
    for selection, (index_bytes, kl) in selections.items():
        for budget in (512, 1024, 2048) if selection.startswith(("means", "sketch")) else (1024,):
            rows.append(
                {
                    "selection": selection,
                    "index_bytes": index_bytes,
                    "budget": budget,
                    "agreement": 1 - kl * 800 / budget,
                    "agreement_se": 0.004,
                    "kl": kl * 1024 / budget,
                    "kl_se": kl / 5,
                }
            )
    return rows, {"kl_two_level_over_means8": 1.25, "kl_sketch_over_means8": 0.12, "num_texts": 9}


def cache() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    shares = {"lru": 1.0, "lfu": 1.05, "lookahead": 0.92, "smoothed": 0.86, "belady": 0.55}
    for text in ("prose 1", "copy 1"):
        for budget in (512, 1024):
            for window in (1, 2, 3):
                row = {"figure": "table 3", "text": text, "budget_tokens": budget, "window": float(window)}
                misses = {name: 0.22 / window**2 * share for name, share in shares.items()}
                row |= {f"hit_{name}": 1 - share for name, share in misses.items()}
                rows.append(row | {f"bytes_{name}": share * budget * 23040 for name, share in misses.items()})
            sized = {"figure": "figure 15", "text": text, "budget_tokens": budget, "window": 1.5}
            rows.append({**sized, "bytes_uniform": 2.1e6, "bytes_2d": 1.8e6})
        for pool, overlap in ((1.0, 0.8), (1.5, 0.91), (2.0, 0.95)):
            rows.append(
                {"figure": "figure 7", "text": text, "budget_tokens": 1024, "pool": pool, "overlap": overlap}
            )
    stages = {"select_us": 120.0, "window_us": 40.0, "fetch_us": 60.0, "gather_us": 80.0, "attend_us": 110.0}
    for window in (1, 2):
        own = {
            "budget_tokens": 1024,
            "window": float(window),
            "page_size": 8,
            "pages_per_centroid": 1,
            "policy": "smoothed",
        }
        rows.append({"figure": "figure 16", **own, **stages, "fetch_us": 120.0 / window})
    rows += [{"figure": "cost", "policy": name, "window": 2.0, **stages} for name in ("lru", "lookahead")]
    return rows, {"lookahead_minus_lru_points": 0.3, "own_share_of_belady_gap": 0.31}


def tiers() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = []
    for sequence, scale in (("real", 1.0), ("shape", 4.0)):
        for configuration, fetch_ms, kib, per_read, ms in (
            ("dram only", 0.0, 0.0, None, 80.0),
            ("layerwise", 400.0, 166_000.0, 4096.0, 480.0),
            ("blockwise", 30.0, 3900.0, 12.0, 110.0),
            ("hierarchical, cold", 14.0, 2900.0, 40.0, 94.0),
            ("hierarchical", 12.0, 2900.0, 40.0, 92.0),
            ("balanced, cold", 9.0, 1900.0, 48.0, 89.0),
            ("balanced", 8.0, 1900.0, 48.0, 88.0),
        ):
            figures = {"ms_per_token": ms * scale, "fetch_ms": fetch_ms * scale, "kib_per_token": kib * scale}
            figures["attention_ms"] = (ms - 50.0) * scale
            first = {"first_fetch_ms": 3 * fetch_ms * scale, "kib_per_read": per_read}
            rows.append({"sequence": sequence, "configuration": configuration, **figures, **first})
    return rows, {"layerwise_over_blockwise_bytes": 42.0, "ssd_over_dram_ms": 1.1, "read_over_raw": 0.8}


def prefill() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [
        {"prefill": name, "ttft_s": seconds, "sealed_after_s": 0.4 if name == "sealed" else None}
        for name, seconds in (("bare", 7.5), ("indexed", 7.6), ("sealed", 7.9), ("torch_native", 15.0))
    ]
    return rows, {"prefill_sealed_over_bare": 1.05}


def pipeline() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [
        {"load": load, "mode": mode, "batch": batch, "ms_per_token": factor * (80 + 30 * batch)}
        for load in ("hits 0.95", "hits 0.8", "first step")
        for batch in (1, 4, 8)
        for mode, factor in (("sequential", 1.5), ("at once", 1.2), ("four parts", 1.0), ("pipelined", 1.0))
    ]
    return rows, {"sequential_over_pipelined": 1.5}


def cold() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [
        {"encoding": name, "kv_over_bf16": share, "agreement": 0.99, "kl": kl, "kl_se": kl / 5}
        for name, share, kl in (
            ("bfloat16 arithmetic", 1.0, 0.001),
            ("int8", 0.5625, 0.0005),
            ("fp8", 0.5625, 0.01),
        )
    ]
    return rows, {"int8_kv_over_bf16": 0.5625, "int8_agreement": 0.99, "int8_kl": 0.0005, "num_texts": 9}


MADE = {
    function.__name__: function
    for function in (exactness, decode, resume, prefill, fidelity, cache, tiers, cold, pipeline)
}


def result(name: str) -> dict[str, Any]:
    """Return what `kvdrive bench NAME --json` would have written."""
    rows, summary = MADE[name]()
    return {"bench": name, "environment": ENVIRONMENT, "rows": rows, "summary": summary}
