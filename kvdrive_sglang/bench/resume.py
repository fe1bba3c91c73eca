"""kvdrive bench resume: a session of 7,000 tokens goes on after its engine was killed.

One session is prefilled and answered once, and its pages are sealed. Then, for 20 further tokens, the time to the first
token at a streaming client:

- warm: the engine never stopped; once more in each restarted engine, after its resumed turn, so that both are timed
  side by side;
- resumed: the engine was killed by SIGKILL and started again, has answered one unrelated request, and the page cache was
  dropped where that is permitted;
- re-prefill: the same prompt under another cache salt, and on an engine with SGLang's ``torch_native`` backend.

Each repeat has 20 tokens of its own, so that nothing of an earlier repeat is found again; warm and resumed turns of a
repeat must give the same tokens. ``bytes_read`` is what the resumed engine read up to the first token, and
``raw_read_s`` the time that the fastest plain way takes for as many bytes of the same files in the same cache state.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_tier.meta.page_keys import page_keys
from kvdrive_sglang.bench.engines import (
    Answer,
    BenchEngine,
    BenchFailed,
    Progress,
    Request,
    median,
    model_path,
    scratch,
    start_kvdrive,
    start_reference,
)
from kvdrive_sglang.bench.report import BenchResult
from kvdrive_sglang.bench.texts import ModelTokenizer, prompts

NAME = "resume"
SUMMARY_KEYS = (
    "reprefill_ttft_s",
    "reprefill_native_ttft_s",
    "warm_ttft_s",
    "resumed_ttft_s",
    "bytes_read",
    "raw_read_s",
    "reprefill_over_resumed",
    "resume_excess_s",
    "tokens_equal",
)

SESSION_TOKENS = 7000
TURN_TOKENS = 20
FIRST_ANSWER_TOKENS = 8
NEW_TOKENS = 16
UNRELATED_TOKENS = 300
PAGE_SIZE = 8
READ_BYTES = 4 << 20
READ_THREADS = (1, 2, 4)
READ_ALLOWANCE = 1.5
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Turn:
    """What one turn took and gave: the tokens of a one-token request and of the longer one after it."""

    ttft_s: float
    tokens: list[int]
    bytes_read: int = 0
    figures: dict[str, int] | None = None


def run(full: bool, progress: Progress) -> BenchResult:
    """Measure with three restarts, with ``full`` five."""
    model = model_path()
    tokenizer = ModelTokenizer(model)
    repeats = 5 if full else 3
    session, unrelated, *turns = prompts(
        tokenizer, [SESSION_TOKENS, UNRELATED_TOKENS * (repeats + 2), *[TURN_TOKENS] * repeats]
    )
    warm_ups = [unrelated[i * UNRELATED_TOKENS :][:UNRELATED_TOKENS] for i in range(repeats + 2)]
    with scratch() as root:
        bench = ResumeBench(model, root, progress, warm_ups)
        history, warm, reprefill = bench.never_stopped(session, turns)
        resumed, raw, how = bench.restarted(history, turns, warm)
        native = bench.native(history, turns)
    return result_of(warm, resumed, reprefill, native, raw, how)


def result_of(
    warm: Sequence[Turn],
    resumed: Sequence[Turn],
    reprefill: Sequence[Turn],
    native: Sequence[Turn],
    raw: Sequence[float],
    how: str,
) -> BenchResult:
    """Put the repeats into rows and their medians into the summary."""
    rows: list[dict[str, Any]] = []
    for i, (w, r) in enumerate(zip(warm, resumed, strict=False)):
        rows.append(
            {
                "repeat": i + 1,
                "warm_ttft_s": w.ttft_s,
                "resumed_ttft_s": r.ttft_s,
                "reprefill_ttft_s": reprefill[i].ttft_s if i < len(reprefill) else None,
                "reprefill_native_ttft_s": native[i].ttft_s if i < len(native) else None,
                "bytes_read": r.bytes_read,
                "raw_read_s": raw[i],
                "tokens_ssd": (r.figures or {}).get("tokens_ssd"),
                "tokens_computed": (r.figures or {}).get("tokens_computed"),
                "tokens_equal": w.tokens == r.tokens,
            }
        )
    figures = {
        name: median(turn.ttft_s for turn in turns)
        for name, turns in (
            ("reprefill_ttft_s", reprefill),
            ("reprefill_native_ttft_s", native),
            ("warm_ttft_s", warm),
            ("resumed_ttft_s", resumed),
        )
    }
    raw_s = median(raw)
    summary: dict[str, Any] = {
        **figures,
        "bytes_read": int(median(turn.bytes_read for turn in resumed)),
        "raw_read_s": raw_s,
        "reprefill_over_resumed": min(figures["reprefill_ttft_s"], figures["reprefill_native_ttft_s"])
        / figures["resumed_ttft_s"],
        "resume_excess_s": figures["resumed_ttft_s"] - figures["warm_ttft_s"] - READ_ALLOWANCE * raw_s,
        "tokens_equal": all(row["tokens_equal"] for row in rows),
        "repeats": len(rows),
        "page_cache": how,
    }
    return BenchResult(NAME, rows, summary)


class ResumeBench:
    """Run the engines one after another on one data directory."""

    def __init__(self, model: Path, root: Path, progress: Progress, warm_ups: list[list[int]]) -> None:
        self.model = model
        self.root = root
        self.progress = progress
        self.warm_ups = warm_ups

    def _start(self, what: str, start: Callable[..., BenchEngine], **settings: Any) -> BenchEngine:
        self.progress(f"starting {what}")
        engine = start(self.model, self.root / "engine", **settings)
        try:
            engine.wait_ready()
            engine.ask(Request(self.warm_ups.pop(), 2))
        except BaseException:
            engine.kill()
            raise
        return engine

    def never_stopped(
        self, session: list[int], turns: list[list[int]]
    ) -> tuple[list[int], list[Turn], list[Turn]]:
        """Answer once and seal; then the warm turns and the re-prefills. Ends by SIGKILL.

        Returns:
            the session's tokens with the first answer, warm turns, re-prefills.
        """
        engine = self._start("our engine", start_kvdrive)
        try:
            self.progress(f"prefill of {len(session)} tokens")
            answer = engine.ask(Request(session, FIRST_ANSWER_TOKENS, session="resume-bench"))
            history = session + answer.tokens
            wait_sealed(engine, history[:-1])
            warm = []
            for number, turn in enumerate(turns):
                self.progress(f"warm turn {number + 1} of {len(turns)}")
                warm.append(take_turn(engine, history + turn))
            reprefill = []
            for number, turn in enumerate(turns):
                self.progress(f"re-prefill {number + 1} of {len(turns)}")
                reprefill.append(take_turn(engine, history + turn, new=1, salt=f"fresh-{number}"))
        finally:
            engine.kill()
        return history, warm, reprefill

    def restarted(
        self, history: list[int], turns: list[list[int]], warm: list[Turn]
    ) -> tuple[list[Turn], list[float], str]:
        """Start, take one turn, read the files raw, kill; as often as there are turns. Adds to ``warm``."""
        resumed, raw, how = [], [], ""
        for number, turn in enumerate(turns):
            engine = self._start(f"our engine again, {number + 1} of {len(turns)}", start_kvdrive)
            try:
                self.progress("resumed turn")
                spans = span_files(self.root)
                how = drop_page_cache(spans)
                resumed.append(take_turn(engine, history + turn))
                warm.append(take_turn(engine, history + turns[number - 1]))
                raw.append(self._raw_read_s(spans, resumed[-1].bytes_read))
            finally:
                engine.kill()
        return resumed, raw, how

    def _raw_read_s(self, spans: list[Path], num_bytes: int) -> float:
        """Return the seconds of the fastest plain way to read ``num_bytes`` of the spans, page cache dropped."""
        self.progress("raw read of the same bytes")
        times = []
        for direct in (True, False):
            for threads in READ_THREADS:
                drop_page_cache(spans)
                times.append(read_raw(spans, num_bytes, threads=threads, direct=direct))
        return min(times)

    def native(self, history: list[int], turns: list[list[int]]) -> list[Turn]:
        """Prefill the same prompts on SGLang's own backend, from an empty cache each."""
        engine = self._start("torch_native", start_reference)
        try:
            prefills = []
            for number, turn in enumerate(turns):
                self.progress(f"re-prefill on torch_native {number + 1} of {len(turns)}")
                engine.flush()
                prefills.append(take_turn(engine, history + turn, new=1, counted=False))
        finally:
            engine.kill()
        return prefills


