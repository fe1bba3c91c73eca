"""kvdrive bench exactness: full attention equals SGLang's own, and residency changes no bit.

Part one. Greedy tokens with a budget that covers the context, against SGLang's ``torch_native`` backend with the same
flags, prompt by prompt and all prompts in one batch. Where tokens part, it is a *tie* if the reference's two largest
logits are no further apart than the largest difference of any logit between two ``torch_native`` runs with chunks of 512
and 2048 tokens, taken over all prompts, all of the vocabulary and all positions where both runs have the same tokens
behind them. Everything else is a *mismatch*. Logits are the raw ones, kept by a probe in the scheduler.

Part two. For each budget: the tokens, and a hash over the attention outputs of every layer and step, with frames for 25%
and 50% of the KV and window caches of one and two budgets, against the same with everything in memory. The engine stays;
its store is rebuilt for each case. One prompt belongs to a session (its pages are sealed and leave the frames), one does
not (its pages are spilled).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_tier.geometry import Geometry
from kvdrive_sglang.bench.engines import (
    Answer,
    BenchEngine,
    Progress,
    Request,
    model_path,
    scratch,
    start_kvdrive,
    start_reference,
)
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, prompts
from kvdrive_sglang.config import KVDriveConfig
from kvdrive_sglang.index_choice import choose_index
from kvdrive_sglang.sizing import dram_bytes_for

NAME = "exactness"
SUMMARY_KEYS = ("prompts", "mismatches", "ties", "residency_configs", "residency_mismatches")

PROMPT_TOKENS = (20, 101, 511, 777, 1500, 2048, 4099, 7000)
NEW_TOKENS = 64
COVERING_BUDGET = 8192
RESIDENT_PROMPTS = (1500, 2301)
RESIDENT_NEW_TOKENS = 20
RESIDENT_CHUNK = 256
BUDGETS: tuple[int | str, ...] = (256, 1024, "all")
CASES = ((1.0, 2), (0.25, 1), (0.25, 2), (0.5, 1), (0.5, 2))  # share of the KV in frames, window multiple


@dataclass(frozen=True)
class Run:
    """Tokens of every prompt, and the logits they were chosen from where the probe kept them."""

    tokens: list[list[int]]
    logits: list[np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """How one answer compares with the reference: ``at`` is the first token that differs, None if none does."""

    at: int | None
    gap: float
    is_tie: bool

    @property
    def name(self) -> str:
        return "equal" if self.at is None else "tie" if self.is_tie else "mismatch"


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None when there is none."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def top_gap(logits: np.ndarray) -> float:
    """Return how far the two largest of [vocabulary] logits are apart."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def judge(ours: Sequence[int], theirs: Sequence[int], their_logits: np.ndarray, tolerance: float) -> Verdict:
    """Compare an answer with the reference's ([output, vocabulary] logits) under the tie rule."""
    at = first_difference(ours, theirs)
    if at is None:
        return Verdict(None, 0.0, False)
    gap = top_gap(their_logits[at])
    return Verdict(at, gap, gap <= tolerance)


def largest_difference(first: Run, second: Run) -> float:
    """Return the largest difference of a logit at positions where both runs have the same tokens behind them."""
    largest = 0.0
    for tokens, others, logits, other_logits in zip(
        first.tokens, second.tokens, first.logits, second.logits, strict=True
    ):
        at = first_difference(tokens, others)
        shared = len(tokens) if at is None else at + 1
        largest = max(largest, float(np.abs(logits[:shared] - other_logits[:shared]).max()))
    return largest


def run(full: bool, progress: Progress) -> BenchResult:
    """Compare everything; ``full`` runs the numeric budget alone as well and doubles the resident prompts."""
    model = model_path()
    tokenizer = ModelTokenizer(model)
    with scratch() as root:
        rows, counts = compare_with_native(model, root, prompts(tokenizer, PROMPT_TOKENS), full, progress)
        lengths = RESIDENT_PROMPTS * (2 if full else 1)
        resident = compare_residency(model, root, prompts(tokenizer, lengths), progress)
    failed = sum(row["outcome"] != "equal" for row in resident)
    summary = {**counts, "residency_configs": len(resident), "residency_mismatches": failed}
    return BenchResult(NAME, rows + resident, summary)


# ---- part one: the reference ----------------------------------------------------------------------------------


def compare_with_native(
    model: Path, root: Path, texts: list[list[int]], full: bool, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, int | float]]:
    alone, together, other = native_runs(model, root, texts, progress)
    tolerance = largest_difference(alone, other)
    rows = []
    for budget in ("all", COVERING_BUDGET):
        modes = ("alone", "batch") if full or budget == "all" else ("batch",)
        with start_kvdrive(
            model, root / f"ours-{budget}", budget_tokens=budget, device_bytes=1 << 34
        ) as engine:
            progress(f"starting our engine, budget {budget}")
            engine.wait_ready()
            for mode in modes:
                reference = alone if mode == "alone" else together
                answers = ask_all(engine, texts, mode, f"budget {budget}", progress, logits=False)
                for text, tokens, theirs, logits in zip(
                    texts, answers.tokens, reference.tokens, reference.logits, strict=True
                ):
                    verdict = judge(tokens, theirs, logits, tolerance)
                    rows.append(_row(budget, mode, len(text), verdict))
    outcomes = [row["outcome"] for row in rows]
    counts = {
        "prompts": len(texts),
        "mismatches": outcomes.count("mismatch"),
        "ties": outcomes.count("tie"),
        "comparisons": len(rows),
        "tie_tolerance_logits": tolerance,
    }
    return rows, counts


