"""Kill a real process that writes spans and token logs, at random points, again and again over one data directory.

Each round forks a writer, which reports over a pipe what it begins and what it was promised; the parent kills it (SIGKILL),
opens the directory as the next engine and service do, and holds it against the reports.

    python -m tests.faults.kill_rounds --rounds 200       prints the figures
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kv_services import token_log
from kv_services.token_log import Record, RecordType
from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.fsck import check_spans, repair_spans
from tests.faults.chains import GEOMETRY, assert_serves_nothing_wrong, keys_of, open_store, seal_chain

SSD_BYTES = 1 << 30
MAX_CHAINS = 6
META = {"session_id": "", "tenant": "t"}


@dataclass
class World:
    """What must be on disk, as far as the parent was told.

    Args:
        chains: tokens of each live session. sealed: how many of its pages are acknowledged.
        logs: records acknowledged of each session's log.
        doing: what was begun and never acknowledged; it may be there or not.
    """

    chains: dict[str, list[int]] = field(default_factory=dict)
    sealed: dict[str, int] = field(default_factory=dict)
    logs: dict[str, list[list[int]]] = field(default_factory=dict)
    doing: dict[str, Any] | None = None
    next_id: int = 0

    def apply(self, report: dict[str, Any]) -> None:
        """Take in one line of the writer."""
        name = report.get("chain", "")
        match report["event"]:
            case "begin":
                self.doing = report
                self.next_id = max(self.next_id, report["next_id"])
            case "logged":
                self.logs.setdefault(name, []).append(report["tokens"])
                self.chains.setdefault(name, []).extend(report["tokens"])
            case "sealed":
                self.sealed[name] = report["pages"]
            case "deleted":
                for state in (self.chains, self.sealed, self.logs):
                    state.pop(name, None)
        if report["event"] in ("sealed", "deleted"):
            self.doing = None


@dataclass
class Figures:
    """What the rounds met."""

    rounds: int = 0
    reports: int = 0
    killed_during: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    recovery_ms: list[float] = field(default_factory=list)
    pages_checked: int = 0
    logs_checked: int = 0
    torn_logs: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the figures for printing."""
        times = sorted(self.recovery_ms)
        return {
            "rounds": self.rounds,
            "acknowledged operations": self.reports,
            "killed during": dict(sorted(self.killed_during.items())),
            "acknowledged pages checked": self.pages_checked,
            "token logs checked": self.logs_checked,
            "left behind": dict(sorted(self.findings.items())) | {"torn logs": self.torn_logs},
            "recovery ms, median and most": [round(times[len(times) // 2], 1), round(times[-1], 1)],
        }


def run_rounds(root: Path, rounds: int, seed: int) -> Figures:
    """Kill and recover so many times; raises AssertionError at the first promise that was broken."""
    world, figures, rng = World(), Figures(), random.Random(seed)
    for number in range(rounds):
        _kill_one(root, world, figures, rng.randrange(2**32), rng)
        try:
            _recover(root, world, figures)
        except AssertionError as error:
            raise AssertionError(f"round {number} of seed {seed}, {world.doing}: {error}") from error
        figures.rounds += 1
    return figures


def _kill_one(root: Path, world: World, figures: Figures, seed: int, rng: random.Random) -> None:
    """Fork a writer, listen for some reports, kill it at once or a moment later, take in what it still said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as pipe:
                write_forever(root, world, random.Random(seed), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        for _ in range(rng.randint(1, 30)):
            line = pipe.readline()
            assert line, "the writer ended by itself"
            _take(world, figures, line)
        time.sleep(
            rng.choice((0.0, rng.random() * 0.004))
        )  # where in the operation the signal meets it is up to chance
        os.kill(pid, signal.SIGKILL)
        for line in pipe:
            if line.endswith("\n"):
                _take(world, figures, line)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer failed with status {status}"
    figures.killed_during[world.doing["what"] if world.doing else "nothing"] += 1


def _take(world: World, figures: Figures, line: str) -> None:
    report = json.loads(line)
    world.apply(report)
    figures.reports += report["event"] != "begin"


def write_forever(root: Path, world: World, rng: random.Random, pipe: TextIO) -> None:
    """Open the directory and do random work: turns of new and old sessions, deletions."""

    def tell(event: str, **what: Any) -> None:
        pipe.write(json.dumps({"event": event, **what}) + "\n")

    with DataDir.open(root, role="engine") as data_dir:
        store = open_store(data_dir, ssd_bytes=SSD_BYTES)
        while True:
            delete = len(world.chains) > MAX_CHAINS or (world.chains and rng.random() < 0.15)
            name = rng.choice(sorted(world.chains)) if world.chains and rng.random() < 0.8 else ""
            if delete and name:
                tell("begin", what="delete", chain=name, next_id=world.next_id)
                store.drop(keys_of(world.chains[name]))
                token_log.remove(log_path(root, name))
                world.apply({"event": "deleted", "chain": name})
                tell("deleted", chain=name)
                continue
            _one_turn(root, world, rng, store, name, tell)


def _one_turn(root: Path, world: World, rng: random.Random, store: Any, name: str, tell: Any) -> None:
    """Log some tokens, then seal what they complete; the session may be new."""
    is_new = not name
    if is_new:
        world.next_id += 1
        name = f"chain{world.next_id}"
    tokens = [rng.randrange(50_000) for _ in range(rng.randint(1, 20))]
    tell("begin", what="turn", chain=name, tokens=tokens, next_id=world.next_id)
    path = log_path(root, name)
    record = Record(RecordType.INPUT, {"turn": 0}, tokens)
    if is_new:
        token_log.create(path, [Record(RecordType.META, META), record])
    else:
        token_log.append(path, record, token_log.load(path)[1])
    world.apply({"event": "logged", "chain": name, "tokens": tokens})
    tell("logged", chain=name, tokens=tokens)
    chain = world.chains[name]
    jobs = seal_chain(store, chain, done=world.sealed.get(name, 0))
    assert all(job.error is None for job in jobs)
    pages = len(chain) // GEOMETRY.page_size
    world.apply({"event": "sealed", "chain": name, "pages": pages})
    tell("sealed", chain=name, pages=pages)


def log_path(root: Path, name: str) -> Path:
    """Locate a session's token log."""
    return root / "sessions" / f"{name}.log"


def _recover(root: Path, world: World, figures: Figures) -> None:
    started = time.perf_counter()
    with DataDir.open(root, role="engine") as data_dir:  # the lock went with its owner
        report = check_spans(data_dir)
        figures.findings.update(finding.kind for finding in report.findings)
        assert {finding.kind for finding in report.findings} <= {"leftover", "superseded"}, report.findings
        before = time.perf_counter()
        store = open_store(data_dir, ssd_bytes=SSD_BYTES)
        figures.recovery_ms.append(1e3 * (time.perf_counter() - before))
        try:
            _check_chains(store, world, figures)
            assert_serves_nothing_wrong(store)
        finally:
            store.close()
        left = check_spans(data_dir)
        repair_spans(data_dir, left.findings)
        assert left.findings == [], left.findings
    _check_logs(root, world, figures)
    assert time.perf_counter() - started < 60


def _check_chains(store: Any, world: World, figures: Figures) -> None:
    deleting = world.doing["chain"] if world.doing and world.doing["what"] == "delete" else ""
    for name, chain in world.chains.items():
        keys = keys_of(chain)[: world.sealed.get(name, 0)]
        found = store.num_restorable(keys)
        figures.pages_checked += len(keys)
        if name != deleting:
            assert found == len(keys), f"{name}: {found} of {len(keys)} acknowledged pages"


def _check_logs(root: Path, world: World, figures: Figures) -> None:
    """Compare logs with what was acknowledged; then take over what the open operation left, as a service would."""
    for unfinished in (root / "sessions").glob(f"*{token_log.TEMPORARY_SUFFIX}"):
        unfinished.unlink()
    doing, world.doing = world.doing, None
    for name, records in list(world.logs.items()):
        figures.logs_checked += 1
        path = log_path(root, name)
        if doing and doing["what"] == "delete" and doing["chain"] == name:
            world.sealed[name] = 0  # any of its spans may be gone
            if not path.exists():
                world.apply({"event": "deleted", "chain": name})
            continue
        loaded, size = token_log.load(path)
        figures.torn_logs += size < path.stat().st_size
        found = [list(record.tokens) for record in loaded[1:]]
        open_ones = [doing["tokens"]] if doing and doing["chain"] == name and doing["what"] == "turn" else []
        assert found in (records, records + open_ones), f"{name}: {len(found)} records for {len(records)}"
        if found != records:
            world.apply({"event": "logged", "chain": name, "tokens": found[-1]})
    if (
        doing
        and doing["what"] == "turn"
        and doing["chain"] not in world.logs
        and log_path(root, doing["chain"]).exists()
    ):
        world.apply({"event": "logged", "chain": doing["chain"], "tokens": doing["tokens"]})


def main() -> int:
    """Run the rounds and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = run_rounds(Path(directory) / "data", options.rounds, options.seed)
    for name, value in figures.summary().items():
        print(f"{name:30} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
