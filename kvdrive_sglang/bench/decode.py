"""kvdrive bench decode: what a token costs at 1K to 32K tokens and in a batch of 8, and how true sparse attention stays.

Three engines live side by side: SGLang's ``torch_native`` backend, ``dense`` (the best dense formulation in plain torch that we
found, ``dense_backend.py``) and ``sparse`` (ours: budget 1024, window cache x2, frames for all of the KV). All three run the
same server with the same flags; the engines that wait sleep. Every round takes each context on each engine once.

First fidelity, then time. Texts of 7,040 tokens with their true continuation of 64 forced tokens, one of them a passage
copied from 6,000 tokens back, give the logits of every decode step: agreement is how often the most likely token is that
of ``torch_native``, KL the mean divergence from it in nats. The dense backend must agree as a dense one should, or nothing
is timed; its figures are the noise floor of the sparse ones (bf16 attention, sums in another order).

ms_per_token is the median time between two tokens at a streaming client; attention_us, per layer, is planning and
attention (write, select, fetch and attend) inside the scheduler, the median over the same steps. In the batch,
ms_per_token is the time between two steps over the requests in them: 1000 over tokens per second.

From 16K on (beyond the model's own 8K, its positions stretched) and in the batch, time alone is measured: prefill writes
its KV without attending. kv_bytes and
attention_flop are what attention to everything (sparse: to the budget) cannot do without, per layer; the last row is what the
machine can do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvdrive_sglang.bench import machine
from kvdrive_sglang.bench.engines import (
    BenchEngine,
    BenchFailed,
    Progress,
    Request,
    median,
    model_path,
    scratch,
    start_dense,
    start_kvdrive,
    start_reference,
)
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, continued_texts, prompts

NAME = "decode"
SUMMARY_KEYS = (
    "native_over_sparse",
    "dense_over_sparse",
    "attention_native_over_sparse",
    "growth_1k_7k5",
    "growth_1k_32k",
    "native_over_sparse_32k",
    "dense_over_sparse_32k",
    "batch8_over_native",
    "batch8_over_dense",
    "agreement",
    "kl",
)

CONTEXTS = {"1K": 1000, "4K": 4000, "7.5K": 7500}
UNATTENDED = {"16K": 16000, "32K": 32000}  # prefill without attention; one text, so that 32K goes on from 16K
BATCH = 8
BATCH_CONTEXT = "7.5K x 8"
BATCH_OWN_TOKENS = 24  # of each request; the rest of the prompt is shared, as with a document
LONGEST = "7.5K"
BUDGET_TOKENS = 1024
WINDOW_MULTIPLE = 2
CONTEXT_LENGTH = 33_000
CAPACITY_TOKENS = 48_000  # KV of the engines that are compared with
FLAGS = {
    "context_length": CONTEXT_LENGTH,
    "json_model_override_args": f'{{"max_position_embeddings": {CONTEXT_LENGTH}}}',
}
ROUND_TOKENS = 32
SKIPPED_TOKENS = 4  # the first steps of a round fill the window cache
ROUNDS = 3
TEXT_TOKENS = 7040
FORCED_TOKENS = 64
COPY = "copy"
DENSE_KL_LIMIT = 0.02  # bf16 rounding moves dense attention by less


def run(full: bool, progress: Progress) -> BenchResult:
    """Measure; ``full`` takes twice the rounds."""
    model = model_path()
    tokenizer = ModelTokenizer(model)
    progress("the machine's roofs")
    roof = machine.roof_row()
    with scratch() as root, ExitStack() as stack:
        engines = {}
        for name, start in STARTS.items():
            progress(f"starting {name}")
            engines[name] = stack.enter_context(start(model, root / name)).wait_ready()
        fidelity = measure_fidelity(engines, tokenizer, progress)
        rounds = 2 * ROUNDS if full else ROUNDS
        *texts, long_text, shared, own = prompts(
            tokenizer,
            [*CONTEXTS.values(), max(UNATTENDED.values()), CONTEXTS[LONGEST], BATCH * BATCH_OWN_TOKENS],
        )
        timed = dict(zip(CONTEXTS, texts, strict=True))
        timed |= {context: long_text[:length] for context, length in UNATTENDED.items()}
        timing = measure_time(engines, timed, rounds, progress)
        batch = [
            shared[:-BATCH_OWN_TOKENS] + own[i * BATCH_OWN_TOKENS : (i + 1) * BATCH_OWN_TOKENS]
            for i in range(BATCH)
        ]
        timing += measure_batch(engines, batch, rounds, progress)
    lengths = {**CONTEXTS, **UNATTENDED, BATCH_CONTEXT: CONTEXTS[LONGEST]}
    for row in timing:
        attended = lengths[row["context"]]
        if row["backend"] == "sparse":
            attended = min(attended, BUDGET_TOKENS)
        row.update(machine.attention_work(model, attended))
    return BenchResult(NAME, [*timing, *fidelity, roof], summary_of(timing, fidelity))


def start_sparse(model: Path, root: Path) -> BenchEngine:
    return start_kvdrive(
        model,
        root,
        probed=True,
        flags=FLAGS,
        budget_tokens=BUDGET_TOKENS,
        window_multiple=WINDOW_MULTIPLE,
        device_bytes=4 << 30,
    )


STARTS = {
    "torch_native": lambda model, root: start_reference(
        model, root, probed=True, flags={**FLAGS, "max_total_tokens": CAPACITY_TOKENS}
    ),
    "dense": lambda model, root: start_dense(
        model, root, flags={**FLAGS, "max_total_tokens": CAPACITY_TOKENS}
    ),
    "sparse": start_sparse,
}


def summary_of(timing: list[dict[str, Any]], fidelity: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios at the longest context, the growth of sparse attention, and its mean fidelity."""
    at = {(row["context"], row["backend"]): row for row in timing}
    native, dense, sparse = (at[LONGEST, backend] for backend in STARTS)
    native_32k, dense_32k, sparse_32k = (at["32K", backend]["ms_per_token"] for backend in STARTS)
    native_8, dense_8, sparse_8 = (at[BATCH_CONTEXT, backend]["ms_per_token"] for backend in STARTS)
    ours = [row for row in fidelity if row["backend"] == "sparse"]
    floor = [row for row in fidelity if row["backend"] == "dense"]
    copy = next(row for row in ours if row["text"] == COPY)
    return {
        "native_over_sparse": native["ms_per_token"] / sparse["ms_per_token"],
        "dense_over_sparse": dense["ms_per_token"] / sparse["ms_per_token"],
        "attention_native_over_sparse": native["attention_us"] / sparse["attention_us"],
        "attention_dense_over_sparse": dense["attention_us"] / sparse["attention_us"],
        "growth_1k_7k5": sparse["ms_per_token"] / at["1K", "sparse"]["ms_per_token"],
        "growth_1k_32k": sparse_32k / at["1K", "sparse"]["ms_per_token"],
        "native_over_sparse_32k": native_32k / sparse_32k,
        "dense_over_sparse_32k": dense_32k / sparse_32k,
        "batch8_over_native": native_8 / sparse_8,
        "batch8_over_dense": dense_8 / sparse_8,
        "agreement": float(np.mean([row["agreement"] for row in ours])),
        "kl": float(np.mean([row["kl"] for row in ours])),
        "agreement_copy": copy["agreement"],
        "kl_copy": copy["kl"],
        "agreement_dense": float(np.mean([row["agreement"] for row in floor])),
        "kl_dense": float(np.mean([row["kl"] for row in floor])),
    }


