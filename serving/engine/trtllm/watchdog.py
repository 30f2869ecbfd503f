"""Is the engine still alive? Its iterators may hang for ever where they should fail, so nobody else knows.

Looked at, once a second: the engine's own health check and fatal error (both private: absent in some
versions), that iterations go on while there is work, that transfers end, and that an idle engine has its
blocks back. What is wrong is one line; the worker then has itself replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOK_S = 1.0
STUCK_S = 120.0  # no iteration with work: autotuning and the first graphs take long
LEAK_S = 60.0
LEAK_FLOOR = 0.05  # of all blocks free, with nothing in flight
MOST_ABANDONED = 8  # transfers that never ended: each keeps its blocks


@dataclass(slots=True)
class Pulse:
    """What the engine's user knows."""

    runnable: bool
    in_flight: int
    abandoned: int
    free_blocks: int | None
    total_blocks: int
    step: int


class Watchdog:
    """`look(pulse)` once in a while; a line says what is fatal, None that nothing is."""

    def __init__(self, llm: Any, clock: Callable[[], float]) -> None:
        self._llm = llm
        self._clock = clock
        self._step = 0
        self._moved_s = clock()
        self._low_since_s: float | None = None

    def fatal(self) -> str | None:
        """What the engine itself says."""
        error = getattr(getattr(self._llm, "_executor", None), "_fatal_error", None)
        if error is not None:
            return f"fatal error: {error!r}"
        check = getattr(self._llm, "_check_health", None)
        try:
            return None if check is None or check() else "its health check fails"
        except Exception as problem:
            return f"its health check raises {problem!r}"

    def look(self, pulse: Pulse) -> str | None:
        now_s = self._clock()
        said = self.fatal()
        if said is not None:
            return said
        if pulse.step != self._step or not pulse.runnable:
            self._step, self._moved_s = pulse.step, now_s
        elif now_s - self._moved_s > STUCK_S:
            return f"no iteration for {STUCK_S:.0f} s with work to do"
        if pulse.abandoned >= MOST_ABANDONED:
            return f"{pulse.abandoned} transfers never ended and keep their blocks"
        return self._leak(pulse, now_s)

    def _leak(self, pulse: Pulse, now_s: float) -> str | None:
        free = pulse.free_blocks
        if free is None or pulse.in_flight or free > LEAK_FLOOR * pulse.total_blocks:
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = now_s
        elif now_s - self._low_since_s > LEAK_S:
            return f"{free} of {pulse.total_blocks} blocks are free with nothing in flight: they leaked"
        return None
