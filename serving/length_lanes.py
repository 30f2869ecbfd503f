"""Lanes by the length of what must be computed, cut so that each holds the same amount of work. Pure.

A few long prompts are as much work as very many short ones. Where the short ones end is a matter of the
traffic, so the borders follow it: a third of the work that is asked for lies in each lane.
"""

from __future__ import annotations

from bisect import bisect_right
from math import log2

__all__ = ["LANES", "LengthLanes"]

LANES = ("short", "medium", "long")
PER_OCTAVE = 2  # classes of length that the borders lie between
CLASSES = 48  # from 0.1 ms on
SHORTEST_MS = 0.1
CUT_AFTER = 64  # requests, between two looks at the borders
FADES = 0.8  # what came before counts so much at each look


class LengthLanes:
    """All is one lane, "short", until there was enough traffic to tell."""

    def __init__(self) -> None:
        self._work_ms = [0.0] * CLASSES
        self._borders: list[int] = []  # first class of the second and of the third lane
        self._offered = 0

    def lane(self, work_ms: float) -> int:
        """Index into LANES."""
        return bisect_right(self._borders, _class(work_ms))

    def offer(self, work_ms: float) -> int:
        """A prompt of that much work came; its lane."""
        lane = self.lane(work_ms)
        self._work_ms[_class(work_ms)] += work_ms
        self._offered += 1
        if self._offered % CUT_AFTER == 0:
            self._cut()
        return lane

    def _cut(self) -> None:
        total = sum(self._work_ms)
        borders: list[int] = []
        before_ms = 0.0
        for index, work_ms in enumerate(self._work_ms):
            # The border that is nearest to an even cut.
            while len(borders) < 2 and before_ms + work_ms / 2 >= total * (len(borders) + 1) / len(LANES):
                borders.append(index)
            before_ms += work_ms
        self._borders = borders
        self._work_ms = [work_ms * FADES for work_ms in self._work_ms]


def _class(work_ms: float) -> int:
    if work_ms <= SHORTEST_MS:
        return 0
    return min(int(PER_OCTAVE * log2(work_ms / SHORTEST_MS)), CLASSES - 1)
