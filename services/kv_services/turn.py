"""One answer being generated: engine events become deltas, and a lost page continues from the tokens."""

from __future__ import annotations

import contextlib
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kv_services.conversation import Finish, Usage
from kv_services.engine import Engine, EngineEvent, EngineInfo, EngineRequest, LostPage, Restored
from kv_services.errors import InvalidRequest, PageLost
from kv_services.text import Detokenizer, StopFilter, Tokenizer

MAX_RETRIES = 3


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; None leaves the engine's default.

    Raises:
        InvalidRequest: a value outside its range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, good, limit in (
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature is None or 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_p", self.top_p is None or 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k is None or self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "at most 16 non-empty strings"),
        ):
            if not good:
                value = getattr(self, name)
                raise InvalidRequest(
                    f"sampling.{name} is {value!r}; it must be {limit}", value=value, limit=limit
                )

    def parameters(self, max_new_tokens: int) -> dict[str, Any]:
        """Give SGLang's names to what is set."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "sampling_seed": self.seed,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "ignore_eos": self.ignore_eos or None,
        }
        return {"max_new_tokens": max_new_tokens} | {
            key: value for key, value in values.items() if value is not None
        }


@dataclass(frozen=True)
class Delta:
    """What an answer grew by. The text waits for whole characters and for possible stop strings."""

    text: str
    token_ids: list[int]


class Answer:
    """Generates one answer.

    Args:
        prompt: [num_tokens] history and prompt.
        max_new_tokens: room for the answer, at least 1.
        clock: seconds, monotonic.

    After `deltas` is exhausted `finish` is set. `token_ids` and `text` hold what was delivered: a delta counts once
    the consumer asks for what follows it.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        tokenizer: Tokenizer,
        *,
        session_id: str,
        cache_salt: str,
        prompt: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._info, self._clock = engine, info, clock
        self._session_id, self._cache_salt = session_id, cache_salt
        self._prompt, self._sampling, self._max_new_tokens = prompt, sampling, max_new_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = StopFilter(sampling.stop)
        self._started_s = clock()
        self._usage = Usage(prompt_tokens=len(prompt))
        self._lost_read_bytes = 0
        self.token_ids: array[int] = array("I")
        self.text = ""
        self.finish: Finish | None = None

    @property
    def usage(self) -> Usage:
        """The cost so far."""
        return replace(self._usage, completion_tokens=len(self.token_ids), total_ms=self._elapsed_ms())

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Generate the answer. Closing the iterator stops the engine's work.

        Raises:
            PageLost: more than MAX_RETRIES times.
            EngineRejected, EngineUnavailable: see `Engine.generate`.
        """
        while self.finish is None:
            try:
                async with contextlib.aclosing(self._attempt()) as deltas:
                    async for delta in deltas:
                        yield delta
                        self.token_ids.extend(delta.token_ids)
                        self.text += delta.text
            except LostPage as error:
                self._count_retry(error)
            if len(self.token_ids) >= self._max_new_tokens and self.finish is None:
                self.finish = Finish.LENGTH

    async def _attempt(self) -> AsyncGenerator[Delta, None]:
        request = EngineRequest(
            uuid.uuid4().hex,
            self._session_id,
            self._cache_salt,
            [*self._prompt, *self.token_ids],
            self._sampling.parameters(self._max_new_tokens - len(self.token_ids)),
        )
        async with contextlib.aclosing(self._engine.generate(self._info, request)) as events:
            async for event in events:
                yield self._delta(event)
                if self.finish is not None:
                    return

    def _delta(self, event: EngineEvent) -> Delta:
        if event.token_ids and not self._usage.ttft_ms:
            self._usage = replace(self._usage, ttft_ms=self._elapsed_ms())
        self._count(event.restored)
        final = event.finish is not None
        text = self._stop.push(self._detokenizer.push(event.token_ids, final=final), final=final)
        if final or self._stop.stopped:
            self.finish = Finish.STOP if self._stop.stopped or event.finish == "stop" else Finish.LENGTH
        return Delta(text, event.token_ids)

    def _count(self, restored: Restored) -> None:
        read_bytes = self._lost_read_bytes + restored.read_bytes
        self._usage = replace(self._usage, **{**vars(restored), "read_bytes": read_bytes})

    def _count_retry(self, error: LostPage) -> None:
        if self._usage.retries >= MAX_RETRIES:
            raise PageLost(
                f"the engine lost pages of this turn {MAX_RETRIES + 1} times ({error}); check the disk, then repeat",
                value=MAX_RETRIES + 1,
                limit=MAX_RETRIES,
            ) from error
        self._usage = replace(self._usage, retries=self._usage.retries + 1)
        self._lost_read_bytes = self._usage.read_bytes

    def _elapsed_ms(self) -> float:
        return (self._clock() - self._started_s) * 1e3
