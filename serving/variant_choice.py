"""Which variant of its model a request goes to: by its prompt's length, then by traffic weights. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.config import PromptRange
from serving.errors import ContextLengthExceeded


@dataclass(frozen=True, slots=True)
class Offer:
    """A variant as it is now."""

    name: str
    prompt_tokens: PromptRange
    able: bool  # a worker of its decode pool is linked


def choose_variant(
    offers: Sequence[Offer], weights: Mapping[str, float], prompt_tokens: int, draw: random.Random
) -> str:
    """In this order, each rule as long as it leaves anything to choose from:

    `prompt_tokens.max` (the one rule without exception: the engine was not made for more), able to answer,
    a traffic weight, `prompt_tokens.min`. Of what is left one is drawn by weight; without weights it is the
    first of the config. Raises ContextLengthExceeded for a prompt that no variant takes.
    """
    left = [o for o in offers if o.prompt_tokens.max is None or prompt_tokens <= o.prompt_tokens.max]
    if not left:
        longest = max(o.prompt_tokens.max or 0 for o in offers)
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; prompts of this model may have {longest}",
            param="prompt",
        )
    left = [o for o in left if o.able] or left
    left = [o for o in left if weights.get(o.name, 0.0) > 0] or left
    left = [o for o in left if o.prompt_tokens.min <= prompt_tokens] or left
    shares = [weights.get(o.name, 0.0) for o in left]
    return (draw.choices(left, shares)[0] if any(shares) else left[0]).name
