"""What the planner counts and shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.observation import VariantDecision
from serving.deployment_name import deployment_name
from serving.metrics import Labels, Registry

if TYPE_CHECKING:
    from serving.planner_host import PlannerHost

TICK_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class PlannerMetrics:
    def __init__(self, registry: Registry, host: PlannerHost) -> None:
        self._host = host
        pool = ("model", "variant", "pool")
        self.tick = registry.histogram("planner_tick_seconds", "One observation and decision", TICK_BUCKETS)
        self.failures = registry.counter("planner_failures", "Ticks that held because something failed")
        self.scalings = registry.counter(
            "planner_scalings", "Replica targets changed, by direction", ("direction",)
        )
        self.flips = registry.counter("planner_flips", "Workers told to change their role")
        self.decisions = registry.counter(
            "planner_decisions", "Decisions, by what they wanted", ("model", "variant", "kind")
        )
        registry.gauge("planner_target_replicas", "Replicas the planner wants", self._targets, pool)
        registry.gauge("planner_actual_replicas", "Replicas that run", self._actual, pool)
        registry.gauge(
            "planner_lent_workers",
            "Decode workers that are to play prefill; below 0 the other way round",
            self._lent,
            ("model", "variant"),
        )

    def decided(self, name: str, wanted: VariantDecision) -> None:
        """Kinds: hold (blind), impossible (a target cannot be met), up, down, steady."""
        model, variant = self._host.key_of[name]
        there = [self._host.counts.get(deployment_name(model, variant, p)) for p in ("prefill", "decode")]
        change = wanted.prefill + wanted.decode - sum(c.target for c in there if c is not None)
        kind = (
            "hold" if wanted.reason.startswith("hold") else "up" if change > 0 else "down" if change else ""
        )
        if not kind:
            kind = "impossible" if wanted.reachable is not None else "steady"
        self.decisions.inc(labels=(model, variant, kind))

    def _targets(self) -> dict[Labels, float]:
        decision = self._host.decision
        if decision is None:
            return {}
        return {
            (*self._host.key_of[name], pool): replicas
            for name, wanted in decision.variants.items()
            for pool, replicas in (("prefill", wanted.prefill), ("decode", wanted.decode))
        }

    def _actual(self) -> dict[Labels, float]:
        return {
            (*key, pool): there.running
            for key in self._host.variants
            for pool in ("prefill", "decode")
            if (there := self._host.counts.get(deployment_name(*key, pool))) is not None
        }

    def _lent(self) -> dict[Labels, float]:
        decision = self._host.decision
        if decision is None:
            return {}
        return {self._host.key_of[name]: wanted.lent for name, wanted in decision.variants.items()}
