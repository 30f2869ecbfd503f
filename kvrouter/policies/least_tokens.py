"""Fewest uncached prompt tokens, queued ones and its own. The total is in tokens."""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["LeastTokens"]


class LeastTokens(Policy):
    name: ClassVar[str] = "least_tokens"

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {
            "queued_tokens": candidate.queued_tokens,
            "uncached_tokens": candidate.uncached_tokens,
            "total": float(candidate.queued_tokens + candidate.uncached_tokens),
        }
