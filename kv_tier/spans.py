"""Spans on SSD: which pages can be restored, and the background writer that seals new ones."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_tier.geometry import DTYPES, Geometry
from kv_tier.helper_threads import compute_on_one_core
from kv_tier.meta.data_dir import DataDir, claimed_id, span_name, temporary_name
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.errors import CapacityError, ConfigError, ExtentIoError, KVDriveError
from kv_tier.meta.file_system import REAL, FileSystem
from kv_tier.meta.kv_codec import KvEncoding
from kv_tier.meta.span_file import (
    SpanFile,
    SpanParts,
    quarantine_span,
    scan_spans,
    supersedes,
    write_span,
    write_unlinked_span,
)
from kv_tier.meta.span_format import NO_SELECTION, NO_SKETCH, Shape, SpanHeader

logger = logging.getLogger(__name__)

KINDS = ("live", "foreign", "quarantine", "undeleted", "leftover", "retired", "spilled", "writing")
"""What ``SpanStore.bytes_of`` counts. The files of the last three have no name, or are not whole yet."""

TOUCH_EVERY_NS = 60 * 10**9
"""How old the use that a file's modification time tells may be before the next use is written there."""

DTYPE_CODES = {DTYPES["bfloat16"]: 1, DTYPES["float16"]: 2, DTYPES["float32"]: 3}


@dataclass(frozen=True)
class Identity:
    """What a span must carry to be read by this engine (contract: fingerprint or nothing).

    Args:
        fingerprint: 32 bytes over model weights, tokenizer, dtype, layout, RoPE scaling and format version.
        selection: 32 bytes over the selection config; only approximate pages carry it.
        sketch: 32 bytes, what the sketch of a span must have been made with; zeros need none.
        tp_rank, tp_size, pp_rank, pp_size: the shard.
    """

    fingerprint: bytes
    selection: bytes
    sketch: bytes = NO_SKETCH
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(eq=False)
class SealJob:
    """One stretch, or a part of one, on its way to SSD; arrays are owned by the job.

    ``pages``/``lives``: [n] int64 logical pages and the life they were taken in. ``durable`` False spills to an
    unlinked file. ``parts`` are let go once they are written. ``doomed``: its pages were dropped meanwhile. ``done``/``span``/
    ``error`` are the result, set by the writer; the job counts as one attached page of its span, released by whoever binds
    the pages.
    """

    pages: np.ndarray
    lives: np.ndarray
    first_page: int
    num_exact: int
    durable: bool
    parent_key: bytes
    parts: SpanParts | None
    doomed: bool = False
    span: SpanFile | None = None
    error: KVDriveError | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class SpaceLimits:
    """Say how many bytes ``spans/`` and ``quarantine/`` may hold.

    Args:
        ssd_bytes: never more than this, the file being written included.
        high_watermark, low_watermark: fractions of it; a write that would pass the high one first evicts idle spans down to
            the low one.
    """

    ssd_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                f"ssd_low_watermark={self.low_watermark}, ssd_high_watermark={self.high_watermark}: must be above 0, at most "
                "1, and the low one not above the high one"
            )

    @property
    def high_bytes(self) -> int:
        return int(self.ssd_bytes * self.high_watermark)

    @property
    def low_bytes(self) -> int:
        return int(self.ssd_bytes * self.low_watermark)


@dataclass(frozen=True)
class Usage:
    """Say what the files that hold some pages are made of; ``kv + other_kv + index`` is the files' size.

    ``kv_bytes``: those pages' KV. ``other_kv_bytes``: KV of other pages in the same files. ``index_bytes``: headers, tokens,
    keys, means, centroids, packing order, checksums and padding.
    """

    num_spans: int
    kv_bytes: int
    other_kv_bytes: int
    index_bytes: int

    @property
    def ssd_bytes(self) -> int:
        return self.kv_bytes + self.other_kv_bytes + self.index_bytes


