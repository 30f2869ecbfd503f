"""Workers that meet the targets: (prefill, decode) for one variant, from distributions. Pure.

Prefill: the least k under which few enough requests wait longer than their target leaves after their own
prefill (planner.queueing). Decode: all sequences in flight share the room that the ITL target leaves in a
step,

    sum over sequences of (e + f * context)  <=  decode workers * (itl - d)

of which the mean follows from Little's law and the spread from the lengths; and KV and batch have room.
Everything is monotone in the demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from kvrouter.deadline import Order
from planner.observation import Arrival, FittedTimes, VariantSeen
from planner.queueing import DEADLINE_POWER, late_share, tail
from planner.settings import Targets, VariantSettings

__all__ = ["Need", "Sizer"]

FEWEST = 100  # arrivals below which the formula has a say
LEAST_SHARE = 0.01  # of requests, for a class to count
HIGHEST_LOAD = 0.95  # of a pool, whatever the tail says
DEFAULT_OUTPUT = 256  # tokens, before any answer was seen
STRETCH = 1.5  # an ITL target that cannot be met is taken as this times the least


@dataclass(frozen=True, slots=True)
class Need:
    prefill: int
    decode: int
    reachable: str | None = None  # what to tell when a target cannot be met


class Sizer:
    """Of one observation. Build it once a tick, then ask `need` for any demand."""

    def __init__(self, seen: VariantSeen, times: FittedTimes, settings: VariantSettings) -> None:
        self._seen = seen
        self._times = times
        self._settings = settings
        self._least_missed: list[str] = []
        self._rows = self._arrivals()
        self.service_s = (
            sum(service for rows in self._rows.values() for _, service, _ in rows)
            / max(sum(len(rows) for rows in self._rows.values()), 1)
        )  # fmt: skip
        self.rate = (
            len(seen.recent) * seen.weight / seen.recent_s if seen.recent_s > 0 else 0.0
        )  # per second, over the kept past
        self._all = sorted(row for rows in self._rows.values() for row in rows)
        self._itl_ms = self._itl_target()
        self._decode = self._decode_load()

    # ------------------------------------------------------------ what was seen

    def _targets(self, name: str | None) -> Targets:
        return self._settings.classes.get(name or "", self._settings.targets)

    def _prefill_ms(self, row: Arrival) -> float:
        a, b, c = self._times.prefill
        u = row.uncached_tokens
        return a + b * u + c * u * (row.prompt_tokens - 0.5 * u) if u > 0 else 0.0

    def _arrivals(self) -> dict[str | None, list[tuple[float, float, float]]]:
        """By class: (at, service, allowed wait) in seconds; those that no queue could save left out."""
        rows: dict[str | None, list[tuple[float, float, float]]] = {}
        lost: dict[str | None, list[float]] = {}
        for row in self._seen.recent:
            own_ms = self._prefill_ms(row)
            targets = self._targets(row.slo_class)
            left_ms = targets.ttft_for(row.prompt_tokens) - own_ms
            if left_ms < 0:
                lost.setdefault(row.slo_class, []).append(own_ms)
                left_ms = math.inf
            rows.setdefault(row.slo_class, []).append((row.at_s, own_ms / 1e3, left_ms / 1e3))
        for name, missed in lost.items():
            targets = self._targets(name)
            share = len(missed) / len(rows[name])
            if len(rows[name]) >= 10 and share > targets.allowed_misses:
                text = f"{name}: " if name else ""
                self._least_missed.append(
                    f"{text}TTFT target below the prefill time of {share:.0%} of the prompts;"
                    f" reachable {min(missed):.0f} to {max(missed):.0f} ms for those"
                )
        return rows

    def _classes(self) -> list[str | None]:
        total = max(len(self._seen.recent), 1)
        return [name for name, rows in self._rows.items() if len(rows) >= LEAST_SHARE * total]

    def _itl_target(self) -> float:
        """The strictest of the classes seen, reachable."""
        wanted = min(
            (self._targets(name).itl_ms for name in self._classes()), default=self._settings.targets.itl_ms
        )
        wanted /= 1 + self._times.step_spread
        d, e, f = self._times.step
        least = d + e + f * self._context()
        if wanted >= least:
            return wanted
        self._least_missed.append(f"ITL target not reachable; least is {least:.1f} ms")
        return least * STRETCH

    def _pairs(self) -> Sequence[tuple[int, int]]:
        """(prompt, output) of those that are answered and of those that are not.

        The first answers of a fresh start are the short ones; those in flight are longer. They count as
        `DEFAULT_OUTPUT`, or as the answered ones' mean when that is more.
        """
        answered = list(self._seen.outputs)
        mean = sum(output for _, output in answered) // len(answered) if answered else 0
        unanswered = (self._seen.decoding or 0) + (self._seen.queued or 0)
        if not answered:
            unanswered = max(unanswered, 1)
        prompts = [row.prompt_tokens for row in self._seen.recent[-unanswered:]] if unanswered else []
        if not answered and not prompts:
            prompts = [1]
        return answered + [(prompt, max(mean, DEFAULT_OUTPUT)) for prompt in prompts]

    def _context(self) -> float:
        pairs = self._pairs()
        return sum(prompt + 0.5 * output for prompt, output in pairs) / len(pairs)

    def _decode_load(self) -> tuple[float, float, float, float]:
        """Per request and second of rate: mean and variance of step weight (ms), sequences, KV tokens."""
        _, e, f = self._times.step
        itl_s = self._itl_ms / 1e3
        pairs = self._pairs()
        mean = variance = sequences = kv = 0.0
        for prompt, output in pairs:
            context = prompt + 0.5 * output
            weight = e + f * context
            stays_s = output * itl_s
            mean += stays_s * weight
            variance += stays_s * weight * weight
            sequences += stays_s
            kv += stays_s * (prompt + output)
        n = len(pairs)
        return mean / n, variance / n, sequences / n, kv / n

    # ------------------------------------------------------------ what it takes

    def need(self, rate: float) -> Need:
        """For `rate` requests per second of the kind that was seen."""
        reachable = "; ".join(dict.fromkeys(self._least_missed)) or None
        return Need(self.prefill(rate), self.decode(rate), reachable)

    def prefill(self, rate: float, least: int = 1) -> int:
        """`least`: known to be needed, from a smaller rate."""
        if rate <= 0 or not self._all:
            return 0
        growth = rate / self.rate if self.rate > 0 else 1.0
        low = high = max(math.ceil(rate * self.service_s / HIGHEST_LOAD), least)
        step = 1
        while not self._prefill_meets(high, rate, growth):
            low, high = high + 1, high + step
            step *= 2
        while low < high:  # least in [low, high]
            middle = (low + high) // 2
            if self._prefill_meets(middle, rate, growth):
                high = middle
            else:
                low = middle + 1
        return high

    def _prefill_meets(self, servers: int, rate: float, growth: float) -> bool:
        power = DEADLINE_POWER if self._settings.order is Order.DEADLINE else 1.0
        longest = max((service for _, service, _ in self._all), default=0.0)
        if servers > rate * self.service_s + 1 + 100 * max(longest, 1.0) * max(rate, 1.0):
            return True  # no queue is left to speak of
        for name in self._classes():
            allowed = self._targets(name).allowed_misses
            rows = self._all if len(self._rows) == 1 else self._marked(name)
            share = late_share(rows, servers, growth, self._seen.weight)
            share *= len(rows) / max(len(self._rows[name]), 1)
            if len(self._all) < FEWEST:
                share = max(share, self._formula(servers, rate, name))
            if min(share, 1.0) ** power > allowed:
                return False
        return True

    def _marked(self, name: str | None) -> list[tuple[float, float, float]]:
        """All arrivals; those of other classes may wait for ever."""
        own = set(self._rows[name])
        return [row if row in own else (row[0], row[1], math.inf) for row in self._all]

    def _formula(self, servers: int, rate: float, name: str | None) -> float:
        """With Poisson arrivals, and lengths as spread as those of the few that came."""
        services = [service for _, service, _ in self._all]
        mean = self.service_s
        cv2 = sum((s - mean) ** 2 for s in services) / len(services) / mean**2 if mean > 0 else 0.0
        allowed = sorted(wait for _, _, wait in self._rows[name])
        return tail(servers, rate, mean, allowed[len(allowed) // 2], 1.0, max(cv2, 1.0))

    def decode(self, rate: float) -> int:
        if rate <= 0:
            return 0
        per_mean, per_variance, per_sequence, per_kv = self._decode
        misses = min(
            (self._targets(name).allowed_misses for name in self._classes()),
            default=self._settings.targets.allowed_misses,
        )
        z = max(NormalDist().inv_cdf(1 - misses), 0.0)
        room_ms = self._itl_ms - self._times.step[0]
        weight = rate * per_mean + z * math.sqrt(rate * per_variance)
        needed = weight / room_ms
        in_flight = rate * per_sequence
        if self._seen.max_batch is not None:
            needed = max(needed, (in_flight + z * math.sqrt(in_flight)) / self._seen.max_batch)
        if self._seen.kv_tokens is not None:
            # All sequences are taken to be as long as the average: the spread is in the number.
            kv = rate * per_kv * (1 + z / math.sqrt(max(in_flight, 1.0)))
            needed = max(needed, kv / self._seen.kv_tokens)
        return max(math.ceil(needed - 1e-9), 1)
