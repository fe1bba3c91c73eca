"""Transcode suspended sessions: their spans are written once more in fewer bits, and swapped in between two steps.

    control thread     request ── hold the spans ──┐                            ┌── outcome
    background                                      └── read, encode, write ──┐ │
    scheduler's thread                                                        └── swap_in: rebind pages, drop their frames

Nobody sees a session half way: until ``swap_in`` everything reads the old span, afterwards everything the new one, whatever is
in frames or kept in window caches. A span that a running request uses, or that left or was damaged meanwhile, stays as it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kv_tier.frames import DUMMY_FRAME
from kv_tier.helper_threads import compute_on_one_core
from kv_tier.meta.errors import KVDriveError
from kv_tier.meta.kv_codec import KvEncoding, encode_pages
from kv_tier.meta.span_file import SpanFile
from kv_tier.modes import ColdEncoding
from kv_tier.page_table import NOWHERE

if TYPE_CHECKING:
    from kv_tier.store import TieredStore

logger = logging.getLogger(__name__)

ENCODINGS: dict[ColdEncoding, KvEncoding] = {"int8": KvEncoding.INT8, "fp8": KvEncoding.FP8}


@dataclass(frozen=True)
class Outcome:
    """Count the spans that are in fewer bits now, those that stay as they are, and the bytes that became free."""

    num_spans: int = 0
    num_left: int = 0
    freed_bytes: int = 0


@dataclass
class _Job:
    """One span on its way: ``old`` is held until the end; ``given_up`` says that nobody waits any more."""

    old: SpanFile
    new: SpanFile | None = None
    given_up: bool = False
    swapped: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Transcoder:
    """Rewrite spans for one store."""

    def __init__(self, store: TieredStore, encoding: ColdEncoding) -> None:
        self.store = store
        self.encoding = encoding
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="kvdrive-transcoder", initializer=compute_on_one_core
        )
        self._written: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[SpanFile] = set()

    # ---- any thread -----------------------------------------------------------------------------------------

    def request(self, keys: Sequence[bytes], wait_s: float) -> Outcome:
        """Transcode the spans all of whose pages are in ``keys``, and wait until they are swapped in.

        The scheduler's thread must call ``swap_in`` meanwhile. What is not done after ``wait_s`` seconds is given up, so
        that nothing changes after this returned.
        """
        if self.encoding == "none":
            return Outcome()
        deadline = time.monotonic() + wait_s
        jobs = [_Job(span) for span in self.store.spans.hold_whole(keys)]
        with self._lock:
            self._held.update(job.old for job in jobs)
        for job in jobs:
            self._worker.submit(self._write, job)
        for job in jobs:
            job.done.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for job in jobs:
                job.given_up = not job.swapped
            swapped = [job for job in jobs if job.swapped]
        freed = sum(job.old.header.file_bytes - job.new.header.file_bytes for job in swapped if job.new)
        return Outcome(len(swapped), len(jobs) - len(swapped), freed)

    def _write(self, job: _Job) -> None:
        """Write the new span; what fails leaves the old one in service."""
        if not job.given_up:
            try:
                encoding = ENCODINGS[self.encoding]
                job.new = self.store.spans.rewrite(job.old, encoding, self._encoded(job.old, encoding))
            except Exception as error:  # whatever it was, the old span must be let go
                known = isinstance(error, KVDriveError)
                logger.warning(
                    "span %d stays in the model's dtype: %s", job.old.span_id, error, exc_info=not known
                )
        self._written.put(job)

    def _encoded(self, span: SpanFile, encoding: KvEncoding) -> Iterator[np.ndarray]:
        path, header = self.store.fetcher.path, span.header
        for layer in range(header.num_layers):
            yield encode_pages(span.read_layer(layer, path=path), encoding, header.dtype_code)

    # ---- the scheduler's thread -----------------------------------------------------------------------------

    def is_held(self, span: SpanFile) -> bool:
        with self._lock:
            return span in self._held

    def swap_in(self) -> None:
        """Let the pages of sessions point to what was written since the last call; between steps alone."""
        if self._written.empty():
            return
        self.store.collect_sealed()
        self.store.fetcher.settle()
        while not self._written.empty():
            self._finish(self._written.get())

    def _finish(self, job: _Job) -> None:
        with self._lock, self.store.spans.lock:  # nobody may retire the old span between look and swap
            if job.new is not None and not job.given_up and self._may_swap(job.old):
                self._swap(job.old, job.new)
                job.swapped = True
            elif job.new is not None:
                self.store.spans.discard(job.new)
            self._held.discard(job.old)
        self.store.spans.release(job.old, 1)
        job.done.set()

    def _may_swap(self, old: SpanFile) -> bool:
        """Whether a span is still offered and sound, and no running request uses a page of it."""
        if old.retired or old.bad_pages:
            return False
        handle, table = id(old), self.store.table
        return not any((table.span_of[pages] == handle).any() for pages in self.store.running_pages())

    def _swap(self, old: SpanFile, new: SpanFile) -> None:
        store, table = self.store, self.store.table
        pages = np.flatnonzero(table.span_of == id(old))
        ordinals = table.ordinal_of[pages]
        held = table.frames[pages]
        store.frames.free(held[held > DUMMY_FRAME].tolist())
        table.frames[pages] = NOWHERE
        store.staging.forget(pages)
        table.exact[pages] = False
        table.life[pages] += 1  # windows that are kept hold what was not rounded
        store.spans.replace(old, new)
        if len(pages):
            store.bind(pages, new, ordinals)

    def close(self) -> None:
        """Stop; what is under way is given up."""
        self._worker.shutdown(cancel_futures=True)
        while not self._written.empty():
            job = self._written.get()
            job.given_up = True
            self._finish(job)
