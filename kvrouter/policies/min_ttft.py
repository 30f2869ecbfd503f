"""Least predicted TTFT, the form of Mooncake's scheduler (FAST'25, algorithm 1): wait + prefill."""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["MinTtft"]


class MinTtft(Policy):
    name: ClassVar[str] = "min_ttft"
    weighs_local: ClassVar[bool] = True

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {
            "wait_ms": candidate.wait_ms,
            "prefill_ms": candidate.prefill_ms,
            "total": candidate.ttft_ms,
        }

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"itl_ms": candidate.itl_ms, "total": candidate.itl_ms}
