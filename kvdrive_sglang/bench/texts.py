"""Real texts that every machine with Python has: its language reference, its licence, its own sources."""

from __future__ import annotations

import argparse
import doctest
import inspect
import pydoc_data.topics
import tarfile
import typing
import unittest.mock
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

COPY_BACK_TOKENS = 6000
COPY_CUE_TOKENS = 48


class Tokenizer(Protocol):
    """Turn text into token ids, as ``tokenizers.Tokenizer`` does."""

    def encode(self, text: str) -> list[int]: ...


class ModelTokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, model_path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(model_path / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)


def reference_text() -> str:
    """Return Python's language reference as shipped for ``help()``: about 100,000 tokens of English prose."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(f"{name}\n\n{topics[name]}" for name in sorted(topics))


def source_text() -> str:
    """Return Python source code: two modules of the standard library."""
    return inspect.getsource(argparse) + inspect.getsource(tarfile)


def prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Cut one prompt per length, none of them overlapping another.

    Args:
        lengths: tokens of each prompt.

    Raises:
        ValueError: the texts hold fewer tokens than asked for.
    """
    tokens = tokenizer.encode(reference_text()[: 8 * sum(lengths)])
    if len(tokens) < sum(lengths):
        raise ValueError(f"the texts hold {len(tokens)} tokens, {sum(lengths)} were asked for: ask for less")
    cut, begin = [], 0
    for length in lengths:
        cut.append(tokens[begin : begin + length])
        begin += length
    return cut


def continued_texts(
    tokenizer: Tokenizer, prompt_tokens: int, forced_tokens: int
) -> dict[str, tuple[list[int], list[int]]]:
    """Return texts with their true continuation, for teacher forcing.

    "copy" is the one that tells selections apart: its last passage repeats one from ``COPY_BACK_TOKENS`` back, and
    the continuation goes on repeating.

    Returns:
        name -> (prompt of ``prompt_tokens``, continuation of ``forced_tokens``).
    """
    length = prompt_tokens + forced_tokens
    reference = tokenizer.encode(reference_text()[: 24 * length])
    source = tokenizer.encode(source_text()[: 10 * length])
    texts = {
        "prose": reference[:length],
        "prose 2": reference[length : 2 * length],
        "source": source[:length],
        "copy": copy_task(reference[2 * length : 3 * length], prompt_tokens),
    }
    return {name: (tokens[:prompt_tokens], tokens[prompt_tokens:length]) for name, tokens in texts.items()}


@dataclass(frozen=True)
class StudiedText:
    """A text with its true continuation; ``kind`` is "prose", "source" or "copy"."""

    kind: str
    name: str
    prompt: list[int]
    forced: list[int]


def studied_texts(
    tokenizer: Tokenizer, prompt_tokens: int, forced_tokens: int, num_each: int
) -> list[StudiedText]:
    """Return ``num_each`` texts of each kind, none overlapping another; every third copy is of source code.

    Raises:
        ValueError: the texts hold fewer tokens than asked for.
    """
    length = prompt_tokens + forced_tokens
    num_copies_of_source = num_each // 3
    prose = _cut(tokenizer, reference_text(), length, 2 * num_each - num_copies_of_source)
    source = _cut(tokenizer, source_text(), length, num_each + num_copies_of_source)
    copies = [copy_task(tokens, prompt_tokens) for tokens in prose[num_each:] + source[num_each:]]
    kinds = {"prose": prose[:num_each], "source": source[:num_each], "copy": copies}
    return [
        StudiedText(kind, f"{kind} {number}", tokens[:prompt_tokens], tokens[prompt_tokens:])
        for kind, texts in kinds.items()
        for number, tokens in enumerate(texts, 1)
    ]


def calibration_texts(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return texts of ``num_tokens`` that no study uses: the end of the language reference, and other sources."""
    prose = tokenizer.encode(reference_text()[-16 * num_tokens :])[-num_tokens:]
    modules = "".join(inspect.getsource(module) for module in (typing, unittest.mock, doctest))
    return [prose, tokenizer.encode(modules[: 16 * num_tokens])[:num_tokens]]


def _cut(tokenizer: Tokenizer, text: str, length: int, count: int) -> list[list[int]]:
    """Cut a text's beginning into ``count`` pieces of ``length`` tokens."""
    tokens = tokenizer.encode(text[: 16 * length * count])
    if len(tokens) < length * count:
        raise ValueError(f"a text holds {len(tokens)} tokens, {length * count} were asked for: ask for less")
    return [tokens[begin : begin + length] for begin in range(0, length * count, length)]


def copy_task(tokens: Sequence[int], prompt_tokens: int) -> list[int]:
    """Let the end of ``tokens`` repeat what stands ``COPY_BACK_TOKENS`` before, from a cue inside the prompt on."""
    begin = prompt_tokens - COPY_CUE_TOKENS
    back = min(COPY_BACK_TOKENS, begin)
    count = len(tokens) - begin
    return [*tokens[:begin], *tokens[begin - back : begin - back + count]]
