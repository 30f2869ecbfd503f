"""Few lines in the log, whatever a stranger sends: the rest is counted and told with the next line."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

BURST = 5
PERIOD_S = 10.0


class LogLimit:
    """Lets `burst` lines through a period. One a source of noise; not thread safe."""

    def __init__(
        self, burst: int = BURST, period_s: float = PERIOD_S, clock: Callable[[], float] = monotonic
    ) -> None:
        self._burst = burst
        self._period_s = period_s
        self._clock = clock
        self._began_s = clock()
        self._said = 0
        self._held = 0

    def pass_on(self) -> str | None:
        """What to append to the line that may be logged now (nothing, or how many were not), or None:
        hold it back."""
        now_s = self._clock()
        if now_s - self._began_s >= self._period_s:
            self._began_s, self._said = now_s, 0
        if self._said >= self._burst:
            self._held += 1
            return None
        self._said += 1
        held, self._held = self._held, 0
        return f" (and {held} more before it)" if held else ""
