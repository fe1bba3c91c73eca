"""What makes another engine of the same weight files: no KV is shared then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_tier.geometry import Geometry
from kvdrive_sglang import pool
from kvdrive_sglang.config import parse_config
from kvdrive_sglang.pool import LOADING, fingerprint_of

GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=8, page_size=8, dtype=torch.bfloat16)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments that SGLang would report."""
    (tmp_path / "tokenizer.json").write_text("{}")
    arguments = SimpleNamespace(
        model_path=str(tmp_path), tokenizer_path=None, json_model_override_args="{}", **dict.fromkeys(LOADING)
    )
    monkeypatch.setattr(pool, "get_server_args", lambda: arguments)
    monkeypatch.setattr(pool, "get_parallel", lambda: SimpleNamespace(tp_rank=0, tp_size=1))
    return arguments


@pytest.mark.parametrize("name", [*LOADING, "json_model_override_args"])
def test_weights_that_are_loaded_otherwise_share_no_kv(server: SimpleNamespace, name: str) -> None:
    config = parse_config({"data_dir": server.model_path, "model_revision": "0" * 40})
    before = fingerprint_of(config, GEOMETRY)
    assert fingerprint_of(config, GEOMETRY) == before
    setattr(server, name, "other")
    assert fingerprint_of(config, GEOMETRY) != before
