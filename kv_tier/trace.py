"""A trace of decode steps that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show: what ran when.

The stages of the pipeline are on one track, the reads of each micro-batch on one of their own. A read is over when that is
first seen, between two stages: its end is late by one stage at most, never early.

The file is a JSON array of events (Chrome's "JSON Array Format"), complete after ``close``; the viewers take it without its
last bracket too, as a killed process leaves it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kv_tier.meta.errors import ConfigError

MOST_EVENTS = 500_000  # about 80 MB; a server that was forgotten writes no more
STAGES = "stages"


class Trace:
    """Write spans of time to a file; owned by one thread.

    Args:
        path: the file, written anew.
        most_events: what comes later is left out.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, *, most_events: int = MOST_EVENTS) -> None:
        try:
            self._file = path.open("w")
        except OSError as error:
            raise ConfigError(
                f"trace_path={path} cannot be written: {error.strerror}: name another file"
            ) from error
        self._left = most_events
        self._tracks: dict[str, int] = {}
        self._events: list[tuple[str, str, int, int, dict[str, Any]]] = []
        self._file.write("[")
        self._write({"name": "process_name", "ph": "M", "args": {"name": "kvdrive"}}, first=True)

    def span(self, name: str, track: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """Add a span from ``begin_ns`` to ``end_ns`` (``time.perf_counter_ns``); spans of one track must nest."""
        if self._left:
            self._left -= 1
            self._events.append((name, track, begin_ns, end_ns, args))

    def flush(self) -> None:
        """Write what was added; between steps, so that it falls into no span."""
        for name, track, begin_ns, end_ns, args in self._events:
            if track not in self._tracks:
                self._tracks[track] = len(self._tracks)
                self._write(
                    {"name": "thread_name", "ph": "M", "tid": self._tracks[track], "args": {"name": track}}
                )
            when = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
            self._write(
                {"name": name, "cat": "kvdrive", "ph": "X", **when, "tid": self._tracks[track], "args": args}
            )
        self._events.clear()
        self._file.flush()

    def close(self) -> None:
        """Write the rest and complete the file."""
        self.flush()
        self._file.write("\n]\n")
        self._file.close()

    def _write(self, event: dict[str, Any], *, first: bool = False) -> None:
        self._file.write(("\n" if first else ",\n") + json.dumps({"pid": os.getpid(), "tid": 0, **event}))
