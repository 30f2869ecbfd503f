"""The day's shape: the last value, times how the days before went on from this time of the day."""

from __future__ import annotations

from planner.predictors.past import DAY_BIN_S, DAY_BINS, Errors, Past

__all__ = ["predict_shape"]

DAYS = 3  # that are looked at, the last ones
MOST = 4.0  # times the last value, either way


def predict_shape(past: Past, lead_s: float, errors: Errors) -> float | None:
    """None before a day was seen."""
    if not past.bins or not past.days:
        return None
    here = int(past.now_s / DAY_BIN_S)
    there = int((past.now_s + lead_s) / DAY_BIN_S)
    ratios = []
    for day in range(1, DAYS + 1):
        before, after = past.at_day(here - day * DAY_BINS), past.at_day(there - day * DAY_BINS)
        if before is not None and after is not None and before > 0:
            # Within one of the shape's steps the next one is approached in part.
            part = min(lead_s / DAY_BIN_S, 1.0)
            following = past.at_day(here + 1 - day * DAY_BINS)
            if here == there and following is not None:
                after = before + part * (following - before)
            ratios.append(after / before)
    if not ratios:
        return None
    ratio = sum(ratios) / len(ratios)
    return past.last * min(max(ratio, 1 / MOST), MOST)
