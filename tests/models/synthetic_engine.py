"""Drive the tiered store as the engine does, without SGLang: scripted queries, keys and values, real spans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from kv_tier.geometry import Geometry
from kv_tier.index import MEANS, IndexPlan
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.page_keys import page_keys
from kv_tier.modes import DEFAULT_EVICTION, ColdEncoding, EvictionName, FetchMode
from kv_tier.pipeline import Pipeline
from kv_tier.request import RequestState, Row
from kv_tier.selection import Budget
from kv_tier.spans import Identity, SpanStore
from kv_tier.steps import AppendRule, DecodeStep, ExtendStep
from kv_tier.store import StoreLimits, TieredStore
from kv_tier.trace import Trace
from kv_tier.transcode import Outcome
from kv_tier.window_profile import WindowProfile
from tests.models.read_paths import make_read_path

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, stretch_tokens=32)
IDENTITY = Identity(fingerprint=b"f" * 32, selection=b"s" * 32)
EVERYTHING = 10**9


@dataclass(frozen=True)
class Script:
    """What a model would compute for one sequence, position by position.

    ``tokens``: [token] int64; ``query``: [layer, token, kv_head, group, head_dim];
    ``k``, ``v``: [layer, token, kv_head, head_dim]; all in the KV dtype.
    """

    tokens: list[int]
    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_script(num_tokens: int, *, seed: int = 0, group: int = 2, geometry: Geometry = GEOMETRY) -> Script:
    """Draw a sequence; keys drift from page to page, so that pages differ in score."""
    generator = torch.Generator().manual_seed(seed)
    layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    topics = draw(layers, geometry.num_pages(num_tokens), heads, dim)
    k = draw(layers, num_tokens, heads, dim) + topics.repeat_interleave(geometry.page_size, 1)[:, :num_tokens]
    tokens = torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist()
    query = 2 * draw(layers, num_tokens, heads, group, dim)
    v = draw(layers, num_tokens, heads, dim)
    return Script(tokens, query.to(geometry.dtype), k.to(geometry.dtype), v.to(geometry.dtype))


def fork_script(script: Script, at: int, *, seed: int, geometry: Geometry = GEOMETRY) -> Script:
    """Return a sequence equal to ``script`` before position ``at`` and another one from there."""
    group = script.query.shape[3]
    other = make_script(len(script.tokens), seed=seed, group=group, geometry=geometry)
    parts = [
        torch.cat([old[:, :at], new[:, at:]], dim=1)
        for old, new in ((script.query, other.query), (script.k, other.k), (script.v, other.v))
    ]
    return Script(script.tokens[:at] + other.tokens[at:], *parts)


@dataclass
class Session:
    """Follow one request: its row, its logical pages by ordinal, how many positions are written."""

    script: Script
    row: int
    generation: int
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class SyntheticEngine:
    """Own a store in a data directory, logical pages and rows; closing and reopening simulates a new process.

    Args:
        path: data directory, created when absent.
        budget_pages: pages attended per step; None attends everything.
        num_frames: frames beside the dummy.
        read_path: a name of ``read_paths.READ_PATHS``.
    """

    def __init__(
        self,
        path: Path,
        *,
        geometry: Geometry = GEOMETRY,
        budget_pages: int | None = 6,
        num_frames: int = 256,
        num_pages: int = 256,
        max_pages: int = 64,
        window_multiple: int = 2,
        num_device_requests: int = 8,
        eviction: EvictionName = DEFAULT_EVICTION,
        window_profile: WindowProfile | None = None,
        index: IndexPlan = MEANS,
        append: AppendRule | None = None,
        ssd_bytes: int = 1 << 30,
        identity: Identity = IDENTITY,
        fetch_mode: FetchMode = "blockwise",
        read_path: str = "best",
        warm_up: bool = True,
        pipeline: Pipeline | None = None,
        trace: Trace | None = None,
        cold_encoding: ColdEncoding = "none",
        keyring: Keyring | None = None,
    ) -> None:
        self.geometry = geometry
        self.append = append or AppendRule("exact")
        self.scale = geometry.head_dim**-0.5
        self.data_dir = DataDir.open(path, role="engine")
        identity = replace(identity, sketch=index.sketch_digest)
        self.spans = SpanStore(self.data_dir, geometry, identity, ssd_bytes=ssd_bytes, keyring=keyring)
        limits = StoreLimits(
            num_pages,
            num_frames + 1,
            max_pages,
            window_multiple,
            max_requests=8,
            num_device_requests=num_device_requests,
            eviction=eviction,
            window_profile=window_profile,
            index=index,
        )
        budget = Budget(budget_pages, 4, 8, geometry.page_size)
        self.store = TieredStore(
            geometry,
            limits,
            budget,
            self.spans,
            fetch_mode=fetch_mode,
            read_path=make_read_path(read_path, self.data_dir.spans_fd),
            warm_up=warm_up,
            pipeline=pipeline,
            trace=trace,
            cold_encoding=cold_encoding,
        )
        self.sessions: list[Session] = []
        self._free_pages = list(range(1, num_pages))
        random.Random(num_frames).shuffle(self._free_pages)  # sequences never own consecutive pages
        self._free_rows = list(range(limits.max_requests))
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process: running requests are lost, files stay."""
        self.store.close()
        self.data_dir.close()

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    # ---- requests -------------------------------------------------------------------------------------------

    def start(self, script: Script) -> Session:
        """Begin a request with no prefix."""
        self._generation += 1
        session = Session(script, self._free_rows.pop(), self._generation)
        self.sessions.append(session)
        return session

    def resume(self, script: Script, num_pages: int) -> Session | None:
        """Begin a request whose first pages are restored from spans; None is a miss."""
        session = self.start(script)
        pages = [self._free_pages.pop() for _ in range(num_pages)]
        session.pages = pages
        if not self.store.attach(np.array(pages), self.keys(script, num_pages)):
            self.end(session)
            return None
        session.num_tokens = num_pages * self.geometry.page_size
        return session

    def keys(self, script: Script, num_pages: int) -> list[bytes]:
        """Return the page keys of the first ``num_pages`` pages."""
        return page_keys(script.tokens[: num_pages * self.geometry.page_size], self.geometry.page_size)

    def num_restorable(self, script: Script) -> int:
        return self.spans.num_restorable(self.keys(script, len(script.tokens) // self.geometry.page_size))

    def state(self, session: Session) -> RequestState:
        return self.store.request(session.row, session.generation)

    def end(self, session: Session) -> None:
        """End a request and free its pages."""
        self.store.end_request(session.row)
        self.store.release_pages(np.array(session.pages, dtype=np.int64))
        self._free_pages.extend(session.pages)
        self._free_rows.append(session.row)
        self.sessions.remove(session)

    def carry_on(self, session: Session) -> Session:
        """Begin a request with the full pages of one that ends, as SGLang's tree hands them on between turns."""
        num_full = session.num_tokens // self.geometry.page_size
        tail, pages = session.pages[num_full:], session.pages[:num_full]
        session.pages = tail
        self.end(session)
        again = self.start(session.script)
        again.pages, again.num_tokens = pages, num_full * self.geometry.page_size
        return again

    # ---- steps ----------------------------------------------------------------------------------------------

    def extend(self, *parts: tuple[Session, int]) -> list[torch.Tensor]:
        """Run one extend step over (session, new tokens); each output is [layer, token, kv_head, group, dim]."""
        rows, slots = self._grow(parts)
        step = ExtendStep(self.store, rows, slots, self.append)
        return self._run(step, parts)

    def prefill(self, session: Session, num_tokens: int, chunk: int = 24) -> torch.Tensor:
        """Extend up to position ``num_tokens`` in chunks; [layer, token, kv_head, group, head_dim]."""
        parts = []
        while session.num_tokens < num_tokens:
            parts += self.extend((session, min(chunk, num_tokens - session.num_tokens)))
        return torch.cat(parts, dim=1)

    def decode(self, *sessions: Session) -> list[torch.Tensor]:
        """Run one decode step; each output is [layer, 1, kv_head, group, head_dim]."""
        parts = [(session, 1) for session in sessions]
        rows, slots = self._grow(parts)
        return self._run(DecodeStep(self.store, rows, slots), parts)

    def generate(self, session: Session, count: int) -> torch.Tensor:
        """Decode ``count`` tokens of one session alone; [layer, count, kv_head, group, head_dim]."""
        return torch.cat([self.decode(session)[0] for _ in range(count)], dim=1)

    def _grow(self, parts: Sequence[tuple[Session, int]]) -> tuple[list[Row], torch.Tensor]:
        rows, slots = [], []
        size = self.geometry.page_size
        for session, count in parts:
            end = session.num_tokens + count
            while len(session.pages) < self.geometry.num_pages(end):
                session.pages.append(self._free_pages.pop())
            pages = torch.tensor(session.pages)
            positions = torch.arange(session.num_tokens, end)
            slots.append(pages[positions // size] * size + positions % size)
            rows.append(Row(self.state(session), pages, session.num_tokens, end))
        return rows, torch.cat(slots)

    def _run(self, step: ExtendStep | DecodeStep, parts: Sequence[tuple[Session, int]]) -> list[torch.Tensor]:
        counts = [count for _, count in parts]
        outs = []
        for layer in range(self.geometry.num_layers):
            query, k, v = (
                torch.cat([getattr(s.script, name)[layer, s.num_tokens : s.num_tokens + n] for s, n in parts])
                for name in ("query", "k", "v")
            )
            outs.append(step.attend(layer, query, k, v, self.scale))
        for session, count in parts:
            session.num_tokens += count
        return list(torch.stack(outs).split(counts, dim=1))

    # ---- residency ------------------------------------------------------------------------------------------

    def seal(self, session: Session, *, open_stretch: bool = False, wait: bool = True) -> None:
        """Write the closed stretches that no span holds, and the open one too at a turn's end."""
        size, per_stretch = self.geometry.page_size, self.geometry.pages_per_stretch
        num_pages = session.num_tokens // size
        keys = self.keys(session.script, num_pages)
        ends = list(range(per_stretch, num_pages + 1, per_stretch))
        if open_stretch and num_pages % per_stretch:
            ends.append(num_pages)
        for end in ends:
            begin = (end - 1) // per_stretch * per_stretch
            if self.spans.num_restorable(keys[begin:end]) < end - begin:
                self._seal_pages(session, keys, begin, end)
        if wait:
            self.settle()

    def _seal_pages(self, session: Session, keys: list[bytes], begin: int, end: int) -> None:
        size = self.geometry.page_size
        self.store.seal(
            np.array(session.pages[begin:end]),
            np.array(session.script.tokens[begin * size : end * size], dtype=np.uint32).reshape(-1, size),
            keys[begin:end],
            first_page=begin,
            parent_key=keys[begin - 1] if begin else bytes(32),
            durable=True,
        )

    def settle(self) -> None:
        """Wait for the writer, then bind what it finished."""
        while self.spans.num_outstanding:
            self.store.collect_sealed(wait_s=30.0)

    def transcode(self, keys: list[bytes], wait_s: float = 30.0) -> Outcome:
        """Ask on another thread, as the control socket does, while this one is between two steps."""
        with ThreadPoolExecutor(1) as control:
            asked = control.submit(self.store.transcoder.request, keys, wait_s)
            while not asked.done():
                self.store.transcoder.swap_in()
                wait([asked], timeout=0.005)
        return asked.result()

    def evict(self) -> int:
        """Take the frames of all sealed pages; returns how many."""
        return self.store._evict_frames(EVERYTHING)

    def span_paths(self) -> list[Path]:
        """List the span files, oldest first."""
        return sorted((self.data_dir.path / "spans").glob("*.span"))
