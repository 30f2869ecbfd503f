"""Observations for planner tests: steady or given arrivals on workers with round numbers."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.decide import decide
from planner.observation import (
    Arrival,
    Decision,
    FittedTimes,
    Observation,
    PoolSeen,
    VariantSeen,
)
from planner.observe import Observer
from planner.settings import PoolLimits, Settings, Targets, VariantSettings
from planner.state import State

NAME = "m/main"
# Of a prefill worker, of a decode worker.
COSTS = {"one": (1.0, 1.0), "a tenth": (0.1, 0.1), "eight": (8.0, 8.0), "mixed": (8.0, 1.0)}
# 10,000 prompt tokens a second; a step of 20 ms and 0.2 ms per sequence.
TIMES = FittedTimes(
    prefill=(0.0, 0.1, 0.0), step=(20.0, 0.2, 0.0), prefill_spread=0.0, step_spread=0.0, samples=100
)
TARGETS = Targets(ttft_ms=1000, ttft_ms_per_1k_tokens=100, itl_ms=40, percentile=95)


def variant(costs: tuple[float, float] = (1.0, 1.0), **changes: object) -> VariantSettings:
    limits = PoolLimits(1, 64)
    own = replace(VariantSettings(TARGETS, prefill=limits, decode=limits), **changes)  # type: ignore[arg-type]
    prefill, decode = replace(own.prefill, cost=costs[0]), replace(own.decode, cost=costs[1])
    return replace(own, prefill=prefill, decode=decode)


def settings(own: VariantSettings | None = None, workers: int = 64, **changes: object) -> Settings:
    """The budget is enough for so many `workers`, whichever they are."""
    own = own or variant()
    given: dict[str, object] = {"budget": workers * max(own.prefill.cost, own.decode.cost), **changes}
    return Settings({NAME: own}, **given)  # type: ignore[arg-type]


def pools(prefill: int = 1, decode: int = 1, *, starting: tuple[int, int] = (0, 0)) -> dict[str, PoolSeen]:
    return {
        "prefill": PoolSeen(ready=prefill, starting=starting[0]),
        "decode": PoolSeen(ready=decode, starting=starting[1]),
    }


class Service:
    """Steady arrivals seen at ticks of 5 s; what the planner asks for is there after `startup_s`.

    Poisson, or `even`ly spaced. Not `placed`: the cluster has no room for more, which shows if it `tells`.
    """

    def __init__(
        self,
        given: Settings,
        rate: float,
        start: tuple[int, int] = (1, 1),
        *,
        prompt: int = 2000,
        output: int = 100,
        startup_s: float = 25.0,
        placed: bool = True,
        tells: bool = False,
        even: bool = False,
    ) -> None:
        self.settings = given
        self.rate = rate
        self.prompt, self.output = prompt, output
        self.now_s = 0.0
        self.state = State()
        self.decisions: list[Decision] = []
        self._random = random.Random(1)
        self._observer = Observer(TIMES)
        self._observer.reported(0.0)
        self._ready = list(start)
        self._starting: list[list[float]] = [[], []]  # when each will be ready
        self._startup_s = startup_s
        self._placed = placed
        self._tells = tells
        self._even = even
        self._next_s = 0.0

    def tick(self, **changes: object) -> Decision:
        self._pass(self.settings.interval_s)
        for role in (0, 1):
            done = [at for at in self._starting[role] if self._placed and at <= self.now_s]
            self._ready[role] += len(done)
            self._starting[role] = [at for at in self._starting[role] if at not in done]
        there = pools(*self._ready, starting=(len(self._starting[0]), len(self._starting[1])))
        if self._tells:
            there = {
                name: replace(pool, unplaced=0 if self._placed else pool.starting)
                for name, pool in there.items()
            }
        seen = self._observer.observe(
            self.now_s,
            there,
            queue_age_s=0.0,
            queued=0,
            decoding=0,
        )
        seen = replace(seen, **changes)  # type: ignore[arg-type]
        decision, self.state = decide(
            Observation({NAME: seen}, 1, 0), self.state, self.settings, self.now_s
        )
        self.decisions.append(decision)
        self._apply(decision)
        return decision

    def unseen(self, seconds: float) -> None:
        """Requests come and nobody looks."""
        self._pass(seconds)
        self._observer.observe(self.now_s, {})

    def add(self, prefill: int) -> None:
        """By hand."""
        self._ready[0] += prefill

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / self.settings.interval_s)):
            self.tick()

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        while self.rate > 0 and self._next_s < self.now_s:
            self._observer.arrived(Arrival(self._next_s, self.prompt, self.prompt))
            self._observer.finished(self.prompt, self.output)
            self._next_s += 1 / self.rate if self._even else self._random.expovariate(self.rate)

    def _apply(self, decision: Decision) -> None:
        wanted = decision.variants[NAME]
        for role, target in enumerate((wanted.prefill, wanted.decode)):
            there = self._ready[role] + len(self._starting[role])
            for _ in range(target - there):
                self._starting[role].append(self.now_s + self._startup_s)
            for _ in range(there - target):
                if self._starting[role]:
                    self._starting[role].pop()
                else:
                    self._ready[role] -= 1

    @property
    def targets(self) -> list[tuple[int, int]]:
        return [(d.variants[NAME].prefill, d.variants[NAME].decode) for d in self.decisions]

    @property
    def replicas(self) -> tuple[int, int]:
        return self._ready[0] + len(self._starting[0]), self._ready[1] + len(self._starting[1])


def seen(
    rate: float,
    *,
    work: float = 1.0,
    output: int = 100,
    now_s: float = 300.0,
    there: dict[str, PoolSeen] | None = None,
    n: int = 200,
    seed: int = 0,
) -> VariantSeen:
    """One observation of `rate` requests per second; prompts are `work` times as long as the base's."""
    generator = random.Random(seed)
    base_s = 100.0
    rows = sorted(generator.uniform(now_s - base_s, now_s) for _ in range(n))
    lengths = [generator.randint(100, 4000) for _ in rows]
    return VariantSeen(
        window_s=5.0,
        arrivals=round(rate * 5),
        pools=there or pools(),
        recent_s=base_s,
        recent=tuple(
            Arrival(at, round(length * work), round(length * work))
            for at, length in zip(rows, lengths, strict=True)
        ),
        outputs=tuple((length, output) for length in lengths),
        cached_share=0.0,
        queue_age_s=0.0,
        queued=0,
        decoding=0,
        times=TIMES,
    )
