"""planner.observe: what was seen and what was not, and the pools that follow when load is not flat."""

from __future__ import annotations

import random

import pytest

from planner.decide import decide
from planner.observation import Arrival, Observation
from planner.observe import MOST_ROWS, Observer
from planner.state import State
from serving.demand_book import DemandBook
from serving.wire import ArrivalRow, FrontendReport
from tests.unit.planner_rig import NAME, TIMES, Service, pools, settings

Pools = tuple[int, int]


def _feed(observer: Observer, rate: float, from_s: float, to_s: float) -> None:
    """Evenly; observed every 5 s."""
    observer.reported(from_s)
    for k in range(int((to_s - from_s) / 5)):
        for i in range(round(5 * rate)):
            at_s = from_s + 5 * k + i / rate
            observer.arrived(Arrival(at_s, 100, 100))
        observer.observe(from_s + 5 * k + 5, {})


# ------------------------------------------------------------ what was seen


def test_a_time_in_which_nobody_reported_is_not_observed() -> None:
    observer = Observer()
    _feed(observer, 4.0, 0.0, 100.0)
    observer.reported(101.0)
    observer.missed(200.0)
    observer.arrived(Arrival(205.0, 100, 100))
    seen = observer.observe(210.0, {})
    assert seen.observed == ((0.0, 101.0), (200.0, 210.0))
    assert seen.recent_s == 111.0
    later = observer.observe(350.0, {})
    assert later.observed == ((50.0, 101.0), (200.0, 350.0))
    assert observer.observe(450.0, {}).observed == ((200.0, 450.0),)
    assert observer.observe(600.0, {}).recent_s == 300.0


def test_without_a_hole_nothing_is_missed() -> None:
    observer = Observer()
    observer.missed(5.0)  # before anything was seen
    _feed(observer, 1.0, 10.0, 20.0)
    observer.reported(20.0)
    observer.missed(15.0)
    assert observer.observe(20.0, {}).observed == ((10.0, 20.0),)


def test_rows_count_less_again_when_few_come() -> None:
    observer = Observer()
    _feed(observer, 100.0, 0.0, 300.0)
    many = observer.observe(300.0, {})
    assert many.weight == 32
    assert MOST_ROWS / 2 <= len(many.recent) <= MOST_ROWS
    _feed(observer, 2.0, 300.0, 400.0)
    few = observer.observe(400.0, {})
    assert few.weight <= 2
    assert few.recent_s == 300.0
    borders = [to_s for _, to_s in few.observed[:-1]]
    assert len(borders) == 1
    assert 320 <= borders[0] <= 340
    since = sum(few.weight for row in few.recent if row.at_s >= borders[0])
    assert since == pytest.approx(2.0 * (400 - borders[0]), abs=2)
    assert sum(1 for row in few.recent if row.at_s < 300.0) > 300, "what is known of requests is kept"


def test_rows_that_nobody_told_do_not_count_as_few() -> None:
    observer = Observer()
    _feed(observer, 100.0, 0.0, 200.0)
    before = observer.observe(200.0, {}).weight
    for k in range(20):
        assert observer.observe(205.0 + 5 * k, {}).weight == before
    observer.missed(300.0)
    _feed(observer, 100.0, 300.0, 320.0)
    seen = observer.observe(320.0, {})
    assert seen.weight == before
    assert seen.observed[-1] == (300.0, 320.0)
    assert seen.recent_s == pytest.approx(200, abs=1)


def test_the_time_in_which_answers_ended() -> None:
    observer = Observer()
    assert observer.observe(5.0, {}).outputs_s is None
    observer.reported(10.0)
    observer.finished(100, 20)
    assert observer.observe(40.0, {}).outputs_s == 30.0
    for k in range(600):
        observer.reported(50.0 + k)
        observer.finished(100, 20)
    seen = observer.observe(650.0, {}, going=[(100, 5)])
    assert len(seen.outputs) == 512
    assert seen.outputs_s == pytest.approx(512, abs=2)
    assert seen.going == ((100, 5),)


# ------------------------------------------------------------ loads that are not flat

STEADY_30 = (7, 3)  # 30 requests/s of 2,000 and 200 tokens: 6 Erlang of prefill


@pytest.mark.parametrize("low", [0.2, 1.0, 5.0])
def test_a_step_up_orders_what_the_new_load_needs(low: float) -> None:
    service = Service(settings(), low, start=(2, 2), output=200)
    service.run(600)
    service.rate, before = 30.0, len(service.targets)
    service.run(90)
    reached = service.targets[before:]
    assert reached[1][0] >= STEADY_30[0] - 1, "at the second tick"
    assert reached[-1][0] >= 30 * 0.2
    service.run(500)
    for prefill, decode in service.targets[before:]:
        assert prefill <= STEADY_30[0] + 2
        assert decode <= STEADY_30[1] + 1


@pytest.mark.parametrize(("high", "low"), [(100.0, 5.0), (60.0, 3.0)])
def test_a_fall_grows_nothing_and_ends_at_what_the_new_load_needs(high: float, low: float) -> None:
    service = Service(settings(), high, start=(24, 10), output=200)
    service.run(400)
    before, ticks = service.replicas, len(service.targets)
    service.rate, service._next_s = low, service.now_s
    service.run(600)
    after = service.targets[ticks:]
    assert max(prefill for prefill, _ in after) <= before[0]
    assert max(decode for _, decode in after) <= before[1]
    assert service.replicas[0] <= low * 0.2 / 0.95 + 2
    wanted = [decision.variants[NAME].wanted for decision in service.decisions[ticks + 60 :]]
    assert max(w[0] for w in wanted if w is not None) <= low * 0.2 / 0.95 + 2
    assert min(w[0] for w in wanted if w is not None) >= low * 0.2


@pytest.mark.parametrize("gap_s", [20.0, 240.0, 600.0])
def test_after_a_time_without_reports_the_pools_are_what_they_were(gap_s: float) -> None:
    """Frontends that Control could not hear for minutes; the load is what it was."""
    key, clock = ("m", "main"), [0.0]
    book = DemandBook([key], {key: TIMES}, lambda: clock[0])
    state, there, generator, next_s = State(), (8, 3), random.Random(3), 0.0
    after: list[Pools] = []
    while clock[0] < 400.0 + gap_s + 150.0:
        clock[0] += 0.5
        rows = []
        while next_s < clock[0]:
            rows.append(ArrivalRow((clock[0] - next_s) * 1e3, 2000, 2000))
            next_s += generator.expovariate(30.0)
        if not 400.0 < clock[0] < 400.0 + gap_s:
            report = FrontendReport("m", "main", rows, [(2000, 200)] * len(rows), 2, 0.0, 150)
            book.reported("f", report)
        if clock[0] % 5 == 0:
            seen = book.observe(key, pools(*there), clock[0], kv_tokens=None, max_batch=None)
            decision, state = decide(Observation({NAME: seen}), state, settings(), clock[0])
            there = decision.variants[NAME].prefill, decision.variants[NAME].decode
            if clock[0] > 400.0:
                after.append(there)
    assert max(prefill for prefill, _ in after) <= STEADY_30[0] + 2
    assert min(prefill for prefill, _ in after) >= STEADY_30[0]
    assert {decode for _, decode in after} <= {3, 4}
