"""Which variant of its model a request goes to: by its prompt's length, then by traffic weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from serving.config import PromptRange
from serving.errors import ContextLengthExceeded


@dataclass(frozen=True, slots=True)
class Offer:
    """A variant as it is now."""

    name: str
    prompt_tokens: PromptRange
    able: bool  # a worker of its decode pool is linked


def choose_variant(
    offers: Sequence[Offer], weights: Mapping[str, float], prompt_tokens: int, point: float
) -> str:
    """In this order, each rule as long as it leaves anything to choose from:

    `prompt_tokens.max` (the one rule without exception: the engine was not made for more), able to answer,
    a traffic weight, `prompt_tokens.min`. Of what is left the one at `point` (in [0, 1)) of their weights,
    laid end to end in the order of the config; without weights the first.
    Raises ContextLengthExceeded for a prompt that no variant takes.
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
    mark = point * sum(weights.get(o.name, 0.0) for o in left)
    for offer in left:
        mark -= weights.get(offer.name, 0.0)
        if mark < 0:
            return offer.name
    return left[0].name


def session_point(model: str, session: str) -> float:
    """Where a session stands, on every frontend and for as long as it lasts: a shift of the weights moves
    only the sessions between the old and the new border."""
    return xxh3_64_intdigest(f"{model}\0{session}".encode()) / 2.0**64
