"""Check every Triton kernel against its definition on one device, then time one decode step's attention.

    python benchmarks/gpu_check.py --json gpu_check.json            # one CUDA GPU, some minutes
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --device cpu --tiny    # the script itself, anywhere

Needs torch and Triton only. Sparse attention (score, select, gather, attend) stands beside full attention over the
same context and beside the memory floor: the bytes either must read, divided by the bandwidth of a large copy.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from kv_kernels import ref, triton_kernels

PAGE_SIZE = 8
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-3)}  # relative, absolute


def main() -> int:
    """Run the checks, then the timings; return 1 if any result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a smoke test")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    checks = check_all(device, lengths=[63] if args.tiny else [1, 63, 100, 1024, 4001])
    shapes = [(2, 4, 64, 512, 128)] if args.tiny else [(8, 4, 128, n, 1024) for n in (32_768, 131_072)]
    rows = [time_step(device, *shape, repeats=2 if args.tiny else 50) for shape in shapes]
    report = {
        "bench": "gpu_check",
        "environment": environment(device),
        "rows": rows,
        "checks": checks,
        "summary": {"num_wrong": sum(not check["ok"] for check in checks)},
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_report(checks, rows)
    return 1 if report["summary"]["num_wrong"] else 0  # type: ignore[index]


def check_all(device: torch.device, lengths: list[int]) -> list[dict[str, Any]]:
    """Compare every kernel with `ref` for both dtypes, group sizes 1, 3, 4, 8 and head sizes 64 and 128."""
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        for heads, group, dim in ((3, 3, 64), (8, 4, 128), (2, 1, 128), (2, 8, 64)):
            for length in lengths:
                for name, largest, ok in compare(device, dtype, heads, group, dim, length):
                    case = f"H{heads} G{group} D{dim} n{length} {str(dtype).removeprefix('torch.')}"
                    checks.append({"kernel": name, "case": case, "max_difference": largest, "ok": ok})
    return checks


def compare(
    device: torch.device, dtype: torch.dtype, heads: int, group: int, dim: int, length: int
) -> list[tuple[str, float, bool]]:
    """Return (kernel, largest difference, within tolerance) of each kernel on random input."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    scale = dim**-0.5
    query, k, v = random(heads, group, dim), random(heads, length, dim), random(heads, length, dim)
    pool = random(heads, length, PAGE_SIZE * dim)
    index = torch.randint(0, length, (heads, min(length, 128)), device=device)
    state = triton_kernels.sparse_decode_attention(query, k, v, length, scale)
    other = triton_kernels.sparse_decode_attention(query, v, k, length, scale)
    score, wanted_score = triton_kernels.page_score(query, k, scale), ref.page_score(query, k, scale)
    attended = ref.sparse_decode_attention(query, k, v, length, scale)
    merged, wanted_merged = triton_kernels.merge_states(*state, *other), ref.merge_states(*state, *other)
    gathered, wanted_gathered = triton_kernels.gather_pages(pool, index), ref.gather_pages(pool, index)
    return [
        ("page_score", *judge(score, wanted_score, torch.float32)),
        ("attention out", *judge(state[0], attended[0], dtype)),
        ("attention lse", *judge(state[1], attended[1], torch.float32)),
        ("merge out", *judge(merged[0], wanted_merged[0], dtype)),
        ("merge lse", *judge(merged[1], wanted_merged[1], torch.float32)),
        ("gather_pages", *judge(gathered, wanted_gathered, None)),
    ]


def judge(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> tuple[float, bool]:
    """Return the largest difference and whether it is allowed; dtype None allows none."""
    difference = float((actual.float() - expected.float()).abs().max())
    if dtype is None:
        return difference, torch.equal(actual, expected)
    relative, absolute = TOLERANCE[dtype]
    return difference, torch.allclose(actual.float(), expected.float(), rtol=relative, atol=absolute)


def time_step(
    device: torch.device, heads: int, group: int, dim: int, num_tokens: int, budget_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time one layer's decode attention, sparse and full, alternating; bf16, one request."""
    scale = dim**-0.5
    num_pages, budget = num_tokens // PAGE_SIZE, budget_tokens // PAGE_SIZE
    shape = (heads, num_pages, 2, PAGE_SIZE, dim)  # K and V of a page side by side
    pool = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    flat = pool.view(heads, num_pages, -1)
    means = pool[:, :, 0].float().mean(2).to(torch.bfloat16)
    k, v = (pool[:, :, side].reshape(heads, num_tokens, dim) for side in (0, 1))
    query = torch.randn(heads, group, dim, device=device, dtype=torch.bfloat16)
    index = ref.topk_pages(ref.page_score(query, means, scale), budget)
    gathered = ref.gather_pages(flat, index).view(heads, budget, 2, PAGE_SIZE, dim)
    few_k, few_v = (gathered[:, :, side].reshape(heads, budget_tokens, dim) for side in (0, 1))
    scores = ref.page_score(query, means, scale)

    def sparse() -> torch.Tensor:
        chosen = ref.topk_pages(triton_kernels.page_score(query, means, scale), budget)
        pages = triton_kernels.gather_pages(flat, chosen).view(heads, budget, 2, PAGE_SIZE, dim)
        keys, values = (pages[:, :, side].reshape(heads, budget_tokens, dim) for side in (0, 1))
        return triton_kernels.sparse_decode_attention(query, keys, values, budget_tokens, scale)[0]

    def full_sdpa() -> torch.Tensor:
        heads_q = query.view(1, heads * group, 1, dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(heads_q, k[None], v[None], scale=scale, enable_gqa=True)

    copied = torch.empty(64 << 20 if device.type == "cuda" else 1 << 20, device=device, dtype=torch.int32)
    microseconds = medians(
        {
            "page_score": lambda: triton_kernels.page_score(query, means, scale),
            "topk_pages": lambda: ref.topk_pages(scores, budget),
            "gather_pages": lambda: triton_kernels.gather_pages(flat, index),
            "attention": lambda: triton_kernels.sparse_decode_attention(
                query, few_k, few_v, budget_tokens, scale
            ),
            "sparse": sparse,
            "full_sdpa": full_sdpa,
            "full_triton": lambda: triton_kernels.sparse_decode_attention(query, k, v, num_tokens, scale),
            "copy": copied.clone,
        },
        device,
        repeats,
    )
    bytes_per_us = 2 * copied.nbytes / microseconds.pop("copy")
    full = min(microseconds["full_sdpa"], microseconds["full_triton"])
    return {
        "kv_heads": heads,
        "group": group,
        "head_dim": dim,
        "context_tokens": num_tokens,
        "budget_tokens": budget_tokens,
        "microseconds": microseconds,
        "copy_gb_per_s": bytes_per_us / 1e3,
        "sparse_floor_us": (means.nbytes + few_k.nbytes + few_v.nbytes) / bytes_per_us,
        "full_floor_us": pool.nbytes / bytes_per_us,
        "full_over_sparse": full / microseconds["sparse"],
    }


def medians(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median microseconds of each call, taken in turn after one round of warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if turn:
                samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it works apart from us."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: torch.device) -> dict[str, str]:
    """Return what the numbers were taken on."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def print_report(checks: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Print wrong checks, the count of right ones, and a table of timings."""
    for check in checks:
        if not check["ok"]:
            print(f"WRONG {check['kernel']:14} {check['case']:32} differs by {check['max_difference']:.3g}")
    print(f"{sum(check['ok'] for check in checks)} of {len(checks)} checks right")
    for row in rows:
        print(
            f"\n{row['context_tokens']} tokens, budget {row['budget_tokens']}, {row['kv_heads']} KV heads x "
            f"{row['group']} x {row['head_dim']}, bf16; copy {row['copy_gb_per_s']:.0f} GB/s"
        )
        for name, value in row["microseconds"].items():
            print(f"  {name:14} {value:10.1f} us")
        print(f"  {'sparse floor':14} {row['sparse_floor_us']:10.1f} us")
        print(f"  {'full floor':14} {row['full_floor_us']:10.1f} us")
        print(f"  full / sparse  {row['full_over_sparse']:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
