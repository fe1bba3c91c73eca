"""Fetch: bring the pages that a layer attends into the window caches, and guess which come next.

    selected pages ──> window cache ──miss──> frame | staging row (DRAM) ──miss──> span (SSD)
                         │                              ^                            │
                         └──────── what leaves ─────────┴───── prefetched, warm ─────┘

Four modes (paper 7.3); all give the same bits, they differ in what is read and when:

    layerwise      a step reads every page of the layer that has no frame (FlexGen)
    blockwise      selected pages that are missing, on demand
    hierarchical   pages that leave a window cache stay in staging rows while there is room; near-critical pages (ranks K
                   to M) are prefetched into them while the layer attends and the next one projects, as long as that pays
    balanced       and the (layer, KV head) pairs that stall most keep a share of the rows to themselves
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_kernels import compiled, dispatch
from kv_tier.frames import DUMMY_FRAME
from kv_tier.meta.read_engine import Ints, ReadPath
from kv_tier.meta.span_file import SpanFile
from kv_tier.modes import FetchMode
from kv_tier.page_table import NOWHERE
from kv_tier.request import RequestState
from kv_tier.span_batch import GAP_BYTES, PageBatch, Pages, Wants
from kv_tier.staging import ABSENT, IN_FLIGHT
from kv_tier.window import Absent, WindowCaches

if TYPE_CHECKING:
    from kv_tier.store import TieredStore

NEAR_SHARE = 8  # ranks up to K + K / 8 are near-critical
ROUND_BYTES = 4 << 20  # of pages per batch, so that buffers stay small
RESIDENT_SHARE = 0.5  # of the staging rows go to quotas in balanced mode
MOST_LENT = 64  # frames in use that staging borrows per step
PROFILE_FETCHES = 512  # fetches between two looks at the stalls
TRIAL_FETCHES = 64  # prefetching is tried for so many fetches,
REST_FETCHES = 448  # and rests for so many if it did not pay
_NONE = np.zeros(0, dtype=np.int64)
LOST = "LOST_PAGE: a page of this sequence could not be read or failed its checksum; a retry recomputes it"


@dataclass(frozen=True)
class _Prefetch:
    """Pages on their way into staging rows: [n] pair, logical page, and the life it had when it was asked for; ``guess``: they
    are near-critical ones."""

    batch: PageBatch
    spans: list[SpanFile]
    pairs: Ints
    pages: Ints
    lives: Ints
    guess: bool


class PrefetchTrial:
    """Decide whether guesses pay: they rest after a trial in which they took more time than they saved, and are tried again.

    A guess saves what a page read on demand takes, recent ones weighing most, once it is asked for. It takes time of the
    scheduler's thread. Where the disk is slow they pay, where the processor is they do not.
    """

    def __init__(self) -> None:
        self.resting = False
        self.spent_ns = 0.0
        self.saved_ns = 0.0
        self.page_ns = 0.0
        self._left = TRIAL_FETCHES

    def demanded(self, num_pages: int, took_ns: int) -> None:
        """Learn what reading on demand takes."""
        self.page_ns += (took_ns / num_pages - self.page_ns) / 8

    def used(self, num_pages: int) -> None:
        """Count guesses that somebody asked for."""
        self.saved_ns += num_pages * self.page_ns

    def next_fetch(self) -> bool:
        """Count a fetch; whether to guess after it."""
        self._left -= 1
        if self._left <= 0:
            self.resting = not self.resting and self.spent_ns > self.saved_ns
            self._left = REST_FETCHES if self.resting else TRIAL_FETCHES
            self.spent_ns = self.saved_ns = 0.0
        return not self.resting


@dataclass
class Fetch:
    """Pages that some requests lack in one layer, on their way: ``Fetcher.start`` begins it, ``finish`` ends it.

    Attributes:
        states: the requests.
        absent: the pages asked for, [page].
        sources: [page] int64 row of the frame arena, negative where only SSD has it.
        staged: [n] int64 rows among them that are staging's.
        away: [n] int64 places in ``absent`` of the pages that SSD alone has.
        inverse: [n] int64 number of each among the distinct ones.
        heads, pages: [distinct] int64 KV head and logical page.
        batches: the reads.
        started_ns, done_ns: when reading began, and when it was first seen to be over (0: not yet).
        start_took_ns: how long it took to ask for the reads.
        waited_ns: from when to when somebody waited for it.
    """

    layer: int
    states: Sequence[RequestState]
    absent: Absent
    sources: Ints
    staged: Ints
    away: Ints
    inverse: Ints
    heads: Ints
    pages: Ints
    batches: list[PageBatch]
    started_ns: int
    start_took_ns: int = field(default=0, init=False)
    done_ns: int = field(default=0, init=False)
    waited_ns: tuple[int, int] = field(default=(0, 0), init=False)


def _move(
    source: tuple[torch.Tensor, torch.Tensor], rows: Ints, target: tuple[torch.Tensor, torch.Tensor], at: Ints
) -> None:
    """Copy rows of keys and values to rows ``at`` of others."""
    dispatch.fetch_pages(*source, *target, torch.from_numpy(rows), torch.from_numpy(at))


class Fetcher:
    """Fetch for one store, on the scheduler's thread; owns the read engine and what is under way."""

    def __init__(self, store: TieredStore, path: ReadPath, mode: FetchMode, *, warm_up: bool = True) -> None:
        self.store = store
        self.path = path
        self.gap_bytes = GAP_BYTES
        self.mode = mode
        self.warm_up = warm_up and mode in ("hierarchical", "balanced")
        self.stages = mode in ("hierarchical", "balanced")
        self.stalls = np.zeros(store.staging.num_pairs, np.int64)
        self.waited_ns = 0  # for reads on demand
        self.expected_reads = 0.0  # pages that a layer reads on demand, recent layers weighing most
        self.trial = PrefetchTrial()
        self._heads = np.arange(store.geometry.num_kv_heads)[:, None]
        self._num_fetches = 0
        self._rows_short = 0
        self._under_way: dict[int, list[_Prefetch]] = {}  # by layer
        self._num_under_way = 0  # pages
        self._num_started = 0  # fetches whose pages in DRAM were not copied yet
        self._promoted: list[Ints] = []  # rows of staging that they copy
        self._read_in = -1, -1  # step and layer that the next line speaks of
        self._num_read = 0  # pages that its fetches read so far
        self._reading = 0  # counts layers of steps
        self._read_at = np.zeros(  # in which one a page was last read, by KV head * logical pages + page
            store.geometry.num_kv_heads * store.limits.num_pages, np.int64
        )

    @property
    def windows(self) -> WindowCaches:
        assert self.store.windows is not None
        return self.store.windows

    @property
    def num_bytes(self) -> int:
        """Bytes of what is remembered per page."""
        return self._read_at.nbytes

    # ---- on demand ------------------------------------------------------------------------------------------

    def start(self, layer: int, absent: Absent, states: Sequence[RequestState]) -> Fetch:
        """Begin to fetch single pages of single heads: reads of what DRAM has not are under way when this returns.

        Several fetches of one layer may be under way. A page that two of them read from SSD is read twice.

        Args:
            absent: what to fetch.
            states: the requests it speaks of.
        """
        store = self.store
        self._num_started += 1
        store.staging.hold()
        self._collect(layer, block=False)
        if len(states) == 1:
            pages = states[0].pages.numpy()[absent.ordinal]
        else:
            pages = np.stack([state.pages.numpy() for state in states])[absent.request, absent.ordinal]
        sources, staged = self._sources(layer, absent.head, pages)
        away = np.flatnonzero(sources < 0)
        keys = heads = missing = inverse = _NONE
        if len(away):
            heads, missing, inverse = absent.head[away], pages[away], np.arange(len(away))
            keys = heads * store.limits.num_pages + missing
            if len(states) > 1:  # requests with a common prefix lack the same pages
                keys, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
                heads, missing = heads[first], missing[first]
        self._count_reads(layer, keys)
        started_ns = time.perf_counter_ns()
        batches: list[PageBatch] = []
        if len(away) or self.mode == "layerwise":
            batches = self._start(layer, heads, missing, states)
        fetch = Fetch(
            layer, states, absent, sources, staged, away, inverse, heads, missing, batches, started_ns
        )
        fetch.start_took_ns = time.perf_counter_ns() - started_ns
        return fetch

    def finish(
        self, fetch: Fetch, k_out: torch.Tensor, v_out: torch.Tensor, at: Ints, gone: Ints | None = None
    ) -> None:
        """Put what was fetched into rows ``at`` ([page]) of ``k_out`` and ``v_out`` ([row, page_size * head_dim]).

        A page that cannot be had is zeros, and the requests that lack it are failed.

        Args:
            gone: [page] ordinals of the pages whose bytes those rows still hold, ABSENT for none: staging keeps them.
        """
        if self.stages and gone is not None:
            self._keep(fetch, k_out, v_out, at, gone)
        self._copy(fetch, k_out, v_out, at)
        begin_ns = time.perf_counter_ns()
        self._wait(fetch)
        if not len(fetch.away) and not fetch.batches:
            return
        self._place(fetch, k_out, v_out, at)
        if len(fetch.pages):
            took_ns = fetch.start_took_ns + time.perf_counter_ns() - begin_ns
            self.trial.demanded(len(fetch.pages), took_ns)

    def _keep(self, fetch: Fetch, k: torch.Tensor, v: torch.Tensor, at: Ints, gone: Ints) -> None:
        """Stage the pages that leave rows ``at`` of a window cache and would have to come from SSD again."""
        table, states, absent = self.store.table, fetch.states, fetch.absent
        left = np.flatnonzero(gone != ABSENT)
        ordinals = gone[left]
        if len(states) == 1:
            pages = states[0].pages.numpy()[ordinals]
        else:
            pages = np.stack([state.pages.numpy() for state in states])[absent.request[left], ordinals]
        on_ssd = (table.frames[pages] == NOWHERE) & (table.span_of[pages] != NOWHERE) & ~table.lost[pages]
        left, pages = left[on_ssd], pages[on_ssd]
        pairs = self._pairs(fetch.layer, absent.head[left])
        if len(states) > 1:  # requests with a common prefix let the same pages go
            _, first = np.unique(pairs * self.store.limits.num_pages + pages, return_index=True)
            left, pages, pairs = left[first], pages[first], pairs[first]
        self._stage(pairs, pages, k, v, at[left])

    def look(self, fetch: Fetch) -> None:
        """Note the time if every read is over; does not block."""
        if not fetch.done_ns and all(batch.is_done for batch in fetch.batches):
            fetch.done_ns = time.perf_counter_ns()

    def _copy(self, fetch: Fetch, k_out: torch.Tensor, v_out: torch.Tensor, at: Ints) -> None:
        """Put what DRAM has into its rows."""
        frames, sources = self.store.frames, fetch.sources
        if len(fetch.away):
            here = np.flatnonzero(sources >= 0)
            sources, at = sources[here], at[here]
        if len(sources):
            _move((frames.k_all, frames.v_all), sources, (k_out, v_out), at)
        self._num_started -= 1
        if len(fetch.staged):
            self._promoted.append(fetch.staged)
        if not self._num_started:
            self.store.staging.release()
            if self._promoted:
                self.store.staging.demote(np.concatenate(self._promoted))
                self._promoted.clear()

    def _wait(self, fetch: Fetch) -> None:
        begin = time.perf_counter_ns()
        for batch in fetch.batches:
            batch.wait()
        end = time.perf_counter_ns()
        fetch.waited_ns = begin, end
        fetch.done_ns = fetch.done_ns or end
        self.waited_ns += end - begin

    def _place(self, fetch: Fetch, k_out: torch.Tensor, v_out: torch.Tensor, at: Ints) -> None:
        """Check what was read and put it into its rows."""
        store, away, inverse = self.store, fetch.away, fetch.inverse
        lost = store.table.span_of[fetch.pages] == NOWHERE
        for batch in fetch.batches:
            done = batch.finish()
            store.counters.bytes_read += done.bytes_read
            store.counters.reads += done.num_reads
            for failed in done.lost:
                lost[failed.rows[failed.rows >= 0]] = True
                store.lose(failed.span, failed.ordinals.tolist(), failed.error)
            halves = self._halves(done)
            place = np.full(len(fetch.heads), -1, np.int64)
            place[done.rows] = np.arange(len(done.rows))
            brought = np.flatnonzero(place[inverse] >= 0)
            source, into = place[inverse[brought]], at[away[brought]]
            _move((halves[:, 0], halves[:, 1]), source, (k_out, v_out), into)
        if not len(away):
            return
        self._count_stalls(fetch)
        gone = lost[inverse]
        if gone.any():
            nothing = torch.from_numpy(at[away[gone]])
            k_out[nothing] = 0
            v_out[nothing] = 0
        owner = fetch.absent.request[away]
        for number, count in enumerate(np.bincount(owner, minlength=len(fetch.states)).tolist()):
            fetch.states[number].figures.bytes_read += count * store.geometry.page_head_bytes
        store.fail([fetch.states[i] for i in np.unique(owner[gone]).tolist()], LOST)

    def _count_reads(self, layer: int, keys: Ints) -> None:
        """Count what this layer of a step reads, and the pages that an earlier fetch of it read too."""
        now = self.store.clock, layer
        if self._read_in != now:
            self.expected_reads += (self._num_read - self.expected_reads) / 2
            self._read_in, self._num_read = now, 0
            self._reading += 1
        if not len(keys):
            return
        self.store.counters.pages_read_again += int((self._read_at[keys] == self._reading).sum())
        self._read_at[keys] = self._reading
        self._num_read += len(keys)

    def _count_stalls(self, fetch: Fetch) -> None:
        num_heads = self.store.geometry.num_kv_heads
        pairs = self._pairs(fetch.layer, np.arange(num_heads))
        self.stalls[pairs] += np.bincount(fetch.heads, minlength=num_heads)
        if self.stages:
            self._balance()

    def _sources(self, layer: int, heads: Ints, pages: Ints) -> tuple[Ints, Ints]:
        """Return the row of the frame arena that holds each page, negative for none, and which of them are staging's."""
        store = self.store
        table, first_pair = store.table, layer * store.geometry.num_kv_heads
        rows = np.empty(len(pages), dtype=np.int64)
        count = compiled.frame_rows(
            heads, pages, first_pair, store.frames.num_frames, table.frames, table.stamp, store.clock, rows
        )
        if not count:
            return rows, rows[:0]
        away = np.flatnonzero(rows == ABSENT)
        pairs = self._pairs(layer, heads[away])
        found = store.staging.find(pairs, pages[away])
        if (found == IN_FLIGHT).any():
            self._collect(layer, block=True)
            found = store.staging.find(pairs, pages[away])
        rows[away] = found
        staged = found[found >= 0]
        self.trial.used(store.staging.took_guesses(staged))
        return rows, staged

    def _pairs(self, layer: int, heads: Ints) -> Ints:
        pairs: Ints = layer * self.store.geometry.num_kv_heads + heads
        return pairs

    def _start(self, layer: int, heads: Ints, pages: Ints, states: Sequence[RequestState]) -> list[PageBatch]:
        """Begin to read pages ([n] KV head, logical page), which are distinct; rows are their numbers."""
        numbers = np.arange(len(heads))
        if self.mode == "layerwise":
            heads, pages, numbers = self._whole_layer(heads, pages, states)
        here = np.flatnonzero(self.store.table.span_of[pages] != NOWHERE)
        step = max(1, ROUND_BYTES // self.store.geometry.page_head_bytes)
        return [
            self._batch(layer, self._wants(heads[some], pages[some], numbers[some]))
            for some in (here[i : i + step] for i in range(0, len(here), step))
        ]

    def _batch(self, layer: int, wants: Sequence[Wants]) -> PageBatch:
        return PageBatch(self.path, layer, wants, gap_bytes=self.gap_bytes)

    def _whole_layer(
        self, heads: Ints, pages: Ints, states: Sequence[RequestState]
    ) -> tuple[Ints, Ints, Ints]:
        """Ask for every page of the sequences that has no frame; only the missing ones are kept."""
        store, num_heads = self.store, self.store.geometry.num_kv_heads
        every = np.unique(np.concatenate([state.pages[: state.num_pages].numpy() for state in states]))
        every = every[store.table.frames[every] == NOWHERE]
        number_of = np.full((num_heads, store.limits.num_pages), -1, np.int64)
        number_of[heads, pages] = np.arange(len(heads))
        all_heads, all_pages = np.repeat(np.arange(num_heads), len(every)), np.tile(every, num_heads)
        return all_heads, all_pages, number_of[all_heads, all_pages]

    def _wants(self, heads: Ints, pages: Ints, rows: Ints) -> list[Wants]:
        table = self.store.table
        handles = table.span_of[pages]
        order = np.argsort(handles, kind="stable")
        handles, heads, rows = handles[order], heads[order], rows[order]
        ordinals = table.ordinal_of[pages[order]]
        cuts = [0, *(np.flatnonzero(np.diff(handles)) + 1).tolist(), len(order)]
        return [
            Wants(self.store.span_files[int(handles[a])], heads[a:b], ordinals[a:b], rows[a:b])
            for a, b in pairwise(cuts)
            if b > a
        ]

    def _halves(self, pages: Pages) -> torch.Tensor:
        """View what a batch brought as [n, 2, page_size * head_dim]."""
        geometry = self.store.geometry
        signed = torch.from_numpy(pages.data.view(np.int16 if geometry.dtype.itemsize == 2 else np.int32))
        return signed.view(geometry.dtype).view(len(pages.rows), 2, geometry.page_elements)

    def _stage(
        self, pairs: Ints, pages: Ints, k: torch.Tensor, v: torch.Tensor, at: Ints, *, guessed: bool = False
    ) -> None:
        """Keep copies of pages (rows ``at`` of ``k`` and ``v``) as far as there is room; what is kept already stays."""
        store, staging = self.store, self.store.staging
        known = staging.row_of[pairs, pages]
        staging.touch(known[known >= 0])
        new = np.flatnonzero(known < 0)
        pairs, pages, at = pairs[new], pages[new], at[new]
        self._rows_short += max(0, len(pairs) - staging.num_free)
        rows = staging.insert(pairs, pages, guessed=guessed)
        _move((k, v), at[: len(rows)], (store.frames.k_all, store.frames.v_all), rows)

    def grow_staging(self) -> None:
        """Borrow frames for the rows that were short since the last call; between steps alone, when no plan of a step
        counts on a frame."""
        most = max(MOST_LENT, self.store.frames.num_free)
        count = min(-(-self._rows_short // self.store.staging.num_pairs), most)
        self._rows_short = 0
        while count and self.store.lend_frame():
            count -= 1

    def _balance(self) -> None:
        """Give each pair a quota of staging rows by its share of the stalls so far."""
        self._num_fetches += 1
        if self.mode == "balanced" and self._num_fetches % PROFILE_FETCHES == 0:
            share = self.stalls / max(1, int(self.stalls.sum()))
            self.store.staging.quota = (share * RESIDENT_SHARE * self.store.staging.num_rows).astype(np.int64)
            self.stalls //= 2

    # ---- ahead of demand ------------------------------------------------------------------------------------

    def look_ahead(
        self, layer: int, states: Sequence[RequestState], selected: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Begin to read the near-critical pages, ranks K to M, that are on SSD alone (ranks up to K are in the window).

        Args:
            selected: [request, kv_head, K]; scores: [request, kv_head, page].
        """
        if not self.stages or not self.trial.next_fetch():
            return
        begin_ns = time.perf_counter_ns()
        critical = selected.shape[2]
        last = critical + critical // NEAR_SHARE
        slot_of = self.windows.slot_of[layer]
        for state, row in zip(states, scores, strict=True):
            assert state.window is not None
            ranks = dispatch.topk_pages(row, min(last, state.num_pages)).numpy()
            heads, places = (slot_of[state.window.row][self._heads, ranks] == ABSENT).nonzero()
            if len(heads):
                self.prefetch(layer, heads, state.pages.numpy()[ranks[heads, places]], guess=True)
        self.trial.spent_ns += time.perf_counter_ns() - begin_ns

    def prefetch(self, layer: int, heads: Ints, pages: Ints, *, guess: bool = False) -> None:
        """Begin to read pages ([n] KV head, logical page) into staging rows; what DRAM or a prefetch has is left out."""
        store = self.store
        pairs = self._pairs(layer, heads)
        wanted = (store.table.frames[pages] == NOWHERE) & (store.table.span_of[pages] != NOWHERE)
        wanted &= (store.staging.row_of[pairs, pages] == ABSENT) & ~store.table.lost[pages]
        heads, pages, pairs = heads[wanted], pages[wanted], pairs[wanted]
        self._num_under_way += len(heads)
        self._rows_short = max(self._rows_short, self._num_under_way - store.staging.num_free)
        step = max(1, ROUND_BYTES // store.geometry.page_head_bytes)
        for some in (slice(i, i + step) for i in range(0, len(heads), step)):
            wants = self._wants(heads[some], pages[some], np.arange(len(heads[some])))
            spans = [want.span for want in wants]
            with store.spans.lock:
                for span in spans:
                    span.num_attached += 1  # its file stays open until the bytes are here
            store.staging.row_of[pairs[some], pages[some]] = IN_FLIGHT
            batch = self._batch(layer, wants)
            lives = store.table.life[pages[some]].copy()
            self._under_way.setdefault(layer, []).append(
                _Prefetch(batch, spans, pairs[some], pages[some], lives, guess)
            )

    def _collect(self, layer: int, *, block: bool) -> None:
        """Stage what has arrived for a layer; with ``block``, all that is under way for it."""
        waiting = self._under_way.pop(layer, [])
        for prefetch in waiting:
            if block or prefetch.batch.is_done:
                begin_ns = time.perf_counter_ns()
                self._arrive(prefetch)
                if prefetch.guess:
                    self.trial.spent_ns += time.perf_counter_ns() - begin_ns
            else:
                self._under_way.setdefault(layer, []).append(prefetch)

    def _arrive(self, prefetch: _Prefetch) -> None:
        store, staging = self.store, self.store.staging
        done = prefetch.batch.finish()
        self._num_under_way -= len(prefetch.pages)
        store.counters.bytes_read += done.bytes_read
        store.counters.reads += done.num_reads
        store.counters.bytes_prefetched += done.bytes_read
        for span in prefetch.spans:
            store.spans.release(span, 1)
        pairs, pages = prefetch.pairs, prefetch.pages
        current = staging.row_of[pairs, pages] == IN_FLIGHT
        current &= store.table.life[pages] == prefetch.lives
        staging.row_of[pairs[current], pages[current]] = ABSENT
        for gone in done.lost:  # whoever needs it finds out; a guess fails nobody
            current[gone.rows] = False
        kept = current[done.rows]
        rows, halves = done.rows[kept], self._halves(done)
        guess = prefetch.guess
        self._stage(pairs[rows], pages[rows], halves[:, 0], halves[:, 1], np.flatnonzero(kept), guessed=guess)

    def settle(self) -> None:
        """Wait for everything under way."""
        for layer in list(self._under_way):
            self._collect(layer, block=True)

    def warm(self, layer: int, state: RequestState, scores: torch.Tensor, *, from_ssd: bool) -> None:
        """Place pages by the importance that the last prompt queries gave them: window cache first, DRAM next.

        Args:
            scores: [kv_head, page] float32; only full pages.
            from_ssd: also read what DRAM lacks, in the background; otherwise only copy.
        """
        store = self.store
        window, _ = store.device_memory(state)
        most = int(window.caches.num_slots[layer].max())
        ranks = torch.topk(scores, min(2 * most, scores.shape[1]), dim=1).indices.numpy()
        heads, ordinals = window.retain(layer, ranks)
        pages = state.pages.numpy()[ordinals]
        pairs = self._pairs(layer, heads)
        frames = store.table.frames[pages]
        staged = store.staging.row_of[pairs, pages]
        rows = np.where(frames > DUMMY_FRAME, pairs * store.frames.num_frames + frames, staged)
        here = rows >= 0
        into = window.place(layer, heads[here], ordinals[here])
        frames_all = store.frames.k_all, store.frames.v_all
        _move(frames_all, rows[here], (self.windows.k[layer], self.windows.v[layer]), into)
        store.staging.demote(staged[here & (frames == NOWHERE)])
        if from_ssd:
            room = len(store.staging.frames) + store.frames.num_free  # rows that each pair can have
            best = ranks[:, :room]
            heads = np.repeat(np.arange(len(best)), best.shape[1])
            self.prefetch(layer, heads, state.pages.numpy()[best.reshape(-1)])

    def close(self) -> None:
        """Wait for what is under way and free the engine."""
        self.settle()
        self.path.engine.close()