class SpanStore:
    """Own the span files of one engine: lookup by page key, sealing, dropping, quarantine, space.

    Reads happen on the caller's thread; writes on one background thread. ``lock`` guards the key map, which the
    control socket reads from its own thread.

    ``bytes_of`` accounts for every byte of the two directories, by kind, and adds up to ``used_bytes``:

        live         spans that can be restored           foreign     spans of other engines, files that are no spans
        retired      unlinked, still attached             quarantine  damaged files, kept until their room is needed
        spilled      unlinked files of unsealed pages     undeleted   whose removal failed; it is tried again
        writing      reserved for the file being written  leftover    of writes that failed; removal is tried again

    Spans leave in the order of their last use: an attach, or the release of the last attached page. A file's modification
    time carries it over a restart, at most ``TOUCH_EVERY_NS`` old, unsynced.

    Args:
        ssd_bytes: a number of bytes, or limits with watermarks.
        keyring: encrypts what is written; without it encrypted spans are foreign, with it plain ones are read.
        clock_ns: nanoseconds since the epoch.

    Raises:
        CapacityError, ExtentIoError: from the writer, handed out as ``SealJob.error``, never raised into a caller.
    """

    def __init__(
        self,
        data_dir: DataDir,
        geometry: Geometry,
        identity: Identity,
        *,
        ssd_bytes: int | SpaceLimits,
        num_outstanding: int = 2,
        keyring: Keyring | None = None,
        fs: FileSystem = REAL,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.data_dir = data_dir
        self.geometry = geometry
        self.identity = identity
        self.limits = ssd_bytes if isinstance(ssd_bytes, SpaceLimits) else SpaceLimits(ssd_bytes)
        self.keyring = keyring
        self.fs = fs
        self.clock_ns = clock_ns
        self.lock = threading.RLock()
        self.sealed = threading.Condition(self.lock)
        self.spans: dict[int, SpanFile] = {}
        self.places: dict[bytes, list[tuple[SpanFile, int]]] = {}
        self.pinned_keys: set[bytes] = set()
        self.bytes_of: Counter[str] = Counter()
        self.last_used_ns: dict[int, int] = {}
        self.num_foreign = 0
        self.num_unindexed = 0
        self.num_quarantined = 0
        self.num_seal_errors = 0
        self.num_remove_errors = 0
        self.num_evicted = 0
        self.num_transcoded = 0
        self.bytes_written = 0
        self.bytes_spilled = 0
        self.pages_written = 0
        self.pages_rewritten = 0
        self._kinds: dict[SpanFile, str] = {}
        self._touched_ns: dict[int, int] = {}
        self._undeleted: list[SpanFile] = []
        self._leftovers: dict[str, int] = {}
        self._next_id = 1
        self._jobs: queue.Queue[SealJob | None] = queue.Queue(maxsize=num_outstanding)
        self._finished: queue.SimpleQueue[SealJob] = queue.SimpleQueue()
        self._num_outstanding = 0
        self._unwritten: list[SealJob] = []
        self._scan()
        self._writer = threading.Thread(target=self._write_jobs, name="kvdrive-sealer", daemon=True)
        self._writer.start()

    @property
    def used_bytes(self) -> int:
        return self.bytes_of.total()

    # ---- what can be restored -------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Find what earlier engines left. Reads every span's header and index, about 1% of the bytes; no KV."""
        found, bad = scan_spans(self.data_dir, keyring=self.keyring, fs=self.fs)
        self.num_quarantined += sum(file.quarantined for file in bad)
        for file in bad:
            logger.warning("%s cannot be used: %s", file.name, file.reason)
            if not file.quarantined:
                self.num_foreign += claimed_id(file.name) > 0
                self.bytes_of["foreign"] += self._size_of(file.name, self.data_dir.spans_fd)
        self._count_quarantine()
        names = [*self.fs.names(self.data_dir.spans_fd), *self.fs.names(self.data_dir.quarantine_fd)]
        self._next_id = 1 + max(
            map(claimed_id, names), default=0
        )  # whatever the file is, nobody overwrites it
        for span in sorted(found, key=lambda s: s.header.sequence):
            if self._is_foreign(span.header) or span.is_closed:
                self.num_foreign += 1
                self.bytes_of["foreign"] += span.header.file_bytes
                span.close()
            else:
                self.last_used_ns[span.span_id] = self._touched_ns[span.span_id] = self.fs.modified_ns(
                    span.fd
                )
                if self.identity.sketch not in (NO_SKETCH, span.sketch_digest):
                    self.num_unindexed += 1
                    span.bad_pages.update(range(span.header.num_pages))
                self._publish(span)
        if self.num_unindexed:
            logger.warning(
                "%d spans in %s hold no sketch of this model's constants, which index=sketch needs: their pages are computed "
                "again when they are next used",
                self.num_unindexed,
                self.data_dir.path,
            )
        if self.num_foreign:
            logger.warning(
                "%d spans in %s come from another model, layout, format or key and are ignored; move them away or delete "
                "them to free their space",
                self.num_foreign,
                self.data_dir.path,
            )

    def _size_of(self, name: str, dir_fd: int) -> int:
        try:
            return self.fs.size_of(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return 0

    def _count_quarantine(self) -> None:
        fd = self.data_dir.quarantine_fd
        self.bytes_of["quarantine"] = sum(self._size_of(name, fd) for name in self.fs.names(fd))

    def _account(self, span: SpanFile, kind: str | None) -> None:
        """Move a span's bytes to another kind; None takes them off."""
        if (old := self._kinds.pop(span, None)) is not None:
            self.bytes_of[old] -= span.header.file_bytes
        if kind is not None:
            self._kinds[span] = kind
            self.bytes_of[kind] += span.header.file_bytes

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
            self._account(span, "live")
            for ordinal, key in enumerate(span.keys[: self._num_servable(span.header)]):
                self.places.setdefault(key, []).append((span, ordinal))
            for old in superseded:
                self.pages_rewritten += old.header.num_pages
                self._retire(old)
            self.sealed.notify_all()

    def _superseded_by(self, span: SpanFile) -> list[SpanFile]:
        """Return earlier spans of the same stretch and chain: their keys are a prefix of the new one's."""
        if span.header.encoding != KvEncoding.RAW and not self._num_servable(span.header):
            return []  # of another configuration, which this engine does not read
        older = {place[0].span_id: place[0] for place in self.places.get(span.keys[0], [])}
        return [s for s in older.values() if supersedes(span.header, span.keys, s.header, s.keys)]

    def _retire(self, span: SpanFile) -> None:
        """Forget a span and unlink its file; attached pages read on through its open descriptor."""
        self._forget(span)
        self._unlink(span)

    def _unlink(self, span: SpanFile) -> None:
        span.retired = True
        self._account(span, "undeleted")
        self._undeleted.append(span)
        self._remove(span)
        self.release(span, 0)

    def _remove(self, span: SpanFile) -> None:
        """Unlink a retired span; where that fails, its bytes stay counted and the next write tries again."""
        try:
            span.unlink()
        except ExtentIoError as error:
            self.num_remove_errors += 1
            logger.error("a span cannot be removed, its space stays in use: %s", error)
            return
        self._undeleted.remove(span)
        self._account(span, "retired" if span.fd >= 0 else None)

    def _forget(self, span: SpanFile) -> None:
        del self.spans[span.span_id]
        self.last_used_ns.pop(span.span_id, None)
        self._touched_ns.pop(span.span_id, None)
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
            if span.num_attached:
                return
            if not span.retired:
                self._use(span)
            elif span.fd >= 0:
                span.close()
                if self._kinds.get(span) != "undeleted":
                    self._account(span, None)

    def _use(self, span: SpanFile) -> None:
        """Note that a span is in use now; the file remembers it, but for the last minute."""
        now = self.clock_ns()
        self.last_used_ns[span.span_id] = now
        if now - self._touched_ns.get(span.span_id, 0) >= TOUCH_EVERY_NS:
            self._touched_ns[span.span_id] = now
            with contextlib.suppress(OSError):  # the order is approximate; a disk that fails shows elsewhere
                self.fs.set_modified_ns(span.fd, now)

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
            for span in {span for span, _ in found}:
                self._use(span)
            return found

    def num_restorable(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of ``keys`` that can be restored."""
        return len(self.restorable(keys))

    def restorable(self, keys: Sequence[bytes]) -> list[tuple[SpanFile, int]]:
        """Return span and ordinal of the leading run of ``keys`` that can be restored."""
        places: list[tuple[SpanFile, int]] = []
        with self.lock:
            for key in keys:
                place = self.locate(key)
                if place is None:
                    break
                places.append(place)
        return places

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
            moved = quarantine_span(self.data_dir, span, reason, fs=self.fs)
            self._account(span, None)
            self.bytes_of["quarantine" if moved.quarantined else "foreign"] += span.header.file_bytes
            self.release(span, 0)
        logger.error("span %d is in quarantine, its pages are recomputed: %s", span.span_id, moved.reason)

    def drop(self, keys: Sequence[bytes], unowned: Sequence[bytes] = ()) -> tuple[int, int]:
        """Delete the spans all of whose pages are in ``keys``, or whose first page that is not is in ``unowned``.

        A page that nobody owns has no owned page behind it, because a key covers everything before it.

        Returns:
            (spans, bytes)
        """
        wanted, free = set(keys), set(unowned)

        def is_free(pages: Sequence[bytes]) -> bool:
            first = next((key for key in pages if key not in wanted), None)
            return first is None or first in free

        with self.lock:
            doomed = [span for span in self._touched_by([*keys, *unowned]) if is_free(span.keys)]
            for span in doomed:
                self._retire(span)
            for job in self._unwritten:  # gone as soon as it is there
                if job.parts is not None and is_free(job.parts.keys):
                    job.doomed = True
        return len(doomed), sum(span.header.file_bytes for span in doomed)

    def left_beside(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Find pages that ``drop(keys)`` leaves in files of these pages, or behind them: nobody may own them any more.

        Returns:
            For each such file its first page that is not in ``keys``: (ordinal in the sequence, page key).
        """
        wanted = set(keys)
        with self.lock:
            found = {span.span_id: span for span in self._touched_by(keys)}
            chain = wanted.union(*(span.keys for span in found.values() if span.keys[0] in wanted))
            for span in sorted(self.spans.values(), key=lambda s: s.header.first_page):
                if span.header.parent_key in chain:
                    found[span.span_id] = span
                    chain.update(span.keys)
        left = []
        for span in found.values():
            ordinal = next((n for n, key in enumerate(span.keys) if key not in wanted), None)
            if ordinal is not None:
                left.append((span.header.first_page + ordinal, span.keys[ordinal]))
        return left

    def _touched_by(self, keys: Iterable[bytes]) -> list[SpanFile]:
        """Return the spans that hold any of ``keys``; those that this configuration cannot serve, if they begin with one."""
        wanted = set(keys)
        spans = {place[0].span_id: place[0] for key in wanted for place in self.places.get(key, [])}
        spans |= {span.span_id: span for span in self.spans.values() if span.keys[0] in wanted}
        return list(spans.values())

    def pin(self, keys: Iterable[bytes], *, pinned: bool = True) -> None:
        """Keep the files that hold any of ``keys`` from being evicted, or stop to; lasts as long as this object."""
        with self.lock:
            if pinned:
                self.pinned_keys.update(keys)
            else:
                self.pinned_keys.difference_update(keys)

    def usage(self, keys: Sequence[bytes]) -> Usage:
        """Measure the files that hold any of ``keys``, each once."""
        wanted = set(keys)
        with self.lock:
            touched = self._touched_by(wanted)
        own_bytes = kv_bytes = 0
        for span in touched:
            kv_bytes += span.header.kv_bytes
            own_bytes += span.header.kv_bytes // span.header.num_pages * len(wanted.intersection(span.keys))
        file_bytes = sum(span.header.file_bytes for span in touched)
        return Usage(len(touched), own_bytes, kv_bytes - own_bytes, file_bytes - kv_bytes)

    # ---- sealing --------------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        return self._num_outstanding

    def submit(self, job: SealJob) -> None:
        """Queue a job; blocks while the writer is behind, so that memory does not grow (back-pressure)."""
        self._num_outstanding += 1
        if job.durable:
            with self.lock:
                self._unwritten.append(job)
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
        compute_on_one_core()
        while (job := self._jobs.get()) is not None:
            try:
                job.span = self._write(job)
            except Exception as error:  # whatever the world does, the next job must find a writer
                known = isinstance(error, KVDriveError)
                self.num_seal_errors += 1
                logger.error(
                    "sealing %d pages failed, they stay in DRAM: %s",
                    len(job.pages),
                    error,
                    exc_info=not known,
                )
                job.error = error if isinstance(error, KVDriveError) else ExtentIoError(repr(error))
            with self.lock:
                if job in self._unwritten:
                    self._unwritten.remove(job)
                job.parts = None
            job.done.set()
            self._finished.put(job)

    def _take_id(self) -> int:
        with self.lock:
            self._next_id += 1
            return self._next_id - 1

    def _header(self, job: SealJob) -> SpanHeader:
        assert job.parts is not None
        geometry, mine = self.geometry, self.identity
        shape = Shape(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            page_size=geometry.page_size,
            stretch_tokens=geometry.stretch_tokens,
            dtype_code=DTYPE_CODES[geometry.dtype],
        )
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
            sequence=self._take_id(),
            num_clusters=job.parts.num_clusters,
            sketch_bytes=job.parts.sketch_bytes,
        )

    def _write(self, job: SealJob) -> SpanFile:
        header = self._header(job)
        assert job.parts is not None
        span = self._write_file(header, job.parts, durable=job.durable)
        span.num_attached = 1  # the job itself, until its pages are bound
        with self.lock:
            if job.durable:
                self.bytes_written += header.file_bytes
                self.pages_written += header.num_pages
                self.last_used_ns[span.span_id] = self._touched_ns[span.span_id] = self.clock_ns()
                self._publish(span)
                self._unwritten.remove(job)
                if job.doomed:
                    self._retire(span)
            else:
                self.bytes_spilled += header.file_bytes
                span.retired = True  # offered to nobody
                self._account(span, "spilled")
        return span

    def _write_file(self, header: SpanHeader, parts: SpanParts, *, durable: bool) -> SpanFile:
        """Make room and write a file; it is offered to nobody and counts as being written until it is published."""
        key = None if self.keyring is None else self.keyring.new_key(header.sequence)
        header = dataclasses.replace(header, encrypted=key is not None)
        self._reserve(header.file_bytes)
        span: SpanFile | None = None
        try:
            if durable:
                span = write_span(self.data_dir, header.sequence, header, parts, key=key, fs=self.fs)
            else:
                span = write_unlinked_span(self.data_dir, header, parts, key=key, fs=self.fs)
            return span
        finally:
            with self.lock:
                self.bytes_of["writing"] -= header.file_bytes
                if span is not None:
                    self._account(span, "writing")
                else:
                    for name in (temporary_name(header.sequence), span_name(header.sequence)):
                        self._leftovers[name] = 0  # the writer removed it, if the disk let it

    def _reserve(self, num_bytes: int) -> None:
        """Make room under ``ssd_bytes`` and take it: quarantined files go first, then idle spans by their last use.

        Raises:
            CapacityError: too little can leave; then nothing does. Or what should have left could not be removed.
        """
        limits = self.limits
        with self.lock:
            self._retry_removals()
            if self.used_bytes + num_bytes > limits.high_bytes:
                self._require_room(num_bytes)
                self._make_room(limits.low_bytes - num_bytes)
            if self.used_bytes + num_bytes > limits.ssd_bytes:
                raise CapacityError(
                    f"a span of {num_bytes} bytes does not fit: ssd_bytes={limits.ssd_bytes}, in use {self.used_bytes} after "
                    f"removals, {self.num_remove_errors} of which failed; look at the disk"
                )
            self.bytes_of["writing"] += num_bytes

    def _require_room(self, num_bytes: int) -> None:
        idle_bytes = sum(span.header.file_bytes for span in self.spans.values() if self._is_idle(span))
        idle_bytes += self.bytes_of["quarantine"]
        if self.used_bytes - idle_bytes + num_bytes > self.limits.ssd_bytes:
            raise CapacityError(
                f"a span of {num_bytes} bytes does not fit: ssd_bytes={self.limits.ssd_bytes}, in use {self.used_bytes}, "
                f"of which {idle_bytes} could leave; raise ssd_bytes or delete sessions"
            )

    def _make_room(self, target_bytes: int) -> None:
        """Let files go until at most ``target_bytes`` are in use, or nothing more may go."""
        if self.used_bytes > target_bytes and self.bytes_of["quarantine"]:
            self._empty_quarantine()
        for span_id in sorted(self.spans, key=lambda s: (self.last_used_ns[s], s)):
            if self.used_bytes <= target_bytes:
                return
            span = self.spans[span_id]
            if self._is_idle(span):
                self._retire(span)
                self.num_evicted += 1
                if span in self._undeleted:
                    return  # a disk that removes nothing: the others stay in service

    def _is_idle(self, span: SpanFile) -> bool:
        pinned = bool(self.pinned_keys) and not self.pinned_keys.isdisjoint(span.keys)
        return span.num_attached == 0 and not pinned

    def _empty_quarantine(self) -> None:
        fd = self.data_dir.quarantine_fd
        for name in self.fs.names(fd):
            try:
                self.fs.unlink(name, dir_fd=fd)
            except OSError as error:
                self.num_remove_errors += 1
                logger.error("quarantine/%s cannot be removed: %s", name, error.strerror)
        self._count_quarantine()

    def _retry_removals(self) -> None:
        """Remove what could not be removed before: retired spans, and files of writes that failed."""
        for span in list(self._undeleted):
            self._remove(span)
        for name in list(self._leftovers):
            with contextlib.suppress(OSError):
                self.fs.unlink(name, dir_fd=self.data_dir.spans_fd)
            with contextlib.suppress(OSError):  # a disk that does not say leaves the last answer
                self._leftovers[name] = self._size_of(name, self.data_dir.spans_fd)
                if not self._leftovers[name]:
                    del self._leftovers[name]
        self.bytes_of["leftover"] = sum(self._leftovers.values())

    # ---- fewer bits -----------------------------------------------------------------------------------------

    def hold_whole(self, keys: Sequence[bytes]) -> list[SpanFile]:
        """Hold the spans that may be rewritten in fewer bits: in the model's dtype, sound, all of whose pages are in ``keys``.

        Returns:
            The spans in the order of the sequence, each with one more attached page.
        """
        wanted = set(keys)
        with self.lock:
            chosen = [
                span
                for span in self._touched_by(keys)
                if span.header.encoding == KvEncoding.RAW
                and not span.bad_pages
                and wanted.issuperset(span.keys)
                and self._num_servable(span.header) == span.header.num_pages
            ]
            for span in chosen:
                span.num_attached += 1
        return sorted(chosen, key=lambda span: span.header.first_page)

    def rewrite(self, old: SpanFile, encoding: KvEncoding, kv: Iterable[np.ndarray]) -> SpanFile:
        """Write a span once more with its KV encoded; it is durable and offered to nobody until ``replace``.

        The next start finds both files if it comes before, and keeps the new one.

        Args:
            old: held by the caller.
            kv: one array [kv_head, place, stored_page_bytes] uint8 per layer.

        Raises:
            CapacityError, CorruptExtentError, ExtentIoError: there is no new file.
        """
        header = dataclasses.replace(
            old.header,
            sequence=self._take_id(),
            encoding=encoding,
            num_exact_pages=0,
            selection=self.identity.selection,
        )
        means, centroids = old.read_means(), old.read_centroids()
        sketch = old.read_sketch() if old.header.sketch_bytes else None
        parts = SpanParts(
            old.tokens, old.keys, means, old.order, old.clusters, kv, centroids, sketch, old.sketch_digest
        )
        new = self._write_file(header, parts, durable=True)
        with self.lock:
            self.bytes_written += header.file_bytes
            self.pages_written += header.num_pages
        return new

    def replace(self, old: SpanFile, new: SpanFile) -> None:
        """Offer a rewritten span instead of the one it was made from, which leaves once nothing is attached to it."""
        with self.lock:
            self.last_used_ns[new.span_id] = self._touched_ns[new.span_id] = self.last_used_ns[old.span_id]
            self._publish(new)
            assert old.retired, (old.span_id, new.span_id)
            self.num_transcoded += 1

    def discard(self, new: SpanFile) -> None:
        """Remove a rewritten span that nobody was offered."""
        with self.lock:
            self._unlink(new)

    def close(self) -> None:
        """Finish the queued jobs, stop the writer and close every file."""
        self._jobs.put(None)
        self._writer.join()
        with self.lock:
            for span in self.spans.values():
                span.close()

    def counters(self) -> dict[str, int]:
        """Return what only grows, by the names of docs/operations.md."""
        return {
            "pages_quarantined": self.num_quarantined,
            "seal_errors": self.num_seal_errors,
            "remove_errors": self.num_remove_errors,
            "spans_evicted": self.num_evicted,
            "spans_transcoded": self.num_transcoded,
            "bytes_written": self.bytes_written,
            "bytes_spilled": self.bytes_spilled,
            "pages_written": self.pages_written,
            "pages_rewritten": self.pages_rewritten,
        }

    def gauges(self) -> dict[str, int]:
        with self.lock:
            return {
                "spans": len(self.spans),
                "ssd_used_bytes": self.used_bytes,
                **{f"ssd_{kind}_bytes": self.bytes_of[kind] for kind in KINDS},
                "foreign_spans": self.num_foreign,
                "unindexed_spans": self.num_unindexed,
                "seal_jobs_outstanding": self._num_outstanding,
            }


def raise_descriptor_limit() -> None:
    """Let the process keep one descriptor per span open: soft limit to the hard one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
