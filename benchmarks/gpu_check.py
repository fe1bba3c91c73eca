"""Check every Triton kernel against its definition on one GPU, then time one layer of a decode step.

    python benchmarks/gpu_check.py --json gpu_check.json     # one CUDA GPU, under five minutes (`make bench-gpu`)
    python benchmarks/gpu_check.py --interpret               # the script itself, tiny, on the CPU

Needs torch and Triton only; `--flashinfer` adds FlashInfer, which may compile for minutes first. Every kernel stands beside its memory
floor: the bytes it cannot avoid, divided by the bandwidth of a large copy (over the bus for what lies in host memory). Whole
steps (score, select, look up, append, attend; everything resident) stand beside full attention over the same context.
Times are medians of CUDA graph replays with a cold second-level cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

PAGE_SIZE = 8
PAGES_PER_CLUSTER = 4
DIRECTIONS = 32
WINDOW_MULTIPLE = 2
FULL_SPLIT = 2048  # positions per program where the kernel attends everything
MAX_FRAMES = 65536  # pages in host memory
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-3)}  # relative, absolute


def main() -> int:
    """Run the checks, then the timings; return 1 if any result is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--interpret", action="store_true", help="tiny sizes through Triton's interpreter; times mean nothing"
    )
    parser.add_argument("--flashinfer", action="store_true", help="compare and time FlashInfer too")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing was checked or timed; --interpret runs the script itself on the CPU")
        return 2
    started = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device("cpu" if args.interpret else "cuda")
    flashinfer = args.flashinfer and device.type == "cuda"
    checks = check_all(device, tiny=args.interpret, flashinfer=flashinfer)
    shapes = tiny_shapes() if args.interpret else full_shapes()
    bandwidth = {
        "device": copy_bandwidth(device, device),
        "host": copy_bandwidth(torch.device("cpu"), device),
    }
    rows = [time_shape(Layer(device, shape), bandwidth, flashinfer=flashinfer) for shape in shapes]
    summary: dict[str, float] = {
        "num_checks": len(checks),
        "num_wrong": sum(not check["ok"] for check in checks),
        "seconds": time.perf_counter() - started,
    }
    for row in rows:
        summary |= {f"{key}_{row['name']}": row[key] for key in row if key.startswith("full_over_")}
    report = {
        "bench": "gpu_check",
        "environment": environment(device) | {f"{name}_gb_per_s": b / 1e3 for name, b in bandwidth.items()},
        "rows": rows,
        "checks": checks,
        "summary": summary,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    return 1 if summary["num_wrong"] else 0


@dataclass(frozen=True)
class Shape:
    """One layer's decode step."""

    batch: int
    context_tokens: int
    budget_tokens: int
    kv_heads: int
    group: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.context_tokens}x{self.batch}"

    @property
    def num_pages(self) -> int:
        return self.context_tokens // PAGE_SIZE

    @property
    def num_selected(self) -> int:
        return self.budget_tokens // PAGE_SIZE

    @property
    def num_slots(self) -> int:
        return WINDOW_MULTIPLE * self.num_selected


def full_shapes() -> list[Shape]:
    return [Shape(batch, context, 1024, 8, 4, 128) for context in (32_768, 131_072) for batch in (1, 8)]


def tiny_shapes() -> list[Shape]:
    return [Shape(1, 256, 128, 1, 2, 64)]


# Checks


def check_all(device: torch.device, *, tiny: bool, flashinfer: bool) -> list[dict[str, Any]]:
    """Compare every kernel with `ref`: group sizes 1, 3, 4, 8, head sizes 64 and 128, both dtypes, odd lengths."""
    cases = [(torch.bfloat16, 3, 3, 64), (torch.bfloat16, 8, 4, 128), (torch.bfloat16, 2, 1, 128)]
    cases += [(torch.float32, 2, 8, 64), (torch.float32, 8, 4, 128)]
    sizes = [37, 1003]
    if tiny:
        cases, sizes = [(torch.bfloat16, 1, 3, 64)], [13]
    checks = []
    for dtype, heads, group, dim in cases:
        for num_pages in sizes:
            case = f"H{heads} G{group} D{dim} pages {num_pages} {str(dtype).removeprefix('torch.')}"
            compared = compare(device, dtype, heads, group, dim, num_pages, flashinfer=flashinfer)
            for name, actual, expected, rounding in compared:
                difference, ok = judge(actual, expected, rounding)
                checks.append({"kernel": name, "case": case, "max_difference": difference, "ok": ok})
    return checks