def take_turn(
    engine: BenchEngine,
    prompt: list[int],
    *,
    new: int = NEW_TOKENS,
    salt: str | None = None,
    counted: bool = True,
) -> Turn:
    """Time a request of one token; then, unless ``new`` is 1, ask for ``new`` tokens of the same prompt.

    The first request belongs to no session, so that nothing of it is written; ``bytes_read`` counts it alone.
    """
    before = bytes_read(engine) if counted else 0
    first: Answer = engine.ask(Request(prompt, 1, salt=salt))
    after = bytes_read(engine) if counted else 0
    tokens = list(first.tokens)
    if new > 1:
        tokens += engine.ask(Request(prompt, new, salt=salt)).tokens
    return Turn(first.ttft_s, tokens, after - before, next(iter(first.meta.get("kvdrive") or [{}])))


def bytes_read(engine: BenchEngine) -> int:
    return int(engine.control("stats")["counters"]["bytes_read"])


def wait_sealed(engine: BenchEngine, tokens: list[int], *, salt: str | None = None) -> None:
    """Wait until every full page of ``tokens`` is on disk.

    Raises:
        BenchFailed: it is not within a minute.
    """
    keys = [key.hex() for key in page_keys(tokens, PAGE_SIZE, cache_salt=salt)]
    num_sealed = engine.control("sealed", keys=keys, wait_s=60.0)["num_sealed"]
    if num_sealed < len(keys):
        raise BenchFailed(f"only {num_sealed} of {len(keys)} pages were sealed after 60 s")


