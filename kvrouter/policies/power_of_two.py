"""Of two drawn at random the one with fewer requests in flight (Mitzenmacher). The total is in requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["PowerOfTwo"]


class PowerOfTwo(Policy):
    name: ClassVar[str] = "power_of_two"

    def keep(
        self, demand: Demand, candidates: Sequence[Candidate], generator: random.Random
    ) -> Sequence[Candidate]:
        return generator.sample(candidates, 2) if len(candidates) > 2 else candidates

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"total": float(candidate.in_flight)}
