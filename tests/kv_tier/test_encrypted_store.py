"""A store that encrypts: the same numbers, no page without the key, no key without its span."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kv_tier.meta.data_dir import DataDir
from kv_tier.meta.encryption import Keyring
from kv_tier.meta.fsck import check_spans, repair_spans
from kv_tier.modes import ColdEncoding
from tests.faults.chains import assert_serves_nothing_wrong, keys_of, open_store, seal_chain, transcode
from tests.faults.crash_disk import LOSSES, RecordingFileSystem, write_image
from tests.kv_tier.conftest import EngineFactory
from tests.kv_tier.test_transcode import NUM_PAGES, SCRIPT, SPARSE, first_turn, second_turn
from tests.models.synthetic_engine import SyntheticEngine

KEYRING = Keyring(b"k" * 32)


def key_files(path: Path) -> list[str]:
    return sorted(name.removesuffix(".key") for name in os.listdir(path / "keys"))


def span_files(path: Path) -> list[str]:
    return sorted(name.removesuffix(".span") for name in os.listdir(path / "spans"))


@pytest.mark.parametrize("cold", ["none", "int8"])
@pytest.mark.parametrize("num_frames", [20, 256])
def test_encryption_changes_no_number(
    new_engine: EngineFactory, tmp_path: Path, cold: ColdEncoding, num_frames: int
) -> None:
    """Live, spilled, transcoded and resumed."""
    settings = {"append": SPARSE, "cold_encoding": cold, "num_frames": num_frames}
    outputs = []
    for keyring in (None, KEYRING):
        path = tmp_path / str(keyring is not None)
        with SyntheticEngine(path, keyring=keyring, **settings) as engine:  # type: ignore[arg-type]
            session = engine.carry_on(first_turn(engine))
            engine.transcode(engine.keys(SCRIPT, NUM_PAGES))
            outputs.append(second_turn(engine, session))
        again = new_engine(path, keyring=keyring, **settings)
        resumed = again.resume(SCRIPT, NUM_PAGES)
        assert resumed is not None
        outputs.append(second_turn(again, resumed))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert key_files(tmp_path / "True") == span_files(tmp_path / "True")
    assert key_files(tmp_path / "False") == []


def test_an_engine_without_the_key_serves_none_and_removes_none(
    new_engine: EngineFactory, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    with SyntheticEngine(path, keyring=KEYRING) as engine:
        engine.carry_on(first_turn(engine))
        files = span_files(path)
    for other in (None, Keyring(b"o" * 32)):
        with SyntheticEngine(path, keyring=other) as engine:
            assert engine.num_restorable(SCRIPT) == 0
            assert engine.spans.bytes_of["foreign"] == engine.spans.used_bytes > 0
    assert key_files(path) == span_files(path) == files
    assert new_engine(path, keyring=KEYRING).num_restorable(SCRIPT) == NUM_PAGES


def test_plain_spans_are_read_and_new_ones_encrypted(new_engine: EngineFactory, tmp_path: Path) -> None:
    path = tmp_path / "data"
    with SyntheticEngine(path) as engine:
        engine.carry_on(first_turn(engine))
    engine = new_engine(path, keyring=KEYRING)
    session = engine.resume(SCRIPT, NUM_PAGES)
    assert session is not None
    engine.prefill(session, 96)
    engine.seal(session)
    assert [span.header.encrypted for span in engine.spans.spans.values()] == [False, False, True]
    assert len(key_files(path)) == 1


def test_dropped_and_superseded_spans_take_their_keys_along(tmp_path: Path) -> None:
    tokens = list(range(100, 122))
    with DataDir.open(tmp_path / "data", role="engine") as data_dir:
        store = open_store(data_dir, keyring=KEYRING)
        seal_chain(store, tokens[:14])
        seal_chain(store, tokens, done=4)
        transcode(store, keys_of(tokens)[:4])
        store.drop(keys_of(tokens)[8:])
        assert key_files(data_dir.path) == span_files(data_dir.path)
        assert len(span_files(data_dir.path)) == 2
        assert_serves_nothing_wrong(store)
        store.close()


@pytest.mark.crash
def test_power_loss_after_every_operation(tmp_path: Path) -> None:
    """What was acknowledged is there; a crash leaves leftovers, leaks and half-shredded spans, which a repair removes."""
    tokens = list(range(100, 122))
    root = tmp_path / "recorded"
    DataDir.open(root, role="engine").close()
    fs = RecordingFileSystem(root)
    with DataDir.open(root, role="engine") as data_dir:
        store = open_store(data_dir, fs=fs, keyring=KEYRING)
        seal_chain(store, tokens[:14])
        fs.mark(keys_of(tokens[:14]))
        seal_chain(store, tokens, done=4)
        fs.mark(keys_of(tokens))
        transcode(store, keys_of(tokens)[:4])
        fs.mark(keys_of(tokens)[:8])  # the rest may go from here on
        store.drop(keys_of(tokens)[8:])
        store.close()
    kinds = set()
    for num_ops in fs.crashes():
        for loss in (LOSSES[0], LOSSES[1], LOSSES[3]):
            image = fs.after(num_ops, loss)
            due = ([], *fs.marks(num_ops))[-1]
            for settle in ("engine", "fsck"):
                write_image(image, tmp_path / "data")
                with DataDir.open(tmp_path / "data", role="engine") as data_dir:
                    if settle == "fsck":
                        findings = check_spans(data_dir).findings
                        kinds |= {finding.kind for finding in findings}
                        repair_spans(data_dir, findings)
                    store = open_store(data_dir, keyring=KEYRING)
                    assert [key for key in due if store.locate(key) is None] == [], (num_ops, loss)
                    assert_serves_nothing_wrong(store)
                    store.close()
                    assert check_spans(data_dir).findings == [], (num_ops, loss, settle)
    assert kinds == {"leftover", "superseded", "key-missing"}
