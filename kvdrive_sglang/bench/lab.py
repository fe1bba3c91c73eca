"""The model in plain torch, for studies of selection: exact prefill once, then sparse decodes without an engine.

A teacher-forced decode of T tokens is one forward pass of T queries. Each (layer, KV head, query) attends the pages that
a ``Select`` gave it and its own position. That equals T sparse decode steps one after another: a new token's KV in a
layer depends on earlier tokens' KV of the layers below only, and those are computed first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from kv_tier.meta.errors import ConfigError

QUERY_TILE = 512  # tokens whose activations of one layer are computed at a time in a prefill

Select = Callable[[int, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
"""(layer, queries, keys) -> positions that each query attends.

queries: [token, kv_head, group, head_dim], the T new tokens, after RoPE. keys: [kv_head, position, head_dim], the prompt's
and those of the new tokens, after RoPE; query t may look at the first ``position - T + t + 1`` only. Returns [kv_head,
token, position] bool (``positions_of`` makes it from pages), or None for everything. Positions after a query's own are
hidden, its own is attended, whatever is selected.
"""


def positions_of(pages: torch.Tensor, page_size: int, num_positions: int) -> torch.Tensor:
    """Expand pages ([..., page] bool) to their positions, [..., num_positions] bool; the last page may be partial."""
    return pages.repeat_interleave(page_size, -1)[..., :num_positions]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, each [out, in]; norms [hidden]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Prefix:
    """Exact KV of a prompt.

    ``keys``, ``values``: one [kv_head, position, head_dim] per layer, keys after RoPE.
    ``queries``: one [token, kv_head, group, head_dim] per layer, where the prefill was asked to keep them.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[1]


@dataclass
class Recorder:
    """See everything and keep what each layer saw: a ``Select`` for studies of locality under full attention.

    ``queries``: per layer [token, kv_head, group, head_dim]; ``keys``: per layer [kv_head, position, head_dim], views.
    """

    queries: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]

    def __init__(self, select: Select | None = None) -> None:
        """Record; attend what ``select`` says, or everything without it."""
        self.select = select
        self.queries, self.keys = {}, {}

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        self.queries[layer], self.keys[layer] = queries, keys
        return None if self.select is None else self.select(layer, queries, keys)


