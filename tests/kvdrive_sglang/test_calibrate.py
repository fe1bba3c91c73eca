"""Calibration of a tiny model, through the command, and whose weights its constants belong to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import kvdrive_sglang
from kv_tier.meta.errors import ConfigError
from kv_tier.sketch import load_maps
from kvdrive_sglang.bench.lab import LabModel
from kvdrive_sglang.calibrate import MAPS_FILE, attention_identity, measure
from kvdrive_sglang.cli.main import build_app
from kvdrive_sglang.packaged_model import CONTEXT_LENGTH, MODEL_NAME

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 24, 2, 4, 2, 8, 300


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "hidden_size": HIDDEN,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
            f"{prefix}self_attn.q_proj.weight": random(HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
            f"{prefix}mlp.gate_proj.weight": random(32, HIDDEN),
            f"{prefix}mlp.up_proj.weight": random(32, HIDDEN),
            f"{prefix}mlp.down_proj.weight": random(HIDDEN, 32),
        }
    save_file(tensors, path / "model.safetensors")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    numbers = torch.randint(VOCABULARY, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{n}" for n in numbers))
    return file


def test_the_command_writes_constants_where_the_engine_looks(model_dir: Path, text: Path) -> None:
    arguments = ["calibrate", "--model-path", str(model_dir), "--text", str(text)]
    done = CliRunner().invoke(build_app(), [*arguments, "--tokens", "300", "--directions", "4"])
    assert done.exit_code == 0, done.output
    maps = load_maps(model_dir / MAPS_FILE, attention_identity(model_dir))
    assert maps.key_map.shape == (LAYERS, KV_HEADS, DIM, 4)
    assert (maps.entry_tokens, maps.num_positions) == (1, 300)
    assert maps.digest()[:16] in done.output


def test_a_text_that_is_too_short_is_refused(model_dir: Path, text: Path) -> None:
    done = CliRunner().invoke(
        build_app(), ["calibrate", "--model-path", str(model_dir), "--text", str(text), "--tokens", "500"]
    )
    assert done.exit_code == 1
    assert not (model_dir / MAPS_FILE).exists()
    with pytest.raises(ConfigError, match="at least 128"):
        measure(LabModel(model_dir), [[1, 2, 3]], (1,), lambda step: None)


def test_identity_is_that_of_queries_and_keys(model_dir: Path) -> None:
    from safetensors.torch import load_file

    before = attention_identity(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, model_dir / "model.safetensors")
    assert attention_identity(model_dir) == before
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1
    save_file(tensors, model_dir / "model.safetensors")
    assert attention_identity(model_dir) != before
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors"):
        attention_identity(model_dir)


def test_the_packaged_models_constants_are_shipped() -> None:
    file = Path(kvdrive_sglang.__file__).parent / "data" / f"{MODEL_NAME}.npz"
    with np.load(file) as arrays:
        weights = arrays["weights"].item()
    maps = load_maps(file, weights)
    assert maps.key_map.shape == maps.query_map.shape == (30, 3, 64, 32)
    assert (maps.entry_tokens, maps.num_positions) == (1, CONTEXT_LENGTH)
    assert file.stat().st_size < 300_000
