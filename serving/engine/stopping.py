"""When a request ends: the one rule, used wherever a token is drawn or handed over."""

from __future__ import annotations

from collections.abc import Set

from serving.engine.base import FinishReason, SamplingParams

_NONE: frozenset[int] = frozenset()


def finish_reason(
    params: SamplingParams, eos_token_ids: Set[int], n_generated: int, token: int
) -> FinishReason | None:
    """Why the request ends with `token`, or None when it goes on.

    `n_generated` counts `token` and all before it, over all attempts (>= 1). The first `min_tokens`
    tokens never stop it, so a stop token counts from position `min_tokens` on; `max_tokens` always does.
    """
    if n_generated > params.min_tokens and (
        (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
    ):
        return FinishReason.STOP
    if n_generated >= params.max_tokens:
        return FinishReason.LENGTH
    return None


def banned_token_ids(params: SamplingParams, eos_token_ids: Set[int], n_generated: int) -> frozenset[int]:
    """Tokens that must not be drawn next, with `n_generated` tokens so far: stops before `min_tokens`."""
    if n_generated >= params.min_tokens:
        return _NONE
    stops = frozenset(params.stop_token_ids)
    return stops if params.ignore_eos else stops | eos_token_ids
