"""What is not served is refused at start, with the flag and its value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_tier.meta.errors import ConfigError
from kvdrive_sglang.refusals import _REQUIRED_VALUES, refuse_unsupported


def good_arguments() -> dict[str, Any]:
    served = {name: value for name, (value, _) in _REQUIRED_VALUES.items()}
    others = {"disable_overlap_schedule": True, "kv_cache_dtype": "auto", "lora_paths": None}
    return {**served, **others, "chunked_prefill_size": 2048}


def good_model(**changes: Any) -> SimpleNamespace:
    from sglang.srt.configs.model_config import AttentionArch

    fields: dict[str, Any] = {
        "attention_arch": AttentionArch.MHA,
        "is_hybrid_swa": False,
        "is_multimodal": False,
        "is_encoder_decoder": False,
        "context_len": 8192,
        "hf_text_config": SimpleNamespace(sliding_window=None, attn_logit_softcapping=None),
        "hf_config": SimpleNamespace(),
    }
    return SimpleNamespace(**{**fields, **changes})


def test_what_we_serve_passes() -> None:
    refuse_unsupported(SimpleNamespace(**good_arguments()), good_model())


WRONG: dict[str, Any] = {
    "pp_size": 2,
    "dp_size": 2,
    "dcp_size": 2,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "enable_lora": True,
    "enable_hierarchical_cache": True,
    "enable_hisparse": True,
    "enable_unified_memory": True,
    "enable_multimodal": True,
    "enable_streaming_session": True,
    "enable_mixed_chunk": True,
    "enable_memory_saver": True,
    "kv_canary": "log",
    "disable_radix_cache": True,
    "enable_session_radix_cache": True,
    "disable_overlap_schedule": False,
    "kv_cache_dtype": "fp8_e4m3",
    "lora_paths": ["adapter"],
    "chunked_prefill_size": None,  # what SGLang makes of -1
}


def test_every_required_value_has_a_wrong_one() -> None:
    assert set(_REQUIRED_VALUES) <= set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_flag_is_refused_by_name(name: str) -> None:
    arguments = SimpleNamespace(**{**good_arguments(), name: WRONG[name]})
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-").removesuffix("-schedule")):
        refuse_unsupported(arguments, good_model())


def test_models_that_are_not_plain_attention() -> None:
    from sglang.srt.configs.model_config import AttentionArch

    arguments = SimpleNamespace(**good_arguments())
    refused = {
        "MLA": good_model(attention_arch=AttentionArch.MLA),
        "sliding-window layers": good_model(is_hybrid_swa=True),
        "multimodal": good_model(is_multimodal=True),
        "cross attention": good_model(is_encoder_decoder=True),
        "sliding window of 4096": good_model(hf_text_config=SimpleNamespace(sliding_window=4096)),
        "caps its attention logits": good_model(
            hf_text_config=SimpleNamespace(sliding_window=None, attn_logit_softcapping=30.0)
        ),
        "state-space": good_model(hf_config=type("MambaConfig", (), {})()),
    }
    for message, model in refused.items():
        with pytest.raises(ConfigError, match=message):
            refuse_unsupported(arguments, model)


def test_weight_updates_and_beams_are_refused_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdrive_sglang import hooks

    monkeypatch.setattr(hooks, "is_requested", lambda: True)
    success, message = hooks.refuse_weight_update(None, None)
    assert not success and "restart" in message
    assert "beam" in hooks.refuse_beam_search(None, None)
    monkeypatch.setattr(hooks, "is_requested", lambda: False)
    assert hooks.refuse_weight_update(lambda self: (True, "done"), None) == (True, "done")
