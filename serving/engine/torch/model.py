"""Loading a Llama-shaped model from a directory, ready to be called with a packed step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from serving.engine.torch.attention import PAGED_ATTENTION
from serving.engine.torch.batch import PackedStep
from serving.engine.torch.fused import fuse
from serving.errors import StartError
from serving.manifest import ModelCard, read_model_card

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # config.json's model_type
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that do not depend on the longest in a batch


@dataclass(slots=True)
class TorchModel:
    """A backbone and its head; `card` says the shape."""

    card: ModelCard
    backbone: nn.Module
    head: nn.Module
    dtype: torch.dtype
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """Every token id must be below it."""
        size: int = self.backbone.get_input_embeddings().num_embeddings  # type: ignore[operator]
        return size

    def __call__(self, step: PackedStep) -> Tensor | None:
        """Compute `step`, writing its KV; logits (draws, vocab) of the rows that draw, None without any."""
        hidden = self.backbone(
            input_ids=step.token_ids, position_ids=step.positions, use_cache=False, step=step.tables
        ).last_hidden_state[0]  # (tokens, hidden)
        if not step.drawing.numel():
            return None
        logits: Tensor = self.head(hidden.index_select(0, step.drawing))
        return logits


def load_model(
    directory: Path, *, dtype: torch.dtype, device: torch.device, fused: bool = True
) -> TorchModel:
    """Raises StartError for a model that would be served wrongly. `fused=False` is the tests' reference."""
    card = read_model_card(directory)
    config = AutoConfig.from_pretrained(directory)
    _refuse_unsupported(directory, config)
    transformers_logging: Any = logging
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # a bar per worker in the logs helps nobody
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=PAGED_ATTENTION
        )
    except (OSError, ValueError) as error:
        raise StartError(f"{directory}: cannot load the weights: {error}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    model = model.eval().requires_grad_(False).to(device)
    if fused:
        fuse(model.model)
    return TorchModel(card, model.model, model.lm_head, dtype, device)


def _refuse_unsupported(directory: Path, config: Any) -> None:
    if config.model_type not in SUPPORTED:
        raise StartError(
            f"{directory}: model_type {config.model_type!r} is not supported; "
            f"allowed: {', '.join(SUPPORTED)}"
        )
    context = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)  # transformers sets it to None where it is off
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    if window is not None and slides and window < context:
        raise StartError(
            f"{directory}: sliding-window attention ({window} of {context} tokens) is not supported; "
            "allowed: sliding_window off, or at least max_position_embeddings"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        raise StartError(
            f"{directory}: rope_type {rope!r} is not supported; allowed: {', '.join(_ROPE_TYPES)}"
        )
