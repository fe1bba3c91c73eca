"""Drive a store without SGLang: a recorded or made-up sequence is sealed once and decoded under any configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from kv_tier.geometry import Geometry
from kv_tier.index import WARM_UP_QUERIES
from kv_tier.layer_stream import LayerStream
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.read_engine import choose_read_path
from kv_tier.modes import FetchMode
from kv_tier.request import RequestState, Row
from kv_tier.selection import Budget
from kv_tier.spans import Identity, SpanStore
from kv_tier.steps import AppendRule, DecodeStep, ExtendStep, Writer
from kv_tier.store import PAGES_PER_CLUSTER, StoreLimits, TieredStore
from kv_tier.within_budget import warm_up

IDENTITY = Identity(fingerprint=b"b" * 32, selection=b"b" * 32)
BUDGET_TOKENS, SINK_TOKENS, LOCAL_TOKENS = 1024, 4, 64
FRAMES_BESIDE = 16  # for the new tokens, beside what a configuration is about

Layers = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""layer -> keys and values of the whole sequence, each [token, kv_head, head_dim]."""


@dataclass(frozen=True)
class Setup:
    """One configuration that is measured.

    Attributes:
        name: for the table.
        mode: fetch mode.
        frame_share: frames for so much of the sequence; 1 holds all of it.
        warm: place pages by importance before the first step.
    """

    name: str
    mode: FetchMode
    frame_share: float
    warm: bool


@dataclass
class Costs:
    """What each step took, in order: seconds, of fetching, of attention that fetches, of all; bytes and reads."""

    fetch_s: list[float] = field(default_factory=list)
    attention_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


