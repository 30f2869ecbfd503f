"""How long it takes here until a change of the pools helps: a start, a worker's other role. Pure.

Seen at the planner's ticks, so rounded up to one. The planner plans with the slowest start of the last
hour, and with the usual change of role: flips that seem slow are not made, and nothing would correct them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from planner.observation import PoolSeen
from planner.scaling import PoolWorker

KEPT = 8  # changes of a kind
KEPT_S = 3600.0  # what is older says little of now
MISSED_TICKS = 3.0  # after so long without a look nobody knows when a change was over

Key = tuple[str, str]  # model, variant


class ChangeTimes:
    """Tell it of every order; begin a tick with `tick`, then show it what is there. Times in seconds."""

    def __init__(self) -> None:
        self._startups: dict[Key, deque[tuple[float, float]]] = {}  # (when, how long)
        self._flips: dict[Key, deque[tuple[float, float]]] = {}
        self._ordered: dict[tuple[Key, str], tuple[float, int]] = {}  # pool -> (when, ready then)
        self._turning: dict[tuple[Key, str], tuple[float, str]] = {}  # worker -> (when, role to play)
        self._tick_s: float | None = None

    def tick(self, now_s: float, interval_s: float) -> None:
        """Changes under way are not measured where ticks were left out."""
        if self._tick_s is not None and now_s - self._tick_s > MISSED_TICKS * interval_s:
            self._ordered.clear()
            self._turning.clear()
        self._tick_s = now_s
        for kept in (*self._startups.values(), *self._flips.values()):
            while kept and kept[0][0] < now_s - KEPT_S:
                kept.popleft()

    @property
    def startups_s(self) -> dict[Key, float]:
        """From an order to a ready worker, where one was seen."""
        return {key: max(s for _, s in seen) for key, seen in self._startups.items() if seen}

    @property
    def flips_s(self) -> dict[Key, float]:
        """From an order to a worker that plays its other role."""
        return {key: median(s for _, s in seen) for key, seen in self._flips.items() if seen}

    def grows(self, key: Key, pool: str, seen: PoolSeen, now_s: float) -> None:
        """More replicas of `pool` were ordered; what is under way already is measured first."""
        self._ordered.setdefault((key, pool), (now_s, seen.ready + seen.lent))

    def turns(self, key: Key, worker: str, role: str, now_s: float) -> None:
        """`worker` was ordered to play `role`."""
        self._turning[key, worker] = now_s, role

    def see_pool(self, key: Key, pool: str, seen: PoolSeen, now_s: float) -> None:
        """A start is over with one more worker that is ready."""
        ordered = self._ordered.get((key, pool))
        if ordered is None:
            return
        if seen.ready + seen.lent > ordered[1]:
            _keep(self._startups, key, now_s, ordered[0])
            del self._ordered[key, pool]
        elif seen.starting == 0:  # taken back before it came
            del self._ordered[key, pool]

    def see_workers(self, key: Key, workers: Sequence[PoolWorker], now_s: float) -> None:
        """`workers`: all of the variant that are linked."""
        there = {worker.ident: worker for worker in workers}
        for at, (ordered_s, role) in list(self._turning.items()):
            if at[0] != key:
                continue
            worker = there.get(at[1])
            if worker is None or worker.set_aside:  # it left before, or an operator drains it
                del self._turning[at]
            elif worker.role == role and not worker.draining:
                _keep(self._flips, key, now_s, ordered_s)
                del self._turning[at]


def _keep(kept: dict[Key, deque[tuple[float, float]]], key: Key, now_s: float, since_s: float) -> None:
    kept.setdefault(key, deque(maxlen=KEPT)).append((now_s, now_s - since_s))
