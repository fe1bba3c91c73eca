"""The window cache: device memory for the pages one request attends, per (layer, KV head)."""

from __future__ import annotations

import numpy as np
import torch

from kv_tier.geometry import Geometry

ABSENT = -1
NOTHING = torch.zeros(0, dtype=torch.int64)


class WindowCache:
    """Hold ``num_slots`` pages of one request for every (layer, KV head), and decide who leaves.

    ``k[layer]``, ``v[layer]``: [kv_head * num_slots, page_size * head_dim] in the KV dtype.
    ``slot_of[layer]``: [kv_head, max_pages + 1] int64, page ordinal -> slot or ABSENT; the last column is scratch.
    ``page_of[layer]``: [kv_head, num_slots] int64, slot -> page ordinal or ABSENT.

    Contents never reach a number except as the bytes of a page: what is resident decides only what must be fetched.
    """

    def __init__(self, geometry: Geometry, num_slots: int, max_pages: int) -> None:
        layers, heads = geometry.num_layers, geometry.num_kv_heads
        self.num_slots = num_slots
        self.num_heads = heads
        self.k = torch.zeros(layers, heads * num_slots, geometry.page_elements, dtype=geometry.dtype)
        self.v = torch.zeros(layers, heads * num_slots, geometry.page_elements, dtype=geometry.dtype)
        self.k_tokens = self.k.view(layers, -1, geometry.head_dim)
        self.v_tokens = self.v.view(layers, -1, geometry.head_dim)
        self.slot_of = torch.full((layers, heads, max_pages + 1), ABSENT, dtype=torch.int64)
        self.page_of = torch.full((layers, heads, num_slots), ABSENT, dtype=torch.int64)
        self.head_base = (torch.arange(heads) * num_slots)[:, None]
        self._heads = np.arange(heads)[:, None]
        self.num_hits = 0
        self.num_misses = 0

    @staticmethod
    def bytes_for(geometry: Geometry, num_slots: int, max_pages: int) -> int:
        """Return the bytes such a cache takes, directory included."""
        pairs = geometry.num_layers * geometry.num_kv_heads
        return pairs * (num_slots * geometry.page_head_bytes + 8 * (num_slots + max_pages + 1))

    def reset(self) -> None:
        """Forget every page and every count."""
        self.slot_of.fill_(ABSENT)
        self.page_of.fill_(ABSENT)
        self.num_hits = self.num_misses = 0

    def drop(self, ordinals: torch.Tensor) -> None:
        """Forget the pages at ``ordinals`` ([n] int64): their bytes are no longer the sequence's."""
        slots = self.slot_of[:, :, ordinals]
        layer, head, index = (slots >= 0).nonzero(as_tuple=True)
        self.page_of[layer, head, slots[layer, head, index]] = ABSENT
        self.slot_of[:, :, ordinals] = ABSENT

    def lookup(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """Return the slots of ``selected`` ([kv_head, n] int64 ordinals), ABSENT where a page must be fetched."""
        return self.slot_of[layer].gather(1, selected)

    def admit(
        self, layer: int, selected: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give every absent selected page a slot: lookahead eviction (paper 5.1).

        The resident page with the lowest score of the *current* step leaves first, empty slots before all; a page
        selected now never leaves. ``slots`` is completed in place.

        Args:
            selected, slots: [kv_head, n] int64, as given to and returned by ``lookup``.
            scores: [kv_head, page] float32 of this step; None when everything is selected.

        Returns:
            (heads, ordinals, rows), each [miss] int64: what to fetch, and the row of ``k[layer]`` it goes to.
        """
        held = slots.numpy()
        if held.min() >= 0:
            self.num_hits += held.size
            return NOTHING, NOTHING, NOTHING
        absent = held < 0
        heads, places = absent.nonzero()
        ordinals = selected.numpy()[heads, places]
        self.num_misses += len(heads)
        self.num_hits += held.size - len(heads)
        slot = self._victims(layer, held, absent, None if scores is None else scores.numpy())
        slot = slot[heads, (absent.cumsum(1) - 1)[heads, places]]
        slot_of, page_of = self.slot_of[layer].numpy(), self.page_of[layer].numpy()
        slot_of[heads, page_of[heads, slot]] = ABSENT  # ABSENT (-1) itself indexes the scratch column
        slot_of[heads, ordinals] = slot
        page_of[heads, slot] = ordinals
        held[heads, places] = slot
        rows = heads * self.num_slots + slot
        return torch.from_numpy(heads), torch.from_numpy(ordinals), torch.from_numpy(rows)

    def _victims(
        self, layer: int, held: np.ndarray, absent: np.ndarray, scores: np.ndarray | None
    ) -> np.ndarray:
        """Return the slots that are given up, [kv_head, most misses of a head], the first to leave first."""
        page_of = self.page_of[layer].numpy()
        known = page_of >= 0 if scores is None else (page_of >= 0) & (page_of < scores.shape[1])
        value = np.where(
            known, np.float32(0) if scores is None else scores[self._heads, page_of * known], -np.inf
        )
        heads, places = np.nonzero(~absent)
        value[heads, held[heads, places]] = np.inf
        count = int(absent.sum(1).max())
        lowest = np.argpartition(value, min(count, self.num_slots - 1), axis=1)[:, :count]
        order = np.argsort(value[self._heads, lowest], axis=1, kind="stable")
        victims: np.ndarray = lowest[self._heads, order]
        return victims

    def check_integrity(self) -> None:
        """Assert that both directories agree."""
        layer, head, slot = (self.page_of >= 0).nonzero(as_tuple=True)
        assert torch.equal(self.slot_of[layer, head, self.page_of[layer, head, slot]], slot)
        assert int((self.slot_of[:, :, :-1] >= 0).sum()) == layer.numel()
