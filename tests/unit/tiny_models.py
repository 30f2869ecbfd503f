"""Random-weight models of two layers, one of each supported shape, saved as a user's directory would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320
EOS = 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "initializer_range": 0.3,  # large, so that greedy continuations wander
}

SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_attention_heads": 4, "head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def save_tiny_model(directory: Path, shape: str = "llama", **overrides: Any) -> Path:
    """Write a float32 model of `shape` (a key of SHAPES) with fixed random weights; returns `directory`."""
    config_class, model_class, own = SHAPES[shape]
    torch.manual_seed(7)
    model = model_class(config_class(**{**_SHAPE, **own, **overrides}))
    for name, weight in model.named_parameters():
        if (
            name.endswith("bias") or "norm" in name
        ):  # transformers starts them at 0 and 1: nothing would show
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    model.save_pretrained(directory)
    return directory
