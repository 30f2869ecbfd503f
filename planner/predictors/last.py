"""The last value goes on: hard to beat over minutes."""

from __future__ import annotations

from planner.predictors.past import Errors, Past

__all__ = ["predict_last"]


def predict_last(past: Past, lead_s: float, errors: Errors) -> float | None:
    return past.last if past.bins else None
