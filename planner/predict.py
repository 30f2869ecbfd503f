"""The forecast: what the rate will be when a worker ordered now is ready. Pure.

A Predictor is a function of the past; `planner.predictors` has one a file. This module keeps the past,
compares each forecast with what came, and adds head-room: the quantile of recent relative errors. So a
good predictor is cheaper, and a bad one is still safe. A jump that shows at once counts at once; that the
predictor lags behind it for minutes is then no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from planner.predictors import PREDICTORS
from planner.predictors.past import BIN_S, Past
from planner.trend import clumped

__all__ = ["Forecast", "ForecastState", "forecast", "record"]

KEPT_ERRORS = 240
FEW_ERRORS = 10  # before these, `FIRST_HEADROOM`
FIRST_HEADROOM = 1.1
MOST_HEADROOM = 2.0
COMPARED = ("last", "shape")  # whose errors are always kept: the blend weighs by them
USED = "used"  # the forecast of the predictor in use, or the level then, the greater: as it was acted upon
LEVEL_S = 240.0  # of the rate that counts as the present one
FAST_WINDOWS_S = (5.0, 10.0, 20.0, 40.0, 80.0)  # in which a jump may show
FAST_SIGMAS = 2.5  # by which it must stand out
LASTING = 13.0  # a jump is taken to last that many times as long as it was seen
CLUMPS_FADE = 0.995  # a tick, of how clumped arrivals were
LEAST_S = 15.0  # of seeing: a rate over less is taken as over this


@dataclass(frozen=True, slots=True)
class ForecastState:
    past: Past = field(default_factory=Past)
    ticks: tuple[tuple[float, float, float], ...] = ()  # (end, window, arrivals) of the last minutes
    open_arrivals: float = 0.0  # in the bin that is not full
    open_s: float = 0.0
    pending: tuple[tuple[float, dict[str, float]], ...] = ()  # (due, forecasts by predictor)
    errors: dict[str, tuple[float, ...]] | None = None  # actual / forecast, the newest last
    dispersion: float = (
        1.0  # planner.trend.clumped of the arrivals in a tick, before any jump that shows now
    )
    ahead: float | None = None  # the last forecast of the predictor in use


@dataclass(frozen=True, slots=True)
class Forecast:
    rate: float  # per second at the lead, head-room included
    expected: float  # without
    level: float  # now
    headroom: float


def record(
    state: ForecastState, window_s: float, arrivals: int, *, predictor: str, lead_s: float, now_s: float
) -> ForecastState:
    """`arrivals` came in the `window_s` up to now. Once a minute there is a new forecast."""
    ticks = (*(t for t in state.ticks if t[0] > now_s - LEVEL_S), (now_s, window_s, float(arrivals)))
    state = replace(
        state,
        ticks=ticks,
        open_arrivals=state.open_arrivals + arrivals,
        open_s=state.open_s + window_s,
        dispersion=max(
            clumped([n for end_s, _, n in ticks if end_s <= now_s - FAST_WINDOWS_S[-1]]),
            state.dispersion * CLUMPS_FADE,
        ),
    )
    return _close_bin(state, predictor, lead_s, now_s) if state.open_s >= BIN_S else state


def forecast(
    state: ForecastState, predictor: str, quantile: float, *, lead_s: float, now_s: float
) -> Forecast:
    """At `lead_s` from now, which `record` was given too."""
    level = _level(state, lead_s, now_s)
    expected = level if state.ahead is None else state.ahead
    headroom = _headroom((state.errors or {}).get(USED, ()), quantile)
    return Forecast(max(expected * headroom, level), expected, level, headroom)


def _close_bin(state: ForecastState, predictor: str, lead_s: float, now_s: float) -> ForecastState:
    past = state.past.with_bin(state.open_arrivals / state.open_s, now_s)
    errors = dict(state.errors or {})
    pending = []
    for due_s, made in state.pending:
        if due_s > now_s - 0.5 * BIN_S:  # the level around then is known half a bin later
            pending.append((due_s, made))
            continue
        for name, value in made.items():
            ratio = min(max(past.last / value if value > 0 else 1.0, 0.1), 10.0)
            errors[name] = (*errors.get(name, ())[-KEPT_ERRORS + 1 :], ratio)
    made = {}
    for name in dict.fromkeys((*COMPARED, predictor)):
        ahead = PREDICTORS[name](past, lead_s, errors)
        if ahead is not None:
            made[name] = ahead
    if predictor in made:
        made[USED] = max(made[predictor], _level(state, lead_s, now_s))
    pending.append((now_s + lead_s, made))
    return replace(
        state,
        past=past,
        open_arrivals=0.0,
        open_s=0.0,
        pending=tuple(pending),
        errors=errors,
        ahead=made.get(predictor),
    )


def _headroom(errors: tuple[float, ...], quantile: float) -> float:
    if len(errors) < FEW_ERRORS:
        return FIRST_HEADROOM
    ordered = sorted(errors)
    at = min(int(quantile * len(ordered)), len(ordered) - 1)
    return min(max(ordered[at], 1.0), MOST_HEADROOM)


def _level(state: ForecastState, lead_s: float, now_s: float) -> float:
    """The present rate. A jump counts as soon as it stands out from what clumps would explain, and has
    lasted long enough to be there still when a worker ordered now is ready."""
    mean = _rate(state.ticks, now_s, LEVEL_S)
    if mean is None:
        return 0.0
    level = mean[0] * min(mean[1] / LEAST_S, 1.0)
    for window_s in FAST_WINDOWS_S:
        seen = _rate(state.ticks, now_s, window_s)
        if seen is None or window_s * LASTING < lead_s:
            continue
        rate, span = seen
        if span >= mean[1]:
            break  # nothing slower to stand out from
        count = rate * span
        sure = (count - FAST_SIGMAS * math.sqrt(max(count, 1.0) * state.dispersion)) / span
        level = max(level, sure)
    return level


def _rate(
    ticks: tuple[tuple[float, float, float], ...], now_s: float, window_s: float
) -> tuple[float, float] | None:
    """(rate, time it was measured over) of about the last `window_s`."""
    count = span = 0.0
    for end_s, length_s, arrivals in reversed(ticks):
        if end_s - length_s < now_s - window_s - 1e-6 and span > 0:
            break
        count += arrivals
        span += length_s
    return (count / span, span) if span > 0 else None
