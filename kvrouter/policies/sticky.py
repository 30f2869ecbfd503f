"""llm-d's rule "sticky until saturated": warm workers only, until they are far busier than cold ones.

    warm = those with 80 % of the prompt cached, or all when there are none
    cold workers join when the least busy warm one has more queued tokens than the least busy by the worth
    of 14 s at the worker's own rate
    then least queued + uncached tokens

The total is in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["Sticky"]

WARM = 0.8
SATURATED_MS = 14_000.0


class Sticky(Policy):
    name: ClassVar[str] = "sticky"

    def keep(
        self, demand: Demand, candidates: Sequence[Candidate], generator: random.Random
    ) -> Sequence[Candidate]:
        warm = [c for c in candidates if c.cached_tokens >= WARM * demand.prompt_tokens]
        if not warm:
            return candidates
        excess_ms = min(c.backlog_ms for c in warm) - min(c.backlog_ms for c in candidates)
        return candidates if excess_ms > SATURATED_MS else warm

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {
            "queued_tokens": candidate.queued_tokens,
            "uncached_tokens": candidate.uncached_tokens,
            "total": float(candidate.queued_tokens + candidate.uncached_tokens),
        }
