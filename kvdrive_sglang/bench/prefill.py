"""kvdrive bench prefill: what the index and the seals cost a prefill (the paper's figure 22).

One prompt, the time to its first token, an empty cache before each, in turn:

- bare: our engine, which neither summarises pages nor seals them (the probe leaves the means out);
- indexed: pages are summarised as they fill up; the request belongs to no session, nothing is written;
- sealed: and the request belongs to a session: its stretches are clustered, packed and written while it runs;
- torch_native: SGLang's own backend.

``sealed_after_s`` is how long after the answer every page is durable. ``files_bytes`` is what was written.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from kvdrive_sglang.bench.engines import (
    BenchEngine,
    Progress,
    Request,
    median,
    model_path,
    scratch,
    start_kvdrive,
    start_reference,
)
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.resume import wait_sealed
from kvdrive_sglang.bench.texts import ModelTokenizer, prompts

NAME = "prefill"
SUMMARY_KEYS = ("prefill_sealed_over_bare", "prefill_indexed_over_bare", "prefill_sealed_over_native")

PROMPT_TOKENS = 4000
WARM_UP_TOKENS = 600
ROUNDS = 3
BARE, INDEXED, SEALED, NATIVE = "bare", "indexed", "sealed", "torch_native"


def run(full: bool, progress: Progress) -> BenchResult:
    """Measure; ``full`` takes twice the rounds."""
    model = model_path()
    prompt, warm_up = prompts(ModelTokenizer(model), [PROMPT_TOKENS, WARM_UP_TOKENS])
    rounds = 2 * ROUNDS if full else ROUNDS
    took: dict[str, list[float]] = {name: [] for name in (BARE, INDEXED, SEALED, NATIVE)}
    durable: list[float] = []
    with scratch() as root, ExitStack() as stack:
        progress("starting our engine")
        ours = stack.enter_context(start_kvdrive(model, root / "ours", probed=True)).wait_ready()
        progress("starting torch_native")
        native = stack.enter_context(start_reference(model, root / "native")).wait_ready()
        for engine in (ours, native):
            engine.ask(Request(warm_up, 2))
        for number in range(rounds):
            for name in took:
                progress(f"{name}, round {number + 1} of {rounds}")
                if name == NATIVE:
                    took[name].append(take(native, Request(prompt, 1)))
                    continue
                request = Request(prompt, 1, salt=f"{name}-{number}", wish={"unindexed": name == BARE})
                request.session = f"bench-{number}" if name == SEALED else None
                took[name].append(take(ours, request))
                if name == SEALED:
                    begin = time.perf_counter()
                    wait_sealed(ours, prompt, salt=request.salt)
                    durable.append(time.perf_counter() - begin)
        written = int(ours.control("stats")["counters"]["bytes_written"])
    return result_of(took, durable, written // rounds)


def take(engine: BenchEngine, request: Request) -> float:
    """Return the time to the first token from an empty cache."""
    engine.flush()
    return engine.ask(request).ttft_s


def result_of(took: dict[str, list[float]], durable: list[float], file_bytes: int) -> BenchResult:
    """Put medians into rows and their ratios into the summary."""
    middle = {name: median(seconds) for name, seconds in took.items()}
    rows: list[dict[str, Any]] = [
        {
            "prefill": name,
            "ttft_s": middle[name],
            "tokens_per_s": PROMPT_TOKENS / middle[name],
            "over_bare": middle[name] / middle[BARE],
            "sealed_after_s": median(durable) if name == SEALED else None,
            "files_bytes": file_bytes if name == SEALED else None,
        }
        for name in took
    ]
    summary = {
        "prefill_sealed_over_bare": middle[SEALED] / middle[BARE],
        "prefill_indexed_over_bare": middle[INDEXED] / middle[BARE],
        "prefill_sealed_over_native": middle[SEALED] / middle[NATIVE],
    }
    return BenchResult(NAME, rows, summary)
