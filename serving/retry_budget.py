"""How many retries a frontend may make: a bad node must not turn into a storm of them. Pure.

A token bucket. `burst` is what it holds: as many as streams can be live at once, since all of them may lose
their worker in the same moment. It fills by `ratio` of every request that starts, and by `per_s` for times
with few requests.
"""

from __future__ import annotations


class RetryBudget:
    """`burst`: tokens, at least 1; `ratio`: tokens a request; `per_s`: tokens a second."""

    def __init__(self, burst: int, *, ratio: float = 0.2, per_s: float = 1.0) -> None:
        self.refused = 0  # monotone
        self._burst = float(burst)
        self._ratio = ratio
        self._per_s = per_s
        self._tokens = self._burst
        self._filled_s: float | None = None

    def earn(self) -> None:
        """A request starts."""
        self._tokens = min(self._burst, self._tokens + self._ratio)

    def spend(self, now_s: float) -> bool:
        """Whether one more retry may be made; it is counted if so."""
        if self._filled_s is not None:
            self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._tokens < 1.0:
            self.refused += 1
            return False
        self._tokens -= 1.0
        return True
