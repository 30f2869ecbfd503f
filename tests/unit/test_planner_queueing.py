"""planner.queueing: against known queues, and monotone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.queueing import Row, erlang_c, late_counts, tail


@pytest.mark.parametrize(
    ("servers", "load", "expected"),
    [
        pytest.param(1, 0.5, 0.5, id="M/M/1 waits with its load"),
        pytest.param(2, 1.0, 1 / 3, id="two servers, one Erlang"),
        pytest.param(10, 8.0, 0.409, id="table value"),
        pytest.param(3, 3.0, 1.0, id="saturated"),
        pytest.param(4, 0.0, 0.0, id="idle"),
    ],
)
def test_erlang_c(servers: int, load: float, expected: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(expected, abs=1e-3)


def test_the_formula_is_exact_for_one_exponential_server() -> None:
    """M/M/1: P(W > t) = rho exp(-(mu - lambda) t)."""
    assert tail(1, 0.5, 1.0, [2.0], arrival_cv2=1.0, service_cv2=1.0) == pytest.approx(0.5 * math.exp(-1.0))


def test_the_replay_agrees_with_the_formula_on_a_poisson_queue() -> None:
    generator = random.Random(3)
    at, rows = 0.0, []
    for _ in range(20_000):
        at += generator.expovariate(1.0)
        rows.append((at, generator.expovariate(1.0), 0.5, 0))
    expected = tail(4, 3.0, 1.0, [0.5], arrival_cv2=1.0, service_cv2=1.0)
    assert _late(rows, 4, 1 / 3.0) / len(rows) == pytest.approx(expected, rel=0.15)


def test_a_thinned_replay_is_on_the_safe_side() -> None:
    generator = random.Random(4)
    at, rows = 0.0, []
    for _ in range(8000):
        at += generator.expovariate(30.0)
        rows.append((at, generator.expovariate(1.0), 0.3, 0))
    full = _late(rows, 34, 1.0)
    thinned = late_counts(rows[::4], 34, 1.0, [math.inf], weight=4)[0]
    assert full <= 4 * thinned < 0.5 * len(rows)


def test_one_pass_counts_every_class_and_ends_when_one_has_too_many() -> None:
    rows = [(0.0, 1.0, 0.5, 0), (0.0, 1.0, 0.5, 1), (0.0, 1.0, 5.0, 1), (0.0, 1.0, 2.5, 1)]
    assert late_counts(rows, 1, 1.0, [math.inf] * 2) == [0, 2]
    assert late_counts(rows, 1, 1.0, [math.inf, 0]) == [0, 1]


def test_the_formula_is_the_mean_over_the_waits_of_those_who_ask() -> None:
    short, long = (tail(2, 1.5, 1.0, [wait], arrival_cv2=1.0, service_cv2=1.0) for wait in (0.1, 60.0))
    both = tail(2, 1.5, 1.0, [0.1, 60.0, math.inf], arrival_cv2=1.0, service_cv2=1.0)
    assert both == pytest.approx((short + long) / 3)


def _late(rows: list[Row], servers: int, pace_s: float) -> int:
    return late_counts(rows, servers, pace_s, [math.inf])[0]


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.01, 5), st.floats(0, 2)), min_size=1, max_size=60
    ),
    servers=st.integers(1, 8),
    pace_s=st.floats(0.2, 5),
    more=st.floats(1.0, 3),
)
def test_the_replay_is_monotone(
    rows: list[tuple[float, float, float]], servers: int, pace_s: float, more: float
) -> None:
    rows.sort()
    given_rows = [(*row, 0) for row in rows]
    base = _late(given_rows, servers, pace_s)
    assert _late(given_rows, servers + 1, pace_s) <= base
    assert _late(given_rows, servers, pace_s / more) >= base
    longer = [(at, service * more, allowed, 0) for at, service, allowed in rows]
    assert _late(longer, servers, pace_s) >= base