class LabModel:
    """A Llama-architecture model (RMSNorm, RoPE, grouped queries, SwiGLU) from a directory of safetensors.

    Attributes:
        num_layers, num_heads, num_kv_heads, group, head_dim: sizes; ``group`` query heads share a KV head.
        scale: the attention scale.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Load the weights.

        Args:
            dtype: of weights and arithmetic. float32 decodes over a bfloat16 model's prefix without the noise of
                bfloat16, which is as large as what a good selection costs.

        Raises:
            ConfigError: the architecture or its RoPE is another one.
            OSError: a file is missing.
        """
        config = json.loads((path / "config.json").read_text())
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
        kind = (config["model_type"], rope.get("rope_type", "default"), config["hidden_act"])
        if kind != ("llama", "default", "silu"):
            raise ConfigError(
                f"{path} has model type, RoPE and activation {kind}; "
                "this bench computes ('llama', 'default', 'silu')"
            )
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads", self.num_heads)
        self.group = self.num_heads // self.num_kv_heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.scale = self.head_dim**-0.5
        self.max_positions: int = config["max_position_embeddings"]
        self._epsilon: float = config["rms_norm_eps"]
        self._theta: float = rope["rope_theta"]
        self._load(path, dtype)

    def _load(self, path: Path, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = tensors.get("lm_head.weight", self._embedding)
        self._norm = tensors["model.norm.weight"]
        self._layers = [_layer_weights(tensors, f"model.layers.{i}.") for i in range(self.num_layers)]

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], *, keep_queries: bool = False) -> Prefix:
        """Compute the exact KV of a prompt with flash attention: some seconds for 7,000 tokens.

        Args:
            keep_queries: keep every layer's queries as well, as much memory as the model's query heads take.
        """
        hidden = self._embedding[torch.tensor(tokens)]
        cos, sin = self._rotation(0, len(tokens))
        prefix = Prefix([], [], [])
        for weights in self._layers:
            query, key, value = self._project(weights, hidden, cos, sin)
            attended = scaled_dot_product_attention(
                query.flatten(1, 2).transpose(0, 1)[None],
                key.repeat_interleave(self.group, 0)[None],
                value.repeat_interleave(self.group, 0)[None],
                is_causal=True,
                scale=self.scale,
            )[0].transpose(0, 1)
            self._finish_layer(weights, hidden, attended.flatten(1))
            prefix.keys.append(key)
            prefix.values.append(value)
            if keep_queries:
                prefix.queries.append(query)
        return prefix

    @torch.inference_mode()
    def forced(self, prefix: Prefix, tokens: Sequence[int], select: Select | None = None) -> torch.Tensor:
        """Decode teacher-forced: token t is fed at position ``prefix.num_tokens + t`` whatever was predicted.

        Args:
            select: the positions that are attended; None for full attention.

        Returns:
            [token, vocabulary] float32 logits of the token after each.
        """
        begin, count = prefix.num_tokens, len(tokens)
        hidden = self._embedding[torch.tensor(tokens)]
        cos, sin = self._rotation(begin, count)
        visible = torch.arange(begin + count) <= torch.arange(begin, begin + count)[:, None]
        for layer, weights in enumerate(self._layers):
            query, key, value = self._project(weights, hidden, cos, sin)
            key = torch.cat([prefix.keys[layer].to(key.dtype), key], dim=1)
            value = torch.cat([prefix.values[layer].to(value.dtype), value], dim=1)
            chosen = None if select is None else select(layer, query, key)
            attended = self._attend(query, key, value, visible, chosen)
            self._finish_layer(weights, hidden, attended)
        return linear(self._normed(hidden, self._norm), self._head).float()

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend [token, kv_head, group, head_dim] over [kv_head, position, head_dim]; return [token, hidden]."""
        count, positions = visible.shape
        mask = visible[None]
        if chosen is not None:
            mask = chosen & visible
            mask[:, torch.arange(count), torch.arange(positions - count, positions)] = True
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        shape = (self.num_kv_heads, self.group, positions, self.head_dim)
        out = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key[:, None].expand(shape),
            value[:, None].expand(shape),
            attn_mask=bias[:, None],
            scale=self.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1)

    def _project(
        self, weights: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (query [token, kv_head, group, head_dim], key and value [kv_head, token, head_dim])."""
        mixed = linear(self._normed(hidden, weights.input_norm), weights.qkv)
        mixed = mixed.view(len(hidden), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = mixed.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        shape = (len(hidden), self.num_kv_heads, self.group, self.head_dim)
        return query.view(shape), key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()

    def _finish_layer(self, weights: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add attention's output ([token, hidden]) and the MLP to ``hidden``, in place."""
        for begin in range(0, len(hidden), QUERY_TILE):
            rows = slice(begin, begin + QUERY_TILE)
            hidden[rows] += linear(attended[rows], weights.output)
            gate, up = linear(self._normed(hidden[rows], weights.mlp_norm), weights.gate_up).chunk(2, -1)
            hidden[rows] += linear(silu(gate) * up, weights.down)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return weight * scaled.to(hidden.dtype)

    def _rotation(self, begin: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [token, 1, head_dim] in the model's dtype, of positions from ``begin``."""
        frequency = self._theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = torch.arange(begin, begin + count).float()[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return angle.cos().to(self._embedding.dtype), angle.sin().to(self._embedding.dtype)


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to [token, head, head_dim]; the pairs are the two halves of a head."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-second, first], dim=-1) * sin


def _layer_weights(tensors: dict[str, torch.Tensor], prefix: str) -> LayerWeights:
    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([tensors[f"{prefix}{name}.weight"] for name in names])

    return LayerWeights(
        input_norm=stacked("input_layernorm"),
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=stacked("self_attn.o_proj"),
        mlp_norm=stacked("post_attention_layernorm"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=stacked("mlp.down_proj"),
    )
