"""From our sampling parameters to the engine's: a fresh object a call, as the engine writes into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from serving.engine.base import Guided, TokenLogprobs, Work
from serving.engine.trtllm.api import Api

_U63 = (1 << 63) - 1


def engine_params(api: Api, work: Work, eos_ids: Sequence[int]) -> Any:
    """How to go on after `work.tokens`. Raises ValueError for what this engine cannot do.

    The answer's end is the same on both sides of a hand-off: every limit counts from the client's prompt.
    """
    params = work.params
    done = len(work.tokens) - work.n_prompt
    values: dict[str, Any] = {
        "max_tokens": params.max_tokens - done,
        "ignore_eos": params.ignore_eos,
        "end_id": eos_ids[0] if eos_ids else None,
        "pad_id": eos_ids[0] if eos_ids else None,
        "include_stop_str_in_output": True,  # the token that ends an answer is part of it here
        "detokenize": False,
        "add_special_tokens": False,
    }
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= set(eos_ids[1:])
    if stops:
        values["stop_token_ids"] = sorted(stops)
    if params.min_tokens > done:
        values["min_tokens"] = params.min_tokens - done
    if params.is_greedy:
        values["top_k"] = 1
    else:
        values |= {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or 0,  # 0 is off
            "seed": params.seed & _U63,
        }
        if params.min_p:
            values["min_p"] = params.min_p
    if params.repetition_penalty != 1.0:
        values["repetition_penalty"] = params.repetition_penalty
    if params.presence_penalty or params.frequency_penalty:
        values |= {
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "prompt_ignore_length": work.n_prompt,  # of the text only the answer counts
        }
    if params.logprobs is not None:
        values["logprobs"] = max(params.logprobs, 1)  # some versions take 0 for "none"
    if params.logit_bias:
        raise ValueError("this engine has no logit_bias")
    if params.guided is not None and done:
        # Its rule would begin anew in the middle of the answer.
        raise ValueError("an answer that is bound to a rule cannot be resumed by this engine")
    if params.guided is not None:
        values["guided_decoding"] = _guided(api, params.guided)
    unknown = set(values) - api.sampling_fields
    if unknown:
        raise ValueError(f"the installed tensorrt_llm has no {', '.join(sorted(unknown))}")
    return api.sampling_params(**values)


def _guided(api: Api, guided: Guided) -> Any:
    if api.guided_params is None:
        raise ValueError("the installed tensorrt_llm has no guided decoding")
    match guided.kind:
        case "json_object":
            return api.guided_params(json_object=True)
        case "json" | "regex" | "grammar":
            return api.guided_params(**{guided.kind: guided.source})
        case _:
            raise ValueError(f"guided decoding by {guided.kind!r} is not known")


def token_logprobs(entry: Any, token: int, n_top: int) -> TokenLogprobs:
    """Of one drawn token, from what the engine says of its position: {token: Logprob}, or one number.

    Raises ValueError when the drawn token is not among them.
    """
    if not isinstance(entry, dict):
        return TokenLogprobs(token, float(entry), [(token, float(entry))][:n_top])
    if token not in entry:
        raise ValueError(f"the engine gave no logprob for token {token}")
    best = sorted(((other, value.logprob) for other, value in entry.items()), key=lambda row: -row[1])
    chosen = entry[token].logprob
    top = [(other, logprob) for other, logprob in best if not math.isnan(logprob)][:n_top]
    return TokenLogprobs(token, chosen, top)
