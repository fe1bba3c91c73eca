"""The tiered store: every page of every request, in DRAM frames, in spans on SSD, or both."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from kv_tier.device_memory import DeviceMemory
from kv_tier.fetch import Fetcher
from kv_tier.frames import DUMMY_FRAME, FrameArena
from kv_tier.geometry import Geometry, bits
from kv_tier.helper_threads import compute_on_one_core
from kv_tier.index import MEANS, DeviceIndex, IndexPlan
from kv_tier.layer_stream import LayerStream
from kv_tier.meta.errors import CapacityError, CorruptExtentError, ExtentIoError
from kv_tier.meta.page_keys import page_keys
from kv_tier.meta.read_engine import ReadPath, aligned_bytes, choose_read_path
from kv_tier.meta.span_file import SpanFile, SpanParts
from kv_tier.modes import DEFAULT_EVICTION, ColdEncoding, EvictionName, FetchMode
from kv_tier.page_table import NOWHERE, PageTable
from kv_tier.pipeline import Pipeline
from kv_tier.request import RequestState
from kv_tier.restore import Costs
from kv_tier.selection import Budget
from kv_tier.spans import SealJob, SpanStore
from kv_tier.staging import Staging
from kv_tier.trace import Trace
from kv_tier.transcode import Transcoder
from kv_tier.window import Window, WindowCaches
from kv_tier.window_profile import WindowProfile

logger = logging.getLogger(__name__)

READ_THREADS = 3
PAGES_PER_CLUSTER = 8
SPILL_PAGES = 128


@dataclass(frozen=True)
class StoreLimits:
    """What the store may use.

    Args:
        num_pages: logical pages SGLang may hand out, the padding page included.
        num_frames: frames in DRAM.
        max_pages_per_request: pages of the longest sequence.
        window_multiple: window cache size as a multiple of the budget.
        max_requests: requests that may run at once.
        num_device_requests: requests whose window caches and indexes the device holds, running or paused; None takes
            ``max_requests``. With fewer than ``max_requests`` the others wait.
        eviction: policy of the window caches.
        window_profile: shares what uniform windows would take among layers and KV heads.
        index: what ranks pages.
    """

    num_pages: int
    num_frames: int
    max_pages_per_request: int
    window_multiple: int
    max_requests: int
    num_device_requests: int | None = None
    eviction: EvictionName = DEFAULT_EVICTION
    window_profile: WindowProfile | None = None
    index: IndexPlan = MEANS

    def window_slots(self, geometry: Geometry, budget_pages: int) -> np.ndarray:
        """Return the pages each window cache of a request holds, [layer, kv_head] int64."""
        if self.window_profile is not None:
            return self.window_profile.slots(self.window_multiple)
        shape = (geometry.num_layers, geometry.num_kv_heads)
        return np.full(shape, budget_pages * self.window_multiple)

    def device_bytes_per_request(self, geometry: Geometry, budget_pages: int) -> int:
        """Return the bytes of window caches and index of one request."""
        slots = self.window_slots(geometry, budget_pages)
        return DeviceMemory.bytes_per_request(
            geometry, slots, self.max_pages_per_request, self.eviction, self.index
        )


@dataclass
class Counters:
    """Count what an operator wants to see; all only grow."""

    bytes_read: int = 0
    bytes_prefetched: int = 0
    reads: int = 0
    pages_lost: int = 0
    pages_attached: int = 0
    pages_sealed: int = 0
    pages_spilled: int = 0
    frames_evicted: int = 0
    window_hits: int = 0
    window_misses: int = 0
    requests_failed: int = 0
    pages_healed: int = 0
    pages_read_again: int = 0


class TieredStore:
    """Own page table, frames, spans and the device memory of the running requests.

    Not thread-safe: the scheduler's thread calls everything but what ``spans`` documents as safe elsewhere.

    Args:
        fetch_mode: how decode steps read from SSD; never changes a number.
        read_path: how the data directory is read, owned from now on; probed when None.
        warm_up: place pages by importance at the end of a prompt.
        pipeline: how decode batches are cut into micro-batches; never changes a number.
        pages_per_cluster: centroids of a stretch are so many times fewer than its pages; they say which pages lie side by
            side in a file, and change no number.
        trace: receives what decode steps do when, owned from now on.
        cold_encoding: what suspended sessions are transcoded to.
    """

    def __init__(
        self,
        geometry: Geometry,
        limits: StoreLimits,
        budget: Budget,
        spans: SpanStore,
        *,
        fetch_mode: FetchMode = "blockwise",
        read_path: ReadPath | None = None,
        warm_up: bool = True,
        pipeline: Pipeline | None = None,
        pages_per_cluster: int = PAGES_PER_CLUSTER,
        trace: Trace | None = None,
        cold_encoding: ColdEncoding = "none",
    ) -> None:
        self.geometry = geometry
        self.limits = limits
        self.budget = budget
        self.spans = spans
        self.pipeline = pipeline or Pipeline()
        self.pages_per_cluster = pages_per_cluster
        self.trace = trace
        self.table = PageTable(geometry, limits.num_pages)
        self.index = limits.index.build(geometry, self.table)
        self.frames = FrameArena(geometry, limits.num_frames)
        self.table.frames[0] = DUMMY_FRAME
        self.span_files: dict[int, SpanFile] = {}
        self.counters = Counters()
        self.costs = Costs()
        self.clock = 0
        self.pinned = np.zeros(limits.num_pages, dtype=bool)
        self.readers = ThreadPoolExecutor(
            READ_THREADS, thread_name_prefix="kvdrive-layers", initializer=compute_on_one_core
        )
        self.staging = Staging(geometry, limits.num_pages, limits.num_frames)
        if read_path is None:
            read_path = choose_read_path(spans.data_dir.spans_fd)
            logger.info("spans are read by %s", read_path.reason)
        self.fetcher = Fetcher(self, read_path, fetch_mode, warm_up=warm_up)
        self.transcoder = Transcoder(self, cold_encoding)
        self._requests: dict[int, RequestState] = {}
        self.device: DeviceMemory | None = None
        if budget.pages is not None:
            self.device = DeviceMemory(
                geometry,
                limits.window_slots(geometry, budget.pages),
                limits.max_pages_per_request,
                limits.num_device_requests or limits.max_requests,
                limits.eviction,
                self.index,
            )

    # ---- requests -------------------------------------------------------------------------------------------

    def request(self, row: int, generation: int) -> RequestState:
        """Return the state of a row of ``req_to_token``, a fresh one if the row has begun another life."""
        state = self._requests.get(row)
        if state is None or state.generation != generation:
            self.end_request(row)
            state = RequestState(row, generation, self.limits.max_pages_per_request)
            self._requests[row] = state
        return state

    def find_request(self, row: int | None, generation: int) -> RequestState | None:
        state = None if row is None else self._requests.get(row)
        return state if state is not None and state.generation == generation else None

    def running_pages(self) -> Iterator[np.ndarray]:
        """Yield the logical pages of every running request."""
        for state in self._requests.values():
            yield state.pages[: state.num_pages].numpy()

    def end_request(self, row: int) -> None:
        """Take back the device memory of a row, if it has any."""
        state = self._requests.pop(row, None)
        if state is not None and self.device is not None:
            self.device.end(state)

    @property
    def windows(self) -> WindowCaches | None:
        return None if self.device is None else self.device.windows

    def device_memory(self, state: RequestState) -> tuple[Window, DeviceIndex]:
        """Return the window caches and the index of a request, lent at its first sparse step."""
        if state.window is None:
            assert self.device is not None
            self.device.lend(state)
        assert state.window is not None and state.index is not None
        return state.window, state.index

    def fail(self, states: Sequence[RequestState], reason: str) -> None:
        """Poison requests: their output of this step is dropped, they end with ``reason``."""
        for state in states:
            if state.failure is None:
                state.failure = reason
                self.counters.requests_failed += 1

    # ---- logical pages --------------------------------------------------------------------------------------

    def release_pages(self, pages: np.ndarray) -> None:
        """End the life of logical pages ([n] int64): SGLang took them back."""
        pages = pages[pages != 0]
        self.fetcher.settle()
        self.staging.forget(pages)
        held = self.table.frames[pages]
        self.frames.free(held[held > DUMMY_FRAME].tolist())
        self._detach(pages)
        self.table.reset(pages)

    def _detach(self, pages: np.ndarray) -> None:
        handles, counts = np.unique(self.table.span_of[pages], return_counts=True)
        self.table.span_of[pages] = NOWHERE
        for handle, count in zip(handles.tolist(), counts.tolist(), strict=True):
            if handle != NOWHERE:
                span = self.span_files[handle]
                self.spans.release(span, count)
                if not (self.table.span_of == handle).any():
                    span.release_tables()
                    del self.span_files[handle]

    def bind(self, pages: np.ndarray, span: SpanFile, ordinals: np.ndarray) -> None:
        """Let pages ([n] int64) point to ``ordinals`` of a span; an earlier binding is given up."""
        self._detach(pages)
        handle = id(span)
        self.span_files[handle] = span
        with self.spans.lock:
            span.num_attached += len(pages)
        self.table.span_of[pages] = handle
        self.table.ordinal_of[pages] = ordinals

    def clear(self) -> None:
        """Forget all pages (SGLang's flush_cache); files stay."""
        self.collect_sealed(wait_s=60.0)
        self.release_pages(np.arange(1, self.limits.num_pages))
        for row in list(self._requests):
            self.end_request(row)
        if self.device is not None:
            self.device.clear()

    def prepare_pages(self, pages: np.ndarray, owners: dict[int, RequestState]) -> None:
        """Give a frame to every page that is about to be written; a page that finds none fails its request."""
        need = pages[(self.table.frames[pages] == NOWHERE)]
        self.pinned[pages] = True
        try:
            if not self.reserve_frames(len(need)):
                room = self.frames.num_free
                for page in need[room:].tolist():
                    self.fail(
                        [owners[page]], "NO_FRAMES: dram_bytes holds no room for this request; retry later"
                    )
                self.table.frames[need[room:]] = DUMMY_FRAME
                self.table.lost[need[room:]] = True
                need = need[:room]
            self.table.frames[need] = self.frames.alloc(len(need))
        finally:
            self.pinned[pages] = False
        self.clock += 1
        self.table.stamp[pages] = self.clock
        self.fetcher.grow_staging()

    def reserve_frames(self, count: int) -> bool:
        """Free frames until ``count`` are there: sealed pages and staged copies leave first, then unsealed pages are
        spilled.

        Returns:
            Whether ``count`` frames are free now. Pages marked ``pinned`` stay.
        """
        self.collect_sealed()
        while not self.free_frames(count):
            if self.spans.num_outstanding:
                self.collect_sealed(wait_s=30.0)
            elif not self._spill():
                return False
        return True

    def free_frames(self, count: int) -> bool:
        """Free frames until ``count`` are there, giving up only what SSD holds too; whether they are."""
        if self.frames.num_free < count:
            self._evict_frames(count - self.frames.num_free)
        while self.frames.num_free < count and self.staging.frames:
            self.frames.free([self.staging.give_back()])
        return self.frames.num_free >= count

    def lend_frame(self) -> bool:
        """Let staging have a frame, of the sealed page that was used least recently if none is free; whether it got one."""
        if self.frames.num_free == 0 and self._evict_frames(1) == 0:
            return False
        self.staging.lend(self.frames.alloc(1)[0])
        return True

    def _evict_frames(self, count: int) -> int:
        table = self.table
        candidates = np.flatnonzero((table.frames > DUMMY_FRAME) & (table.span_of != NOWHERE) & ~self.pinned)
        if len(candidates) > count:
            order = np.argpartition(table.stamp[candidates], count - 1)
            candidates = candidates[order[:count]]
        self.frames.free(table.frames[candidates].tolist())
        table.frames[candidates] = NOWHERE
        self.counters.frames_evicted += len(candidates)
        return len(candidates)

    def _spill(self) -> bool:
        """Write full pages that no span holds to an unlinked file, oldest first; whether there were any."""
        table = self.table
        full = (table.filled == self.geometry.page_size) & (table.frames > DUMMY_FRAME)
        candidates = np.flatnonzero(full & (table.span_of == NOWHERE) & ~table.lost & ~self.pinned)
        if len(candidates) == 0:
            return False
        count = min(SPILL_PAGES, self.geometry.pages_per_stretch)
        pages = candidates[np.argsort(table.stamp[candidates], kind="stable")[:count]]
        tokens = np.zeros((len(pages), self.geometry.page_size), dtype=np.uint32)
        keys = page_keys(tokens.reshape(-1), self.geometry.page_size)  # nobody looks an unlinked span up
        errors_before = self.spans.num_seal_errors
        self.seal(pages, tokens, keys, first_page=0, parent_key=bytes(32), durable=False)
        self.collect_sealed(wait_s=60.0)
        self.counters.pages_spilled += len(pages)
        return self.spans.num_seal_errors == errors_before

    def can_admit(self, num_tokens: int) -> bool:
        """Whether a prefill of ``num_tokens`` more positions finds frames now (frame admission control)."""
        return self.reserve_frames(min(self.geometry.num_pages(num_tokens) + 1, self.frames.num_usable))

    # ---- sealing and attaching ------------------------------------------------------------------------------

    def seal(
        self,
        pages: np.ndarray,
        tokens: np.ndarray,
        keys: Sequence[bytes],
        *,
        first_page: int,
        parent_key: bytes,
        durable: bool,
    ) -> None:
        """Write pages of one stretch to a span in the background; blocks while the writer is behind.

        Args:
            pages: [n] int64 full logical pages, ascending ordinals from ``first_page``.
            tokens: [n, page_size] uint32.
            keys: n page keys of 32 bytes; parent_key: the key of the page before, zeros for none.
            durable: False spills to an unlinked file that dies with the process.
        """
        if self.table.lost[pages].any():
            return
        kv_pages = torch.from_numpy(pages)
        geometry = self.geometry
        means = torch.stack([m.index_select(0, kv_pages).transpose(0, 1) for m in self.table.means])
        num_clusters = max(1, len(pages) // self.pages_per_cluster)
        closed = durable and len(pages) == geometry.pages_per_stretch
        assignment, centroids = self.index.clusters(kv_pages, means, num_clusters, closed=closed)
        order = torch.argsort(assignment, dim=2, stable=True)
        packed = self._pack(pages, order)
        if packed is None:
            return
        parts = SpanParts(
            tokens=tokens,
            keys=list(keys),
            means=bits(means),
            order=order.numpy().astype(np.uint16),
            clusters=assignment.gather(2, order).numpy().astype(np.uint16),
            centroids=bits(centroids.to(geometry.dtype)),
            sketch=self.index.sketch_of(kv_pages),
            sketch_digest=self.limits.index.sketch_digest,
            kv=packed,
        )
        exact = self.table.exact[pages]
        num_exact = len(pages) if exact.all() else int(np.argmin(exact))
        self.spans.submit(
            SealJob(pages, self.table.life[pages].copy(), first_page, num_exact, durable, parent_key, parts)
        )

    def _pack(self, pages: np.ndarray, order: torch.Tensor) -> np.ndarray | None:
        """Copy pages in packing order: [layer, kv_head, place, 2, page_size, head_dim] raw bits; None if some are lost."""
        geometry = self.geometry
        shape = (
            geometry.num_layers,
            geometry.num_kv_heads,
            len(pages),
            2,
            geometry.page_size,
            geometry.head_dim,
        )
        memory = aligned_bytes(len(pages) * geometry.page_bytes)  # it can be written past the page cache
        packed = torch.from_numpy(memory).view(geometry.dtype).view(shape)
        stream = LayerStream(self, [pages])
        first = (torch.arange(geometry.num_kv_heads) * len(pages))[:, None]
        for layer in range(geometry.num_layers):
            rows = (order[layer] + first).view(-1)
            for half, source in enumerate(stream.gather(layer, pages)):
                flat = source.view(-1, geometry.page_elements).index_select(0, rows)
                packed[layer, :, :, half] = flat.view(source.shape)
        return None if stream.lost_pages else bits(packed)

    def collect_sealed(self, wait_s: float = 0.0) -> None:
        """Bind pages to the spans that were finished since the last call."""
        for job in self.spans.finished(wait_s):
            if job.span is None:
                continue
            alive = self.table.life[job.pages] == job.lives
            pages = job.pages[alive]
            if len(pages):
                self.bind(pages, job.span, np.flatnonzero(alive))
            self.spans.release(job.span, 1)  # the job's own hold
            self.counters.pages_sealed += len(pages)

    def attach(self, pages: np.ndarray, keys: Sequence[bytes]) -> bool:
        """Bind logical pages to the spans that hold ``keys``: indexes are read, no KV is.

        Returns:
            False, a miss, when a page is gone or an index does not match its checksum; nothing is bound then.
        """
        places = self.spans.hold(keys)
        if places is None:
            return False
        groups: dict[int, tuple[SpanFile, list[int], list[int]]] = {}
        for page, (span, ordinal) in zip(pages.tolist(), places, strict=True):
            group = groups.setdefault(id(span), (span, [], []))
            group[1].append(page)
            group[2].append(ordinal)
        reads = [
            self.readers.submit(lambda span: (span.read_means(), self.index.read(span)), group[0])
            for group in groups.values()
        ]
        indexes = []
        for (span, _, _), read in zip(groups.values(), reads, strict=True):
            try:
                indexes.append(read.result())
            except (CorruptExtentError, ExtentIoError) as error:
                wait(reads)
                self.spans.quarantine(span, str(error))
                for held, held_pages, _ in groups.values():
                    self.spans.release(held, len(held_pages))
                return False
        for (span, group_pages, ordinals), (index, parts) in zip(groups.values(), indexes, strict=True):
            at = np.array(group_pages)
            into = torch.from_numpy(at)
            means = torch.from_numpy(index.view(np.int16 if index.itemsize == 2 else np.int32))
            means = means.view(self.geometry.dtype)
            if ordinals != list(range(means.shape[2])):
                means = means[:, :, ordinals]
            for layer, table_means in enumerate(self.table.means):
                table_means.index_copy_(0, into, means[layer].transpose(0, 1).contiguous())
            self.index.attach(torch.from_numpy(at), ordinals, parts)
            self.counters.bytes_read += index.nbytes + sum(part.nbytes for part in parts)
            self.bind(at, span, np.array(ordinals))
            self.spans.release(span, len(group_pages))
            self.table.filled[at] = self.geometry.page_size
            self.table.exact[at] = np.array(ordinals) < span.header.num_exact_pages
        self.counters.pages_attached += len(pages)
        self.clock += 1
        self.table.stamp[pages] = self.clock
        return True

    def lose(self, span: SpanFile, ordinals: Sequence[int], reason: object) -> None:
        """Give up pages of a span whose bytes failed: quarantined, counted, recomputed from tokens when next used.

        The rest of the span is read once, so that one retry knows all that is gone. Pages that are in frames are sound
        and no longer depend on the file.
        """
        ordinals = sorted({*ordinals, *(() if span.bad_pages else _unreadable(span, self.fetcher.path))})
        new = self.spans.mark_bad(span, ordinals)
        self.counters.pages_lost += new
        logger.error("%d pages of span %d are lost and will be recomputed: %s", new, span.span_id, reason)
        attached = np.flatnonzero(self.table.span_of == id(span))
        bad = attached[np.isin(self.table.ordinal_of[attached], ordinals)]
        resident = self.table.frames[bad] != NOWHERE
        self.table.lost[bad[~resident]] = True
        self._detach(bad[resident])

    def adopt(self, source: int, target: int) -> None:
        """Let a lost page take over the recomputed bytes of ``source``, which is about to be freed."""
        assert self.table.lost[target] and not self.table.lost[source]
        frame = int(self.table.frames[target])
        if frame > DUMMY_FRAME:
            self.frames.free([frame])
        self._detach(np.array([target]))
        self.staging.forget(np.array([source, target]))
        self.table.move(source, target)
        self.index.move(source, target)
        self.counters.pages_healed += 1

    # ---- figures --------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        geometry = self.geometry
        return {
            "frames_total": self.frames.num_usable,
            "frames_free": self.frames.num_free,
            "pages_lost_now": int(self.table.lost.sum()),
            "frames_staging": len(self.staging.frames),
            "dram_bytes": self.frames.num_frames * geometry.page_bytes
            + self.table.num_bytes
            + self.index.num_bytes
            + self.fetcher.num_bytes
            + self.staging.bytes_for(geometry, self.limits.num_pages, self.limits.num_frames),
            **self._device_gauges(),
            "requests": len(self._requests),
            **self.spans.gauges(),
        }

    def _device_gauges(self) -> dict[str, int]:
        device = self.device
        if device is None:
            return {"device_bytes": 0, "windows_total": 0, "windows_lent": 0, "windows_kept": 0}
        return {
            "device_bytes": device.num_held * device.request_bytes,
            "windows_total": device.num_requests,
            "windows_lent": device.windows.num_lent - device.num_kept,
            "windows_kept": device.num_kept,
        }

    def check_integrity(self) -> None:
        """Assert that frames, page table and attachments agree."""
        self.fetcher.settle()
        self.staging.check_integrity()
        held = self.table.frames[self.table.frames > DUMMY_FRAME]
        self.frames.check_integrity([*held.tolist(), *self.staging.frames])
        handles, counts = np.unique(self.table.span_of[self.table.span_of != NOWHERE], return_counts=True)
        assert set(handles.tolist()) == set(self.span_files), "attached spans and page table disagree"
        for handle, count in zip(handles.tolist(), counts.tolist(), strict=True):
            span = self.span_files[handle]
            most_held = bool(self.spans.num_outstanding) + self.transcoder.is_held(span)
            assert 0 <= span.num_attached - count <= most_held, (handle, span.num_attached, count)
        if self.windows is not None:
            self.windows.check_integrity()

    def close(self) -> None:
        """Let the writer finish and close every file."""
        self.readers.shutdown()
        self.transcoder.close()
        self.fetcher.close()
        self.spans.close()
        self.collect_sealed()
        for span in self.span_files.values():
            span.close()
        if self.trace is not None:
            self.trace.close()


def _unreadable(span: SpanFile, path: ReadPath) -> set[int]:
    """Read a whole span and return the ordinals of the pages that fail."""
    bad: set[int] = set()
    for layer in range(span.header.num_layers):
        try:
            span.read_layer(layer, path=path)
        except (CorruptExtentError, ExtentIoError) as error:
            bad.update(getattr(error, "bad_pages", None) or range(span.header.num_pages))
    return bad


def require_capacity(limits: StoreLimits, geometry: Geometry, chunk_tokens: int) -> None:
    """Refuse frames that cannot hold two prefill chunks and a decode tail per request.

    Raises:
        CapacityError: names the flag and the least value.
    """
    need = 2 * geometry.num_pages(chunk_tokens) + limits.max_requests + 1
    if limits.num_frames < need:
        raise CapacityError(
            f"dram_bytes leaves {limits.num_frames} frames of {geometry.page_bytes} bytes, but two prefill chunks of "
            f"{chunk_tokens} tokens and {limits.max_requests} decode tails need {need}: raise dram_bytes by "
            f"{(need - limits.num_frames) * geometry.page_bytes}, or lower --chunked-prefill-size or "
            f"--max-running-requests"
        )
