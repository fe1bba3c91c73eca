"""Spans on SSD: which pages can be restored, and the background writer that seals new ones."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_tier.geometry import DTYPES, Geometry
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import CapacityError, KVDriveError
from kv_tier.meta.span_file import (
    SpanFile,
    SpanParts,
    quarantine_span,
    scan_spans,
    write_span,
    write_unlinked_span,
)
from kv_tier.meta.span_format import NO_SELECTION, Shape, SpanHeader

logger = logging.getLogger(__name__)

DTYPE_CODES = {DTYPES["bfloat16"]: 1, DTYPES["float16"]: 2, DTYPES["float32"]: 3}


@dataclass(frozen=True)
class Identity:
    """What a span must carry to be read by this engine (contract: fingerprint or nothing).

    Args:
        fingerprint: 32 bytes over model weights, tokenizer, dtype, layout, RoPE scaling and format version.
        selection: 32 bytes over the selection config; only approximate pages carry it.
        tp_rank, tp_size, pp_rank, pp_size: the shard.
    """

    fingerprint: bytes
    selection: bytes
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass
class SealJob:
    """One stretch, or a part of one, on its way to SSD; arrays are owned by the job.

    ``pages``/``lives``: [n] int64 logical pages and the life they were taken in. ``durable`` False spills to an
    unlinked file. ``done``/``span``/``error`` are the result, set by the writer; the job counts as one attached page
    of its span, released by whoever binds the pages.
    """

    pages: np.ndarray
    lives: np.ndarray
    first_page: int
    num_exact: int
    durable: bool
    parent_key: bytes
    parts: SpanParts
    span: SpanFile | None = None
    error: KVDriveError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class SpanStore:
    """Own the span files of one engine: lookup by page key, sealing, dropping, quarantine.

    Reads happen on the caller's thread; writes on one background thread. ``lock`` guards the key map, which the
    control socket reads from its own thread.

    Raises:
        CapacityError, ExtentIoError: from the writer, handed out as ``SealJob.error``, never raised into a caller.
    """

    def __init__(
        self,
        data_dir: DataDir,
        geometry: Geometry,
        identity: Identity,
        *,
        ssd_bytes: int,
        num_outstanding: int = 2,
    ) -> None:
        self.data_dir = data_dir
        self.geometry = geometry
        self.identity = identity
        self.ssd_bytes = ssd_bytes
        self.lock = threading.RLock()
        self.sealed = threading.Condition(self.lock)
        self.spans: dict[int, SpanFile] = {}
        self.places: dict[bytes, list[tuple[SpanFile, int]]] = {}
        self.used_bytes = 0
        self.num_foreign = 0
        self.num_quarantined = 0
        self.num_seal_errors = 0
        self.bytes_written = 0
        self._next_id = 1
        self._jobs: queue.Queue[SealJob | None] = queue.Queue(maxsize=num_outstanding)
        self._finished: queue.SimpleQueue[SealJob] = queue.SimpleQueue()
        self._num_outstanding = 0
        self._scan()
        self._writer = threading.Thread(target=self._write_jobs, name="kvdrive-sealer", daemon=True)
        self._writer.start()

    # ---- what can be restored -------------------------------------------------------------------------------

    def _scan(self) -> None:
        found, bad = scan_spans(self.data_dir)
        self.num_quarantined += len(bad)
        for span in sorted(found, key=lambda s: s.header.sequence):
            self._next_id = max(self._next_id, span.span_id + 1)
            self.used_bytes += span.header.file_bytes
            if self._is_foreign(span.header):
                self.num_foreign += 1
                span.close()
            else:
                self._publish(span)
        if self.num_foreign:
            logger.warning(
                "%d spans in %s come from another model, layout or format and are ignored; move them away or delete "
                "them to free their space",
                self.num_foreign,
                self.data_dir.path,
            )

    def _is_foreign(self, header: SpanHeader) -> bool:
        mine, geometry = self.identity, self.geometry
        shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.page_size)
        shard = (mine.tp_rank, mine.tp_size, mine.pp_rank, mine.pp_size)
        return (
            header.fingerprint != mine.fingerprint
            or (header.num_layers, header.num_kv_heads, header.head_dim, header.page_size) != shape
            or (header.tp_rank, header.tp_size, header.pp_rank, header.pp_size) != shard
            or header.stretch_tokens != geometry.stretch_tokens
            or header.dtype_code != DTYPE_CODES[geometry.dtype]
        )

    def _num_servable(self, header: SpanHeader) -> int:
        """Exact pages serve every config, approximate ones only the config that wrote them."""
        same = header.selection in (NO_SELECTION, self.identity.selection)
        return header.num_pages if same else header.num_exact_pages

    def _publish(self, span: SpanFile) -> None:
        """Make a span's pages restorable and retire the spans it supersedes."""
        with self.lock:
            superseded = self._superseded_by(span)
            self.spans[span.span_id] = span
            for ordinal, key in enumerate(span.keys[: self._num_servable(span.header)]):
                self.places.setdefault(key, []).append((span, ordinal))
            for old in superseded:
                self._retire(old)
            self.sealed.notify_all()

    def _superseded_by(self, span: SpanFile) -> list[SpanFile]:
        """Return earlier spans of the same stretch and chain: their keys are a prefix of the new one's."""
        older = {place[0].span_id: place[0] for place in self.places.get(span.keys[0], [])}
        return [
            s
            for s in older.values()
            if s.header.first_page == span.header.first_page
            and len(s.keys) <= len(span.keys)
            and s.keys == span.keys[: len(s.keys)]
            and s.header.num_exact_pages <= span.header.num_exact_pages
        ]

    def _retire(self, span: SpanFile) -> None:
        """Forget a span and unlink its file; attached pages read on through its open descriptor."""
        self._forget(span)
        try:
            span.unlink()
        finally:
            self.release(span, 0)

    def _forget(self, span: SpanFile) -> None:
        del self.spans[span.span_id]
        span.retired = True
        for key in span.keys:
            left = [place for place in self.places.get(key, []) if place[0] is not span]
            if left:
                self.places[key] = left
            else:
                self.places.pop(key, None)

    def release(self, span: SpanFile, count: int) -> None:
        """Take ``count`` attached pages off a span; a retired one without any is closed and its space is free."""
        with self.lock:
            span.num_attached -= count
            assert span.num_attached >= 0, (span.span_id, span.num_attached)
            if span.retired and span.num_attached == 0 and span.fd >= 0:
                span.close()
                self.used_bytes -= span.header.file_bytes

    def locate(self, key: bytes) -> tuple[SpanFile, int] | None:
        """Return the newest sound place of a page, or None: a miss."""
        for span, ordinal in reversed(self.places.get(key, [])):
            if ordinal not in span.bad_pages:
                return span, ordinal
        return None

    def hold(self, keys: Sequence[bytes]) -> list[tuple[SpanFile, int]] | None:
        """Locate all of ``keys`` and count each as attached, so that no file goes away; None when one is missing."""
        with self.lock:
            places = [self.locate(key) for key in keys]
            found = [place for place in places if place is not None]
            if len(found) < len(places):
                return None
            for span, _ in found:
                span.num_attached += 1
            return found

    def num_restorable(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of ``keys`` that can be restored."""
        with self.lock:
            for count, key in enumerate(keys):
                if self.locate(key) is None:
                    return count
        return len(keys)

    def wait_sealed(self, keys: Sequence[bytes], wait_s: float) -> int:
        """Wait until all of ``keys`` are durable, at most ``wait_s`` seconds; return the leading run that is."""

        def all_there() -> bool:
            return all(self.locate(key) is not None for key in keys)

        with self.sealed:
            self.sealed.wait_for(all_there, timeout=wait_s)
        return self.num_restorable(keys)

    def mark_bad(self, span: SpanFile, ordinals: Iterable[int]) -> int:
        """Quarantine single pages of a span: they are never served again. Returns how many are new."""
        with self.lock:
            new = set(ordinals) - span.bad_pages
            span.bad_pages |= new
            self.num_quarantined += len(new)
        return len(new)

    def quarantine(self, span: SpanFile, reason: str) -> None:
        """Take a whole span out of service and set its file aside: its index did not match its checksums."""
        with self.lock:
            if span.span_id not in self.spans:
                return
            self.num_quarantined += 1
            self._forget(span)
            moved = quarantine_span(self.data_dir, span, reason)
            self.release(span, 0)
        logger.error("span %d is in quarantine, its pages are recomputed: %s", span.span_id, moved.reason)

    def drop(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Delete the spans all of whose pages are in ``keys``; returns (spans, bytes)."""
        wanted = set(keys)
        with self.lock:
            touched = {place[0].span_id: place[0] for key in wanted for place in self.places.get(key, [])}
            doomed = [span for span in touched.values() if wanted.issuperset(span.keys)]
            for span in doomed:
                self._retire(span)
        return len(doomed), sum(span.header.file_bytes for span in doomed)

    def usage(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return (spans, bytes) of the files that hold any of ``keys``."""
        with self.lock:
            touched = {place[0].span_id: place[0] for key in keys for place in self.places.get(key, [])}
        return len(touched), sum(span.header.file_bytes for span in touched.values())

    # ---- sealing --------------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        return self._num_outstanding

    def submit(self, job: SealJob) -> None:
        """Queue a job; blocks while the writer is behind, so that memory does not grow (back-pressure)."""
        self._num_outstanding += 1
        self._jobs.put(job)

    def finished(self, wait_s: float = 0.0) -> list[SealJob]:
        """Return the jobs that ended since the last call; waits for the first one if asked and any is under way."""
        jobs: list[SealJob] = []
        while self._num_outstanding:
            try:
                jobs.append(self._finished.get(block=not jobs and wait_s > 0, timeout=wait_s or None))
            except queue.Empty:
                break
            self._num_outstanding -= 1
        return jobs

    def _write_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.span = self._write(job)
                self.bytes_written += job.span.header.file_bytes
            except KVDriveError as error:
                self.num_seal_errors += 1
                logger.error("sealing %d pages failed, they stay in DRAM: %s", len(job.pages), error)
                job.error = error
            job.done.set()
            self._finished.put(job)

    def _header(self, job: SealJob) -> SpanHeader:
        geometry, mine = self.geometry, self.identity
        shape = Shape(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            page_size=geometry.page_size,
            stretch_tokens=geometry.stretch_tokens,
            dtype_code=DTYPE_CODES[geometry.dtype],
        )
        with self.lock:
            sequence = self._next_id
            self._next_id += 1
        return SpanHeader.plan(
            shape,
            fingerprint=mine.fingerprint,
            selection=NO_SELECTION if job.num_exact == len(job.pages) else mine.selection,
            parent_key=job.parent_key,
            tp_rank=mine.tp_rank,
            tp_size=mine.tp_size,
            pp_rank=mine.pp_rank,
            pp_size=mine.pp_size,
            first_page=job.first_page,
            num_pages=len(job.pages),
            num_exact_pages=job.num_exact,
            sequence=sequence,
            num_clusters=job.parts.num_clusters,
        )

    def _write(self, job: SealJob) -> SpanFile:
        header = self._header(job)
        self._reserve(header.file_bytes)
        if job.durable:
            span = write_span(self.data_dir, header.sequence, header, job.parts)
        else:
            span = write_unlinked_span(self.data_dir, header, job.parts)
            span.retired = True  # offered to nobody
        span.num_attached = 1  # the job itself, until its pages are bound
        with self.lock:
            self.used_bytes += header.file_bytes
        if job.durable:
            self._publish(span)
        return span

    def _reserve(self, num_bytes: int) -> None:
        """Make room under ``ssd_bytes``: unattached spans leave, least recently written first.

        Raises:
            CapacityError: too little can leave; then nothing does.
        """
        with self.lock:
            idle = [span for span in self.spans.values() if span.num_attached == 0]
            idle_bytes = sum(span.header.file_bytes for span in idle)
            if self.used_bytes - idle_bytes + num_bytes > self.ssd_bytes:
                raise CapacityError(
                    f"a span of {num_bytes} bytes does not fit: ssd_bytes={self.ssd_bytes}, in use {self.used_bytes}, "
                    f"of which {idle_bytes} could leave; raise ssd_bytes or delete sessions"
                )
            for span in sorted(idle, key=lambda s: s.header.sequence):
                if self.used_bytes + num_bytes <= self.ssd_bytes:
                    return
                self._retire(span)

    def close(self) -> None:
        """Finish the queued jobs, stop the writer and close every file."""
        self._jobs.put(None)
        self._writer.join()
        with self.lock:
            for span in self.spans.values():
                span.close()

    def gauges(self) -> dict[str, int]:
        with self.lock:
            return {
                "spans": len(self.spans),
                "ssd_used_bytes": self.used_bytes,
                "foreign_spans": self.num_foreign,
                "seal_jobs_outstanding": self._num_outstanding,
            }


def raise_descriptor_limit() -> None:
    """Let the process keep one descriptor per span open: soft limit to the hard one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
