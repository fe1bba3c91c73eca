"""Read pages of one layer from any spans and KV heads with few large reads.

    pages wanted      . .#. ..## . . #. . . . . . .##.      offsets in one file, # wanted
    reads            |--------------|             |--|      neighbours and small gaps become one read

Every page handed out was checked, and decoded where the span holds it in fewer bits; what cannot be read or fails its checksum
comes back as zeros and by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.read_engine import ALIGNMENT, Bytes, Ints, ReadBatch, ReadPath, aligned_bytes
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
    """Pages in file order: which want they come from, where they lie, which read brings them."""

    owner: Ints
    index: Ints  # within the want
    offsets: Ints
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
        files: list[tuple[FileSystem, int]] = []
        offsets: list[Ints] = []
        for want in sorted(wants, key=lambda want: want.span.header.kv_version):
            try:
                files.append(want.span.kv_file(path.direct))
                offsets.append(want.span.page_offsets(layer, want.heads, want.ordinals))
            except (CorruptExtentError, ExtentIoError) as error:
                del files[len(offsets) :]
                self.lost.append(LostPages(want.span, want.ordinals, want.rows, error))
                continue
            self.wants.append(want)
        self.page_bytes = wants[0].span.header.page_head_bytes if wants else 0
        self._stored_bytes = np.array([want.span.header.stored_page_bytes for want in self.wants], np.int64)
        if self.wants:
            self._plan = self._make_plan(files, offsets, gap_bytes)
            path.engine.start(self._plan.batch)

    @property
    def is_done(self) -> bool:
        return self._plan is None or self.path.engine.is_done(self._plan.batch)

    def _make_plan(self, files: list[tuple[FileSystem, int]], places: list[Ints], gap_bytes: int) -> _Plan:
        counts = [len(want.heads) for want in self.wants]
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.concatenate([np.arange(n) for n in counts])
        offsets = np.concatenate(places)
        order = np.lexsort((offsets, owner))
        owner, index, offsets = owner[order], index[order], offsets[order]
        grid = self.path.grid
        ends = offsets + self._stored_bytes[owner]
        apart = offsets[1:] - ends[:-1] > gap_bytes
        begins = np.concatenate([[True], apart | (np.diff(owner) != 0)])
        first = np.flatnonzero(begins)
        # a run longer than one read is cut where a page begins
        part = (offsets - np.repeat(offsets[first], np.diff([*first, len(offsets)]))) // MAX_READ_BYTES
        begins[1:] |= np.diff(part) != 0
        first = np.flatnonzero(begins)
        last = np.concatenate([first[1:], [len(offsets)]]) - 1
        start = offsets[first] // grid * grid
        lengths = -(-ends[last] // grid) * grid - start
        padded = -(-lengths // ALIGNMENT) * ALIGNMENT
        at = np.cumsum(padded) - padded
        buffer = aligned_bytes(int(padded.sum()))
        batch = ReadBatch(files, owner[first], start, lengths, buffer, at)
        return _Plan(owner, index, offsets, np.cumsum(begins) - 1, batch)

    def finish(self) -> Pages:
        """Wait, check every page and hand it out; call once."""
        plan = self._plan
        if plan is None:
            return Pages(np.zeros(0, np.int64), np.zeros((0, self.page_bytes), np.uint8), self.lost)
        batch = plan.batch
        self.path.engine.wait(batch)
        if not self.path.direct:
            for fs, fd in batch.files:
                fs.drop_cache(fd)
        rows = np.concatenate([want.rows for want in self.wants])
        starts = np.cumsum([0, *(len(want.rows) for want in self.wants)])[plan.owner]
        rows = rows[starts + plan.index]
        parts = [self._take(plan, rows, alike) for alike in self._alike()]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        num_bytes = int(np.maximum(batch.results, 0).sum())
        return Pages(rows[rows >= 0], data, self.lost, num_bytes, len(batch))

    def _alike(self) -> list[range]:
        """Split the numbers of the wants by how their spans store KV."""
        kinds = [want.span.header.kv_version for want in self.wants]
        cuts = [0, *(n for n in range(1, len(kinds)) if kinds[n] != kinds[n - 1]), len(kinds)]
        return [range(*pair) for pair in itertools.pairwise(cuts)]

    def _take(self, plan: _Plan, rows: Ints, wants: range) -> Bytes:
        """Return the kept pages of wants whose spans encode alike: [n, page_head_bytes], in file order, zeros for lost pages."""
        span = self.wants[wants[0]].span
        counts = np.bincount(plan.owner, minlength=len(self.wants))
        begin, end = int(counts[: wants.start].sum()), int(counts[: wants.stop].sum())
        kept = begin + np.flatnonzero(rows[begin:end] >= 0)
        stored = self._extract(plan, kept, span.header.stored_page_bytes)
        stored[~self._check(plan, rows, kept, stored, wants)] = 0
        return span.decode(stored)

    def _extract(self, plan: _Plan, kept: Ints, size: int) -> Bytes:
        """Copy pages out of the reads: [n, size], in file order."""
        batch, grid = plan.batch, self.path.grid
        at = (batch.at - batch.offsets)[plan.read_of[kept]] + plan.offsets[kept]
        unit = math.gcd(size, ALIGNMENT, grid if grid > 1 else 0)
        chosen = (at // unit)[:, None] + np.arange(size // unit)
        data: Bytes = batch.buffer.reshape(-1, unit)[chosen].reshape(len(kept), size)
        return data

    def _check(self, plan: _Plan, rows: Ints, kept: Ints, data: Bytes, wants: range) -> Bools:
        """Return which of the kept pages (rows of ``data``, [n]) are sound; the others go to ``lost``."""
        batch = plan.batch
        arrived = (batch.results >= batch.lengths)[plan.read_of[kept]]
        good = arrived.copy()
        owner = plan.owner[kept]
        for number in wants:
            want = self.wants[number]
            begin, end = np.searchsorted(owner, [number, number + 1]).tolist()
            mine = np.arange(begin, end)
            missing = kept[mine[~arrived[mine]]]
            if len(missing):
                self._lose(
                    want, plan, rows, missing, _error_of(want.span, batch, int(plan.read_of[missing[0]]))
                )
            mine = mine[arrived[mine]]
            here = kept[mine]
            heads, ordinals = want.heads[plan.index[here]], want.ordinals[plan.index[here]]
            pages_read = data[mine]
            sound = want.span.good_pages(self.layer, heads, ordinals, pages_read)
            if want.span.header.encrypted:
                data[mine] = pages_read
            if not sound.all():
                good[mine[~sound]] = False
                pages = sorted(set(ordinals[~sound].tolist()))
                message = f"{want.span.path}: layer {self.layer}: pages {pages} fail their checksum"
                self._lose(want, plan, rows, here[~sound], CorruptExtentError(message, pages))
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
