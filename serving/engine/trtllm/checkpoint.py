"""A Hugging Face checkpoint as the engine will read it: shape, limits, quantisation; JSON files only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.config import Parallel, TrtllmConfig
from serving.errors import ConfigError
from serving.manifest import ModelCard, read_model_card

QUANT_FILE = "hf_quant_config.json"  # ModelOpt writes it
_ELEMENT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    directory: Path
    card: ModelCard
    heads: int
    quant_algo: str | None  # of the weights
    kv_quant_algo: str | None

    def context_tokens(self, max_seq_len: int | None) -> int:
        return max_seq_len or self.card.context_tokens

    def kv_block_bytes(self, block_tokens: int, kv_dtype: str) -> int:
        """Of one block over all ranks; a dtype that is left to the engine counts as 2 bytes an element."""
        if kv_dtype == "auto" and self.kv_quant_algo is not None:
            kv_dtype = self.kv_quant_algo.lower()
        element = _ELEMENT_BYTES.get(kv_dtype, 2.0)
        card = self.card
        return int(card.layers * 2 * block_tokens * card.kv_heads * card.head_dim * element)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Raises StartError when it is no decoder's checkpoint."""
    card = read_model_card(directory)
    config = _json(directory / "config.json")
    quant = _json(directory / QUANT_FILE).get("quantization", {})
    algo = quant.get("quant_algo") or config.get("quantization_config", {}).get("quant_method")
    return Checkpoint(
        directory, card, int(config["num_attention_heads"]), algo, quant.get("kv_cache_quant_algo")
    )


def check_shape(
    checkpoint: Checkpoint, parallel: Parallel, config: TrtllmConfig, block_tokens: int
) -> None:
    """Raises ConfigError, one line, where the settings ask for what this checkpoint cannot be."""
    card, tensor = checkpoint.card, parallel.tensor
    at = f"model in {checkpoint.directory}"
    if checkpoint.heads % tensor:
        raise ConfigError(f"parallel.tensor = {tensor}; {at} has {checkpoint.heads} attention heads")
    if card.kv_heads % tensor and tensor % card.kv_heads:
        raise ConfigError(f"parallel.tensor = {tensor}; {at} has {card.kv_heads} KV heads")
    if parallel.pipeline > card.layers:
        raise ConfigError(f"parallel.pipeline = {parallel.pipeline}; {at} has {card.layers} layers")
    if config.max_seq_len is not None and config.max_seq_len > card.context_tokens:
        raise ConfigError(
            f"engine.trtllm.max_seq_len = {config.max_seq_len}; {at} was made for {card.context_tokens}"
        )
    context = checkpoint.context_tokens(config.max_seq_len)
    if config.max_tokens_in_buffer is not None and config.max_tokens_in_buffer < context:
        raise ConfigError(
            f"engine.trtllm.max_tokens_in_buffer = {config.max_tokens_in_buffer}; allowed: at least the "
            f"longest prompt ({context} tokens); lower engine.trtllm.max_seq_len with it"
        )
    if config.max_num_tokens < block_tokens:
        raise ConfigError(
            f"engine.trtllm.max_num_tokens = {config.max_num_tokens}; "
            f"allowed: at least block_tokens ({block_tokens})"
        )
    if config.kv_dtype == "nvfp4" and (checkpoint.kv_quant_algo or "").upper() != "NVFP4":
        raise ConfigError(
            f"engine.trtllm.kv_dtype = 'nvfp4'; {at} has no NVFP4 KV scales in {QUANT_FILE}: "
            "quantise it offline with ModelOpt first"
        )
    known = checkpoint.kv_quant_algo
    if known is not None and config.kv_dtype not in ("auto", known.lower()):
        raise ConfigError(
            f"engine.trtllm.kv_dtype = {config.kv_dtype!r}; {at} was quantised for {known} KV: "
            f"allowed: auto, {known.lower()}"
        )


def _json(path: Path) -> dict[str, Any]:
    """Empty when there is no such file; config.json was read as such before."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
