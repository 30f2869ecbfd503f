"""From a variant's settings to its engine; the only place that knows every kind."""

from __future__ import annotations

import re

from serving.config import Variant
from serving.engine.base import Capabilities, Engine
from serving.errors import StartError
from serving.manifest import model_digest, read_model_card, resolve_weights
from serving.sim_profile import load_profile

# What a simulated model says: one space and one word a token, so that text can be counted back into tokens.
_PLAIN_WORD = re.compile(rb" [A-Za-z]+")


def engine_capabilities(variant: Variant) -> Capabilities:
    """What the variant's engine can do, known without building it: the door refuses the rest."""
    if variant.engine.kind == "sim":
        from serving.engine.sim import CAPABILITIES

        return CAPABILITIES
    return Capabilities()


def build_engine(variant: Variant) -> Engine:
    """Prepare the weights on this node and build the engine; blocks for seconds, so not on a loop.

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
    raise StartError(f"engine.kind = {config.kind!r} is not part of this installation")
