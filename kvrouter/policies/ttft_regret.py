"""Ours: predicted TTFT, plus the GPU time that a colder worker burns, plus the delay it causes.

    total = wait + T_prefill(u) + lambda * [T_prefill(u) - T_prefill(u on the best-cached)] + 0.1 * queue behind

The second term prices what a choice takes from later arrivals: a prefix stays where it is cached until its
own queue costs more than computing (or pulling) it elsewhere; then it spreads. No threshold, one weight.
`queue behind` is backlog that is not in the wait already: under a deadline order short prompts overtake it,
and should still keep off busy workers. Decode: least predicted ITL, ties to the longest match.
"""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["TtftRegret"]

BEHIND_WEIGHT = 0.1
SESSION_MS = 5.0  # a session stays where it is unless another worker is this much better


class TtftRegret(Policy):
    name: ClassVar[str] = "ttft_regret"
    weighs_local: ClassVar[bool] = True

    def __init__(self, regret_weight: float = 1.0) -> None:
        self.regret_weight = regret_weight

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        regret_ms = self.regret_weight * (candidate.prefill_ms - demand.best_prefill_ms)
        behind_ms = BEHIND_WEIGHT * (candidate.backlog_ms - candidate.wait_ms)
        session_ms = 0.0
        if demand.session_worker is not None and demand.session_worker != candidate.ident:
            session_ms = SESSION_MS
        return {
            "wait_ms": candidate.wait_ms,
            "prefill_ms": candidate.prefill_ms,
            "regret_ms": regret_ms,
            "behind_ms": behind_ms,
            "session_ms": session_ms,
            "total": candidate.wait_ms + candidate.prefill_ms + regret_ms + behind_ms + session_ms,
        }

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        # A match saves its transfer, at most; it only decides between equals.
        tie_ms = -1e-6 * candidate.cached_tokens / max(demand.prompt_tokens, 1)
        return {"itl_ms": candidate.itl_ms, "match_ms": tie_ms, "total": candidate.itl_ms + tie_ms}
