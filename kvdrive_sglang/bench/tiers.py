"""kvdrive bench tiers: what a decode step pays for KV that is on SSD.

Two sequences, sealed once, attached and decoded under each configuration; frames for a quarter of the KV, window caches of
twice the budget, no page cache:

- real: 7,500 tokens of Python's language reference through SmolLM2-135M in plain torch. Its decode steps run the model
  with the store as its attention, so that a token's time is a token's time.
- shape: 32K tokens in the shape of an 8B model (8 KV heads, head_dim 128), a part of its layers; keys, values and queries
  are made up. Every (layer, KV head) drifts so fast that its window cache hits as often as a recorded pair's did.
  Beside attention a token's time has the products of such a model's layers, with weights that are made up, read from
  memory once per layer.

Attention alone, where fetching weighs most, has columns and ratios of its own.

Every configuration must give the same bits. The rows hold medians after the first steps; ``first_*`` are means over those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kv_tier.attention import attend_masked
from kv_tier.geometry import Geometry
from kv_tier.index import WARM_UP_QUERIES
from kv_tier.meta.read_engine import (
    ReadBatch,
    ReadEngine,
    RingEngine,
    RingUnavailable,
    ThreadEngine,
    aligned_bytes,
)
from kv_tier.meta.span_file import write_span
from kv_tier.span_batch import PageBatch, Wants
from kv_tier.spans import SealJob
from kv_tier.steps import DecodeStep, ExtendStep
from kvdrive_sglang.bench.engines import BenchFailed, Progress, model_path, scratch
from kvdrive_sglang.bench.made_up import HEAD_DIM, PAGE, drifting, page_topics, stays_for
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, prompts
from kvdrive_sglang.bench.tier_driver import Costs, Layers, Setup, TierSession, describe_path

NAME = "tiers"
SUMMARY_KEYS = (
    "layerwise_over_blockwise_bytes",
    "ssd_over_dram_ms",
    "ssd_over_dram_attention_ms",
    "read_over_raw",
    "write_over_raw",
    "seal_over_raw",
    "warmup_gain",
    "append_read_over_selected",
    "outputs_equal",
)

FRAME_SHARE = 0.25
FIRST_STEPS = 8
DRAM = Setup("dram only", "blockwise", 1.0, False)
SETUPS = (
    DRAM,
    Setup("layerwise", "layerwise", FRAME_SHARE, False),
    Setup("blockwise", "blockwise", FRAME_SHARE, False),
    Setup("hierarchical, cold", "hierarchical", FRAME_SHARE, False),
    Setup("hierarchical", "hierarchical", FRAME_SHARE, True),
    Setup("balanced, cold", "balanced", FRAME_SHARE, False),
    Setup("balanced", "balanced", FRAME_SHARE, True),
)
REAL_PROMPT, REAL_STEPS = 7504, 40
SHAPE_PROMPT, SHAPE_STEPS, SHAPE_LAYERS, SHAPE_ALL_LAYERS = 32768, 40, 8, 32
APPENDED = 20  # tokens of a sparse append after a resume
LAYERWISE_STEPS = 12  # enough for its median: every step reads the same
RUN_ORDER = (SETUPS[0], SETUPS[-1], *SETUPS[1:-1])  # what is compared runs next to each other
REPEATS, READ_REPEATS = 3, 9
WRITE_FLAGS = (os.O_DIRECT, 0, os.O_DIRECT, os.O_DIRECT)  # past the page cache and through it


@dataclass
class Subject:
    """A sequence to decode: what the store needs to know, and how a step runs.

    ``run`` takes a session through one planned step, of one token or so many new ones, and returns what it computed, to
    compare.
    """

    name: str
    geometry: Geometry
    tokens: list[int]
    num_prompt: int
    num_steps: int
    layers: Layers
    last_queries: Callable[[int], torch.Tensor]
    run: Callable[[TierSession, DecodeStep | ExtendStep, int], torch.Tensor]
    layer_scale: float = 1.0


def run(full: bool, progress: Progress) -> BenchResult:
    """Measure; ``full`` takes all 32 layers of the 8B shape (4.3 GB of KV) and more repeats.

    Raises:
        BenchFailed: two configurations computed different bits.
    """
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    repeats = 2 * REPEATS if full else REPEATS
    with scratch() as directory:
        summary["read_path"] = describe_path(directory / "probe")
        progress("recording 7.5K tokens of the model")
        real = record_real(progress)
        rates = measure(real, directory / "real", rows, summary, repeats, progress)
        progress("making up 32K tokens of an 8B model's shape")
        layers = SHAPE_ALL_LAYERS if full else SHAPE_LAYERS
        shape = make_shape(rates, layers)
        measure(shape, directory / "shape", rows, summary, repeats, progress)
    for key in ("ms", "attention_ms"):
        summary[f"ssd_over_dram_{key}"] = max(
            summary[f"{n}_balanced_over_dram_{key}"] for n in ("real", "shape")
        )
    summary["layerwise_over_blockwise_bytes"] = min(
        summary[f"{n}_layerwise_over_blockwise_bytes"] for n in ("real", "shape")
    )
    summary["warmup_gain"] = min(summary[f"{n}_warmup_gain"] for n in ("real", "shape"))
    summary["append_read_over_selected"] = summary["shape_append_read_over_selected"]
    for key in ("read_over_raw", "write_over_raw", "seal_over_raw"):
        summary[key] = min(summary[f"real_{key}"], summary[f"shape_{key}"])
    summary["outputs_equal"] = True
    return BenchResult(NAME, rows, summary)


# ---- measuring --------------------------------------------------------------------------------------------------


def measure(
    sequence: Subject,
    directory: Path,
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    repeats: int,
    progress: Progress,
) -> np.ndarray:
    """Seal once, decode under every configuration in turn; returns the window hit rate of every (layer, KV head)."""
    progress(f"{sequence.name}: sealing {sequence.num_prompt} tokens")
    num_bytes, seconds = seal(sequence, directory)
    span_write, raw_write = write_rates(sequence, directory)
    summary[f"{sequence.name}_seal_over_raw"] = num_bytes / seconds / raw_write
    summary[f"{sequence.name}_write_over_raw"] = span_write / raw_write
    costs: dict[str, list[Costs]] = {setup.name: [] for setup in SETUPS}
    outputs: dict[str, torch.Tensor] = {}
    rates = np.zeros(0)
    for repeat in range(repeats):
        for setup in RUN_ORDER:
            if setup.mode == "layerwise" and repeat:
                continue  # it takes longest, and its bytes never change
            progress(f"{sequence.name}: {setup.name} ({repeat + 1} of {repeats})")
            session, out = decode(sequence, directory, setup)
            costs[setup.name].append(session.costs)
            compare(sequence.name, setup.name, outputs, out)
            if setup is DRAM:
                rates = hit_rates(session)
    for setup in SETUPS:
        rows.append(row_of(sequence, setup, costs[setup.name]))
    summarise(sequence.name, costs, summary)
    progress(f"{sequence.name}: a sparse append after a resume")
    summary[f"{sequence.name}_append_read_over_selected"] = append_read_over_selected(sequence, directory)
    progress(f"{sequence.name}: reads beside a raw probe")
    summary[f"{sequence.name}_read_over_raw"], detail = read_over_raw(sequence, directory)
    summary.update({f"{sequence.name}_{key}": value for key, value in detail.items()})
    return rates


def open_session(sequence: Subject, directory: Path, setup: Setup) -> TierSession:
    return TierSession(
        directory, sequence.geometry, sequence.tokens, sequence.num_prompt, setup, sequence.last_queries
    )


def seal(sequence: Subject, directory: Path) -> tuple[int, float]:
    with open_session(sequence, directory, DRAM) as session:
        return session.seal(sequence.layers)


def decode(sequence: Subject, directory: Path, setup: Setup) -> tuple[TierSession, torch.Tensor]:
    """Attach and decode; the session is closed, its figures remain."""
    num_steps = LAYERWISE_STEPS if setup.mode == "layerwise" else sequence.num_steps
    outs = []
    with open_session(sequence, directory, setup) as session, torch.inference_mode():
        session.attach()
        for _ in range(num_steps):
            step = session.begin_step()
            outs.append(sequence.run(session, step, 1))
            session.end_step()
        session.store.check_integrity()
    return session, torch.stack(outs)


def compare(name: str, setup: str, outputs: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """Refuse to time what is wrong: every configuration must compute the bits of the first one."""
    known = outputs.setdefault(name, out)
    common = min(len(known), len(out))
    if not torch.equal(known[:common], out[:common]):
        raise BenchFailed(f"{name}: {setup} computes other bits than {DRAM.name}")


def hit_rates(session: TierSession) -> np.ndarray:
    """Return the window hit rate of every (layer, KV head), flat."""
    windows = session.store.windows
    assert windows is not None
    hits, misses = windows.total_hits, windows.total_misses
    rates: np.ndarray = (hits / np.maximum(1, hits + misses)).reshape(-1)
    return rates


def row_of(sequence: Subject, setup: Setup, costs: list[Costs]) -> dict[str, Any]:
    """One line of the table: medians over all steps but the first ones, of all repeats; scaled to all layers."""
    scale = sequence.layer_scale

    def after(values: Callable[[Costs], Sequence[float]]) -> float:
        return float(median([v for c in costs for v in values(c)[FIRST_STEPS:]]))

    def first(values: Callable[[Costs], Sequence[float]]) -> float:
        return float(np.mean([v for c in costs for v in values(c)[:FIRST_STEPS]]))

    num_bytes, reads = after(lambda c: c.bytes_read), after(lambda c: c.reads)
    return {
        "sequence": sequence.name,
        "configuration": setup.name,
        "ms_per_token": 1e3 * scale * after(lambda c: c.step_s),
        "attention_ms": 1e3 * scale * after(lambda c: c.attention_s),
        "fetch_ms": 1e3 * scale * after(lambda c: c.fetch_s),
        "kib_per_token": scale * num_bytes / 1024,
        "reads_per_token": scale * reads,
        "kib_per_read": num_bytes / 1024 / reads if reads else None,
        "first_fetch_ms": 1e3 * scale * first(lambda c: c.fetch_s),
        "first_kib_per_token": scale * first(lambda c: c.bytes_read) / 1024,
    }


def summarise(name: str, costs: dict[str, list[Costs]], summary: dict[str, Any]) -> None:
    def mean_after(setup: str, values: Callable[[Costs], Sequence[float]]) -> float:
        return float(np.mean([v for c in costs[setup] for v in values(c)[FIRST_STEPS:]]))

    def over(values: Callable[[Costs], Sequence[float]]) -> float:
        pairs = zip(costs["balanced"], costs[DRAM.name], strict=True)  # of one repeat each
        return float(
            median(median(values(c)[FIRST_STEPS:]) / median(values(b)[FIRST_STEPS:]) for c, b in pairs)
        )

    def first_fetch(setup: str) -> float:
        return float(np.mean([v for c in costs[setup] for v in c.fetch_s[:FIRST_STEPS]]))

    summary[f"{name}_balanced_over_dram_ms"] = over(lambda c: c.step_s)
    summary[f"{name}_balanced_over_dram_attention_ms"] = over(lambda c: c.attention_s)
    layerwise, blockwise = (mean_after(m, lambda c: c.bytes_read) for m in ("layerwise", "blockwise"))
    summary[f"{name}_layerwise_over_blockwise_bytes"] = layerwise / max(1.0, blockwise)
    summary[f"{name}_warmup_gain"] = first_fetch("balanced, cold") / first_fetch("balanced")


# ---- the disk ---------------------------------------------------------------------------------------------------


def write_rates(sequence: Subject, directory: Path) -> tuple[float, float]:
    """Return the best bytes per second of writing span files that are packed already (checksums, file, flush, rename), and of
    writing one file front to back, in turn."""
    spans, raw = [], []
    with open_session(sequence, directory / "write", DRAM) as session:
        jobs = packed_spans(session, sequence)
        for flags in WRITE_FLAGS:
            try:
                raw.append(raw_write_rate(directory, flags))
            except OSError as error:
                if not flags or error.errno != errno.EINVAL:  # not just a file system without direct I/O
                    raise
            spans.append(span_write_rate(session, jobs))
    return max(spans), max(raw)


def packed_spans(session: TierSession, sequence: Subject) -> list[SealJob]:
    """Seal a few stretches; returns what was to be written."""
    jobs: list[SealJob] = []
    submit = session.spans.submit

    def remember(job: SealJob) -> None:
        jobs.append(dataclasses.replace(job))  # the writer lets its parts go
        submit(job)

    session.spans.submit = remember  # type: ignore[method-assign]
    session.num_prompt = 4 * sequence.geometry.stretch_tokens
    session.seal(sequence.layers)
    return jobs


def span_write_rate(session: TierSession, jobs: Sequence[SealJob]) -> float:
    seconds, num_bytes = 0.0, 0
    for job in jobs:
        header = session.spans._header(job)
        begin = time.perf_counter()
        assert job.parts is not None
        span = write_span(session.data_dir, header.sequence, header, job.parts)
        seconds += time.perf_counter() - begin
        num_bytes += header.file_bytes
        span.unlink()
        span.close()
    return num_bytes / seconds


def raw_write_rate(directory: Path, flags: int, num_bytes: int = 256 << 20) -> float:
    """Write a file front to back, flush included; ``flags`` to open it with.

    Raises:
        OSError: the file system does not take such a file.
    """
    block = aligned_bytes(4 << 20)
    block[:] = np.random.default_rng(0).integers(0, 256, len(block), dtype=np.uint8)
    path = directory / "raw"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    try:
        begin = time.perf_counter()
        for offset in range(0, num_bytes, len(block)):
            os.pwrite(fd, block.data, offset)
        os.fsync(fd)
        return num_bytes / (time.perf_counter() - begin)
    finally:
        os.close(fd)
        path.unlink()


def append_read_over_selected(sequence: Subject, directory: Path) -> float:
    """Return the KV bytes that a resumed session reads before its first token, over those of the pages it attends."""
    with open_session(sequence, directory, SETUPS[2]) as session, torch.inference_mode():
        session.attach()
        before = session.store.counters.bytes_read
        sequence.run(session, session.sparse_append(APPENDED), APPENDED)
        num_bytes = session.store.counters.bytes_read - before
        assert session.state.failure is None, session.state.failure
    geometry, budget = sequence.geometry, session.store.budget
    assert budget.pages is not None
    return num_bytes / (budget.pages * geometry.page_bytes)


def read_over_raw(sequence: Subject, directory: Path) -> tuple[float, dict[str, Any]]:
    """Time the batches of one cold step, checked and copied, beside bare reads of the same places at the same depth."""
    made: list[tuple[int, Sequence[Wants]]] = []
    ours: list[float] = []
    with open_session(sequence, directory, SETUPS[2]) as session, torch.inference_mode():
        session.attach()
        fetcher = session.store.fetcher
        batch_of = fetcher._batch

        def remember(layer: int, wants: Sequence[Wants]) -> PageBatch:
            made.append((layer, wants))
            return batch_of(layer, wants)

        fetcher._batch = remember  # type: ignore[method-assign]
        sequence.run(session, session.begin_step(), 1)
        fetcher._batch = batch_of  # type: ignore[method-assign]
        engines: dict[str, ReadEngine] = {"threads": ThreadEngine()}
        with contextlib.suppress(RingUnavailable):
            engines["ring"] = RingEngine()
        raw: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(READ_REPEATS):
            total, bare = 0.0, dict.fromkeys(raw, 0.0)
            num_bytes = num_reads = 0
            for layer, wants in made:
                begin = time.perf_counter()
                batch = PageBatch(fetcher.path, layer, wants, gap_bytes=fetcher.gap_bytes)
                done = batch.finish()
                total += time.perf_counter() - begin
                num_bytes, num_reads = num_bytes + done.bytes_read, num_reads + done.num_reads
                assert batch._plan is not None
                plan = batch._plan.batch
                for name, engine in engines.items():
                    again = ReadBatch(
                        plan.files, plan.file_of, plan.offsets, plan.lengths, plan.buffer, plan.at
                    )
                    begin = time.perf_counter()
                    engine.start(again)
                    engine.wait(again)
                    bare[name] += time.perf_counter() - begin
            ours.append(total)
            for name, seconds in bare.items():
                raw[name].append(seconds)
        for engine in engines.values():
            engine.close()
    best = min(median(times) for times in raw.values())
    detail = {
        "read_mb_per_s": num_bytes / 1e6 / median(ours),
        "raw_read_mb_per_s": num_bytes / 1e6 / best,
        "kib_per_read": num_bytes / 1024 / num_reads,
        "reads_per_batch": num_reads / len(made),
    }
    return best / median(ours), detail


# ---- what is decoded --------------------------------------------------------------------------------------------


class Recorder:
    """Stand where a transformers model's attention stands: ``attend`` is called once per layer.

    ``attend(layer, query, k, v, scale)`` takes query [token, kv_head, group, head_dim], k and v [token, kv_head,
    head_dim], and returns what it attended, shaped as the query.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        AttentionInterface.register("kvdrive_bench", self._forward)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="kvdrive_bench"
        )
        self.model.eval()
        self.attend: Callable[..., torch.Tensor] = self.record
        config = self.model.config
        self.geometry = Geometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
        )
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.queries: list[torch.Tensor] = []

    def _forward(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        heads, count = key.shape[1], query.shape[2]
        grouped = query[0].transpose(0, 1).view(count, heads, -1, query.shape[3])
        k, v = (t[0].transpose(0, 1).contiguous() for t in (key, value))
        out = self.attend(module.layer_idx, grouped, k, v, scaling)
        return out.reshape(1, count, -1, query.shape[3]), None

    def record(
        self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend causally over everything, and keep it."""
        assert layer == len(self.k)
        self.k.append(k)
        self.v.append(v)
        self.queries.append(query[REAL_PROMPT - WARM_UP_QUERIES : REAL_PROMPT].clone())
        out, _ = attend_masked(query, k.transpose(0, 1), v.transpose(0, 1), None, scale, causal=True)
        return out

    def forward(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """Run tokens at positions from ``first`` on; returns the last one's logits."""
        positions = torch.arange(first, first + len(tokens))[None]
        out = self.model(
            torch.tensor([list(tokens)]), position_ids=positions, use_cache=False, logits_to_keep=1
        )
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def record_real(progress: Progress) -> Subject:
    """Run the packaged model over a real text once; its decode steps will run it again over the store."""
    path = model_path()
    (tokens,) = prompts(ModelTokenizer(path), [REAL_PROMPT + REAL_STEPS])
    recorder = Recorder(path)
    with torch.inference_mode():
        recorder.forward(tokens[:REAL_PROMPT], 0)

    def step(session: TierSession, planned: DecodeStep | ExtendStep, count: int) -> torch.Tensor:
        recorder.attend = planned.attend
        return recorder.forward(session.tokens[session.num_tokens :][:count].tolist(), session.num_tokens)

    return Subject(
        "real",
        recorder.geometry,
        tokens,
        REAL_PROMPT,
        REAL_STEPS,
        lambda layer: (recorder.k[layer], recorder.v[layer]),
        lambda layer: recorder.queries[layer],
        step,
    )


HEADS, GROUP = 8, 4
HIDDEN, INNER = HEADS * GROUP * HEAD_DIM, 14336  # of Llama 3 8B


class LayerProducts:
    """What a layer of an 8B model computes beside attention, with weights that are made up: 218 million of them.

    All layers share them; they are many times what the caches hold, so that each layer reads them from memory.
    """

    def __init__(self, generator: torch.Generator) -> None:
        def weights(outputs: int, inputs: int) -> torch.Tensor:
            made = torch.empty(outputs, inputs, dtype=torch.bfloat16)
            return made.uniform_(-1, 1, generator=generator).mul_(inputs**-0.5)

        self.qkv = weights(HIDDEN + 2 * HEADS * HEAD_DIM, HIDDEN)
        self.out = weights(HIDDEN, HIDDEN)
        self.gate, self.up, self.down = weights(INNER, HIDDEN), weights(INNER, HIDDEN), weights(HIDDEN, INNER)

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project ``hidden`` ([token, HIDDEN]) to queries, keys and values; only the time it takes counts."""
        return F.linear(F.rms_norm(hidden, (HIDDEN,)), self.qkv)

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` after a layer whose attention gave ``attended`` ([token, kv_head, group, head_dim])."""
        hidden = hidden + F.linear(attended.flatten(1), self.out)
        inner = F.rms_norm(hidden, (HIDDEN,))
        return hidden + F.linear(F.silu(F.linear(inner, self.gate)) * F.linear(inner, self.up), self.down)


def make_shape(rates: np.ndarray, num_layers: int) -> Subject:
    """Make up a sequence in the shape of an 8B model that hits its windows as often as the recorded one did."""
    geometry = Geometry(num_layers=num_layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=PAGE)
    generator = torch.Generator().manual_seed(2)
    num_tokens = SHAPE_PROMPT + SHAPE_STEPS
    num_pages = geometry.num_pages(num_tokens)
    stays = torch.tensor(stays_for(rates, SHAPE_STEPS, num_pages), dtype=torch.float32)
    stays = stays[torch.randint(len(stays), (num_layers, HEADS), generator=generator)]
    keys, values, queries = [], [], []
    for layer in range(num_layers):
        k = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator)
        k = k.mul_(0.3) + page_topics(num_pages, HEADS, generator).repeat_interleave(PAGE, 0)[:num_tokens]
        keys.append(k.to(torch.bfloat16))
        values.append(torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16))
        drift = drifting(WARM_UP_QUERIES + SHAPE_STEPS, stays[layer], generator)
        spread = 0.1 * torch.randn(*drift.shape[:2], GROUP, HEAD_DIM, generator=generator)
        queries.append((drift[:, :, None] + spread).to(torch.bfloat16))

    products = LayerProducts(generator)

    def step(session: TierSession, planned: DecodeStep | ExtendStep, count: int) -> torch.Tensor:
        position = session.num_tokens
        number = WARM_UP_QUERIES + position - SHAPE_PROMPT
        here = slice(position, position + count)
        hidden = torch.ones(count, HIDDEN, dtype=torch.bfloat16)
        outs = []
        for layer in range(num_layers):
            products.before(hidden)
            out = planned.attend(
                layer,
                queries[layer][number : number + count],
                keys[layer][here],
                values[layer][here],
                session.scale,
            )
            hidden = products.after(hidden, out)
            outs.append(out)
        return torch.stack(outs)

    return Subject(
        "shape",
        geometry,
        torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist(),
        SHAPE_PROMPT,
        SHAPE_STEPS,
        lambda layer: (keys[layer], values[layer]),
        lambda layer: queries[layer][:WARM_UP_QUERIES],
        step,
        SHAPE_ALL_LAYERS / num_layers,
    )
