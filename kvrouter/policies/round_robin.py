"""One after the other, whatever they do: the one that was not chosen for longest. The total is in turns."""

from __future__ import annotations

from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["RoundRobin"]


class RoundRobin(Policy):
    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}  # worker -> turn it was last chosen in

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        return {"total": float(self._last.get(candidate.ident, 0))}

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        return self.score(demand, candidate)

    def chosen(self, candidate: Candidate) -> None:
        self._turn += 1
        self._last[candidate.ident] = self._turn
