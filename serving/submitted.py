"""A frontend's Submit, found to be sane and turned into the engine's Work.

The door refused what clients may not ask; here is what no honest frontend sends, because one bad value
would fail every other request of the batch, or end the engine's thread.
"""

from __future__ import annotations

from math import isfinite

from serving.engine.base import AttemptId, Engine, Mode, SamplingParams, Work
from serving.wire import Submit, unpack_u32

ATTEMPTS = 1 << 63  # names from here on are those of loans
MOST_STOP_IDS = 4096
MOST_BIASES = 4096
MOST_LOGPROBS = 128
MOST_PRIORITY = 1 << 16
LONGEST_WAIT_MS = 3_600_000  # who says he waited longer is served as if it were that long


def read_submit(submit: Submit, engine: Engine, own_epoch: int) -> Work:
    """Raises ValueError with one line. A pull from ourselves (`own_epoch`) is none."""
    tokens = unpack_u32(submit.tokens)
    mode = Mode(submit.mode)
    if submit.attempt >= ATTEMPTS:
        raise ValueError("an attempt under the name of a loan")
    if not 1 <= submit.n_prompt <= len(tokens):
        raise ValueError(f"n_prompt {submit.n_prompt} of {len(tokens)} tokens")
    if len(tokens) >= engine.context_tokens:
        raise ValueError(f"{len(tokens)} tokens; the context has {engine.context_tokens}")
    if mode is Mode.DECODE and submit.handoff is None:
        raise ValueError("decode without a hand-off")
    live = submit.handoff if submit.handoff is not None and submit.handoff.live else None
    if live is not None and not engine.capabilities.migrate_kv:
        raise ValueError("a live hand-off, which this engine cannot take over")
    if live is not None and live.epoch == own_epoch:
        raise ValueError("a live hand-off to where it is")
    if submit.params.guided is not None and not engine.capabilities.guided:
        raise ValueError("a guided answer, which this engine would not keep to")
    if abs(submit.priority) > MOST_PRIORITY:
        raise ValueError(f"priority {submit.priority}")
    _check_params(submit.params)
    pull_tokens = 0
    if submit.pull is not None and mode is not Mode.DECODE and submit.pull.epoch != own_epoch:
        whole = min(submit.pull.tokens, len(tokens) - 1) // engine.block_tokens
        pull_tokens = whole * engine.block_tokens
    return Work(
        attempt=AttemptId(submit.attempt),
        mode=mode,
        tokens=tokens,
        n_prompt=submit.n_prompt,
        params=submit.params,
        namespace=submit.namespace,
        priority=submit.priority,
        pull_tokens=pull_tokens,
        reserve_tokens=0 if live is None else max(1, submit.reserve_tokens),
        adapter=submit.adapter or None,
        waited_s=min(submit.waited_ms, LONGEST_WAIT_MS) / 1e3,
    )


def _check_params(params: SamplingParams) -> None:
    biases = params.logit_bias or {}
    right = {
        "max_tokens": params.max_tokens >= 1,
        "min_tokens": params.min_tokens >= 0,
        "seed": 0 <= params.seed < 1 << 64,
        "temperature": 0 <= params.temperature <= 100,  # comparisons with nan are false
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k is None or params.top_k >= 1,
        "min_p": 0 <= params.min_p <= 1,
        "presence_penalty": -2 <= params.presence_penalty <= 2,
        "frequency_penalty": -2 <= params.frequency_penalty <= 2,
        "repetition_penalty": 0 < params.repetition_penalty <= 10,
        "logprobs": params.logprobs is None or 0 <= params.logprobs <= MOST_LOGPROBS,
        "logit_bias": len(biases) <= MOST_BIASES
        and all(token >= 0 and isfinite(bias) for token, bias in biases.items()),
        "stop_token_ids": len(params.stop_token_ids) <= MOST_STOP_IDS
        and all(token >= 0 for token in params.stop_token_ids),
    }
    wrong = [name for name, is_right in right.items() if not is_right]
    if wrong:
        raise ValueError(f"out of range: {', '.join(wrong)}")
