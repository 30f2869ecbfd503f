"""A model's shape: the numbers of its config.json that weights and KV cache follow from.

Known are decoders of the Llama family and what grew out of it: grouped-query attention, experts (Mixtral,
Qwen-MoE, DeepSeek), latent attention (DeepSeek's MLA) and sliding windows on all or some of the layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import ConfigError
from serving.quantization import DTYPE_BYTES, checkpoint_quantization

PLAIN_MLP = {"nemotron", "phi", "starcoder2"}  # two matrices a layer; all others gate, with three
QKV_BIAS = {"qwen2", "qwen2_moe"}  # have biases without saying so
QK_NORM = {"gemma3", "gemma3_text", "qwen3", "qwen3_moe"}
WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # of so many layers the last sees everything


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: a token's KV is one vector of `kv_rank + rope_dim`, whatever the heads."""

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Experts:
    routed: int  # experts a layer
    active: int  # of those, how many compute a token
    width: int  # inner width of one
    shared_width: int  # inner width of the shared experts together; 0 without any
    layers: int  # how many layers have experts; the others have a dense MLP


@dataclass(frozen=True, slots=True)
class ModelShape:
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    context_tokens: int
    tied: bool  # the head is the embedding
    dtype: str  # of what is not quantised
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    window_tokens: int | None = None  # how far back `window_layers` look; None: all layers see everything
    window_layers: int = 0
    quantization: str | None = None  # of the checkpoint's weights, as it says; None: none
    kv_quantization: str | None = None

    @property
    def full_layers(self) -> int:
        """Layers that keep the KV of the whole context."""
        return self.layers - self.window_layers

    @property
    def kv_values_per_layer(self) -> int:
        """Numbers that one token leaves in the KV cache of one layer."""
        return self.latent.width if self.latent else 2 * self.kv_heads * self.head_dim


def read_shape(path: Path) -> ModelShape:
    """From a config.json, or the directory that holds one. Raises ConfigError with one line."""
    file = path / "config.json" if path.is_dir() else path
    return parse_shape(_json(file), str(file), _modelopt(file))


def read_precision(directory: Path) -> tuple[str | None, str | None, str]:
    """(quantisation of the weights, of the KV, dtype of the rest), of any model, also one without a shape
    that is known here. Raises ConfigError with one line."""
    file = directory / "config.json"
    config = _json(file)
    weights, kv = checkpoint_quantization(config, _modelopt(file))
    return weights, kv, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _modelopt(config: Path) -> dict[str, Any] | None:
    file = config.with_name("hf_quant_config.json")
    return _json(file) if file.is_file() else None


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return values


class _Fields:
    """A config.json that is asked for its numbers; every wrong answer is one line."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, a whole number of 1 or more."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self.where}: {name} = {value!r}; allowed: a whole number, 1 or more")
            return value
        if default is not None:
            return default
        raise ConfigError(
            f"{self.where}: no {' or '.join(names)}; the config.json of a decoder model has it"
        )

    def optional(self, name: str) -> int | None:
        return self.count(name) if self.values.get(name) is not None else None


def parse_shape(
    config: Mapping[str, Any], where: str, modelopt: Mapping[str, Any] | None = None
) -> ModelShape:
    """`modelopt`: the checkpoint's hf_quant_config.json, if any. Raises ConfigError with one line."""
    text = config.get("text_config")  # a multimodal model's language part
    values = {**config, **text} if isinstance(text, Mapping) else config
    fields = _Fields(values, where)
    kind = str(values.get("model_type", ""))
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_key_value_heads = {kv_heads} does not divide {heads} heads")
    if "head_dim" not in values and hidden % heads:
        raise ConfigError(f"{where}: {heads} heads do not divide hidden_size = {hidden}, and no head_dim")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{where}: dtype = {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    context = fields.count("max_position_embeddings")
    window, window_layers = _windows(fields, kind, layers, context)
    weights, kv = checkpoint_quantization(values, modelopt)
    bias = bool(values.get("attention_bias", False))
    return ModelShape(
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.count("head_dim", default=max(1, hidden // heads)),
        mlp_width=fields.count("intermediate_size", "moe_intermediate_size"),
        vocab=fields.count("vocab_size"),
        context_tokens=context,
        tied=bool(values.get("tie_word_embeddings", False)),
        dtype=dtype,
        gated=kind not in PLAIN_MLP,
        qkv_bias=bias or kind in QKV_BIAS,
        output_bias=bias,
        qk_norm=kind in QK_NORM,
        latent=_latent(fields),
        experts=_experts(fields, layers),
        window_tokens=window,
        window_layers=window_layers,
        quantization=weights,
        kv_quantization=kv,
    )


def _latent(fields: _Fields) -> Latent | None:
    if fields.values.get("kv_lora_rank") is None:
        return None
    return Latent(
        q_rank=fields.optional("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
        nope_dim=fields.count("qk_nope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )


def _experts(fields: _Fields, layers: int) -> Experts | None:
    values = fields.values
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    if all(not values.get(name) for name in names):
        return None
    width = fields.count("moe_intermediate_size", "intermediate_size")
    shared = width * int(values.get("n_shared_experts") or 0)
    shared += int(values.get("shared_expert_intermediate_size") or 0)
    first = int(values.get("first_k_dense_replace") or 0)  # DeepSeek: so many dense layers come first
    every = fields.count("moe_layer_freq", "decoder_sparse_step", default=1)
    after = 1 if "decoder_sparse_step" in values else 0  # Qwen counts layers from 1
    dense = set(values.get("mlp_only_layers") or ())
    with_experts = [i for i in range(first, layers) if (i + after) % every == 0 and i not in dense]
    return Experts(
        routed=fields.count(*names),
        active=fields.count("num_experts_per_tok"),
        width=width,
        shared_width=shared,
        layers=len(with_experts),
    )


def _windows(fields: _Fields, kind: str, layers: int, context: int) -> tuple[int | None, int]:
    """(window, layers that have it)."""
    values = fields.values
    named = values.get("layer_types")
    if named is not None:
        unknown = set(named) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ConfigError(
                f"{fields.where}: layer_types has {sorted(unknown)[0]!r}; "
                "known: full_attention, sliding_attention"
            )
        if len(named) != layers:
            raise ConfigError(f"{fields.where}: {len(named)} layer_types for {layers} layers")
    window = fields.optional("sliding_window")
    if window is None or window >= context or values.get("use_sliding_window") is False:
        return None, 0
    if named is not None:
        slide = sum(name == "sliding_attention" for name in named)
    elif every := fields.optional("sliding_window_pattern") or WINDOW_PATTERN.get(kind):
        slide = layers - layers // every
    elif kind.startswith("qwen"):  # the first ones see everything
        slide = max(0, layers - fields.count("max_window_layers", default=layers))
    else:
        slide = layers
    return (window, slide) if slide else (None, 0)
