"""What can decide in a simulation: the planner itself, and pools that never change."""

from __future__ import annotations

from planner.decide import decide
from planner.observation import Decision, Observation, VariantDecision
from planner.settings import Settings
from planner.sim_cluster import VARIANT
from planner.state import State

__all__ = ["Planner", "Static"]


class Planner:
    """`planner.decide` with its state."""

    def __init__(self, settings: Settings) -> None:
        self.interval_s = settings.interval_s
        self.settings = settings
        self.state = State()

    def decide(self, observation: Observation, now_s: float) -> Decision:
        decision, self.state = decide(observation, self.state, self.settings, now_s)
        return decision


class Static:
    interval_s = 30.0

    def __init__(self, prefill: int, decode: int) -> None:
        self._decision = Decision({VARIANT: VariantDecision(prefill, decode, 0, "never changes")})

    def decide(self, observation: Observation, now_s: float) -> Decision:
        return self._decision
