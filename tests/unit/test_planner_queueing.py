"""planner.queueing and planner.sizing: against known queues, and monotone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.observation import FittedTimes
from planner.queueing import erlang_c, late_share, tail
from planner.settings import Targets
from planner.sizing import Sizer
from tests.unit.planner_rig import TIMES, seen, variant


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
    assert tail(1, 0.5, 1.0, 2.0, arrival_cv2=1.0, service_cv2=1.0) == pytest.approx(0.5 * math.exp(-1.0))


def test_the_replay_agrees_with_the_formula_on_a_poisson_queue() -> None:
    generator = random.Random(3)
    at, rows = 0.0, []
    for _ in range(20_000):
        at += generator.expovariate(3.0)
        rows.append((at, generator.expovariate(1.0), 0.5))
    expected = tail(4, 3.0, 1.0, 0.5, arrival_cv2=1.0, service_cv2=1.0)
    assert late_share(rows, 4, 1.0) == pytest.approx(expected, rel=0.15)


def test_a_thinned_replay_is_on_the_safe_side() -> None:
    generator = random.Random(4)
    at, rows = 0.0, []
    for _ in range(8000):
        at += generator.expovariate(30.0)
        rows.append((at, generator.expovariate(1.0), 0.3))
    full = late_share(rows, 34, 1.0)
    assert full <= late_share(rows[::4], 34, 1.0, weight=4) < 0.5


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.01, 5), st.floats(0, 2)), min_size=1, max_size=60
    ),
    servers=st.integers(1, 8),
    growth=st.floats(0.2, 5),
    more=st.floats(1.0, 3),
)
def test_the_replay_is_monotone(
    rows: list[tuple[float, float, float]], servers: int, growth: float, more: float
) -> None:
    rows.sort()
    base = late_share(rows, servers, growth)
    assert late_share(rows, servers + 1, growth) <= base + 1e-9
    assert late_share(rows, servers, growth * more) >= base - 1e-9
    longer = [(at, service * more, allowed) for at, service, allowed in rows]
    assert late_share(longer, servers, growth) >= base - 1e-9


def test_decode_follows_littles_law() -> None:
    """50 requests/s of 100 tokens at 40 ms: 200 in flight, each 0.2 ms of the 20 that a step has left."""
    sizer = Sizer(seen(50.0), TIMES, variant())
    floor = 50.0 * 100 * 0.040 * 0.2 / 20.0
    assert sizer.slow(math.floor(floor), 50.0) == 1.0
    assert sizer.slow(math.ceil(floor * 1.5), 50.0) < 0.01


def test_kv_room_bounds_decode() -> None:
    without = seen(50.0)
    prefill, decode = Sizer(without, TIMES, variant()).cheapest(50.0)
    full = Sizer(replace(without, kv_tokens=50_000), TIMES, variant()).cheapest(50.0)
    assert full[0] == prefill
    assert full[1] >= 2 * decode


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        pytest.param(
            Targets(1000, 100, 15, 95), "ITL target 15 ms not reachable; best is 20.2 ms", id="itl"
        ),
        pytest.param(Targets(50, 0, 40, 95), "TTFT target not reachable", id="ttft"),
    ],
)
def test_impossible_targets_are_reported_with_the_best_reachable(targets: Targets, says: str) -> None:
    sizer = Sizer(seen(5.0), TIMES, variant(targets=targets))
    assert says in (sizer.unreachable or "")
    assert sizer.cheapest(5.0)[0] < 20, "nobody is ordered for what nobody can do"


def test_possible_targets_are_not_reported() -> None:
    assert Sizer(seen(5.0), TIMES, variant()).unreachable is None


def test_a_stricter_class_asks_for_more() -> None:
    base = seen(20.0)
    strict = Targets(100, 100, 25, 99)
    rows = tuple(replace(row, slo_class="gold") for row in base.recent)
    own = variant(classes={"gold": strict})
    usual = Sizer(base, TIMES, own).cheapest(20.0)
    gold = Sizer(replace(base, recent=rows), TIMES, own).cheapest(20.0)
    assert gold[0] > usual[0]
    assert gold[1] > usual[1]


def test_the_spread_of_the_times_makes_room() -> None:
    unsure: FittedTimes = replace(TIMES, step_spread=0.3)
    assert (
        Sizer(seen(50.0), unsure, variant()).cheapest(50.0)[1]
        > Sizer(seen(50.0), TIMES, variant()).cheapest(50.0)[1]
    )
