"""Prompts cut from real texts, with a tokenizer of one token per word."""

from __future__ import annotations

import pytest

from kvdrive_sglang.bench import texts
from kvdrive_sglang.bench.texts import (
    calibration_texts,
    continued_texts,
    copy_task,
    prompts,
    studied_texts,
)


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


def test_studied_texts_are_of_three_kinds_and_none_is_a_calibration_text() -> None:
    words = Words()
    found = studied_texts(words, 180, 16, num_each=3)
    assert [text.kind for text in found] == ["prose"] * 3 + ["source"] * 3 + ["copy"] * 3
    assert all((len(text.prompt), len(text.forced)) == (180, 16) for text in found)
    assert len({tuple(text.prompt) for text in found}) == 9
    calibration = calibration_texts(words, 500)
    assert [len(tokens) for tokens in calibration] == [500, 500]
    runs = {tuple(tokens[i : i + 50]) for tokens in calibration for i in range(450)}
    for text in found:
        assert not any(tuple(text.prompt[i : i + 50]) in runs for i in range(130))


def test_studied_texts_beyond_the_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for less"):
        studied_texts(Words(), 1_000_000, 16, num_each=3)
