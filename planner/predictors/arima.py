"""ARIMA(1,1,1) on the minutes of the last hours, for comparison. Needs statsmodels (the extra `arima`)."""

from __future__ import annotations

import warnings

from planner.predictors.past import BIN_S, Errors, Past
from serving.errors import ConfigError

__all__ = ["predict_arima"]

FEWEST = 20  # bins
ORDER = (1, 1, 1)


def predict_arima(past: Past, lead_s: float, errors: Errors) -> float | None:
    """None before there are enough bins. Raises ConfigError where statsmodels is not installed."""
    if len(past.bins) < FEWEST:
        return past.last if past.bins else None
    try:
        from statsmodels.tsa.arima.model import ARIMA
    except ImportError:
        raise ConfigError(
            "planner.predictor = 'arima' needs statsmodels: pip install 'kvrelay[arima]'; "
            "allowed without it: blend, last, shape"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fit did not converge: it is still a forecast
        try:
            fitted = ARIMA(list(past.bins), order=ORDER).fit(method_kwargs={"maxiter": 20})
            ahead = float(fitted.forecast(max(round(lead_s / BIN_S), 1))[-1])
        except ValueError:  # LinAlgError is one: rates that are all alike, for instance
            return past.last
    return max(ahead, 0.0)
