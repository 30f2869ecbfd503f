"""When paced decode steps start."""

from __future__ import annotations

import math


class DecodeGrid:
    """Multiples of `period_s` (> 0) on the clock that the caller reads, one decode step for each.

    The schedule never slips: a late step is due at once and the next one keeps its place, so whoever
    watches the tokens sees the lateness.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._slot: int | None = None

    def due_s(self, now_s: float) -> float:
        """Start of the next decode step; the first call after `reset` picks the next multiple."""
        if self._slot is None:
            self._slot = math.ceil(now_s / self._period_s)
        return self._slot * self._period_s

    def advance(self) -> None:
        """The step that was due has run."""
        if self._slot is not None:
            self._slot += 1

    def reset(self) -> None:
        """Nothing decodes: no step is due."""
        self._slot = None
