"""The window cache of one KV head, as a list that is searched."""

from __future__ import annotations

from collections.abc import Sequence


class WindowModel:
    """Keep at most ``num_slots`` pages; the one of the lowest current score leaves, never one selected now."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.resident: list[int] = []

    def missing(self, selected: Sequence[int]) -> list[int]:
        """Return which selected pages must be fetched, in order."""
        return [page for page in selected if page not in self.resident]

    def num_victims(self, selected: Sequence[int]) -> int:
        """Return how many pages must leave: empty slots are used first."""
        return max(0, len(self.resident) + len(self.missing(selected)) - self.num_slots)

    def victim_scores(self, selected: Sequence[int], scores: Sequence[float]) -> list[float]:
        """Return the scores of the pages that leave, ascending; which of equals leaves is open."""
        may_leave = sorted(scores[page] for page in self.resident if page not in selected)
        return may_leave[: self.num_victims(selected)]

    def admit(self, selected: Sequence[int], victims: Sequence[int]) -> None:
        """Take the selected pages in; ``victims`` were chosen among equals by the code under test."""
        self.resident = [p for p in self.resident if p not in victims] + self.missing(selected)
        assert len(self.resident) <= self.num_slots

    def drop(self, pages: Sequence[int]) -> None:
        self.resident = [page for page in self.resident if page not in pages]
