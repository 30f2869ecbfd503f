"""Arrival times without their trend: each stretch of constant rate at one arrival per unit of time. Pure.

A replay of recent arrivals at another rate must not press together what already came at that rate. So the
seen time is cut where the rate changed by more than the usual clumps explain (likelihood ratio of two
constant rates over one, by binary segmentation), and each stretch is scaled by itself. Clumps stay in their
stretch: a piece shorter than `LEAST_S` is a clump, unless it reaches to an end of what was seen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

__all__ = ["clumped", "detrended"]

Span = tuple[float, float]  # seconds, from and to

LEAST_S = 30.0  # of a stretch between two others
LEAST_END_S = 5.0  # of the first and of the last: more of it may lie outside
SURE = 12.0  # twice the log of the likelihood ratio, beyond which a change is no accident
BIN_S = 5.0  # in which arrivals are counted to see how clumped they are
FEWEST_PAIRS = 5  # of neighbouring bins, below which these say nothing
LOOKS = 64  # at places where the rate may change; then at all around the best of them


def detrended(times: Sequence[float], spans: Sequence[Span]) -> list[float]:
    """`times`, in order, in units of the mean gap of their stretch.

    Each of `spans`, in order, was seen as a whole and alike; nothing is known of the time between two.
    """
    units: list[float] = []
    if not times:
        return units
    borders = [bisect_left(times, begin_s) for begin_s, _ in spans[1:]]
    for (begin_s, end_s), low, high in zip(spans, [0, *borders], [*borders, len(times)], strict=True):
        if low == high:
            continue
        span = min(begin_s, times[low]), max(end_s, times[high - 1])
        sure = SURE * clumped(_counts(times[low:high], span))
        for first, last, from_s, to_s in _stretches(times, (low, high), span, sure):
            pace = (last - first) / (to_s - from_s) if to_s > from_s else 0.0
            done = len(units)
            units.extend(done + (times[i] - from_s) * pace for i in range(first, last))
    return units


def _stretches(
    times: Sequence[float], rows: tuple[int, int], span: Span, sure: float
) -> Iterator[tuple[int, int, float, float]]:
    """(first, last, from_s, to_s) of constant rate, in order."""
    todo = [(*rows, *span)]
    while todo:
        first, last, from_s, to_s = todo.pop()
        least = (
            LEAST_END_S if from_s == span[0] else LEAST_S,
            LEAST_END_S if to_s == span[1] else LEAST_S,
        )
        cut = _change(times, (first, last), (from_s, to_s), least, sure)
        if cut is None:
            yield first, last, from_s, to_s
            continue
        at, at_s = cut
        todo += [(at, last, at_s, to_s), (first, at, from_s, at_s)]


def _change(
    times: Sequence[float], rows: tuple[int, int], span: Span, least: Span, sure: float
) -> tuple[int, float] | None:
    """(first row after it, when) of the change of rate that explains most; None when none is sure."""
    first, last = rows
    from_s, to_s = span
    if last - first < 2 or to_s - from_s < least[0] + least[1]:
        return None
    together = _likelihood(last - first, to_s - from_s)

    def best_of(candidates: range) -> tuple[float, int, float]:
        best = (0.0, first, from_s)
        for i in candidates:
            at_s = times[i]
            before_s, after_s = at_s - from_s, to_s - at_s
            if before_s < least[0] or after_s < least[1]:
                continue
            for at in (i, i + 1):  # just before this arrival, just after it
                apart = _likelihood(at - first, before_s) + _likelihood(last - at, after_s)
                best = max(best, (2 * (apart - together), at, at_s))
        return best

    step = max((last - first) // LOOKS, 1)
    best = best_of(range(first, last, step))
    if step > 1:
        best = max(best, best_of(range(max(best[1] - step, first), min(best[1] + step, last))))
    return best[1:] if best[0] > sure else None


def _likelihood(count: int, length_s: float) -> float:
    """Log, of so many arrivals at their own mean rate."""
    return count * math.log(count / length_s) if count else 0.0


def clumped(counts: Sequence[int] | Sequence[float]) -> float:
    """Variance of the arrivals in a bin by their mean: 1 for Poisson, and where too few bins tell. A change
    of rate hardly counts: only neighbours are compared."""
    ratios = [(a - b) ** 2 / (a + b) for a, b in pairwise(counts) if a + b]
    return max(sum(ratios) / len(ratios), 1.0) if len(ratios) >= FEWEST_PAIRS else 1.0


def _counts(times: Sequence[float], span: Span) -> list[int]:
    counts = [0] * max(math.ceil((span[1] - span[0]) / BIN_S), 1)
    for at_s in times:
        counts[min(int((at_s - span[0]) / BIN_S), len(counts) - 1)] += 1
    return counts
