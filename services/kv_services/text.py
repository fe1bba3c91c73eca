"""Text and tokens: the model's tokenizer and chat template, without torch and transformers.

`Detokenizer` turns ids into text as they come, in whole characters; `StopFilter` holds back what may become a stop
string. Chat messages are rendered once: `Tokenizer.chat_delta` gives the ids that a template puts between an answer
and the next one, by rendering a dummy conversation with and without the new messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from kv_services.errors import InvalidRequest, TokenizerMissing

_CONTEXT_IDS = 5
_DUMMY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "kvdrive-answer"}]

Message = Mapping[str, str]


class Tokenizer:
    """A tokenizer directory's `tokenizer.json` and chat template.

    Args:
        path: directory of the model, or the `tokenizer.json` in it.

    Raises:
        TokenizerMissing: the directory has no readable `tokenizer.json`.
    """

    def __init__(self, path: str) -> None:
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissing(
                f"{file}: no such file; serve a model directory with a fast tokenizer", value=file
            )
        self.path = path
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        config = _read_json(directory / "tokenizer_config.json")
        self._special = {
            name: value if isinstance(value, str) else value.get("content", "")
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        self._template = _find_template(directory, config)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """Encode text; `first` adds what the tokenizer puts before a sequence (such as BOS)."""
        return list(self._tokenizer.encode(text, add_special_tokens=first).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, leaving out special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first messages of a conversation, up to where the answer starts.

        Raises:
            InvalidRequest: the template refuses the messages.
            TokenizerMissing: the model has no chat template.
        """
        return self.encode(self._render(messages, answer=True))

    def chat_delta(self, messages: Sequence[Message], tail: Sequence[int]) -> list[int]:
        """Encode new messages for a conversation that ends with an answer.

        Args:
            messages: the new ones only.
            tail: the last ids of the conversation: what of the end-of-turn marker is there is not repeated.

        Raises:
            InvalidRequest: the template refuses the messages, or would change what is before them.
            TokenizerMissing: the model has no chat template.
        """
        before = self._render(_DUMMY, answer=False)
        after = self._render([*_DUMMY, *messages], answer=True)
        content = _DUMMY[1]["content"]
        if not after.startswith(before) or content not in before:
            raise InvalidRequest(
                "the chat template rewrites earlier messages when these are added; "
                "send them as one conversation to a new session, or use text or token input",
                roles=",".join(message["role"] for message in messages),
            )
        closing = before[before.rindex(content) + len(content) :]
        ids = self.encode(closing + after[len(before) :])
        return ids[_overlap(tail, ids[: len(self.encode(closing))]) :]

    def _render(self, messages: Sequence[Message], *, answer: bool) -> str:
        if self._template is None:
            raise TokenizerMissing(
                f"{self.path} has no chat template; use text or token input", value=self.path
            )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}",
                roles=",".join(message["role"] for message in messages),
            ) from error


class Detokenizer:
    """Turns ids into text while they come, in whole characters.

    Args:
        context: the last ids before the answer; some tokenizers need them to place spaces.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT_IDS:])
        self._start, self._read = 0, len(self._ids)

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Add ids; return the text that is whole now, or with `final` all that is left."""
        self._ids.extend(ids)
        known = self._tokenizer.decode(self._ids[self._start : self._read])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]


class StopFilter:
    """Cuts text at the first stop string, and holds back what may become one.

    Args:
        stops: non-empty stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, final: bool = False) -> str:
        """Add text; return what is certainly before any stop string, or with `final` all that is left."""
        if self.stopped:
            return ""
        self._held += text
        cuts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(cuts)
        keep = min(cuts) if cuts else len(self._held) - (0 if final else self._num_held_back())
        ready, self._held = self._held[:keep], self._held[keep:]
        return ready

    def _num_held_back(self) -> int:
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


def _overlap(tail: Sequence[int], closing: Sequence[int]) -> int:
    """Count the leading ids of `closing` that `tail` already ends with."""
    for size in range(min(len(tail), len(closing)), 0, -1):
        if list(tail[-size:]) == list(closing[:size]):
            return size
    return 0


def _find_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerMissing(
            f"the chat template in {directory} does not parse: {error}", value=directory
        ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
