"""Predictors of the request rate, one a file: (past, lead_s, errors) -> rate per second, None: unknown."""

from __future__ import annotations

from collections.abc import Callable

from planner.predictors.arima import predict_arima
from planner.predictors.blend import predict_blend
from planner.predictors.last import predict_last
from planner.predictors.past import Errors, Past
from planner.predictors.shape import predict_shape

__all__ = ["PREDICTORS"]

PREDICTORS: dict[str, Callable[[Past, float, Errors], float | None]] = {
    "last": predict_last,
    "shape": predict_shape,
    "blend": predict_blend,
    "arima": predict_arima,
}
