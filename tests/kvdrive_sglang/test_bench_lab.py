"""The plain-torch model against transformers' on random weights, and what a selection may see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.bench.lab import LabModel, Recorder, positions_of

PROMPT, NEW = 21, 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(50, (PROMPT + NEW,), generator=torch.Generator().manual_seed(1)).tolist()


def test_logits_are_those_of_transformers(
    reference: tuple[Path, LlamaForCausalLM], tokens: list[int]
) -> None:
    path, theirs = reference
    model = LabModel(path, torch.float32)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0, PROMPT:]
    got = model.forced(model.prefill(tokens[:PROMPT]), tokens[PROMPT:])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def test_selecting_everything_is_full_attention_and_the_own_position_is_always_attended(
    reference: tuple[Path, LlamaForCausalLM], tokens: list[int]
) -> None:
    model = LabModel(reference[0], torch.float32)
    prefix = model.prefill(tokens[:PROMPT], keep_queries=True)
    assert [q.shape for q in prefix.queries] == [(PROMPT, 2, 3, 8)] * 3
    full = model.forced(prefix, tokens[PROMPT:])
    everything = torch.ones(2, NEW, PROMPT + NEW, dtype=torch.bool)
    recorder = Recorder(lambda layer, queries, keys: everything)
    torch.testing.assert_close(model.forced(prefix, tokens[PROMPT:], recorder), full)
    assert recorder.queries[2].shape == (NEW, 2, 3, 8)
    assert recorder.keys[2].shape == (2, PROMPT + NEW, 8)
    alone = model.forced(prefix, tokens[PROMPT:], lambda layer, queries, keys: ~everything)
    assert alone.isfinite().all()
    assert not torch.allclose(alone, full, atol=1e-3)


def test_a_forced_decode_equals_steps_of_one_token(
    reference: tuple[Path, LlamaForCausalLM], tokens: list[int]
) -> None:
    model = LabModel(reference[0], torch.float32)
    prefix = model.prefill(tokens[:PROMPT])
    chosen = positions_of(torch.rand(2, NEW, 7, generator=torch.Generator().manual_seed(2)) < 0.5, 4, 27)

    def select(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return chosen[:, : len(queries), : keys.shape[1]]

    whole = model.forced(prefix, tokens[PROMPT:], select)
    for count in range(1, NEW):
        part = model.forced(prefix, tokens[PROMPT : PROMPT + count], select)
        torch.testing.assert_close(part, whole[:count], atol=1e-5, rtol=1e-4)


def test_the_last_page_may_be_partial() -> None:
    assert (
        positions_of(torch.tensor([True, False, True]), 4, 10).tolist()
        == [True] * 4 + [False] * 4 + [True] * 2
    )


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "hidden_act": "gelu"}')
    with pytest.raises(ConfigError, match="gpt2"):
        LabModel(tmp_path)
