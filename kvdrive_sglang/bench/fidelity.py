"""kvdrive bench fidelity: how close does each selection come to full attention, and what does its index take?

Teacher-forced: after an exact prefill the true continuation is fed, and each step's next-token distribution under sparse
attention is compared with that under full attention: agreement of the two best tokens, and KL(full | sparse) in nats. The
model runs in plain torch (``lab.py``): prefill in bfloat16, as an engine does, the decodes that are compared in float32
over those keys and values, because bfloat16's own noise (the row "bfloat16 arithmetic") is as large as what a good
selection costs. Logits are first checked against themselves under a selection of everything.

Index bytes are device bytes per token, layer and KV head (the KV itself takes 256 in SmolLM2-135M).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kv_tier.geometry import Geometry
from kv_tier.selection import Budget
from kv_tier.sketch import SketchMaps, solve_maps
from kvdrive_sglang.bench.engines import BenchFailed, Progress, model_path
from kvdrive_sglang.bench.lab import LabModel, Prefix
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.selectors import (
    Chance,
    Clusters,
    KeySketch,
    Level,
    Means,
    Oracle,
    QuestBounds,
    Recent,
    Selection,
)
from kvdrive_sglang.bench.texts import ModelTokenizer, calibration_texts, studied_texts
from kvdrive_sglang.calibrate import measure

NAME = "fidelity"
SUMMARY_KEYS = (
    "kl_two_level_over_means8",
    "kl_sketch_over_means8",
    "kl_quarter_bytes_over_means8",
    "num_texts",
)

PROMPT_TOKENS = 7040  # the forced tokens close no stretch
FORCED_TOKENS = 64
BUDGETS = (256, 512, 1024, 2048)
SUMMARY_BUDGET = 1024
BASE = "means 8"
TWO_LEVEL = "two-level, pages/2 keep 3x"
SKETCH = "sketch 32x4, page 8"
QUARTER = "sketch 32x4 of 4-token means"
NOISE = "bfloat16 arithmetic, full attention"
MAPS = ((32, 1), (16, 1), (32, 2), (32, 4), (64, 8))  # directions, tokens per entry
TINY = 1e-9  # nats; what rounding may leave of a KL of zero


@dataclass(frozen=True)
class Case:
    """One selection.

    Args:
        make: a fresh selection for one text.
        index_bytes: device bytes per token, layer and KV head.
        is_main: measured at every budget also without ``full``.
    """

    name: str
    page_size: int
    make: Callable[[], Sequence[Level]]
    index_bytes: float
    is_main: bool = False


def cases(model: LabModel, maps: dict[tuple[int, int], SketchMaps]) -> list[Case]:
    """List the selections that are compared.

    Args:
        maps: (directions, entry_tokens) -> maps.
    """
    scale, row = model.scale, 2 * model.head_dim
    geometry = Geometry(model.num_layers, model.num_kv_heads, model.head_dim)

    def means(size: int) -> Case:
        return Case(f"means {size}", size, lambda: [Level(Means(size, scale))], row / size, is_main=size == 8)

    def cluster_bytes(pages: int) -> float:
        return (row / pages + 1) / geometry.page_size  # and one byte of assignment per page

    def clusters(pages: int) -> Case:
        make = lambda: [Level(Clusters(geometry, pages, scale))]  # noqa: E731
        return Case(f"clusters, pages/{pages}", 8, make, cluster_bytes(pages))

    def two_level(pages: int, factor: int) -> Case:
        make = lambda: [Level(Clusters(geometry, pages, scale), factor), Level(Means(8, scale))]  # noqa: E731
        name = f"two-level, pages/{pages} keep {factor}x"
        return Case(name, 8, make, cluster_bytes(pages), is_main=name == TWO_LEVEL)

    def sketch(name: str, directions: int, entry: int, size: int, is_main: bool = False) -> Case:
        found = maps[directions, entry]
        return Case(
            name, size, lambda: [Level(KeySketch(found, size, scale))], found.entry_bytes / entry, is_main
        )

    def coded() -> Sequence[Level]:
        return [Level(KeySketch(maps[64, 8], 8, scale), 2), Level(Means(8, scale))]

    def pruned() -> Sequence[Level]:
        return [Level(Means(8, scale), 4), Level(KeySketch(maps[32, 1], 8, scale))]

    return [
        means(4),
        means(8),
        means(16),
        *(clusters(pages) for pages in (2, 4, 8)),
        *(two_level(pages, 2) for pages in (2, 4, 8)),
        two_level(2, 3),
        Case("two-level, 4-bit means 8 keep 2x", 8, coded, maps[64, 8].entry_bytes / 8),
        sketch(SKETCH, 32, 1, 8, True),
        sketch("sketch 32x4, page 4", 32, 1, 4),
        sketch("sketch 32x4, page 16", 32, 1, 16),
        sketch("sketch 16x4, page 8", 16, 1, 8),
        sketch("sketch 32x4 of 2-token means", 32, 2, 8),
        sketch(QUARTER, 32, 4, 8, True),
        Case("means 8 keep 4x, sketch 32x4", 8, pruned, row / 8 + maps[32, 1].entry_bytes),
        Case("Quest bounds 16", 16, lambda: [Level(QuestBounds(16, scale))], 2 * row / 16),
        Case("sinks + local", 8, lambda: [Level(Recent(8))], 0),
        Case("random", 8, lambda: [Level(Chance(8))], 0),
        Case("oracle 8", 8, lambda: [Level(Oracle(8, scale))], 2 * row, is_main=True),
    ]


@dataclass(frozen=True)
class Outcome:
    """One selection at one budget on one text: means over its steps."""

    text: str
    case: str
    budget: int
    agreement: float
    kl: float


def compare(full: torch.Tensor, sparse: torch.Tensor) -> tuple[float, float]:
    """Return (share of steps with the same best token, mean KL(full | sparse)) of [step, vocabulary] logits."""
    p, q = full.log_softmax(-1), sparse.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float((full.argmax(-1) == sparse.argmax(-1)).float().mean()), float(kl)


def budget_of(tokens: int, page_size: int) -> Budget:
    return Budget(tokens // page_size, num_sink_tokens=4, local_window_tokens=64, page_size=page_size)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, zero for a single value."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.mean()), float(
        tensor.std(correction=min(1, len(values) - 1)) / math.sqrt(len(values))
    )


def check_lab(model: LabModel, prefix: Prefix, forced: Sequence[int], full: torch.Tensor) -> None:
    """Refuse to measure with a selection that changes what it should not.

    Raises:
        BenchFailed: a budget that covers the context gives other logits than full attention.
    """
    covering = Selection([Level(Means(8, model.scale))], budget_of(8 * len(forced) + prefix.num_tokens, 8))
    _, kl = compare(full, model.forced(prefix, forced, covering))
    if kl > 1e-6:
        raise BenchFailed(
            f"a budget that covers the context is {kl:.2g} nats from full attention, expected 0"
        )


def run(full: bool, progress: Progress) -> BenchResult:
    """Compare every selection at budget 1024 and the main ones at all; ``full``: all at all, and more texts."""
    torch.set_grad_enabled(False)
    model, precise = LabModel(model_path()), LabModel(model_path(), torch.float32)
    tokenizer = ModelTokenizer(model_path())
    sizes = sorted({entry for _, entry in MAPS})
    moments = measure(model, calibration_texts(tokenizer, model.max_positions), sizes, progress)
    maps = {
        (directions, entry): solve_maps(
            moments[entry], directions, num_positions=model.max_positions, entry_tokens=entry
        )
        for directions, entry in MAPS
    }
    compared = cases(model, maps)
    texts = studied_texts(tokenizer, PROMPT_TOKENS, FORCED_TOKENS, 4 if full else 3)
    outcomes = []
    for number, text in enumerate(texts, 1):
        label = f"{text.name} ({number} of {len(texts)})"
        progress(f"{label}: prefill")
        prefix = model.prefill(text.prompt)
        wanted = precise.forced(prefix, text.forced)
        if number == 1:
            check_lab(precise, prefix, text.forced, wanted)
        noise = compare(wanted, model.forced(prefix, text.forced))
        outcomes.append(Outcome(text.name, NOISE, SUMMARY_BUDGET, *noise))
        for case in compared:
            progress(f"{label}: {case.name}")
            levels = case.make()
            for budget in BUDGETS:
                if full or case.is_main or budget == SUMMARY_BUDGET:
                    select = Selection(levels, budget_of(budget, case.page_size))
                    found = compare(wanted, precise.forced(prefix, text.forced, select))
                    outcomes.append(Outcome(text.name, case.name, budget, *found))
    return result_of({case.name: case.index_bytes for case in compared}, outcomes)


def result_of(index_bytes: Mapping[str, float], outcomes: Sequence[Outcome]) -> BenchResult:
    """Sum up over texts; ratios of KL to page means of 8 are geometric means over texts.

    Args:
        index_bytes: by selection; bfloat16's noise has none.
    """
    texts = list(dict.fromkeys(o.text for o in outcomes))
    base = {(o.text, o.budget): o.kl for o in outcomes if o.case == BASE}
    grouped: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((outcome.case, outcome.budget), []).append(outcome)
    rows: list[dict[str, Any]] = []
    for (case, budget), found in grouped.items():
        logs = [math.log(max(o.kl, TINY) / max(base[o.text, budget], TINY)) for o in found]
        ratio, error = mean_and_error(logs)
        row: dict[str, Any] = {"selection": case, "index_bytes": index_bytes.get(case), "budget": budget}
        row["agreement"], row["agreement_se"] = mean_and_error([o.agreement for o in found])
        row["kl"], row["kl_se"] = mean_and_error([o.kl for o in found])
        row["over_means8"], row["over_means8_se"] = math.exp(ratio), math.exp(ratio) * error
        rows.append(row)
    ratios = {row["selection"]: row["over_means8"] for row in rows if row["budget"] == SUMMARY_BUDGET}
    summary = {
        "kl_two_level_over_means8": ratios[TWO_LEVEL],
        "kl_sketch_over_means8": ratios[SKETCH],
        "kl_quarter_bytes_over_means8": ratios[QUARTER],
        "num_texts": len(texts),
    }
    return BenchResult(NAME, rows, summary, details=[asdict(outcome) for outcome in outcomes])
