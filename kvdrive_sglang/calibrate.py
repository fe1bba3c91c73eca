"""Measure what the key sketch's constants are computed from, and say whose weights they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from kv_tier.index import page_means
from kv_tier.meta.errors import ConfigError
from kv_tier.sketch import Moments, mean_moments, moments_of
from kvdrive_sglang.bench.lab import LabModel, Prefix
from kvdrive_sglang.bench.selectors import paged

MAPS_FILE: Final = "kvdrive_sketch.npz"  # in a model's directory
FIRST_TOKEN: Final = 64  # earlier positions are sinks, or see too little


def measure(
    model: LabModel,
    texts: Sequence[Sequence[int]],
    entry_tokens: Sequence[int],
    progress: Callable[[str], None],
) -> dict[int, list[Moments]]:
    """Measure a model on texts, each as long as the positions that will be in use.

    Args:
        entry_tokens: sizes of entries to measure: consecutive keys averaged into one.

    Returns:
        size of an entry -> the mean moments of each layer.

    Raises:
        ConfigError: no text, or one that is too short.
    """
    if not texts or min(map(len, texts)) < 2 * FIRST_TOKEN:
        raise ConfigError(f"calibration needs texts of at least {2 * FIRST_TOKEN} tokens: give longer ones")
    measured: dict[int, list[list[Moments]]] = {count: [] for count in entry_tokens}
    for number, tokens in enumerate(texts, 1):
        progress(f"calibrating: text {number} of {len(texts)}, {len(tokens):,} tokens")
        prefix = model.prefill(tokens, keep_queries=True)
        for count, found in measured.items():
            found.append(prefix_moments(prefix, count))
    return {
        count: [mean_moments(layer) for layer in zip(*found, strict=True)]
        for count, found in measured.items()
    }


def prefix_moments(prefix: Prefix, entry_tokens: int) -> list[Moments]:
    """Measure every layer of one text, whose prefix holds its queries."""
    found = []
    for queries, keys in zip(prefix.queries, prefix.keys, strict=True):
        used = queries[FIRST_TOKEN:].permute(1, 0, 2, 3).flatten(1, 2)
        found.append(moments_of(used, page_means(paged(keys[:, FIRST_TOKEN:], entry_tokens))))
    return found


def attention_identity(model_path: Path) -> str:
    """Return a hash over what makes a model's queries and keys: the projections of all layers, and RoPE.

    Raises:
        OSError: the model is no directory of safetensors.
    """
    from safetensors import safe_open

    config = json.loads((model_path / "config.json").read_text())
    rope = {name: config.get(name) for name in ("rope_parameters", "rope_theta", "rope_scaling")}
    digests = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                if name.endswith((".q_proj.weight", ".k_proj.weight")):
                    content = tensors.get_tensor(name).view(torch.uint8).numpy()
                    digests[name] = hashlib.sha256(content.tobytes()).hexdigest()
    if not digests:
        raise ConfigError(
            f"{model_path} holds no safetensors with q_proj and k_proj: the sketch needs a Llama-like model"
        )
    return hashlib.sha256(json.dumps([rope, digests], sort_keys=True).encode()).hexdigest()
