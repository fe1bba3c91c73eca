"""Restore or recompute: what a prefix costs from SSD, what computing it again would cost, and the cheaper of the two.

Both are measured while serving: the time that prefills wait for pages, and the time they take beside that. The first pages
of a prefix are the cheapest to compute and all cost the same to restore, so that a part of a prefix is never the best
choice: it is all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_tier.geometry import Geometry
from kv_tier.meta.span_file import SpanFile
from kv_tier.modes import RestoreMode

MEMORY = 0.9  # weight of what was known before an observation
LEAST_BYTES = 1 << 20  # a smaller read says little about bandwidth
LEAST_TOKENS = 64  # a smaller prefill little about its rate


@dataclass(frozen=True)
class Choice:
    """What is done with the pages of a prompt that SSD has.

    Args:
        restore: attach them; else compute them again.
        restore_s, recompute_s: estimates in seconds, None while nothing was measured.
    """

    restore: bool
    restore_s: float | None = None
    recompute_s: float | None = None


class Costs:
    """Measured costs, newer ones weighing more; seconds.

    A prefill of n tokens after a prefix of p takes ``a n + b n (p + n / 2)``: a for the weights, b for attention.
    """

    def __init__(self) -> None:
        self._wait_s = self._bytes = 0.0
        self._nn = self._nm = self._mm = self._ns = self._ms = (
            0.0  # sums of products: tokens n, pairs m, seconds s
        )

    def observe_read(self, num_bytes: int, wait_s: float) -> None:
        """Take note that ``num_bytes`` of a prefix were streamed from SSD and waited for ``wait_s``."""
        if num_bytes >= LEAST_BYTES:
            self._bytes = MEMORY * self._bytes + num_bytes
            self._wait_s = MEMORY * self._wait_s + wait_s

    def observe_prefill(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take note that one pass over ``spans`` ([request] of tokens before, new tokens) took ``seconds``, waiting apart."""
        tokens = float(sum(new for _, new in spans))
        if tokens < LEAST_TOKENS:
            return
        pairs = _pairs(spans)
        self._nn = MEMORY * self._nn + tokens * tokens
        self._nm = MEMORY * self._nm + tokens * pairs
        self._mm = MEMORY * self._mm + pairs * pairs
        self._ns = MEMORY * self._ns + tokens * seconds
        self._ms = MEMORY * self._ms + pairs * seconds

    def read_s(self, num_bytes: int) -> float | None:
        """Estimate what a prefill waits for ``num_bytes``."""
        return num_bytes * self._wait_s / self._bytes if self._bytes else None

    def prefill_s(self, prefix_tokens: int, new_tokens: int) -> float | None:
        """Estimate a prefill: the least squares of what was observed, with no cost below zero."""
        if not self._nn:
            return None
        spread = self._nn * self._mm - self._nm * self._nm
        if spread > 1e-6 * self._nn * self._mm:
            per_token = (self._ns * self._mm - self._ms * self._nm) / spread
            per_pair = (self._ms * self._nn - self._ns * self._nm) / spread
        else:
            per_token, per_pair = self._ns / self._nn, 0.0
        if per_pair < 0:
            per_token, per_pair = self._ns / self._nn, 0.0
        elif per_token < 0:
            per_token, per_pair = 0.0, self._ms / self._mm
        return per_token * new_tokens + per_pair * _pairs([(prefix_tokens, new_tokens)])


def _pairs(spans: Sequence[tuple[int, int]]) -> float:
    return sum(new * (before + new / 2) for before, new in spans)


def choose(
    mode: RestoreMode, costs: Costs, places: Sequence[tuple[SpanFile, int]], geometry: Geometry
) -> Choice:
    """Decide what to do with the restorable pages of a prompt, before anything of them is attached.

    Pages that sparse attention made are always restored: nobody can compute them again. Without measurements everything is
    restored. A recomputed exact page has the numbers of the restored one, so that the choice is one of time alone.

    Args:
        places: span and ordinal of each page, in the order of the sequence, without gaps.
    """
    if not places:
        return Choice(restore=True)
    span, ordinal = places[0]
    before = (span.header.first_page + ordinal) * geometry.page_size
    read_s = costs.read_s(len(places) * geometry.page_bytes)
    compute_s = costs.prefill_s(before, len(places) * geometry.page_size)
    exact = all(ordinal < span.header.num_exact_pages for span, ordinal in places)
    cheaper = read_s is not None and compute_s is not None and compute_s < read_s
    return Choice(not (mode == "auto" and exact and cheaper), read_s, compute_s)
