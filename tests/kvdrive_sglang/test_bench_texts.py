"""Prompts cut from real texts, with a tokenizer of one token per word."""

from __future__ import annotations

import pytest

from kvdrive_sglang.bench import texts
from kvdrive_sglang.bench.texts import continued_texts, copy_task, prompts


class Words:
    """Number words by first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in text.split()]


def test_prompts_have_the_lengths_asked_for() -> None:
    cut = prompts(Words(), [20, 101, 3])
    assert [len(prompt) for prompt in cut] == [20, 101, 3]


def test_prompts_beyond_the_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for less"):
        prompts(Words(), [10_000_000])


def test_the_copy_task_repeats_what_stands_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "COPY_BACK_TOKENS", 50)
    monkeypatch.setattr(texts, "COPY_CUE_TOKENS", 4)
    task = copy_task(list(range(80)), prompt_tokens=70)
    assert task[:66] == list(range(66))
    assert task[66:] == list(range(16, 30))


def test_every_text_has_its_continuation() -> None:
    found = continued_texts(Words(), 400, 16)
    assert set(found) == {"prose", "prose 2", "source", "copy"}
    assert all((len(prompt), len(forced)) == (400, 16) for prompt, forced in found.values())
    assert len({tuple(prompt) for prompt, _ in found.values()}) == 4
