"""kvdrive bench pipeline: what overlapping selection, reads and attention of micro-batches saves.

A batch of requests over 32K tokens of an 8B model's shape (8 KV heads, group 4, head_dim 128; two of its layers, times scaled
to 32), budget 1024, window caches of twice the budget, frames for a quarter of the KV, no page cache. Keys, values and
queries are made up; they drift so fast that a window cache hits .95 of its lookups, as recorded with SmolLM2 (8K tokens), or
.8, as the paper reports for its models. A third load is the first step after a resume, whose window caches are empty.

The plans of one executor, in turn from step to step:

- sequential: four micro-batches, every stage waits for the former;
- at once: one micro-batch, the whole batch;
- four parts: four micro-batches, of which all reads are under way while the earlier ones attend;
- pipelined: the same with as many micro-batches as the reads of the last layers are worth, which is what an engine runs;
- tuned: what `kvdrive tune`'s search finds within 45 seconds for batch 4 at hit rate .8, measured in turn with the defaults.

A row splits a step in the time it waited for reads and the rest. If sequential waits for w and computes for c, no plan takes
less than max(w, c): ``possible`` is (w + c) over that, if waiting were all that can be saved. The summary's three ratios are the smallest over batches of 4 and
more at hit rate .8; every other load has its own. ``--trace`` writes what pipelined did when, at batch 4.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kv_tier.geometry import Geometry
from kv_tier.pipeline import AUTO_PARTS, Pipeline
from kv_tier.trace import Trace
from kvdrive_sglang.bench.batch_driver import BatchSession, StepCost, seal
from kvdrive_sglang.bench.engines import BenchFailed, Progress, scratch
from kvdrive_sglang.bench.made_up import Inputs
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.tier_driver import describe_path
from kvdrive_sglang.bench.tuning_cost import StoreCost, spans_name
from kvdrive_sglang.tuning import Settings, confirm, search

NAME = "pipeline"
SUMMARY_KEYS = (
    "sequential_over_pipelined",
    "at_once_over_pipelined",
    "possible",
    "default_over_tuned",
    "outputs_equal",
)
RATIOS = SUMMARY_KEYS[:3]

GEOMETRY = Geometry(num_layers=2, num_kv_heads=8, head_dim=128)
GROUP, ALL_LAYERS = 4, 32
PROMPT, STEPS, FIRST_STEPS = 32768, 21, 3
BUDGET_TOKENS, FRAME_SHARE, DEFAULTS = 1024, 0.25, Settings()
HIT_RATES, MAIN_RATE, FIRST_STEP = (0.95, 0.8), 0.8, "first step"
BATCHES, LEAST_BATCH = (1, 4, 8), 4
REPEATS, TRACED_STEPS = 3, 4
TUNE_S = 45.0


def plans_for(batch: int) -> dict[str, Pipeline]:
    """Return the plans that are compared, by mode."""
    size = -(-batch // AUTO_PARTS)
    return {
        "sequential": Pipeline(size, ahead=0),
        "at once": Pipeline(batch),
        "four parts": Pipeline(size),
        "pipelined": Pipeline(),
    }


def run(full: bool, progress: Progress) -> BenchResult:
    """Measure; ``full`` repeats twice as often.

    Raises:
        BenchFailed: two plans computed different bits.
    """
    rows: list[dict[str, Any]] = []
    trace = ""
    with scratch() as directory:
        read_path = describe_path(directory / "probe")
        for hit_rate in HIT_RATES:
            progress(f"making up {PROMPT:,} tokens of an 8B model's shape, hit rate {hit_rate}")
            inputs = Inputs(GEOMETRY, GROUP, PROMPT, STEPS, max(BATCHES), hit_rate)
            place = directory / f"hits-{hit_rate}" / spans_name(DEFAULTS.pages_per_cluster)
            seal(inputs, place, max(BATCHES), DEFAULTS.pages_per_cluster)
            for batch in BATCHES:
                with open_session(inputs, place, batch) as session:
                    rows += compare(session, 2 * REPEATS if full else REPEATS, progress)
                    if (hit_rate, batch) == (MAIN_RATE, LEAST_BATCH):
                        trace = traced_steps(session, directory / "trace.json")
            if hit_rate == MAIN_RATE:
                tuned, gain = tune(inputs, place.parent, progress)
                rows.append(tuned)
    summary = {**summarise(rows), "default_over_tuned": gain, "read_path": read_path, "outputs_equal": True}
    return BenchResult(NAME, rows, summary, trace=trace)


def open_session(inputs: Inputs, directory: Path, batch: int) -> BatchSession:
    return BatchSession(
        inputs,
        directory,
        batch,
        budget_tokens=BUDGET_TOKENS,
        window_multiple=DEFAULTS.window_multiple,
        frame_share=FRAME_SHARE,
    )


def compare(session: BatchSession, repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """Time every plan over the same steps; one row per load and mode."""
    inputs, batch = session.inputs, session.batch
    plans = plans_for(batch)
    costs = alternate(session, plans, repeats, progress)
    loads = {load_name(inputs.hit_rate): range(FIRST_STEPS, inputs.num_steps)}
    if inputs.hit_rate == MAIN_RATE:
        loads[FIRST_STEP] = range(1)
    return [
        {
            "load": load,
            "batch": batch,
            "mode": mode,
            "micro_batch": plans[mode].micro_batch,
            **figures([cost for number in numbers for cost in costs[mode][number]]),
        }
        for load, numbers in loads.items()
        for mode in plans
    ]


def traced_steps(session: BatchSession, path: Path) -> str:
    """Return a trace of the first steps, pipelined."""
    session.restart()
    trace = session.store.trace = Trace(path)
    with torch.inference_mode():
        for _ in range(TRACED_STEPS):
            session.step(plans_for(session.batch)["pipelined"])
    session.store.trace = None
    trace.close()
    return path.read_text()


def tune(inputs: Inputs, directory: Path, progress: Progress) -> tuple[dict[str, Any], float]:
    """Search the settings that are fastest; their row, and how many times the time of the defaults is theirs.

    Args:
        directory: where spans of the defaults were sealed.
    """
    sizes = sorted({DEFAULTS.micro_batch, 1, 2, LEAST_BATCH})
    values = {"window_multiple": [1, 2, 3, 4], "pages_per_cluster": [8, 4, 2], "micro_batch": sizes}
    with StoreCost(inputs, directory, LEAST_BATCH, BUDGET_TOKENS, FRAME_SHARE, progress) as cost:
        found = search(values, DEFAULTS, cost, time.monotonic, TUNE_S)
        tuned = confirm(found, DEFAULTS, cost, time.monotonic, TUNE_S / 3)
    row = {"load": load_name(inputs.hit_rate), "batch": LEAST_BATCH, "mode": "tuned", **asdict(tuned.best)}
    return row | {"ms_per_token": in_ms(tuned.best_cost)}, tuned.start_cost / tuned.best_cost


def in_ms(seconds: float) -> float:
    """Scale the seconds of the measured layers to milliseconds of all."""
    return 1e3 * seconds * ALL_LAYERS / GEOMETRY.num_layers


def load_name(hit_rate: float) -> str:
    return f"hits {hit_rate}"


def alternate(
    session: BatchSession, plans: Mapping[str, Pipeline], repeats: int, progress: Progress
) -> dict[str, list[list[StepCost]]]:
    """Run the same steps again and again, the plan changing from step to step, until each plan ran each step ``repeats``
    times.

    What is resident does not depend on plans, so that a step has the same work under each.

    Returns:
        costs by mode and step.

    Raises:
        BenchFailed: two plans computed different bits.
    """
    modes, num_steps = list(plans), session.inputs.num_steps
    costs: dict[str, list[list[StepCost]]] = {mode: [[] for _ in range(num_steps)] for mode in plans}
    expected: list[torch.Tensor] = []
    turns = repeats * len(modes)
    with torch.inference_mode():
        for turn in range(turns):
            progress(
                f"{load_name(session.inputs.hit_rate)}, batch {session.batch}: turn {turn + 1} of {turns}"
            )
            session.restart()
            for number in range(num_steps):
                mode = modes[(number + turn) % len(modes)]
                out, cost = session.step(plans[mode])
                costs[mode][number].append(cost)
                if turn == 0:
                    expected.append(out)
                elif not torch.equal(out, expected[number]):
                    first = modes[number % len(modes)]
                    raise BenchFailed(
                        f"batch {session.batch}, step {number}: {mode} computes other bits than {first}"
                    )
    session.store.check_integrity()
    return costs


def figures(costs: Sequence[StepCost]) -> dict[str, float]:
    """Return what a step takes, scaled to all layers: medians."""
    scale = ALL_LAYERS / GEOMETRY.num_layers
    step_ms = 1e3 * median(cost.plan_s for cost in costs) + in_ms(median(cost.layers_s for cost in costs))
    wait_ms = in_ms(median(cost.wait_s for cost in costs))
    return {
        "ms_per_token": step_ms,
        "wait_ms": wait_ms,
        "compute_ms": step_ms - wait_ms,
        "mib_per_step": scale * median(cost.bytes_read for cost in costs) / 2**20,
        "reads_per_step": scale * median(cost.reads for cost in costs),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the ratios of every load and batch, and the smallest of those that count."""
    by_case: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["load"], row["batch"]), {})[row["mode"]] = row
    ratios = {case: ratios_of(by_mode) for case, by_mode in by_case.items()}
    counted = [ratios[case] for case in ratios if case[0] == load_name(MAIN_RATE) and case[1] >= LEAST_BATCH]
    summary = {key: min(one[key] for one in counted) for key in RATIOS}
    for (load, batch), one in ratios.items():
        name = f"{load.replace(' ', '_')}_batch_{batch}"
        summary |= {f"{name}_{key}": value for key, value in one.items()}
    return summary


def ratios_of(by_mode: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Compare the modes of one load and batch."""
    sequential, pipelined = by_mode["sequential"], by_mode["pipelined"]["ms_per_token"]
    return {
        "sequential_over_pipelined": sequential["ms_per_token"] / pipelined,
        "at_once_over_pipelined": by_mode["at once"]["ms_per_token"] / pipelined,
        "possible": sequential["ms_per_token"] / max(sequential["wait_ms"], sequential["compute_ms"]),
    }