# ---- the disk ---------------------------------------------------------------------------------------------------


def span_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "engine" / "data" / "spans").iterdir() if path.is_file())


def drop_page_cache(files: Sequence[Path]) -> str:
    """Drop the page cache, all of it where permitted, else that of ``files``; return which."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        return "posix_fadvise on the span files"
    return "drop_caches"


def read_raw(files: Sequence[Path], num_bytes: int, *, threads: int, direct: bool) -> float:
    """Return the seconds to read the first ``num_bytes`` of ``files`` in blocks of 4 MiB; infinite if not supported."""
    blocks = plan_blocks([(path, path.stat().st_size) for path in files], num_bytes)
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    try:
        fds = {path: os.open(path, flags) for path in files}
    except OSError:
        return float("inf")  # a file system without direct reads
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(bytes(READ_BYTES))  # pages are there before the clock starts

    def read(worker: int) -> None:
        for path, offset, length in blocks[worker::threads]:
            os.preadv(fds[path], [memoryview(buffers[worker])[:length]], offset)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.0] * threads))
            begin = time.perf_counter()
            list(pool.map(read, range(threads)))
            return time.perf_counter() - begin
    finally:
        for fd in fds.values():
            os.close(fd)


def plan_blocks(sizes: Sequence[tuple[Path, int]], num_bytes: int) -> list[tuple[Path, int, int]]:
    """Cut the first ``num_bytes`` of files into (path, offset, length), lengths multiples of 4096 up to 4 MiB."""
    blocks, left = [], -(-num_bytes // 4096) * 4096
    for path, size in sizes:
        for offset in range(0, min(size, left), READ_BYTES):
            blocks.append((path, offset, min(READ_BYTES, size - offset, left - offset)))
        left -= min(size, left)
    return blocks
