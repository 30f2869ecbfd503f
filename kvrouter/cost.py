"""What a choice is made of: candidates with their predictions; filter, score, pick. Pure.

A policy filters and scores; `pick` takes the least total, ties by a seeded generator. Terms are named with
their unit (`_ms`, `_tokens`, `_blocks`); `total` is what is compared, in milliseconds unless the policy
says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.perf_model import WorkerModels

__all__ = [
    "EVEN",
    "Candidate",
    "Demand",
    "Pull",
    "Terms",
    "cheapest_prefix",
    "local_terms",
    "pick",
    "whole_ms",
    "with_room",
]

Terms = dict[str, float]
EVEN = 0.005  # of the ITL, a request in flight: about the models' own error


@dataclass(slots=True)
class Demand:
    """What a request asks of any worker."""

    prompt_tokens: int
    output_tokens: int  # expected
    best_cached_tokens: int = 0  # on the best-cached candidate
    best_prefill_ms: float = 0.0  # there
    session_worker: str | None = None  # where the session's last request went
    lender: tuple[str, int] | None = None  # who has the longest prefix to be read from it now, in blocks
    waited_s: float = 0.0  # its client, until now


@dataclass(slots=True)
class Candidate:
    """One worker as one request sees it. Counts are before insertion, predictions after it."""

    ident: str
    cached_tokens: int = 0  # longest prefix here, pulled ones not counted
    uncached_tokens: int = 0  # to compute here
    prefill_ms: float = 0.0  # to compute or pull them
    wait_ms: float = 0.0  # until that starts, under the worker's order
    backlog_ms: float = 0.0  # all its queued prompts
    queued_tokens: int = 0  # uncached tokens of them
    delays: int = 0  # queued prompts that this one would make wait
    in_flight: int = 0  # requests
    kv_blocks: int = 0  # held by their prompts
    prompt_blocks: int = 0  # this request's own
    itl_ms: float = 0.0  # of the batch with this request in it
    room_blocks: int = 0  # not promised to anyone
    needs_blocks: int = 0  # prompt and expected output
    turnover: float = 0.0  # by how many caches it was overwritten more than its peers lately
    compute_ms: float = 0.0  # to compute them all
    pull_from: str | None = None
    pull_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill_ms


@dataclass(slots=True)
class Pull:
    """The cheapest way to a computed prompt on one worker: compute it all, or pull a prefix first."""

    ms: float
    uncached_tokens: int
    compute_ms: float  # without a pull
    source: str | None = None
    tokens: int = 0


def cheapest_prefix(
    models: WorkerModels, prompt_tokens: int, cached: int, best: tuple[str, int] | None, most_cached: int
) -> Pull:
    """Compute what is not cached, or pull what `best` (worker, tokens cached there) has beyond it.

    `best` None: nothing may be pulled. `most_cached`: the last token is always computed.
    """
    cached = min(cached, most_cached)
    uncached = prompt_tokens - cached
    compute_ms = models.prefill.ms(uncached, prompt_tokens)
    compute = Pull(compute_ms, uncached, compute_ms)
    if best is None or min(best[1], most_cached) <= cached:
        return compute
    reach = min(best[1], most_cached)
    moved = reach - cached
    ms = models.move.ms(moved) + models.prefill.ms(prompt_tokens - reach, prompt_tokens)
    if ms >= compute_ms:
        return compute
    return Pull(ms, prompt_tokens - reach, compute_ms, best[0], moved)


def with_room(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those with KV room for prompt and expected output; all when nobody has: the engine will queue it."""
    able = [c for c in candidates if c.room_blocks >= c.needs_blocks]
    return able or candidates


def local_terms(decode: Candidate, batch: int) -> Terms:
    """What prefilling on the decode worker costs all its clients together.

    Its own TTFT, and every step of the batch comes later by the time the prompt takes.
    """
    return {
        "wait_ms": decode.wait_ms,
        "prefill_ms": decode.prefill_ms,
        "disturbance_ms": batch * decode.prefill_ms,
        "total": decode.ttft_ms + batch * decode.prefill_ms,
    }


def whole_ms(demand: Demand, decode: Candidate, computes: Candidate, move_ms: float) -> float:
    """Of the whole answer, prompt and tokens: compares pairs of no common worker, under any policy.

    `decode` may be `computes`: then, as in `local_terms`, its batch waits too. `move_ms`: of the KV.
    """
    ttft_ms = computes.ttft_ms + move_ms
    if decode.ident == computes.ident:
        ttft_ms += decode.in_flight * computes.prefill_ms
    return ttft_ms + demand.output_tokens * decode.itl_ms * (1 + EVEN * decode.in_flight)


def pick(
    candidates: Sequence[Candidate], totals: Sequence[float], generator: random.Random
) -> tuple[Candidate, float]:
    """The candidate with the least total; equals are drawn from evenly."""
    least = min(totals)
    equal = [c for c, total in zip(candidates, totals, strict=True) if total == least]
    return (equal[0] if len(equal) == 1 else generator.choice(equal)), least