Comparison = tuple[str, torch.Tensor, torch.Tensor, torch.dtype | None]


def compare(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    group: int,
    dim: int,
    num_pages: int,
    *,
    flashinfer: bool,
) -> list[Comparison]:
    """Return (kernel, its result, the definition's, dtype that sets the tolerance or None for equality)."""
    from kv_kernels import ref, triton_kernels

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    scale, f32, num_selected = dim**-0.5, torch.float32, min(num_pages - 3, 100)
    query, keys = random(2, heads, group, dim), random(2, heads, num_pages * PAGE_SIZE - 5, dim)
    means, centroids = random(2, heads, num_pages, dim), random(2, heads, num_pages // 4, dim)
    cluster_of = torch.randint(-1, num_pages // 4, (2, heads, num_pages), device=device)
    lengths = torch.tensor([num_pages, num_pages // 2], dtype=torch.int32, device=device)
    key_map, offset = torch.randn(heads, dim, DIRECTIONS, device=device), torch.full((heads, DIRECTIONS), 8.0)
    key_map, offset = key_map * (3 / dim**0.5), offset.to(device)
    query_map = torch.randn(heads, dim, DIRECTIONS, device=device) / 20
    found: list[Comparison] = []

    def add(name: str, rounding: torch.dtype | None, function: str, *arguments: Any) -> torch.Tensor:
        actual = getattr(triton_kernels, function)(*arguments)
        expected = getattr(ref, function)(*arguments)
        if isinstance(expected, torch.Tensor):
            actual, expected = (actual,), (expected,)
        for part, wanted in zip(actual, expected, strict=True):
            found.append((name, part, wanted, rounding if part.dtype == dtype else rounding and f32))
        return expected[0]  # type: ignore[no-any-return]

    scores = add("page_score", f32, "page_score", query, means, scale, lengths)
    sketch = ref.sketch_build(keys, key_map, offset)
    built = triton_kernels.sketch_build(keys, key_map, offset)
    unequal = (ref.unpack_codes(built).int() - ref.unpack_codes(sketch).int()).abs()
    # float32 and float64 may fall on either side of an integer, rarely and by one
    found.append(
        ("sketch_build", (unequal.float().mean() * 1e4).floor() + (unequal > 1).any(), torch.zeros(()), None)
    )
    counts = lengths * PAGE_SIZE - 5
    add("sketch_score", f32, "sketch_score", query, sketch, query_map, scale, PAGE_SIZE, counts)
    add("cluster_score", f32, "cluster_score", query, centroids, cluster_of, scale)
    candidates = ref.topk_pages(scores, num_selected)
    add("candidate_score", f32, "candidate_score", query, means, candidates, scale)
    budgets = torch.randint(1, num_selected, (2, heads), device=device)
    selected = add("topk_pages", None, "topk_pages", scores.round(decimals=4), num_selected, budgets)
    k_pool, v_pool = (
        random(heads * 4 * num_pages, PAGE_SIZE, dim),
        random(heads * 4 * num_pages, PAGE_SIZE, dim),
    )
    attended = (selected >= 0).sum(-1) * PAGE_SIZE - 3
    found += compare_window(device, scores, selected, num_selected)
    found += compare_moves(k_pool, v_pool, selected, query)
    state = add(
        "attention", dtype, "sparse_decode_attention", query, k_pool, v_pool, selected, attended, scale
    )
    lse = torch.randn(2, heads, group, device=device) * 9
    add("merge_states", dtype, "merge_states", state, lse, query, lse.flip(0))
    rows = means.flatten(0, 1)
    centres = centroids.flatten(0, 1)
    assignment = ref.cluster_assign(rows, centres)
    # which of two centroids at the same distance is a matter of rounding; the distance is not
    products = rows.float() @ centres.float().mT
    nearest = triton_kernels.cluster_assign(rows, centres)
    reached, wanted = (products.gather(2, part[:, :, None]) for part in (nearest, assignment))
    found.append(("cluster_assign", reached, wanted, f32))
    add("cluster_sums", f32, "cluster_sums", rows, assignment, num_pages // 4)
    if flashinfer and dtype == torch.bfloat16:
        from kv_kernels.flashinfer_decode import FlashInferDecode

        planned = FlashInferDecode(PAGE_SIZE, group, dim, dtype, device, scale)
        planned.plan(attended.int().cpu())
        defined = ref.sparse_decode_attention(query, k_pool, v_pool, selected, attended, scale)
        for part, expected in zip(planned.run(query, k_pool, v_pool, selected), defined, strict=True):
            found.append(("flashinfer", part, expected, dtype))
    return found


def compare_window(
    device: torch.device, scores: torch.Tensor, selected: torch.Tensor, num_selected: int
) -> list[Comparison]:
    """Admit three selections into window caches of two requests."""
    from kv_kernels import ref, triton_kernels

    heads, num_pages = scores.shape[1:]
    slots = num_selected + 3
    first_slot, rows = torch.arange(heads + 1, device=device) * slots, torch.tensor([2, 0], device=device)

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        slot_of = torch.full((3, heads, num_pages), -1, dtype=torch.int32, device=device)
        return slot_of, torch.full((3, heads * slots), -1, dtype=torch.int32, device=device)

    mine, wanted, found = empty(), empty(), []
    for step in range(3):
        moved = torch.where(selected >= 0, (selected + 2 * step) % num_pages, -1)
        actual = triton_kernels.window_admit(rows, moved, scores, *mine, first_slot)
        expected = ref.window_admit(rows, moved, scores, *wanted, first_slot)
        found += [("window_admit", a, e, None) for a, e in zip(actual, expected, strict=True)]
        found += [("window_admit", a.clone(), e.clone(), None) for a, e in zip(mine, wanted, strict=True)]
    return found  # type: ignore[return-value]


def compare_moves(
    k_pool: torch.Tensor, v_pool: torch.Tensor, selected: torch.Tensor, query: torch.Tensor
) -> list[Comparison]:
    """Fetch pages from host memory and append a token."""
    from kv_kernels import ref, triton_kernels

    device = k_pool.device
    sources = [host_memory(pool.flip(0).cpu(), device) for pool in (k_pool, v_pool)]
    target = torch.randperm(len(k_pool), device=device)[: selected.numel()].view(selected.shape)
    mine, wanted = ([k_pool.clone(), v_pool.clone()] for _ in range(2))
    token, last = query[:, :, 0].contiguous(), target[:, :, 0]
    offsets = torch.tensor([0, PAGE_SIZE - 1], device=device)
    for module, pools in ((triton_kernels, mine), (ref, wanted)):
        module.fetch_pages(*sources, *pools, selected, target)
        module.append_tokens(*pools, token, -token, last, offsets)
    return [("fetch_pages, append_tokens", a, e, None) for a, e in zip(mine, wanted, strict=True)]


def judge(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> tuple[float, bool]:
    """Return the largest difference and whether it is allowed; dtype None allows none."""
    actual = actual.to(expected.device)
    if dtype is None:
        return float((actual != expected).sum()), torch.equal(actual.to(expected.dtype), expected)
    a, e = (part.float().masked_fill(expected == float("-inf"), 0) for part in (actual, expected))
    same_holes = torch.equal(actual == float("-inf"), expected == float("-inf"))
    relative, absolute = TOLERANCE[dtype]
    return float((a - e).abs().max()), same_holes and torch.allclose(a, e, rtol=relative, atol=absolute)


def host_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` in host memory that the device can read."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


# Timings


@dataclass(frozen=True)
class Timed:
    """A call to time: how many bytes it cannot avoid, and where from."""

    call: Callable[[], object]
    floor_bytes: int
    memory: str = "device"
    graph: bool = True


def time_shape(layer: Layer, bandwidth: dict[str, float], *, flashinfer: bool) -> dict[str, Any]:
    """Time every kernel, whole steps and full attention for one shape; bandwidth in bytes per microsecond."""
    device, shape = layer.device, layer.shape
    calls = layer.calls() | (layer.flashinfer_calls() if flashinfer else {})
    microseconds = {name: microseconds_of(device, timed) for name, timed in calls.items()}
    floors = {name: timed.floor_bytes / bandwidth[timed.memory] for name, timed in calls.items()}
    full = min(us for name, us in microseconds.items() if name.startswith("full "))
    row: dict[str, Any] = {
        "name": shape.name,
        **{field: getattr(shape, field) for field in shape.__dataclass_fields__},
        "microseconds": microseconds,
        "floor_microseconds": floors,
        "over_floor": {name: us / floors[name] for name, us in microseconds.items()},
    }
    for index in ("means", "two_level", "sketch"):
        row[f"full_over_{index}"] = full / microseconds[f"step {index}"]
    return row


class Layer:
    """The tensors of one layer's decode step, and the calls over them; everything selected is resident."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        from kv_kernels import ref, triton_kernels

        self.device, self.shape, self.scale = device, shape, shape.head_dim**-0.5
        batch, heads, pages, dim = shape.batch, shape.kv_heads, shape.num_pages, shape.head_dim
        self.query = self.bf16(batch, heads, shape.group, dim)
        self.k, self.v = (
            self.bf16(batch * heads * pages, PAGE_SIZE, dim),
            self.bf16(batch * heads * pages, PAGE_SIZE, dim),
        )
        self.keys, self.values = self.k.view(batch, heads, -1, dim), self.v.view(batch, heads, -1, dim)
        self.every = self.long(torch.arange(batch * heads * pages)).view(batch, heads, pages)
        self.all_lengths = torch.full((batch, heads), shape.context_tokens, dtype=torch.int32, device=device)
        # three indexes
        self.means = self.k.mean(1).view(batch, heads, pages, dim)
        self.centroids = self.means[:, :, ::PAGES_PER_CLUSTER].contiguous()
        self.cluster_of = torch.randint(
            0, self.centroids.shape[2], (batch, heads, pages), device=device
        ).int()
        packed = (batch, heads, shape.context_tokens, DIRECTIONS // 2)
        self.sketch = torch.randint(0, 256, packed, device=device, dtype=torch.uint8)
        self.maps = torch.randn(heads, dim, DIRECTIONS, device=device) / 20
        self.offset = torch.zeros(heads, DIRECTIONS, device=device)
        # window caches that hold what the means select
        slots = shape.num_slots
        self.scores = ref.page_score(self.query, self.means, self.scale)
        self.selected = ref.topk_pages(self.scores, shape.num_selected)
        self.rows, self.first_slot = (
            self.long(torch.arange(batch)),
            self.long(torch.arange(heads + 1) * slots),
        )
        self.slot_of = torch.full((batch, heads, pages), -1, dtype=torch.int32, device=device)
        self.page_of = torch.full((batch, heads * slots), -1, dtype=torch.int32, device=device)
        self.k_window = self.bf16(batch * heads * slots, PAGE_SIZE, dim)
        self.v_window = self.bf16(batch * heads * slots, PAGE_SIZE, dim)
        self.table = self.admit(self.selected, self.scores)
        self.lengths = torch.full((batch, heads), shape.budget_tokens, dtype=torch.int32, device=device)
        self.token, self.offsets = (
            self.bf16(batch, heads, dim),
            self.long(torch.full((batch,), PAGE_SIZE - 1)),
        )
        # a tenth of the selection must come from host memory
        present = self.long(torch.arange(self.selected.numel())).view(self.selected.shape) % 10 > 0
        first = self.long(torch.arange(batch * heads)).view(batch, heads, 1) * pages
        self.source = ((self.selected + first) % MAX_FRAMES).masked_fill(present, -1)
        self.k_frames, self.v_frames = (
            host_memory(pool[:MAX_FRAMES].cpu(), device) for pool in (self.k, self.v)
        )
        self.stretch = self.means[:, :, : 1024 // PAGE_SIZE].flatten(0, 1).float()
        self.centres = self.stretch[:, ::2].contiguous()
        self.state = triton_kernels.sparse_decode_attention(
            self.query, self.k_window, self.v_window, self.table, self.lengths, self.scale
        )

    def bf16(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def long(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device)

    def admit(self, selected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        from kv_kernels import triton_kernels

        directory = (self.slot_of, self.page_of, self.first_slot)
        return triton_kernels.window_admit(
            self.rows, selected, scores, *directory, max_slots=self.shape.num_slots
        )[0]

    def append(self, table: torch.Tensor) -> None:
        from kv_kernels import triton_kernels

        triton_kernels.append_tokens(
            self.k_window, self.v_window, self.token, self.token, table[:, :, -1], self.offsets
        )

    def attend(self, table: torch.Tensor) -> torch.Tensor:
        from kv_kernels import triton_kernels

        return triton_kernels.sparse_decode_attention(
            self.query, self.k_window, self.v_window, table, self.lengths, self.scale
        )[0]

    def step(self, scores: torch.Tensor) -> torch.Tensor:
        """Do what follows the score: select, look up, append, attend."""
        from kv_kernels import triton_kernels

        table = self.admit(triton_kernels.topk_pages(scores, self.shape.num_selected), scores)
        self.append(table)
        return self.attend(table)

    def score_means(self) -> torch.Tensor:
        from kv_kernels import triton_kernels

        return triton_kernels.page_score(self.query, self.means, self.scale)

    def score_two_level(self) -> torch.Tensor:
        from kv_kernels import triton_kernels

        return triton_kernels.two_level_score(
            self.query, self.centroids, self.cluster_of, self.means, self.scale, 2 * self.shape.num_selected
        )

    def score_sketch(self) -> torch.Tensor:
        from kv_kernels import triton_kernels

        return triton_kernels.sketch_score(self.query, self.sketch, self.maps, self.scale, PAGE_SIZE)

    def cluster_step(self) -> torch.Tensor:
        from kv_kernels import triton_kernels

        assignment = triton_kernels.cluster_assign(self.stretch, self.centres)
        return triton_kernels.cluster_sums(self.stretch, assignment, self.centres.shape[1])[0]

    def sdpa(self, *, folded: bool) -> torch.Tensor:
        """Attend everything by torch: the group as query heads, or folded into the query length."""
        query = self.query if folded else self.query.reshape(self.shape.batch, -1, 1, self.shape.head_dim)
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, self.keys, self.values, scale=self.scale, enable_gqa=not folded)

    def calls(self) -> dict[str, Timed]:
        """Return what is timed, kernels first, then whole steps, then full attention."""
        from kv_kernels import triton_kernels

        shape, dim = self.shape, self.shape.head_dim
        attended = 2 * self.selected.numel() * PAGE_SIZE * dim * 2  # keys and values, two bytes each
        two_level = (
            nbytes(self.centroids, self.cluster_of)
            + 4 * shape.batch * shape.kv_heads * shape.num_selected * dim
        )
        fetched = int((self.source >= 0).sum()) * 2 * PAGE_SIZE * dim * 2
        kv = nbytes(self.k, self.v)
        return {
            "page_score": Timed(self.score_means, nbytes(self.means)),
            "two_level_score": Timed(self.score_two_level, two_level),
            "sketch_score": Timed(self.score_sketch, nbytes(self.sketch)),
            "sketch_build": Timed(
                lambda: triton_kernels.sketch_build(self.keys, self.maps, self.offset),
                nbytes(self.keys, self.sketch),
            ),
            "topk_pages": Timed(
                lambda: triton_kernels.topk_pages(self.scores, shape.num_selected),
                nbytes(self.scores, self.selected),
            ),
            "window_admit": Timed(
                lambda: self.admit(self.selected, self.scores),
                nbytes(self.selected, self.page_of, self.table),
            ),
            "fetch_pages": Timed(
                lambda: triton_kernels.fetch_pages(
                    self.k_frames, self.v_frames, self.k_window, self.v_window, self.source, self.table
                ),
                fetched,
                "host",
            ),
            "append_tokens": Timed(lambda: self.append(self.table), 4 * nbytes(self.token)),
            "attention": Timed(lambda: self.attend(self.table), attended),
            "merge_states": Timed(
                lambda: triton_kernels.merge_states(*self.state, *self.state), 3 * nbytes(*self.state)
            ),
            "cluster step": Timed(self.cluster_step, nbytes(self.stretch, self.centres, self.centres)),
            "step means": Timed(lambda: self.step(self.score_means()), nbytes(self.means) + attended),
            "step two_level": Timed(lambda: self.step(self.score_two_level()), two_level + attended),
            "step sketch": Timed(lambda: self.step(self.score_sketch()), nbytes(self.sketch) + attended),
            "full sdpa": Timed(lambda: self.sdpa(folded=False), kv),
            "full sdpa, group folded": Timed(lambda: self.sdpa(folded=True), kv),
            "full triton": Timed(
                lambda: triton_kernels.sparse_decode_attention(
                    self.query,
                    self.k,
                    self.v,
                    self.every,
                    self.all_lengths,
                    self.scale,
                    split_positions=FULL_SPLIT,
                ),
                kv + self.every.nbytes,
            ),
        }

    def flashinfer_calls(self) -> dict[str, Timed]:
        """Return what FlashInfer does of it; not captured into graphs."""
        from kv_kernels.flashinfer_decode import FlashInferDecode

        def planned(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> Timed:
            group, dim = self.shape.group, self.shape.head_dim
            runner = FlashInferDecode(PAGE_SIZE, group, dim, torch.bfloat16, self.device, self.scale)
            runner.plan(lengths.cpu())
            attended = int(lengths.sum()) * 2 * dim * 2
            return Timed(lambda: runner.run(self.query, k, v, table), attended + table.nbytes, graph=False)

        return {
            "attention flashinfer": planned(self.k_window, self.v_window, self.table, self.lengths),
            "full flashinfer": planned(self.k, self.v, self.every, self.all_lengths),
        }


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def microseconds_of(device: torch.device, timed: Timed, repeats: int = 20) -> float:
    """Return the median time of a call in microseconds, with a cold second-level cache."""
    if device.type != "cuda":
        start = time.perf_counter()
        timed.call()
        return (time.perf_counter() - start) * 1e6
    for _ in range(2):
        timed.call()
    torch.cuda.synchronize()
    run: Callable[[], object] = timed.call
    if timed.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            timed.call()
        run = graph.replay
    flushed = torch.empty(256 << 20, dtype=torch.int8, device=device)
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(samples)


def copy_bandwidth(source: torch.device, target: torch.device) -> float:
    """Return bytes per microsecond of a large copy, reads and writes counted on one device, reads alone over the bus."""
    count = 512 << 20 if target.type == "cuda" else 1 << 20
    origin, into = (
        torch.zeros(count, dtype=torch.int8, device=source),
        torch.empty(count, dtype=torch.int8, device=target),
    )
    if source != target:
        origin = host_memory(origin, target)
    moved = count * 2 if source == target else count
    copy = Timed(lambda: into.copy_(origin, non_blocking=True), moved, graph=False)
    return moved / microseconds_of(target, copy)


# Report


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def print_report(report: dict[str, Any]) -> None:
    """Print wrong checks and one table per shape."""
    for check in report["checks"]:
        if not check["ok"]:
            print(f"WRONG {check['kernel']:26} {check['case']:32} differs by {check['max_difference']:.3g}")
    summary, where = report["summary"], report["environment"]
    print(
        f"{where['device']}: {summary['num_checks'] - summary['num_wrong']} of {summary['num_checks']} checks right"
    )
    print(
        f"copies at {where['device_gb_per_s']:.0f} GB/s, from the host at {where['host_gb_per_s']:.0f} GB/s"
    )
    for row in report["rows"]:
        print(
            f"\n{row['context_tokens']} tokens, batch {row['batch']}, budget {row['budget_tokens']},"
            f" {row['kv_heads']} KV heads x {row['group']} x {row['head_dim']}, bf16"
        )
        print(f"  {'':26}{'us':>10} {'floor us':>10} {'over floor':>10}")
        for name, us in row["microseconds"].items():
            print(
                f"  {name:26}{us:10.1f} {row['floor_microseconds'][name]:10.1f} {row['over_floor'][name]:10.2f}"
            )
        ratios = ", ".join(
            f"{key.removeprefix('full_over_')} {row[key]:.2f}" for key in row if key.startswith("full_over_")
        )
        print(f"  full attention over a step: {ratios}")
    print(f"\n{summary['seconds']:.0f} seconds")


if __name__ == "__main__":
    sys.exit(main())
