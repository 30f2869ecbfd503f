"""From a variant's settings to its engine; the only place that knows every kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serving.config import Variant
from serving.engine.base import Capabilities, Engine
from serving.manifest import model_digest, read_model_card, resolve_weights
from serving.sim_profile import load_profile

# What a simulated model says: one space and one word a token, so that text can be counted back into tokens.
_PLAIN_WORD = re.compile(rb" [A-Za-z]+")


def engine_capabilities(variant: Variant) -> Capabilities:
    """What the variant's engine can do, known without building it: the door refuses the rest."""
    if variant.engine.kind == "sim":
        from serving.engine.sim import CAPABILITIES

        return CAPABILITIES
    if variant.engine.kind == "tensorrt_llm":
        from serving.engine.trtllm.capabilities import capabilities_of

        return capabilities_of(variant.engine.trtllm)
    from serving.engine.core import CAPABILITIES as OF_THE_CORE

    return OF_THE_CORE


def engine_context(variant: Variant) -> int | None:
    """Most tokens of a prompt and its answer, as the settings say; None: what the model was made for."""
    if variant.engine.kind == "sim":
        return load_profile(variant.engine.profile).context_tokens
    return variant.engine.trtllm.max_seq_len if variant.engine.kind == "tensorrt_llm" else None


def build_engine(
    variant: Variant,
    role: str = "decode",
    *,
    gpus: int | None = None,
    placement: Mapping[str, Any] | None = None,
) -> Engine:
    """Prepare the weights on this node and build the engine; blocks for seconds, so not on a loop.

    Only TensorRT-LLM looks at the rest: `role` of the worker (prefill, decode), GPUs that this process may
    use, and where the Ray orchestrator puts its workers (serving.engine.trtllm.placement).

    Raises StartError or ConfigError with one line.
    """
    config = variant.engine
    directory = resolve_weights(variant.weights)
    if config.kind == "torch":
        from serving.engine.torch.build import build_torch_engine

        return build_torch_engine(config, directory)
    if config.kind == "sim":
        from serving.engine.sim import build_sim_engine
        from serving.tokenizer import Tokenizer

        card = read_model_card(directory)
        tokenizer = Tokenizer.from_file(directory / "tokenizer.json")
        return build_sim_engine(
            config,
            load_profile(config.profile),
            [i for i, raw in enumerate(tokenizer.token_bytes) if _PLAIN_WORD.fullmatch(raw)],
            card.eos_token_ids,
            model_digest(directory),
        )
    from serving.engine.trtllm.build import build_trtllm_engine

    shapes = {
        "prefill": variant.prefill.parallel or variant.parallel,
        "decode": variant.decode.parallel or variant.parallel,
    }
    return build_trtllm_engine(
        config,
        directory,
        shapes[role],
        role,
        gpus=gpus,
        placement=placement,
        topology=">".join(f"tp{shape.tensor}pp{shape.pipeline}" for shape in shapes.values()),
    )
