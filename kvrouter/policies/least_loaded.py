"""Fewest requests in flight, however large they are. The total is in requests."""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["LeastLoaded"]


class LeastLoaded(Policy):
    name: ClassVar[str] = "least_loaded"

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"total": float(candidate.in_flight)}
