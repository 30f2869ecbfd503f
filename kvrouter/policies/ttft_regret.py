"""Ours: predicted TTFT, the GPU time that a colder worker burns, and the delay that others get.

    total = wait + T_prefill(u)
          + lambda * [T_prefill(u) - T_prefill(u on the best-cached worker)]      regret
          + T_prefill(u) * (queued prompts that it overtakes)                      delay
          + 0.5 * T_prefill(u) * (turnover of the cache above its peers')          eviction

Regret is what a choice takes from later arrivals: a prefix stays where it is cached until its own queue
costs more than computing (or pulling) it elsewhere; then it spreads. No threshold, one weight. Delay is the
rest of the sum of all TTFTs: under FIFO nobody is overtaken; under a deadline order a short prompt hardly
waits anywhere, and this keeps it from where it makes others wait. Eviction prices the blocks that new ones
push out: younger ones where more was written lately. All in milliseconds.

Decode: least predicted ITL, where each request in flight counts 0.5 % more than the models say. Workers
whose times hardly depend on the batch would else differ by the noise of their models alone, and the
luckiest would get every stream. Ties to the longest match.
"""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import EVEN, Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["TtftRegret"]

EVICTION_WEIGHT = 0.5  # flat between 0.25 and 1 on the traces
SESSION_MS = 5.0  # a session stays where it is unless another worker is this much better
MATCH_MS = 1e-6  # decides between equal ITLs only


class TtftRegret(Policy):
    name: ClassVar[str] = "ttft_regret"
    weighs_local: ClassVar[bool] = True

    def __init__(self, regret_weight: float = 1.0) -> None:
        self.regret_weight = regret_weight

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        prefill_ms = candidate.prefill_ms
        regret_ms = self.regret_weight * (prefill_ms - demand.best_prefill_ms)
        delay_ms = prefill_ms * candidate.delays
        eviction_ms = EVICTION_WEIGHT * prefill_ms * candidate.turnover
        elsewhere = demand.session_worker is not None and demand.session_worker != candidate.ident
        session_ms = SESSION_MS if elsewhere else 0.0
        return {
            "wait_ms": candidate.wait_ms,
            "prefill_ms": prefill_ms,
            "regret_ms": regret_ms,
            "delay_ms": delay_ms,
            "eviction_ms": eviction_ms,
            "session_ms": session_ms,
            "total": candidate.wait_ms + prefill_ms + regret_ms + delay_ms + eviction_ms + session_ms,
        }

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        match_ms = MATCH_MS * candidate.cached_tokens / max(demand.prompt_tokens, 1)
        even_ms = EVEN * candidate.itl_ms * candidate.in_flight
        return {
            "itl_ms": candidate.itl_ms,
            "even_ms": even_ms,
            "match_ms": -match_ms,
            "total": candidate.itl_ms + even_ms - match_ms,
        }
