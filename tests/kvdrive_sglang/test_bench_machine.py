"""The machine's roofs and the work of attention under them."""

import json
from pathlib import Path

import pytest

from kvdrive_sglang.bench import machine

CONFIG = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def test_roofs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "PRODUCT_SIZE", 32)
    row = machine.roof_row()
    assert row["memory_gb_per_s"] > 0 and row["product_gflop_per_s"] > 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kv_bytes": 2 * 3 * 64 * 2 * 10, "attention_flop": 4 * 9 * 64 * 10}),
        ({"head_dim": 32}, {"kv_bytes": 2 * 3 * 32 * 2 * 10, "attention_flop": 4 * 9 * 32 * 10}),
    ],
)
def test_work_counts_kv_bytes_and_operations(
    tmp_path: Path, changes: dict[str, int], expected: dict[str, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    assert machine.attention_work(tmp_path, 10) == expected
