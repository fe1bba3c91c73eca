"""What we do not serve yet, refused at start with the flag to change; each becomes supported with a test."""

from __future__ import annotations

from typing import Any

from kv_tier.meta.errors import ConfigError

# attribute of ServerArgs -> (the value we serve, the flag)
_REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "pp_size": (1, "--pp-size"),
    "dp_size": (1, "--dp-size"),
    "dcp_size": (1, "--dcp-size"),
    "speculative_algorithm": (None, "--speculative-algorithm"),
    "disaggregation_mode": ("null", "--disaggregation-mode"),
    "enable_lora": (False, "--enable-lora"),
    "enable_hierarchical_cache": (False, "--enable-hierarchical-cache"),
    "enable_hisparse": (False, "--enable-hisparse"),
    "enable_unified_memory": (False, "--enable-unified-memory"),
    "enable_multimodal": (False, "--enable-multimodal"),
    "enable_streaming_session": (False, "--enable-streaming-session"),
    "enable_mixed_chunk": (False, "--enable-mixed-chunk"),
    "enable_memory_saver": (False, "--enable-memory-saver"),
    "kv_canary": ("none", "--kv-canary"),
    "disable_radix_cache": (False, "--disable-radix-cache"),
    "enable_session_radix_cache": (False, "--enable-session-radix-cache"),
}


def refuse_unsupported(server_args: Any, model_config: Any) -> None:
    """Refuse an engine whose flags or model we cannot serve correctly.

    Raises:
        ConfigError: names the flag or the property of the model, its value, and what to do.
    """
    for name, (served, flag) in _REQUIRED_VALUES.items():
        value = getattr(server_args, name)
        if value != served and not (served is False and value is None):
            raise ConfigError(
                f"{flag} is {value!r}: the kvdrive backend serves only {served!r}; drop the flag"
            )
    if server_args.lora_paths:
        raise ConfigError(
            f"--lora-paths is {server_args.lora_paths!r}: a LoRA's id does not cover its weights; drop it"
        )
    chunk = server_args.chunked_prefill_size
    if not chunk or chunk < 0:
        raise ConfigError(
            f"--chunked-prefill-size is {chunk!r}: a prompt would need frames for all of itself; drop the flag or pass at least "
            "--page-size"
        )
    if not server_args.disable_overlap_schedule:
        raise ConfigError("the overlap scheduler is on: start with --disable-overlap-schedule")
    cache_dtype = server_args.kv_cache_dtype
    if cache_dtype not in ("auto", "bfloat16", "bf16", "float16", "float32"):
        raise ConfigError(f"--kv-cache-dtype is {cache_dtype!r}: quantised KV is not served; drop the flag")
    _refuse_model(model_config)


def _refuse_model(model_config: Any) -> None:
    from sglang.srt.configs.model_config import AttentionArch

    if model_config.attention_arch != AttentionArch.MHA:
        raise ConfigError(
            f"the model uses {model_config.attention_arch.name} attention: the kvdrive backend serves multi-head and "
            f"grouped-query attention; use another --attention-backend"
        )
    for name, what in (
        ("is_hybrid_swa", "sliding-window layers"),
        ("is_multimodal", "multimodal inputs"),
        ("is_encoder_decoder", "cross attention"),
    ):
        if getattr(model_config, name, False):
            raise ConfigError(f"the model has {what}: not served by the kvdrive backend; use another backend")
    text = model_config.hf_text_config
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True) and window < model_config.context_len:
        raise ConfigError(f"the model attends through a sliding window of {window} tokens: not served")
    if getattr(text, "attn_logit_softcapping", None):
        raise ConfigError("the model caps its attention logits: not served by the kvdrive backend")
    if any(name in type(model_config.hf_config).__name__ for name in ("Mamba", "Jamba", "Qwen3Next")):
        raise ConfigError(f"{type(model_config.hf_config).__name__} has state-space layers: not served")
