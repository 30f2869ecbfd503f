"""A circuit breaker per worker: one that keeps failing requests gets no new ones for a while. Pure.

    closed --THRESHOLD failures in a row--> open (FIRST_OPEN_S, doubled by a relapse up to LONGEST_OPEN_S)
    open --its time is over--> trial: one request at a time --success--> closed
                                                            --failure--> open

An open worker is a worker to avoid, not a forbidden one: when nobody else is left it is still asked.
"""

from __future__ import annotations

from dataclasses import dataclass

THRESHOLD = 5  # failures in a row; a single bad request is retried at most `MAX_TRIES` times
FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 30.0
TRIAL_S = 2.0  # how long the outcome of a trial is waited for before the next one


@dataclass(slots=True)
class _Breaker:
    failures: int = 0  # in a row
    open_s: float = 0.0  # length of the last opening; 0: never opened since the last success
    until_s: float = 0.0  # nothing is placed before
    trial: bool = False  # something was placed since it opened


class Breakers:
    """The breakers of one variant's workers on one frontend; a worker without failures costs nothing."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def failed(self, worker: str, now_s: float) -> bool:
        """Whether it opens by this."""
        breaker = self._breakers.setdefault(worker, _Breaker())
        breaker.failures += 1
        if not (breaker.trial if breaker.open_s else breaker.failures >= THRESHOLD):
            return False  # not yet; or a failure of what was placed before it opened
        breaker.trial = False
        breaker.open_s = min(breaker.open_s * 2 or FIRST_OPEN_S, LONGEST_OPEN_S)
        breaker.until_s = now_s + breaker.open_s
        return True

    def succeeded(self, worker: str) -> None:
        """It answered: closed, whatever was before."""
        if self._breakers:
            self._breakers.pop(worker, None)

    def forget(self, worker: str) -> None:
        """It left, or came back as another process."""
        self._breakers.pop(worker, None)

    def placed(self, worker: str, now_s: float) -> None:
        """A request goes to `worker`: if that is its trial, others wait for the outcome."""
        breaker = self._breakers.get(worker)
        if breaker is not None and breaker.open_s:
            breaker.trial = True
            breaker.until_s = max(breaker.until_s, now_s + TRIAL_S)

    def avoid(self, now_s: float) -> frozenset[str]:
        """The workers that should get nothing now."""
        if not self._breakers:
            return frozenset()
        return frozenset(w for w, b in self._breakers.items() if b.open_s and now_s < b.until_s)
