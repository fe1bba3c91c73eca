"""Read pages of one layer from any spans and KV heads with few large reads.

    pages wanted      . .#. ..## . . #. . . . . . .##.      offsets in one file, # wanted
    reads            |--------------|             |--|      neighbours and small gaps become one read

Every page handed out was checked, and decoded where the span holds it in fewer bits; what cannot be read or fails its checksum
comes back as zeros and by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_kernels import compiled
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.file_system import FileSystem
from kv_tier.meta.read_engine import ALIGNMENT, Bytes, Ints, ReadBatch, ReadPath
from kv_tier.meta.span_format import crc32c_rows
from kv_tier.meta.span_reader import SpanFile

GAP_BYTES = 4096
MAX_READ_BYTES = 1 << 20

Crcs = npt.NDArray[np.uint32]


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


def page_places(layer: int, want: Wants) -> tuple[Ints, Crcs]:
    """Return where the pages lie in their file ([n] bytes) and their CRC-32C ([n]).

    Raises:
        CorruptExtentError, ExtentIoError: the span's tables cannot be had.
    """
    place_of, page_crcs, begin = want.span.layer_places(layer)
    offsets, crcs = np.empty(len(want.heads), np.int64), np.empty(len(want.heads), np.uint32)
    page_bytes = want.span.header.stored_page_bytes
    compiled.page_places(place_of, page_crcs, want.heads, want.ordinals, begin, page_bytes, offsets, crcs)
    return offsets, crcs


@dataclass
class _Plan:
    """Pages in file order: which want they come from, what the caller calls them, and which read brings them."""

    owner: Ints
    index: Ints  # within the want
    rows: Ints
    crcs: Crcs
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
        self._waited = False
        files: list[tuple[FileSystem, int]] = []
        located: list[tuple[Ints, Crcs]] = []
        for want in sorted(wants, key=lambda want: want.span.header.kv_version):
            try:
                files.append(want.span.kv_file(path.direct))
                located.append(page_places(layer, want))
            except (CorruptExtentError, ExtentIoError) as error:
                del files[len(located) :]
                self.lost.append(LostPages(want.span, want.ordinals, want.rows, error))
                continue
            self.wants.append(want)
        self.page_bytes = wants[0].span.header.page_head_bytes if wants else 0
        if self.wants:
            self._plan = self._make_plan(files, located, gap_bytes)
            path.engine.start(self._plan.batch)

    @property
    def is_done(self) -> bool:
        return self._plan is None or self._waited or self.path.engine.is_done(self._plan.batch)

    def _make_plan(
        self, files: list[tuple[FileSystem, int]], located: list[tuple[Ints, Crcs]], gap_bytes: int
    ) -> _Plan:
        counts = np.array([len(want.heads) for want in self.wants])
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.concatenate([offsets for offsets, _ in located])
        order = np.lexsort((offsets, owner))
        owner, offsets = owner[order], offsets[order]
        sizes = np.array([want.span.header.stored_page_bytes for want in self.wants])
        read_of = np.empty(len(owner), np.int64)
        reads = np.empty((4, len(owner) + 1), np.int64)
        count = compiled.plan_reads(
            owner,
            offsets,
            offsets + sizes[owner],
            gap_bytes,
            MAX_READ_BYTES,
            self.path.grid,
            ALIGNMENT,
            read_of,
            reads,
        )
        buffer = self.path.lend(int(reads[3, count]))
        batch = ReadBatch(
            files, reads[0, :count], reads[1, :count], reads[2, :count], buffer, reads[3, :count]
        )
        rows = np.concatenate([want.rows for want in self.wants])[order]
        crcs = np.concatenate([crcs for _, crcs in located])[order]
        return _Plan(owner, index[order], rows, crcs, offsets, read_of, batch)

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
        kept = np.flatnonzero(plan.rows >= 0)
        parts = [self._take(plan, some) for some in self._alike(plan, kept)]
        self.path.give_back(batch.buffer)  # its pages were copied out
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        num_bytes = int(np.maximum(batch.results, 0).sum())
        return Pages(plan.rows[kept], data, self.lost, num_bytes, len(batch))

    def _alike(self, plan: _Plan, kept: Ints) -> list[Ints]:
        """Split pages by how their spans store KV; the wants are in that order."""
        kinds = [want.span.header.kv_version for want in self.wants]
        cuts = [n for n in range(1, len(kinds)) if kinds[n] != kinds[n - 1]]
        return np.split(kept, np.searchsorted(plan.owner[kept], cuts)) if cuts else [kept]

    def _take(self, plan: _Plan, pages: Ints) -> Bytes:
        """Return pages of spans that store alike: [n, page_head_bytes], in file order, zeros for lost ones."""
        if not len(pages):
            return np.zeros((0, self.page_bytes), np.uint8)
        batch, read_of = plan.batch, plan.read_of[pages]
        span = self.wants[int(plan.owner[pages[0]])].span
        starts = (batch.at - batch.offsets)[read_of] + plan.offsets[pages]
        size = span.header.stored_page_bytes
        windows = np.ndarray((len(batch.buffer) - size + 1, size), np.uint8, batch.buffer, strides=(1, 1))
        stored = windows[starts]  # a copy
        arrived = (batch.results >= batch.lengths)[read_of]
        sound = arrived & (np.array(crc32c_rows(stored), np.uint32) == plan.crcs[pages])
        if span.header.encrypted:
            for number in np.unique(plan.owner[pages]).tolist():
                mine = np.flatnonzero(plan.owner[pages] == number)
                opened = stored[mine]
                sound[mine] &= self.wants[number].span.open_pages(plan.offsets[pages[mine]], opened)
                stored[mine] = opened
        if not sound.all():
            stored[~sound] = 0
            self._lose(plan, pages[~arrived], pages[arrived & ~sound])
        return span.decode(stored)

    def _lose(self, plan: _Plan, missing: Ints, damaged: Ints) -> None:
        """Put down pages that did not arrive, and pages that fail their checksum, by the want they come from."""
        for number, want in enumerate(self.wants):
            mine = missing[plan.owner[missing] == number]
            if len(mine):
                error = _error_of(want.span, plan.batch, int(plan.read_of[mine[0]]))
                self.lost.append(
                    LostPages(want.span, want.ordinals[plan.index[mine]], plan.rows[mine], error)
                )
            mine = damaged[plan.owner[damaged] == number]
            if len(mine):
                ordinals = want.ordinals[plan.index[mine]]
                bad = sorted(set(ordinals.tolist()))
                failed = CorruptExtentError(
                    f"{want.span.path}: layer {self.layer}: pages {bad} fail their checksum", bad
                )
                self.lost.append(LostPages(want.span, ordinals, plan.rows[mine], failed))


def _error_of(span: SpanFile, batch: ReadBatch, number: int) -> CorruptExtentError | ExtentIoError:
    result, offset = int(batch.results[number]), int(batch.offsets[number])
    if result < 0:
        return ExtentIoError.of(OSError(-result, ""), "read", span.path, offset)
    missing = int(batch.lengths[number]) - result
    return CorruptExtentError(f"{span.path}: ends at byte {offset + result}, {missing} bytes are missing")
