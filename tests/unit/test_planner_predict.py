"""The forecast: what each predictor says, head-room that holds its rate, jumps that count at once."""

from __future__ import annotations

import math
import random

import pytest

from planner.predict import ForecastState, forecast, record
from planner.predictors import PREDICTORS
from planner.predictors.past import DAY_BIN_S, DAY_S, Past

LEAD_S = 60.0


def past_of(rate_at: object, until_s: float, begin_s: float = 0.0) -> Past:
    past = Past()
    at_s = begin_s
    while at_s < until_s:
        at_s += 60.0
        past = past.with_bin(rate_at(at_s - 30.0), at_s)  # type: ignore[operator]
    return past


def wave(at_s: float) -> float:
    return 10.0 - 5.0 * math.cos(2 * math.pi * at_s / DAY_S)


def test_the_last_value_is_that_of_some_minutes() -> None:
    past = past_of(lambda at_s: at_s / 60.0, 600.0)
    assert PREDICTORS["last"](past, LEAD_S, {}) == pytest.approx(8.0)


def test_the_shape_knows_what_the_day_before_did_next() -> None:
    past = past_of(wave, 1.25 * DAY_S)
    lead_s = 3600.0
    ahead = PREDICTORS["shape"](past, lead_s, {})
    assert ahead == pytest.approx(wave(1.25 * DAY_S + lead_s), rel=0.05)
    assert PREDICTORS["last"](past, lead_s, {}) == pytest.approx(wave(1.25 * DAY_S), rel=0.02)


def test_without_a_day_before_there_is_no_shape_and_the_blend_is_the_last_value() -> None:
    past = past_of(wave, 4 * DAY_BIN_S)
    assert PREDICTORS["shape"](past, LEAD_S, {}) is None
    assert PREDICTORS["blend"](past, LEAD_S, {}) == PREDICTORS["last"](past, LEAD_S, {})


def test_the_blend_believes_who_was_right() -> None:
    past = past_of(wave, 1.25 * DAY_S)
    lead_s = 3600.0
    last, shape = (PREDICTORS[name](past, lead_s, {}) for name in ("last", "shape"))
    assert last is not None
    assert shape is not None
    good, bad = (1.01,) * 20, (1.5,) * 20
    towards_shape = PREDICTORS["blend"](past, lead_s, {"last": bad, "shape": good})
    towards_last = PREDICTORS["blend"](past, lead_s, {"last": good, "shape": bad})
    assert towards_shape == pytest.approx(shape, rel=0.01)
    assert towards_last == pytest.approx(last, rel=0.01)


def test_arima_forecasts() -> None:
    pytest.importorskip("statsmodels")
    generator = random.Random(2)
    past = past_of(lambda at_s: 5.0 + generator.gauss(0, 0.2), 3600.0)
    assert PREDICTORS["arima"](past, LEAD_S, {}) == pytest.approx(5.0, rel=0.15)


@pytest.mark.parametrize("name", list(PREDICTORS))
def test_rates_that_are_all_alike_stay_so(name: str) -> None:
    if name == "arima":
        pytest.importorskip("statsmodels")
    past = past_of(lambda at_s: 3.0, 7200.0)
    assert PREDICTORS[name](past, LEAD_S, {}) in (None, pytest.approx(3.0, rel=0.01))


def driven(counts: list[int], tick_s: float = 5.0, state: ForecastState | None = None) -> ForecastState:
    state = state or ForecastState()
    begin_s = state.ticks[-1][0] if state.ticks else 0.0
    for number, count in enumerate(counts, 1):
        now_s = begin_s + number * tick_s
        state = record(state, tick_s, count, predictor="blend", lead_s=LEAD_S, now_s=now_s)
    return state


def test_headroom_is_the_quantile_of_past_errors() -> None:
    generator = random.Random(3)
    counts = [max(0, round(generator.gauss(50, 12))) for _ in range(1500)]
    state = driven(counts)
    now_s = state.ticks[-1][0]
    low = forecast(state, "blend", 0.5, lead_s=LEAD_S, now_s=now_s)
    high = forecast(state, "blend", 0.95, lead_s=LEAD_S, now_s=now_s)
    assert low.headroom < high.headroom < 1.3
    errors = (state.errors or {})["blend"]
    assert sum(error > high.headroom for error in errors) / len(errors) == pytest.approx(0.05, abs=0.03)


def test_a_jump_counts_at_once() -> None:
    state = driven([random.Random(n).randint(8, 12) for n in range(100)])
    state = driven([100, 100], state=state)
    now_s = state.ticks[-1][0]
    assert forecast(state, "blend", 0.8, lead_s=LEAD_S, now_s=now_s).level > 12
    assert forecast(state, "blend", 0.8, lead_s=600.0, now_s=now_s).level < 6, "too short for that lead"


def test_clumps_are_no_jump() -> None:
    """Thirty requests every third tick, as always."""
    state = driven([30, 0, 0] * 100)
    assert forecast(state, "blend", 0.8, lead_s=LEAD_S, now_s=state.ticks[-1][0]).level < 2.5


def test_before_anything_was_seen_nothing_is_expected() -> None:
    made = forecast(ForecastState(), "blend", 0.8, lead_s=LEAD_S, now_s=0.0)
    assert (made.rate, made.level) == (0.0, 0.0)
