"""Uncached tokens times decode blocks: Dynamo's `lmetric`, after Blitz. Scale-free; the total has no unit.

total = (queued tokens + uncached tokens) * (decode blocks + 1)
"""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["Lmetric"]


class Lmetric(Policy):
    name: ClassVar[str] = "lmetric"

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        tokens = candidate.queued_tokens + candidate.uncached_tokens
        return {
            "tokens": tokens,
            "kv_blocks": candidate.kv_blocks,
            "total": float(tokens * (candidate.kv_blocks + 1)),
        }

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"total": float(candidate.kv_blocks)}
