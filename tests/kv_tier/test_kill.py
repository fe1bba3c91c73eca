"""Real processes and SIGKILL: a few rounds here, many under `make soak`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.errors import DataDirBusy
from tests.faults.chains import keys_of, open_store, seal_chain
from tests.faults.kill_rounds import run_rounds

pytestmark = pytest.mark.crash


def test_a_few_kills(tmp_path: Path) -> None:
    figures = run_rounds(tmp_path / "data", rounds=8, seed=2)
    assert figures.rounds == 8 and figures.pages_checked > 0 and figures.logs_checked > 0


def test_a_second_engine_is_refused_and_takes_over_after_sigkill(tmp_path: Path) -> None:
    root = tmp_path / "data"
    tokens = list(range(16))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = open_store(DataDir.open(root, role="engine"))
            seal_chain(store, tokens)
            os.write(writer, b"sealed")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 6) == b"sealed"
        with pytest.raises(DataDirBusy, match=f"the engine with pid {pid} owns it"):
            DataDir.open(root, role="engine")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    with DataDir.open(root, role="engine") as data_dir:  # at once
        store = open_store(data_dir)
        assert store.num_restorable(keys_of(tokens)) == 8
        store.close()
