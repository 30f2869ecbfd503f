"""What can decide in a simulation: the planner itself, fixed pools, and two rules of other systems.

The rules are written from their published descriptions, with their default values.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import dataclass
from functools import cache

from planner.decide import decide
from planner.observation import Decision, FittedTimes, Observation, VariantDecision, VariantSeen
from planner.settings import Settings, Targets
from planner.sim_setup import VARIANT
from planner.state import State

__all__ = ["MeanThroughput", "Means", "Planner", "RequestCount", "Static", "mean_pools"]


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
    """Pools that never change."""

    interval_s = 30.0

    def __init__(self, prefill: int, decode: int) -> None:
        self._decision = _decision(prefill, decode, "never changes")

    def decide(self, observation: Observation, now_s: float) -> Decision:
        return self._decision


@dataclass(frozen=True, slots=True)
class Means:
    """Averages over an interval: all that a mean-based rule looks at."""

    rps: float
    prompt: float
    uncached: float
    output: float


class MeanThroughput:
    """Throughput rule of the strongest peer's planner: per pool,

        replicas = max(ceil(headroom * predicted_rps / engine_rps), minimum)

    with the most requests per second that one engine takes within its targets at the mean lengths. Every
    180 s; ARIMA from 5 points on, the last value before. It counts arrivals at the door here, which is
    kinder to it than the completions that it counts by itself. `headroom` 1 is the rule as it stands.
    """

    interval_s = 180.0
    MOST_NEW = 8  # replicas a tick
    FEWEST_POINTS = 5

    def __init__(
        self, targets: Targets, initial: tuple[int, int], budget: int, headroom: float = 1.0
    ) -> None:
        self._targets = targets
        self._held = initial
        self._budget = budget
        self._headroom = headroom
        self._seen: list[Means] = []

    def decide(self, observation: Observation, now_s: float) -> Decision:
        seen = observation.variants[VARIANT]
        means = _means(seen, now_s, self.interval_s)
        if means is None or seen.times is None:
            return _decision(self._held[0], self._held[1], "no metrics: hold")
        self._seen.append(means)
        predicted = Means(
            *(
                _next_value(tuple(getattr(m, key) for m in self._seen), self.FEWEST_POINTS)
                for key in ("rps", "prompt", "uncached", "output")
            )
        )
        wanted = mean_pools(predicted, seen.times, self._targets, self._headroom)
        prefill, decode = (
            min(max(want, 1), now + self.MOST_NEW) for want, now in zip(wanted, self._held, strict=True)
        )
        if prefill + decode > self._budget:
            prefill = min(max(round(self._budget * prefill / (prefill + decode)), 1), self._budget - 1)
            decode = self._budget - prefill
        self._held = prefill, decode
        return _decision(prefill, decode, f"{predicted.rps:.2f} requests/s predicted")


class RequestCount:
    """Ray Serve's default rule: replicas = ongoing requests / target, per pool.

    Up after 30 s in which it always wanted more, down after 600 s; ongoing requests averaged over 30 s. The
    target is Serve's 2 for prefill. For decode it is the largest batch within the ITL target at the mean
    lengths: with 2 it would ask for an order of magnitude more.
    """

    interval_s = 10.0
    LOOK_BACK_S = 30.0
    UP_S, DOWN_S = 30.0, 600.0
    PREFILL_TARGET = 2.0

    def __init__(self, targets: Targets, initial: tuple[int, int], budget: int) -> None:
        self._targets = targets
        self._budget = budget
        self._held = list(initial)
        self._ongoing: tuple[deque[float], deque[float]] = (deque(maxlen=3), deque(maxlen=3))
        self._since: list[float | None] = [None, None]  # it wants the same direction
        self._up = [True, True]

    def decide(self, observation: Observation, now_s: float) -> Decision:
        seen = observation.variants[VARIANT]
        means = _means(seen, now_s, 300.0)
        if seen.queued is None or seen.decoding is None or seen.times is None or means is None:
            return _decision(self._held[0], self._held[1], "no metrics: hold")
        batch = best_batch(means, seen.times, self._targets.itl_ms)
        for role, (ongoing, target) in enumerate(
            ((seen.queued, self.PREFILL_TARGET), (seen.decoding, batch))
        ):
            past = self._ongoing[role]
            past.append(float(ongoing))
            wanted = max(math.ceil(sum(past) / len(past) / target), 1)
            held = self._held[role]
            up = wanted > held
            if wanted == held or self._since[role] is None or up != self._up[role]:
                self._since[role] = None if wanted == held else now_s
                self._up[role] = up
                continue
            if now_s - (self._since[role] or 0.0) >= (self.UP_S if up else self.DOWN_S):
                room = self._budget - self._held[1 - role]
                self._held[role] = min(wanted, room)
                self._since[role] = None
        return _decision(self._held[0], self._held[1], f"{seen.queued} + {seen.decoding} ongoing")


def mean_pools(
    means: Means, times: FittedTimes, targets: Targets, headroom: float = 1.0
) -> tuple[int, int]:
    """What the mean demand needs when every request is average."""
    a, b, c = times.prefill
    prefill_ms = a + b * means.uncached + c * means.uncached * (means.prompt - 0.5 * means.uncached)
    batch = best_batch(means, times, targets.itl_ms)
    d, e, f = times.step
    step_ms = d + batch * (e + f * (means.prompt + 0.5 * means.output))
    engine_rps = 1e3 / max(prefill_ms, 1e-6), batch * 1e3 / (step_ms * max(means.output, 1.0))
    prefill, decode = (max(math.ceil(headroom * means.rps / rps - 1e-9), 1) for rps in engine_rps)
    return prefill, decode


def best_batch(means: Means, times: FittedTimes, itl_ms: float) -> float:
    """Largest batch of average sequences within the target; at least 1."""
    d, e, f = times.step
    return max((itl_ms - d) / (e + f * (means.prompt + 0.5 * means.output)), 1.0)


def _means(seen: VariantSeen, now_s: float, window_s: float) -> Means | None:
    rows = [row for row in seen.recent if row.at_s >= now_s - window_s]
    if not rows or not seen.outputs or not seen.arrivals or seen.window_s <= 0:
        return None
    n = len(rows)
    return Means(
        rps=seen.arrivals / seen.window_s,
        prompt=sum(row.prompt_tokens for row in rows) / n,
        uncached=sum(row.uncached_tokens for row in rows) / n,
        output=sum(output for _, output in seen.outputs) / len(seen.outputs),
    )


@cache  # a sweep asks the same again and again
def _next_value(values: tuple[float, ...], fewest: int) -> float:
    if len(values) < fewest:
        return values[-1]
    from statsmodels.tsa.arima.model import ARIMA

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fit did not converge: it is still a forecast
        try:
            fitted = ARIMA(list(values), order=(1, 1, 1)).fit(method_kwargs={"maxiter": 20})
            ahead = float(fitted.forecast(1)[0])
        except ValueError:  # LinAlgError is one: values that are all alike, for instance
            return values[-1]
    return min(max(ahead, 0.0), 4 * max(values))


def _decision(prefill: int, decode: int, reason: str) -> Decision:
    return Decision({VARIANT: VariantDecision(prefill, decode, 0, reason)})