def _row(budget: int | str, mode: str, prompt_tokens: int, verdict: Verdict) -> dict[str, Any]:
    return {
        "case": f"budget {budget}, {mode}",
        "prompt_tokens": prompt_tokens,
        "outcome": verdict.name,
        "first_difference": verdict.at,
        "reference_gap_logits": verdict.gap if verdict.at is not None else None,
    }


def native_runs(model: Path, root: Path, texts: list[list[int]], progress: Progress) -> tuple[Run, Run, Run]:
    """Return the reference alone and in a batch (chunks of 2048), and alone with chunks of 512."""
    runs = []
    for chunk, modes in ((2048, ("alone", "batch")), (512, ("alone",))):
        flags = {"chunked_prefill_size": chunk}
        with start_reference(model, root / f"native-{chunk}", probed=True, flags=flags) as engine:
            progress(f"starting torch_native, chunks of {chunk}")
            engine.wait_ready()
            for mode in modes:
                runs.append(
                    ask_all(engine, texts, mode, f"torch_native, chunks of {chunk}", progress, logits=True)
                )
    alone, together, other = runs
    return alone, together, other


def ask_all(
    engine: BenchEngine, texts: list[list[int]], mode: str, what: str, progress: Progress, *, logits: bool
) -> Run:
    """Answer every prompt, one after another or all in one batch, from an empty cache."""
    engine.flush()
    requests = [Request(text, NEW_TOKENS, wish={"logits": True} if logits else {}) for text in texts]
    answers: list[Answer] = []
    if mode == "alone":
        for request in requests:
            progress(f"{what}: {len(request.prompt)} tokens alone")
            answers.append(engine.ask(request))
    else:
        progress(f"{what}: {len(requests)} prompts in one batch")
        answers = engine.ask_together(requests)
    kept: list[np.ndarray] = []
    if logits:
        steps = engine.new_steps()
        kept = [engine.logits(answer, len(text), steps) for answer, text in zip(answers, texts, strict=True)]
    return Run([answer.tokens for answer in answers], kept)


# ---- part two: residency ----------------------------------------------------------------------------------------


def compare_residency(
    model: Path, root: Path, texts: list[list[int]], progress: Progress
) -> list[dict[str, Any]]:
    geometry = geometry_of(model)
    most = max(geometry.num_pages(len(text) + RESIDENT_NEW_TOKENS) for text in texts)
    num_pages = most * len(texts) + 8
    index = choose_index(KVDriveConfig(data_dir=str(root)).index, str(model), most * geometry.page_size)
    everything = dram_bytes_for(num_pages + 1, num_pages + 1, geometry, index)
    flags = {
        "chunked_prefill_size": RESIDENT_CHUNK,
        "max_running_requests": 2,
        "context_length": geometry.page_size * most,
    }
    settings = {"dram_bytes": everything, "logical_tokens": geometry.page_size * num_pages}
    with start_kvdrive(model, root / "residency", probed=True, flags=flags, **settings) as engine:
        progress("starting our engine for residency")
        engine.wait_ready()
        rows = []
        for budget in BUDGETS:
            wanted = None
            for number, (share, window) in enumerate(CASES):
                progress(f"residency: budget {budget}, window x{window}, frames for {share:.0%} of the KV")
                frames = num_pages if share == 1 else int(most * share)
                engine.rebuild_store(
                    data_dir=str(root / f"case-{budget}-{number}"),
                    budget_tokens=budget,
                    window_multiple=window,
                    dram_bytes=dram_bytes_for(frames + 1, num_pages + 1, geometry, index),
                )
                got, moved = attention_of(engine, texts)
                if wanted is None:
                    wanted = got
                else:
                    rows.append(_resident_row(budget, window, share, got == wanted, moved))
    return rows


def _resident_row(
    budget: int | str, window: int, share: float, equal: bool, moved: dict[str, int]
) -> dict[str, Any]:
    return {
        "case": f"budget {budget}, window x{window}, frames {share:.0%}",
        "outcome": "equal" if equal else "mismatch",
        "pages_spilled": moved["pages_spilled"],
        "pages_sealed": moved["pages_sealed"],
        "bytes_read": moved["bytes_read"],
    }


def attention_of(
    engine: BenchEngine, texts: list[list[int]]
) -> tuple[list[tuple[list[int], list[str]]], dict[str, int]]:
    """Answer the prompts one by one; return their tokens and the digest of every step, and the engine's counters."""
    results = []
    for number, text in enumerate(texts):
        engine.new_steps()
        session = f"resident-{number}" if number % 2 == 0 else None
        answer = engine.ask(Request(text, RESIDENT_NEW_TOKENS, session=session, wish={"digest": True}))
        results.append((answer.tokens, [step.digest for step in engine.new_steps()]))
    return results, dict(engine.control("stats")["counters"])


def geometry_of(model: Path) -> Geometry:
    """Return the geometry of a model's KV from its configuration file."""
    import torch

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return Geometry(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        dtype=getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )
