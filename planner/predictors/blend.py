"""Last value and daily shape, each weighted by the inverse of its recent squared error."""

from __future__ import annotations

from planner.predictors.last import predict_last
from planner.predictors.past import Errors, Past
from planner.predictors.shape import predict_shape

__all__ = ["predict_blend"]

RECENT = 60  # errors that count
FEW = 10


def predict_blend(past: Past, lead_s: float, errors: Errors) -> float | None:
    last, shape = predict_last(past, lead_s, errors), predict_shape(past, lead_s, errors)
    if last is None or shape is None:
        return last
    return _weighed((last, _error(errors, "last")), (shape, _error(errors, "shape")))


def _error(errors: Errors, name: str) -> float | None:
    recent = errors.get(name, ())[-RECENT:]
    if len(recent) < FEW:
        return None
    return max(sum((ratio - 1) ** 2 for ratio in recent) / len(recent), 1e-4)


def _weighed(*parts: tuple[float, float | None]) -> float:
    """One whose error is not known yet has no say, unless none is known."""
    known = [(value, 1 / error) for value, error in parts if error is not None]
    if not known:
        return parts[0][0]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
