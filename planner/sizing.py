"""Workers that meet the targets: (prefill, decode) for one variant, from distributions. Pure.

Prefill: how many requests wait longer than their target leaves after their own prefill
(planner.queueing), with recent arrivals brought to the rate in question (planner.trend). Decode: all
sequences in flight share the room that the ITL target leaves in a step,

    sum over sequences of (e + f * context)  <=  decode workers * (itl - d)

of which the mean follows from Little's law and the spread from the lengths (planner.lengths); and KV and
batch have room. What decodes now keeps its workers: the lengths may not yet tell how long it stays.
A request may miss by either, so both are searched together: the cheapest pair whose misses add up to what
the percentile allows. All misses grow with the demand and shrink with the workers; so the cost of the
cheapest pair is monotone in the demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from kvrouter.deadline import Order
from planner.lengths import expected_answers
from planner.observation import FittedTimes, PoolSeen, VariantSeen
from planner.queueing import DEADLINE_POWER, Row, late_counts, tail
from planner.settings import Targets, VariantSettings
from planner.trend import detrended

__all__ = ["Roles", "Sizer"]

Roles = tuple[int, int]

FEWEST = 100  # arrivals below which the formula has a say
LEAST_SHARE = 0.01  # of requests, for a class to count
HIGHEST_LOAD = 0.95  # of a pool, whatever the tail says
NEGLIGIBLE = 0.02  # of the allowed misses: more workers for less than this are not looked at
STRETCH = 1.5  # an ITL target that cannot be met is taken as this times the least
MOST = 4096  # workers of a pool
TINY_MS = 1e-3
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
        self._rows, self._classes = self._read_arrivals()
        n = len(self._rows)
        self.service_s = sum(row[1] for row in self._rows) / n if n else 0.0
        self._counting = self._classes_that_count()
        self._step_ms, self._flight_ms = self._now_in_flight()
        self._answers = self._expected_answers()
        self._itl_ms = self._reachable_itl()
        self._room_ms = max(self._itl_ms - times.step[0], TINY_MS)
        self._load = self._decode_load()
        self._streams = self._workers_of_streams()
        self._late = cache(self._late_now)

    @property
    def unreachable(self) -> str | None:
        """What no number of workers can do, with the best that can be had."""
        return "; ".join(self._unreachable) or None

    # ------------------------------------------------------------ pairs of pools

    def meets(self, roles: Roles, rate: float) -> bool:
        if rate <= 0:
            return roles[1] >= self._streams
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
            return floor[0], max(floor[1], self._streams)
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
        power = DEADLINE_POWER if self._settings.order is Order.DEADLINE else 1.0
        names = list(self._classes)
        counts = [len(waits) for waits in self._classes.values()]
        most = [
            count * self._targets(name).allowed_misses ** (1 / power)
            if name in self._counting
            else math.inf
            for name, count in zip(names, counts, strict=True)
        ]
        late = late_counts(self._rows, servers, self._seen.weight / rate, most, self._seen.weight)
        found: dict[str | None, float] = {}
        for name, waits, number in zip(names, self._classes.values(), late, strict=True):
            if name not in self._counting:
                continue
            share = number / len(waits)
            if len(self._rows) < FEWEST:
                share = max(share, self._formula(servers, rate, waits))
            found[name] = min(share, 1.0) ** power
        return found

    def _formula(self, servers: int, rate: float, waits_s: Sequence[float]) -> float:
        """With Poisson arrivals, and lengths as spread as those of the few that came."""
        mean = self.service_s
        if mean <= 0:
            return 0.0
        cv2 = sum((row[1] - mean) ** 2 for row in self._rows) / len(self._rows) / mean**2
        return tail(servers, rate, mean, waits_s, arrival_cv2=1.0, service_cv2=max(cv2, 1.0))

    def slow(self, workers: int, rate: float) -> float:
        """Share of requests whose ITL misses. 1 where KV or batch have no room."""
        load = self._load
        if workers < self._decode_floor(rate):
            return 1.0
        sd = math.sqrt(rate * load.variance)
        return 1 - NORMAL.cdf((workers * self._room_ms - rate * load.weight) / sd) if sd > 0 else 0.0

    def _decode(self, rate: float, misses: float) -> int:
        """Least workers with no more than that share of `slow`."""
        load = self._load
        z = max(NORMAL.inv_cdf(1 - min(max(misses, 1e-9), 0.5)), 0.0)
        weight = rate * load.weight + z * math.sqrt(rate * load.variance)
        workers = max(math.ceil(weight / self._room_ms - 1e-9), self._decode_floor(rate), 1)
        while self.slow(workers, rate) > misses:  # rounding
            workers += 1
        return workers

    def _decode_floor(self, rate: float) -> int:
        load = self._load
        floor = rate * load.weight / self._room_ms / HIGHEST_LOAD
        if self._seen.max_batch is not None:
            floor = max(floor, rate * load.sequences / HIGHEST_LOAD / self._seen.max_batch)
        if self._seen.kv_tokens is not None:
            floor = max(floor, rate * load.kv_tokens / HIGHEST_LOAD / self._seen.kv_tokens)
        return max(math.ceil(floor - 1e-9), self._streams)

    # ------------------------------------------------------------ what was seen

    def _targets(self, name: str | None) -> Targets:
        return self._settings.classes.get(name or "", self._settings.targets)

    @property
    def _allowed(self) -> float:
        return min(self._targets(name).allowed_misses for name in self._counting)

    def _read_arrivals(self) -> tuple[list[Row], dict[str | None, list[float]]]:
        """The arrivals, in units of their mean gap; and by class the waits that are allowed, in seconds.

        As for decode a target is divided by 1 + spread. Those that no queue could save may wait for ever:
        more workers would not help them.
        """
        a, b, c = self._times.prefill
        arrivals = sorted(self._seen.recent, key=lambda row: row.at_s)
        at_s = [row.at_s for row in arrivals]
        spans = self._seen.observed
        if not spans and at_s:
            spans = ((at_s[0], at_s[0] + self._seen.recent_s),)
        targets: dict[str | None, Targets] = {None: self._settings.targets}
        targets.update(self._settings.classes)
        rows: list[Row] = []
        waits: dict[str | None, list[float]] = {}
        lost: dict[str | None, list[float]] = {}
        order: dict[str | None, int] = {}
        for at, row in zip(detrended(at_s, spans), arrivals, strict=True):
            u, prompt = row.uncached_tokens, row.prompt_tokens
            own_ms = a + b * u + c * u * (prompt - 0.5 * u) if u > 0 else 0.0
            name = row.slo_class if row.slo_class in targets else None
            target_ms = targets[name].ttft_for(prompt)
            left_s = max(target_ms / (1 + self._times.prefill_spread) - own_ms, 0.0) / 1e3
            if own_ms > target_ms:
                lost.setdefault(name, []).append(own_ms)
                left_s = math.inf
            rows.append((at, own_ms / 1e3, left_s, order.setdefault(name, len(order))))
            waits.setdefault(name, []).append(left_s)
        for name, missed in lost.items():
            share = len(missed) / len(waits[name])
            if len(rows) >= 10 and share > targets[name].allowed_misses:
                self._unreachable.append(
                    f"{name + ': ' if name else ''}TTFT target not reachable for {share:.0%} of prompts;"
                    f" their prefill alone takes {min(missed):.0f} to {max(missed):.0f} ms"
                )
        return rows, waits

    def _classes_that_count(self) -> list[str | None]:
        least = LEAST_SHARE * len(self._rows)
        return [name for name, waits in self._classes.items() if len(waits) >= least] or [None]

    def _reachable_itl(self) -> float:
        """The strictest of the classes seen; where no worker could meet it, somewhat above the least."""
        wanted = min(self._targets(name).itl_ms for name in self._counting)
        d, e, f = self._times.step
        own = e + f * sum(share * (prompt + 0.5 * output) for share, prompt, output in self._answers)
        usable = wanted / (1 + self._times.step_spread)
        if wanted < d + own:
            self._unreachable.append(f"ITL target {wanted:g} ms not reachable; best is {d + own:.1f} ms")
            return (d + own) * STRETCH
        if usable < d + 2 * own:
            self._unreachable.append(
                f"ITL target {wanted:g} ms reachable only with almost no batch: one sequence alone takes"
                f" {d + own:.1f} ms"
            )
        return max(usable, d + own)

    def _now_in_flight(self) -> tuple[float, float]:
        """A step's time now, and what all that decodes now adds to steps; ms."""
        d, e, f = self._times.step
        seen = self._seen
        rows = seen.going or seen.outputs
        context = sum(prompt + output for prompt, output in rows) / len(rows) if rows else 0.0
        flight_ms = (seen.decoding or 0) * (e + f * context)
        return d + flight_ms / max(self._decode_workers(starting=False), 1), flight_ms

    def _decode_workers(self, *, starting: bool) -> int:
        pools = self._seen.pools
        prefill, decode = (pools.get(name, PoolSeen()) for name in ("prefill", "decode"))
        return decode.ready + prefill.lent + (decode.starting if starting else 0)

    def _expected_answers(self) -> list[tuple[float, int, float]]:
        """(share, prompt, output) of those to come."""
        seen = self._seen
        tokens = math.inf if seen.outputs_s is None else seen.outputs_s * 1e3 / max(self._step_ms, TINY_MS)
        going: Sequence[tuple[int, int]] = seen.going
        if not going and not seen.outputs:
            going = [(row.prompt_tokens, 0) for row in seen.recent] or [(1, 0)]
        return expected_answers(seen.outputs, going, tokens)

    def _decode_load(self) -> _Load:
        _, e, f = self._times.step
        itl_s = self._itl_ms / 1e3
        weight = variance = sequences = kv = 0.0
        for share, prompt, output in self._answers:
            own = e + f * (prompt + 0.5 * output)
            stays_s = share * output * itl_s
            weight += stays_s * own
            variance += stays_s * own * own
            sequences += stays_s
            kv += stays_s * (prompt + output)
        return _Load(weight, variance, sequences, kv)

    def _workers_of_streams(self) -> int:
        """Of those that are there, what is in flight needs; with slower steps it would be more that is."""
        slower = self._itl_ms / max(self._step_ms, TINY_MS)
        needed = self._flight_ms * slower / self._room_ms
        rows, decoding = self._seen.going, self._seen.decoding or 0
        if self._seen.kv_tokens is not None and rows:
            kv_tokens = decoding * sum(prompt + so_far for prompt, so_far in rows) / len(rows)
            needed = max(needed, kv_tokens / self._seen.kv_tokens)
        if self._seen.max_batch is not None:
            needed = max(needed, decoding / self._seen.max_batch)
        return min(math.ceil(needed - 1e-9), self._decode_workers(starting=True))
