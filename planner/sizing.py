"""Workers that meet the targets: (prefill, decode) for one variant, from distributions. Pure.

Prefill: how many requests wait longer than their target leaves after their own prefill
(planner.queueing). Decode: all sequences in flight share the room that the ITL target leaves in a step,

    sum over sequences of (e + f * context)  <=  decode workers * (itl - d)

of which the mean follows from Little's law and the spread from the lengths; and KV and batch have room.
A request may miss by either, so both are searched together: the cheapest pair whose misses add up to what
the percentile allows. All misses grow with the demand and shrink with the workers; so the cost of the
cheapest pair is monotone in the demand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from kvrouter.deadline import Order
from planner.observation import FittedTimes, VariantSeen
from planner.queueing import DEADLINE_POWER, late_share, tail
from planner.settings import Targets, VariantSettings

__all__ = ["Roles", "Sizer"]

Roles = tuple[int, int]

FEWEST = 100  # arrivals below which the formula has a say
LEAST_SHARE = 0.01  # of requests, for a class to count
HIGHEST_LOAD = 0.95  # of a pool, whatever the tail says
NEGLIGIBLE = 0.02  # of the allowed misses: more workers for less than this are not looked at
DEFAULT_OUTPUT = 256  # tokens, before any answer was seen
STRETCH = 1.5  # an ITL target that cannot be met is taken as this times the least
MOST = 4096  # workers of a pool
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class _Load:
    """What one request per second puts on decode, at the ITL target."""

    weight: float  # mean of the summed step weights, ms
    variance: float  # of that sum
    sequences: float
    kv_tokens: float


class Sizer:
    """Of one observation. Build it once a tick, then ask for any demand, in requests per second of the kind
    that was seen."""

    def __init__(self, seen: VariantSeen, times: FittedTimes, settings: VariantSettings) -> None:
        self._seen = seen
        self._times = times
        self._settings = settings
        self._unreachable: list[str] = []
        self._rows: list[tuple[float, float, float]] = []  # at, service, allowed wait; seconds
        self._classes: list[str | None] = []  # of each row
        self._read_arrivals()
        n = len(self._rows)
        self.service_s = sum(row[1] for row in self._rows) / n if n else 0.0
        self._rate = n * seen.weight / seen.recent_s if seen.recent_s > 0 else 0.0
        self._counting = self._classes_that_count()
        self._itl_ms = self._reachable_itl()
        self._load = self._decode_load()
        self._late = cache(self._late_now)

    @property
    def unreachable(self) -> str | None:
        """What no number of workers can do, with the best that can be had."""
        return "; ".join(self._unreachable) or None

    # ------------------------------------------------------------ pairs of pools

    def meets(self, roles: Roles, rate: float) -> bool:
        if rate <= 0:
            return True
        slow = self.slow(roles[1], rate)
        return all(
            late + slow <= self._targets(name).allowed_misses
            for name, late in self._late(roles[0], rate).items()
        )

    def cheapest(self, rate: float, floor: Roles = (0, 0), near: Roles | None = None) -> Roles:
        """The pair that meets the targets at the least cost, each pool at least `floor`.

        Of equally cheap ones that nearest to `near`, then the one with the fewest misses.
        """
        if rate <= 0:
            return floor
        costs = self._settings.prefill.cost, self._settings.decode.cost
        prefill = max(math.ceil(rate * self.service_s / HIGHEST_LOAD), floor[0], 1)
        best: tuple[tuple[float, int, float], Roles] | None = None
        while prefill < MOST:
            late = self._late(prefill, rate)
            left = min(self._targets(name).allowed_misses - share for name, share in late.items())
            if left > 0:
                decode = max(self._decode(rate, left), floor[1])
                cost = prefill * costs[0] + decode * costs[1]
                moves = abs(prefill - near[0]) + abs(decode - near[1]) if near is not None else 0
                key = (cost, moves, max(late.values()) + self.slow(decode, rate))
                if best is None or key < best[0]:
                    best = key, (prefill, decode)
                least = prefill * costs[0] + max(self._decode(rate, self._allowed), floor[1]) * costs[1]
                if least > best[0][0] or max(late.values()) <= NEGLIGIBLE * left:
                    break
            prefill += 1 if best is not None or prefill < 32 else max(prefill // 16, 1)
        return best[1] if best is not None else (prefill, self._decode(rate, self._allowed))

    def cost(self, roles: Roles) -> float:
        return roles[0] * self._settings.prefill.cost + roles[1] * self._settings.decode.cost

    # ------------------------------------------------------------ one pool

    def _late_now(self, servers: int, rate: float) -> dict[str | None, float]:
        """Share of requests whose TTFT misses, by class."""
        if not self._rows:
            return {None: 0.0}
        if servers <= 0 or servers < rate * self.service_s / HIGHEST_LOAD:
            return dict.fromkeys(self._counting, 1.0)
        growth = rate / self._rate if self._rate > 0 else 1.0
        power = DEADLINE_POWER if self._settings.order is Order.DEADLINE else 1.0
        found: dict[str | None, float] = {}
        for name in self._counting:
            rows, part = self._rows, 1.0
            if len(self._counting) > 1:
                rows = [
                    row if own == name else (row[0], row[1], math.inf)
                    for row, own in zip(self._rows, self._classes, strict=True)
                ]
                part = self._classes.count(name) / len(rows)
            most = part * self._targets(name).allowed_misses ** (1 / power)
            share = late_share(rows, servers, growth, self._seen.weight, most) / part
            if len(rows) < FEWEST:
                share = max(share, self._formula(servers, rate))
            found[name] = min(share, 1.0) ** power
        return found

    def _formula(self, servers: int, rate: float) -> float:
        """With Poisson arrivals, and lengths as spread as those of the few that came."""
        mean = self.service_s
        if mean <= 0:
            return 0.0
        cv2 = sum((service - mean) ** 2 for _, service, _ in self._rows) / len(self._rows) / mean**2
        waits = sorted(wait for _, _, wait in self._rows)
        return tail(servers, rate, mean, waits[len(waits) // 2], arrival_cv2=1.0, service_cv2=max(cv2, 1.0))

    def slow(self, workers: int, rate: float) -> float:
        """Share of requests whose ITL misses. 1 where KV or batch have no room."""
        load = self._load
        if workers < self._decode_floor(rate):
            return 1.0
        room_ms = workers * (self._itl_ms - self._times.step[0])
        sd = math.sqrt(rate * load.variance)
        return 1 - NORMAL.cdf((room_ms - rate * load.weight) / sd) if sd > 0 else 0.0

    def _decode(self, rate: float, misses: float) -> int:
        """Least workers with no more than that share of `slow`."""
        load = self._load
        z = max(NORMAL.inv_cdf(1 - min(max(misses, 1e-9), 0.5)), 0.0)
        weight = rate * load.weight + z * math.sqrt(rate * load.variance)
        needed = weight / (self._itl_ms - self._times.step[0])
        workers = max(math.ceil(needed - 1e-9), self._decode_floor(rate), 1)
        while self.slow(workers, rate) > misses:  # rounding
            workers += 1
        return workers

    def _decode_floor(self, rate: float) -> int:
        load = self._load
        floor = rate * load.weight / (self._itl_ms - self._times.step[0]) / HIGHEST_LOAD
        if self._seen.max_batch is not None:
            floor = max(floor, rate * load.sequences / HIGHEST_LOAD / self._seen.max_batch)
        if self._seen.kv_tokens is not None:
            floor = max(floor, rate * load.kv_tokens / HIGHEST_LOAD / self._seen.kv_tokens)
        return math.ceil(floor - 1e-9)

    # ------------------------------------------------------------ what was seen

    def _targets(self, name: str | None) -> Targets:
        return self._settings.classes.get(name or "", self._settings.targets)

    @property
    def _allowed(self) -> float:
        return min(self._targets(name).allowed_misses for name in self._counting)

    def _read_arrivals(self) -> None:
        """Those that no queue could save may wait for ever: more workers would not help them."""
        a, b, c = self._times.prefill
        begin_s = self._seen.recent[0].at_s if self._seen.recent else 0.0
        targets: dict[str | None, Targets] = {None: self._settings.targets}
        targets.update(self._settings.classes)
        lost: dict[str | None, list[float]] = {}
        for row in self._seen.recent:
            u, prompt = row.uncached_tokens, row.prompt_tokens
            own_ms = a + b * u + c * u * (prompt - 0.5 * u) if u > 0 else 0.0
            name = row.slo_class if row.slo_class in targets else None
            left_ms = targets[name].ttft_for(prompt) - own_ms
            if left_ms < 0:
                lost.setdefault(name, []).append(own_ms)
                left_ms = math.inf
            self._rows.append((row.at_s - begin_s, own_ms / 1e3, left_ms / 1e3))
            self._classes.append(name)
        for name, missed in lost.items():
            share = len(missed) / self._classes.count(name)
            if len(self._rows) >= 10 and share > targets[name].allowed_misses:
                self._unreachable.append(
                    f"{name + ': ' if name else ''}TTFT target not reachable for {share:.0%} of prompts;"
                    f" their prefill alone takes {min(missed):.0f} to {max(missed):.0f} ms"
                )

    def _classes_that_count(self) -> list[str | None]:
        if not self._rows:
            return [None]
        names = dict.fromkeys(self._classes)
        return [n for n in names if self._classes.count(n) >= LEAST_SHARE * len(self._classes)]

    def _reachable_itl(self) -> float:
        """The strictest of the classes seen; where no worker could meet it, somewhat above the least."""
        wanted = min(self._targets(name).itl_ms for name in self._counting)
        d, e, f = self._times.step
        pairs = self._pairs()
        context = sum(prompt + 0.5 * output for prompt, output in pairs) / len(pairs)
        least = d + e + f * context
        usable = wanted / (1 + self._times.step_spread)
        if usable > least:
            return usable
        if wanted < least:
            self._unreachable.append(f"ITL target {wanted:g} ms not reachable; best is {least:.1f} ms")
        return least * STRETCH

    def _pairs(self) -> list[tuple[int, int]]:
        """(prompt, output) of those that are answered and of those that are not.

        The first answers of a fresh start are the short ones; those in flight are longer. They count as
        `DEFAULT_OUTPUT`, or as the answered ones' mean when that is more.
        """
        answered = list(self._seen.outputs)
        mean = sum(output for _, output in answered) // len(answered) if answered else 0
        open_ones = (self._seen.decoding or 0) + (self._seen.queued or 0)
        if not answered:
            open_ones = max(open_ones, 1)
        rows = self._seen.recent[-open_ones:] if open_ones else ()
        prompts = [row.prompt_tokens for row in rows]
        if not answered and not prompts:
            prompts = [1]
        return answered + [(prompt, max(mean, DEFAULT_OUTPUT)) for prompt in prompts]

    def _decode_load(self) -> _Load:
        _, e, f = self._times.step
        itl_s = self._itl_ms / 1e3
        weight = variance = sequences = kv = 0.0
        pairs = self._pairs()
        for prompt, output in pairs:
            own = e + f * (prompt + 0.5 * output)
            stays_s = output * itl_s
            weight += stays_s * own
            variance += stays_s * own * own
            sequences += stays_s
            kv += stays_s * (prompt + output)
        n = len(pairs)
        return _Load(weight / n, variance / n, sequences / n, kv / n)
