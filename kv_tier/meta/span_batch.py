"""Read pages of one layer from any spans and KV heads with few large reads.

    pages wanted      . .#. ..## . . #. . . . . . .##.      offsets in one file, # wanted
    reads            |--------------|             |--|      neighbours and small gaps become one read

Every page handed out was checked; what cannot be read or fails its checksum comes back as zeros and by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.read_engine import ALIGNMENT, Bytes, Ints, ReadBatch, ReadPath, aligned_bytes
from kv_tier.meta.span_format import crc32c_rows
from kv_tier.meta.span_reader import SpanFile

GAP_BYTES = 4096
MAX_READ_BYTES = 1 << 20

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Wants:
    """Pages of one span in one layer.

    Attributes:
        heads, ordinals: [n] KV head, and page ordinal within the span.
        rows: [n] what the caller calls each page; -1 reads a page and throws it away.
    """

    span: SpanFile
    heads: Ints
    ordinals: Ints
    rows: Ints


@dataclass(frozen=True)
class LostPages:
    """Pages of a span that could not be had, and why: ``ordinals`` within it, ``rows`` as in ``Wants``."""

    span: SpanFile
    ordinals: Ints
    rows: Ints
    error: CorruptExtentError | ExtentIoError


@dataclass
class Pages:
    """What a batch brought.

    Attributes:
        rows: [n] as in ``Wants``, without -1.
        data: [n, page_head_bytes] uint8: keys, then values; zeros for lost pages.
        lost: the pages that failed.
        bytes_read, num_reads: what went over the wire, gaps included.
    """

    rows: Ints
    data: Bytes
    lost: list[LostPages]
    bytes_read: int = 0
    num_reads: int = 0


@dataclass
class _Plan:
    """Pages in file order: which want they come from, where they lie, their checksums, which read brings them."""

    owner: Ints
    index: Ints  # within the want
    offsets: Ints
    crcs: np.ndarray
    read_of: Ints
    batch: ReadBatch


class PageBatch:
    """Bring pages of one layer; made, it is under way, and ``finish`` waits for it.

    Args:
        path: how the data directory is read; its engine is used from the caller's thread alone.
        gap_bytes: wanted pages so far apart or less are read together.
    """

    def __init__(
        self, path: ReadPath, layer: int, wants: Sequence[Wants], *, gap_bytes: int = GAP_BYTES
    ) -> None:
        self.path = path
        self.layer = layer
        self.lost: list[LostPages] = []
        self.wants: list[Wants] = []
        self._plan: _Plan | None = None
        self._waited = False
        files: list[tuple[FileSystem, int]] = []
        places: list[tuple[Ints, np.ndarray]] = []
        for want in wants:
            try:
                files.append(want.span.kv_file(path.direct))
                places.append(want.span.page_places(layer, want.heads, want.ordinals))
            except (CorruptExtentError, ExtentIoError) as error:
                del files[len(places) :]
                self.lost.append(LostPages(want.span, want.ordinals, want.rows, error))
                continue
            self.wants.append(want)
        self.page_bytes = wants[0].span.header.page_head_bytes if wants else 0
        if self.wants:
            self._plan = self._make_plan(files, places, gap_bytes)
            path.engine.start(self._plan.batch)

    @property
    def is_done(self) -> bool:
        return self._plan is None or self._waited or self.path.engine.is_done(self._plan.batch)

    def _make_plan(
        self, files: list[tuple[FileSystem, int]], places: list[tuple[Ints, np.ndarray]], gap_bytes: int
    ) -> _Plan:
        counts = [len(want.heads) for want in self.wants]
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.concatenate([np.arange(n) for n in counts])
        offsets, crcs = (np.concatenate(part) for part in zip(*places, strict=True))
        order = np.lexsort((offsets, owner))
        owner, index, offsets = owner[order], index[order], offsets[order]
        size, grid = self.page_bytes, self.path.grid
        apart = np.diff(offsets) > size + gap_bytes
        begins = np.concatenate([[True], apart | (np.diff(owner) != 0)])
        first = np.flatnonzero(begins)
        # a run longer than one read is cut where a page begins
        part = (offsets - np.repeat(offsets[first], np.diff([*first, len(offsets)]))) // MAX_READ_BYTES
        begins[1:] |= np.diff(part) != 0
        first = np.flatnonzero(begins)
        last = np.concatenate([first[1:], [len(offsets)]]) - 1
        start = offsets[first] // grid * grid
        lengths = -(-(offsets[last] + size) // grid) * grid - start
        padded = -(-lengths // ALIGNMENT) * ALIGNMENT
        at = np.cumsum(padded) - padded
        buffer = aligned_bytes(int(padded.sum()))
        batch = ReadBatch(files, owner[first], start, lengths, buffer, at)
        return _Plan(owner, index, offsets, crcs[order], np.cumsum(begins) - 1, batch)

    def wait(self) -> None:
        """Block until every read is over."""
        if self._plan is not None and not self._waited:
            self.path.engine.wait(self._plan.batch)
            self._waited = True

    def finish(self) -> Pages:
        """Wait, check every page and hand it out; call once."""
        self.wait()
        plan = self._plan
        if plan is None:
            return Pages(np.zeros(0, np.int64), np.zeros((0, self.page_bytes), np.uint8), self.lost)
        batch = plan.batch
        if not self.path.direct:
            for fs, fd in batch.files:
                fs.drop_cache(fd)
        rows = np.concatenate([want.rows for want in self.wants])
        starts = np.cumsum([0, *(len(want.rows) for want in self.wants)])[plan.owner]
        rows = rows[starts + plan.index]
        kept = np.flatnonzero(rows >= 0)
        data = self._extract(plan, kept)
        data[~self._check(plan, rows, kept, data)] = 0
        num_bytes = int(np.maximum(batch.results, 0).sum())
        return Pages(rows[rows >= 0], data, self.lost, num_bytes, len(batch))

    def _extract(self, plan: _Plan, kept: Ints) -> Bytes:
        """Copy pages out of the reads: [n, page_head_bytes], in file order."""
        batch, grid = plan.batch, self.path.grid
        at = (batch.at - batch.offsets)[plan.read_of[kept]] + plan.offsets[kept]
        unit = math.gcd(self.page_bytes, ALIGNMENT, grid if grid > 1 else 0)
        chosen = (at // unit)[:, None] + np.arange(self.page_bytes // unit)
        data: Bytes = batch.buffer.reshape(-1, unit)[chosen].reshape(len(kept), self.page_bytes)
        return data

    def _check(self, plan: _Plan, rows: Ints, kept: Ints, data: Bytes) -> Bools:
        """Return which of the kept pages (rows of ``data``) are sound; the others go to ``lost``."""
        batch = plan.batch
        arrived = (batch.results >= batch.lengths)[plan.read_of[kept]]
        good: Bools = arrived & (np.array(crc32c_rows(data), np.uint32) == plan.crcs[kept])
        for number in np.unique(plan.owner[kept[~good]]).tolist():
            want, mine = self.wants[number], plan.owner[kept] == number
            missing, bad = kept[mine & ~arrived], kept[mine & arrived & ~good]
            if len(missing):
                error = _error_of(want.span, batch, int(plan.read_of[missing[0]]))
                self._lose(want, plan, rows, missing, error)
            if len(bad):
                pages = sorted(set(want.ordinals[plan.index[bad]].tolist()))
                message = f"{want.span.path}: layer {self.layer}: pages {pages} fail their checksum"
                self._lose(want, plan, rows, bad, CorruptExtentError(message, pages))
        return good

    def _lose(
        self,
        want: Wants,
        plan: _Plan,
        rows: Ints,
        at: Ints,
        error: CorruptExtentError | ExtentIoError,
    ) -> None:
        self.lost.append(LostPages(want.span, want.ordinals[plan.index[at]], rows[at], error))


def _error_of(span: SpanFile, batch: ReadBatch, number: int) -> CorruptExtentError | ExtentIoError:
    result, offset = int(batch.results[number]), int(batch.offsets[number])
    if result < 0:
        return ExtentIoError.of(OSError(-result, ""), "read", span.path, offset)
    missing = int(batch.lengths[number]) - result
    return CorruptExtentError(f"{span.path}: ends at byte {offset + result}, {missing} bytes are missing")