class TierSession:
    """One sequence over one store: attach it, make it resident or warm, decode step after step.

    Args:
        path: data directory; spans sealed there before are found again.
        tokens: the whole sequence.
        num_prompt: tokens of it, whole pages, that are sealed or attached.
        last_queries: layer -> [token, kv_head, group, head_dim] of the prompt's last tokens.
        pages_per_cluster: how finely spans that are sealed here are packed.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        tokens: Sequence[int],
        num_prompt: int,
        setup: Setup,
        last_queries: Callable[[int], torch.Tensor],
        *,
        pages_per_cluster: int = PAGES_PER_CLUSTER,
    ) -> None:
        self.geometry = geometry
        self.setup = setup
        self.num_prompt = num_prompt
        self.scale = geometry.head_dim**-0.5
        self.last_queries = last_queries
        num_pages = geometry.num_pages(len(tokens)) + 2
        frames = int(setup.frame_share * geometry.num_pages(num_prompt)) + FRAMES_BESIDE
        self.data_dir = DataDir.open(path, role="engine")
        self.spans = SpanStore(self.data_dir, geometry, IDENTITY, ssd_bytes=1 << 40)
        limits = StoreLimits(num_pages, min(frames, num_pages), num_pages, 2, 1)
        budget = Budget(BUDGET_TOKENS // geometry.page_size, SINK_TOKENS, LOCAL_TOKENS, geometry.page_size)
        self.store = TieredStore(
            geometry,
            limits,
            budget,
            self.spans,
            fetch_mode=setup.mode,
            warm_up=setup.warm,
            pages_per_cluster=pages_per_cluster,
        )
        self.tokens = np.array(tokens, dtype=np.uint32)
        self.keys = page_keys(self.tokens[:num_prompt], geometry.page_size)
        self.pages = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.num_tokens = 0
        self.costs = Costs()
        self._spent_s = {"fetch": 0.0, "attention": 0.0}
        for name in ("start", "finish", "look_ahead"):
            self._time(self.store.fetcher, name, "fetch")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()
        self.data_dir.close()

    def _time(self, owner: Any, name: str, what: str) -> None:
        """Add the time of every call of a method to what the step spends on fetching or attention."""
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args)
            self._spent_s[what] += time.perf_counter() - begin
            return result

        setattr(owner, name, timed)

    @property
    def state(self) -> RequestState:
        return self.store.request(0, 1)

    def row(self, prefix: int, end: int) -> Row:
        pages = self.pages[: self.geometry.num_pages(end)]
        return Row(self.state, pages, prefix, end)

    # ---- the prompt -----------------------------------------------------------------------------------------

    def seal(self, layers: Layers) -> tuple[int, float]:
        """Write the prompt stretch by stretch and seal it; returns bytes of the files and seconds, KV copies apart."""
        geometry, seconds = self.geometry, 0.0
        size = geometry.stretch_tokens
        for begin in range(0, self.num_prompt, size):
            end = min(begin + size, self.num_prompt)
            row = self.row(begin, end)
            row.state.sync(row.pages, self.store.table)
            first, last = begin // geometry.page_size, end // geometry.page_size
            positions = torch.arange(begin, end)
            slots = row.pages[positions // geometry.page_size] * geometry.page_size
            writer = Writer(self.store, slots + positions % geometry.page_size, [row])
            for layer in range(geometry.num_layers):
                k, v = layers(layer)
                writer.write(layer, k[begin:end], v[begin:end])
            pages = row.pages[first:last].numpy()
            self.store.table.exact[pages] = True
            started = time.perf_counter()
            self.store.seal(
                pages,
                self.tokens[begin:end].reshape(-1, geometry.page_size),
                self.keys[first:last],
                first_page=first,
                parent_key=self.keys[first - 1] if first else bytes(32),
                durable=True,
            )
            seconds += time.perf_counter() - started
        started = time.perf_counter()
        while self.spans.num_outstanding:
            self.store.collect_sealed(wait_s=30.0)
        return self.spans.bytes_written, seconds + time.perf_counter() - started

    def attach(self) -> None:
        """Bind the prompt to its spans, and bring it where the configuration wants it."""
        pages = self.pages[: self.geometry.num_pages(self.num_prompt)].numpy()
        assert self.store.attach(pages, self.keys), "the prompt is not in its spans"
        self.num_tokens = self.num_prompt
        if self.setup.frame_share >= 1:
            stream = LayerStream(self.store, [pages], keep=True)
            for layer in range(self.geometry.num_layers):
                stream.gather(layer, pages)
            stream.finish()
            assert (self.store.table.frames[pages] > 0).all()
        if self.setup.warm:
            row = self.row(self.num_prompt - WARM_UP_QUERIES, self.num_prompt)
            row.state.sync(row.pages, self.store.table)
            for layer in range(self.geometry.num_layers):
                self.store.fetcher.grow_staging()
                warm_up(self.store, layer, row, self.last_queries(layer), self.scale, from_ssd=True)
            self.store.fetcher.settle()
            self.store.fetcher.grow_staging()

    # ---- decode ---------------------------------------------------------------------------------------------

    def begin_step(self) -> DecodeStep:
        """Plan the next decode step; ``end_step`` ends it."""
        size, position = self.geometry.page_size, self.num_tokens
        row = self.row(position, position + 1)
        counters = self.store.counters
        self._before = (time.perf_counter(), counters.bytes_read, counters.reads)
        self._spent_s = dict.fromkeys(self._spent_s, 0.0)
        slots = row.pages[-1:] * size + position % size
        step = DecodeStep(self.store, [row], slots)
        self._time(step, "attend", "attention")
        return step

    def end_step(self) -> None:
        """Note what the step cost."""
        begin, num_bytes, reads = self._before
        counters = self.store.counters
        self.costs.step_s.append(time.perf_counter() - begin)
        self.costs.fetch_s.append(self._spent_s["fetch"])
        self.costs.attention_s.append(self._spent_s["attention"])
        self.costs.bytes_read.append(counters.bytes_read - num_bytes)
        self.costs.reads.append(counters.reads - reads)
        self.num_tokens += 1
        assert self.state.failure is None, self.state.failure

    def sparse_append(self, count: int) -> ExtendStep:
        """Plan an append of ``count`` tokens that attends within the budget."""
        position, size = self.num_tokens, self.geometry.page_size
        row = self.row(position, position + count)
        positions = torch.arange(position, position + count)
        slots = row.pages[positions // size] * size + positions % size
        return ExtendStep(self.store, [row], slots, AppendRule("sparse"))


def describe_path(path: Path) -> str:
    """Say how a directory is read."""
    with DataDir.open(path, role="engine") as data_dir:
        chosen = choose_read_path(data_dir.spans_fd)
        chosen.engine.close()
    return chosen.reason
