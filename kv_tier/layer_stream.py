"""Stream whole pages from SSD, layer after layer, tile after tile, ahead of the one in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from kv_tier.attention import TILE_TOKENS
from kv_tier.frames import DUMMY_FRAME
from kv_tier.geometry import Geometry, bits
from kv_tier.meta.errors import CorruptExtentError, ExtentIoError
from kv_tier.meta.read_engine import InlineEngine, Ints, ReadBuffer, ReadPath
from kv_tier.meta.span_file import SpanFile
from kv_tier.page_table import NOWHERE
from kv_tier.span_batch import PageBatch, Wants

if TYPE_CHECKING:
    from kv_tier.store import TieredStore

AHEAD = 3  # tiles under way, the one in use included


@dataclass(frozen=True)
class _Wanted:
    """Pages of one tile that one span has: logical ``pages`` and their ``ordinals``; ``at`` [kv_head, page] are the rows
    of a frame arena, or of a staging buffer, that receive them."""

    span: SpanFile
    pages: Ints
    ordinals: Ints
    at: Ints


@dataclass
class _Read:
    """What one job brought: bytes and reads, and the ordinals that failed with the reason."""

    num_bytes: int = 0
    num_reads: int = 0
    bad: list[int] | None = None
    error: Exception | None = None


_buffers = threading.local()  # one per reader thread


def stream_bytes(geometry: Geometry) -> int:
    """Return the bytes of DRAM that one stream stages at most."""
    return AHEAD * (TILE_TOKENS // geometry.page_size) * geometry.num_kv_heads * geometry.page_head_bytes


class LayerStream:
    """Bring the pages that have no frame from their spans, a tile (at most ``TILE_TOKENS`` positions) of one layer at
    a time, ``AHEAD`` of them at once.

    Where frames are free, the bytes stay in them (the pages are resident afterwards); otherwise a tile is staged until
    the next one is asked for. Pages that cannot be read are zeros and are listed in ``lost_pages`` ({logical page}).
    ``wait_s`` is what ``gather`` waited for reads.

    Args:
        tiles: logical pages ([n] int64) of each tile; ``gather`` is called with them in this order, layer after layer.
        keep: make what is read resident, if frames can be had for all of it.
    """

    def __init__(self, store: TieredStore, tiles: Sequence[np.ndarray], *, keep: bool = False) -> None:
        self.store = store
        table = store.table
        self.lost_pages: set[int] = {int(p) for tile in tiles for p in tile[table.lost[tile]]}
        self.bytes_read = 0
        self.wait_s = 0.0
        self._tiles = list(tiles)
        self._away = [
            np.unique(t[(table.frames[t] == NOWHERE) & (table.span_of[t] != NOWHERE)]) for t in self._tiles
        ]
        self._next = 0  # (layer, tile) in the order they are used, as one number
        self._jobs: dict[int, list[tuple[_Wanted, Future[_Read]]]] = {}
        self._frame_of = table.frame_of
        self._frames: torch.Tensor | None = None
        self._kept = np.unique(np.concatenate(self._away or [np.zeros(0, np.int64)]))
        if not len(self._kept):
            return
        if keep and self._can_keep(np.concatenate(self._tiles)):
            self._frames = torch.tensor(store.frames.alloc(len(self._kept)), dtype=torch.int64)
            self._frame_of = table.frame_of.clone()
            self._frame_of[torch.from_numpy(self._kept)] = self._frames
        else:
            geometry = store.geometry
            most = max(len(away) for away in self._away)
            shape = (geometry.num_kv_heads * most, geometry.page_elements)
            ahead = min(AHEAD, geometry.num_layers * len(self._tiles))
            self._staging = [
                (torch.zeros(shape, dtype=geometry.dtype), torch.zeros(shape, dtype=geometry.dtype))
                for _ in range(ahead)
            ]
        self._plans = [self._wanted(away) for away in self._away]

    def _can_keep(self, pages: np.ndarray) -> bool:
        """Whether frames for every page on its way can be had without spilling."""
        store, count = self.store, len(self._kept)
        store.pinned[pages] = True
        try:
            store.free_frames(count)
        finally:
            store.pinned[pages] = False
        return store.frames.num_free >= count

    def _wanted(self, away: Ints) -> list[_Wanted]:
        """Sort the pages of a tile that are on their way by the span that has them."""
        store, heads = self.store, np.arange(self.store.geometry.num_kv_heads)[:, None]
        handles = store.table.span_of[away]
        wanted = []
        for handle in np.unique(handles).tolist():
            chosen = np.flatnonzero(handles == handle)
            if self._frames is not None:
                at = heads * store.frames.num_frames + self._frame_of.numpy()[away[chosen]]
            else:
                at = heads * len(away) + chosen
            pages = away[chosen]
            wanted.append(_Wanted(store.span_files[handle], pages, store.table.ordinal_of[pages], at))
        return wanted

    def _request(self, number: int) -> None:
        layer, tile = divmod(number, len(self._tiles))
        if number in self._jobs or layer >= self.store.geometry.num_layers or not len(self._away[tile]):
            return
        store = self.store
        if self._frames is not None:
            k, v = store.frames.k_rows[layer], store.frames.v_rows[layer]
        else:
            k, v = self._staging[number % len(self._staging)]
        path = store.fetcher.path
        self._jobs[number] = [
            (wanted, store.readers.submit(_read_layer, path, layer, wanted, k, v))
            for wanted in self._plans[tile]
        ]

    def _arrive(self, number: int) -> None:
        """Wait for a tile; the next ones are on their way then, one staging buffer each."""
        ahead = AHEAD if self._frames is not None else len(self._staging)
        for later in range(number, number + ahead):
            self._request(later)
        store = self.store
        for wanted, job in self._jobs.pop(number, []):
            started_s = time.perf_counter()
            done = job.result()
            self.wait_s += time.perf_counter() - started_s
            self.bytes_read += done.num_bytes
            store.counters.bytes_read += done.num_bytes
            store.counters.reads += done.num_reads
            if done.error is not None:
                bad = done.bad or wanted.ordinals.tolist()
                store.lose(wanted.span, bad, done.error)
                self.lost_pages.update(wanted.pages[np.isin(wanted.ordinals, bad)].tolist())

    def gather(self, layer: int, pages: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the next tile, whose pages are ``pages``: each [kv_head, n, page_size, head_dim],
        owned by the caller."""
        tile = self._next % len(self._tiles)
        assert self._next // len(self._tiles) == layer, (self._next, len(self._tiles), layer)
        assert len(pages) == len(self._tiles[tile]), (len(pages), len(self._tiles[tile]))
        k, v = self._gather_tile(layer, tile)
        self._next += 1
        return k, v

    def _gather_tile(self, layer: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        store, pages = self.store, self._tiles[tile]
        if len(self._kept):
            self._arrive(self._next)
        frames = self._frame_of[torch.from_numpy(pages)]
        at = frames.clamp(min=DUMMY_FRAME)
        k = store.frames.k[layer].index_select(1, at)
        v = store.frames.v[layer].index_select(1, at)
        missing = (frames < 0).nonzero().view(-1)
        if missing.numel():
            self._fill_staged(tile, missing, k, v)
        return k, v

    def _fill_staged(self, tile: int, missing: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Complete what frames do not hold: staged pages, and zeros for pages that are nowhere."""
        away, pages = self._away[tile], self._tiles[tile][missing.numpy()]
        places = np.searchsorted(away, pages)
        found = np.isin(pages, away) if self._frames is None else np.zeros(len(pages), bool)
        if found.any():
            here, heads = torch.from_numpy(places[found]), k.shape[0]
            rows = ((torch.arange(heads) * len(away))[:, None] + here).view(-1)
            for out, source in zip((k, v), self._staging[self._next % len(self._staging)], strict=True):
                out[:, missing[torch.from_numpy(found)]] = source.index_select(0, rows).view(
                    heads, -1, *out.shape[2:]
                )
        if not found.all():
            gone = missing[torch.from_numpy(~found)]
            k[:, gone] = 0
            v[:, gone] = 0

    def finish(self) -> None:
        """Make the kept pages resident after the last layer; lost ones give their frame back."""
        if self._frames is None:
            return
        frames = self._frames.numpy()
        good = np.array([page not in self.lost_pages for page in self._kept.tolist()])
        self.store.table.frames[self._kept[good]] = frames[good]
        self.store.staging.forget(self._kept[good])
        self.store.frames.free(frames[~good].tolist())
        self.store.table.stamp[self._kept] = self.store.clock
        self._frames = None


def _read_layer(path: ReadPath, layer: int, wanted: _Wanted, k: torch.Tensor, v: torch.Tensor) -> _Read:
    """Read one layer of a span on a reader thread into rows of ``k`` and ``v``; what fails is zeros."""
    span, ordinals, at = wanted.span, wanted.ordinals, wanted.at
    heads = np.arange(span.header.num_kv_heads)[:, None]
    try:
        data = span.read_layer(layer, path=path, buffer=_buffer())
        done = _Read(span.header.layer_bytes, 1)
        if len(ordinals) == span.header.num_pages:  # in the order of the file, not of the pages
            row_of = np.empty(at.shape, np.int64)
            row_of[:, ordinals] = at
            at = row_of[heads, span.order[layer]]
        else:
            data = data[heads, span.place_of[layer][:, ordinals]]
    except (CorruptExtentError, ExtentIoError) as error:
        data, done = _read_what_is_left(path, span, layer, ordinals, error)
    pages = data.view(span.header.bits_dtype).reshape(at.size, 2, -1)
    for rows, half in ((k, 0), (v, 1)):
        bits(rows)[at.reshape(-1)] = pages[:, half]  # numpy moves rows twice as fast as torch does
    return done


def _buffer() -> ReadBuffer:
    if not hasattr(_buffers, "buffer"):
        _buffers.buffer = ReadBuffer()
    return cast(ReadBuffer, _buffers.buffer)


def _read_what_is_left(
    path: ReadPath, span: SpanFile, layer: int, ordinals: Ints, error: Exception
) -> tuple[np.ndarray, _Read]:
    """Read page by page what one large read could not bring: [kv_head * page, page_head_bytes], head after head."""
    heads = span.header.num_kv_heads
    count = heads * len(ordinals)
    want = Wants(span, np.repeat(np.arange(heads), len(ordinals)), np.tile(ordinals, heads), np.arange(count))
    alone = ReadPath(InlineEngine(), path.direct, path.grid, path.reason)
    pages = PageBatch(alone, layer, [want], gap_bytes=0).finish()
    data = np.zeros((count, span.header.page_head_bytes), np.uint8)
    data[pages.rows] = pages.data
    bad = sorted({int(o) for lost in pages.lost for o in lost.ordinals})
    return data, _Read(pages.bytes_read, pages.num_reads, bad, error if bad else None)