# ---- time ---------------------------------------------------------------------------------------------------------


def measure_time(
    engines: dict[str, BenchEngine], texts: dict[str, list[int]], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """Decode ``ROUND_TOKENS`` per context, engine and round, all of them in turn, so that a slow minute of the machine
    falls on all; prompts are prefilled in the first round and kept."""
    cells = [(context, name) for context in texts for name in engines]
    gaps: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    attention: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    for engine in engines.values():
        engine.flush()
    for number in range(rounds):
        for context, name in cells:
            progress(f"{context}: {name}, round {number + 1} of {rounds}")
            engine = engines[name]
            engine.new_steps()
            wish = {"unattended": context in UNATTENDED}
            answer = engine.ask(Request(texts[context], ROUND_TOKENS, wish=wish))
            gaps[context, name] += [b - a for a, b in pairwise(answer.arrivals[SKIPPED_TOKENS:])]
            steps = [step for step in engine.new_steps() if step.decode and answer.rid in step.rids]
            attention[context, name] += [step.attention_us for step in steps[SKIPPED_TOKENS:]]
    for engine in engines.values():
        engine.flush()
    return [
        {
            "context": context,
            "backend": name,
            "ms_per_token": median(gaps[context, name]) * 1e3,
            "attention_us": median(attention[context, name]),
        }
        for context, name in cells
    ]


def measure_batch(
    engines: dict[str, BenchEngine], batch: list[list[int]], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """Decode all requests together, the engines in turn; only steps with every request in them count."""
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    attention: dict[str, list[float]] = {name: [] for name in engines}
    requests = [Request(prompt, ROUND_TOKENS, wish={"unattended": True}) for prompt in batch]
    with ThreadPoolExecutor(len(batch)) as pool:
        for number in range(rounds):
            for name, engine in engines.items():
                progress(f"{BATCH_CONTEXT}: {name}, round {number + 1} of {rounds}")
                if number == 0:
                    engine.ask(Request(batch[0], 1, wish={"unattended": True}))  # the shared prefix, once
                engine.new_steps()
                list(pool.map(engine.ask, requests))
                steps = [step for step in engine.new_steps() if step.decode and len(step.rids) == len(batch)]
                if len(steps) <= SKIPPED_TOKENS + 1:
                    raise BenchFailed(
                        f"{name}: {len(steps)} steps held all {len(batch)} requests, too few to time"
                    )
                steps = steps[SKIPPED_TOKENS:]
                gaps[name] += [b.at_s - a.at_s for a, b in pairwise(steps)]
                attention[name] += [step.attention_us for step in steps]
    return [
        {
            "context": BATCH_CONTEXT,
            "backend": name,
            "ms_per_token": median(gaps[name]) * 1e3 / len(batch),
            "attention_us": median(attention[name]) / len(batch),
        }
        for name in engines
    ]


# ---- fidelity -----------------------------------------------------------------------------------------------------


def measure_fidelity(
    engines: dict[str, BenchEngine], tokenizer: ModelTokenizer, progress: Progress
) -> list[dict[str, Any]]:
    """Compare every decode step's logits with those of ``torch_native`` under the same forced tokens.

    Raises:
        BenchFailed: the dense backend is further from it than rounding explains.
    """
    rows = []
    for text, (prompt, forced) in continued_texts(tokenizer, TEXT_TOKENS, FORCED_TOKENS).items():
        logits = {}
        for name, engine in engines.items():
            progress(f"fidelity on {text}: {name}")
            logits[name] = forced_logits(engine, prompt, forced)
        for name in ("dense", "sparse"):
            agreement, kl = compare(logits["torch_native"], logits[name])
            rows.append({"text": text, "backend": name, "agreement": agreement, "kl": kl})
            if name == "dense" and kl > DENSE_KL_LIMIT:
                raise BenchFailed(
                    f"the dense backend is {kl:.3f} nats from torch_native on {text}: it is wrong"
                )
    return rows


def forced_logits(engine: BenchEngine, prompt: list[int], forced: list[int]) -> np.ndarray:
    """Return [step, vocabulary] float32 of the decode steps that follow ``prompt`` and all but the last forced token."""
    engine.flush()
    engine.new_steps()
    answer = engine.ask(Request(prompt, len(forced), wish={"forced": forced, "logits": True}))
    if answer.tokens != forced:
        raise BenchFailed(f"the engine answered {answer.tokens[:8]}..., forced were {forced[:8]}...")
    return engine.logits(answer, len(prompt), engine.new_steps())[1:]


def compare(reference: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return how often the most likely token agrees, and the mean KL of ``other`` from ``reference`` in nats."""
    agreement = float(np.mean(reference.argmax(-1) == other.argmax(-1)))
    return agreement, float(np.mean([divergence(a, b) for a, b in zip(reference, other, strict=True)]))


def divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """Return KL(reference || other) of two [vocabulary] logit vectors in nats."""
    log_p, log_q = log_softmax(reference), log_softmax(other)
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
