"""Fair shares converge to max-min, old amounts fade, memory is bounded; lanes hold equal work."""

from __future__ import annotations

import random

import pytest

from serving.fair_shares import ASKS_S, MEMORY_S, MOST_KEYS, FairShares
from serving.length_lanes import CUT_AFTER, LANES, LengthLanes


@pytest.mark.parametrize(
    ("demands", "shares"),
    [
        pytest.param((1.0, 1.0), (0.5, 0.5), id="both want all"),
        pytest.param((1.0, 0.2), (0.8, 0.2), id="one wants little"),
        pytest.param((1.0, 1.0, 0.1), (0.45, 0.45, 0.1), id="the rest is shared"),
    ],
)
def test_whoever_is_not_over_goes_first(demands: tuple[float, ...], shares: tuple[float, ...]) -> None:
    """One unit of room a second; `demands` of it. Those that are over get what the others leave."""
    fair: FairShares[int] = FairShares()
    got = [0.0] * len(demands)
    generator = random.Random(1)
    for step in range(4000):
        now_s = step * 0.1
        asking = [key for key, demand in enumerate(demands) if generator.random() < demand]
        for key in asking:
            fair.ask(key, now_s)
        first = sorted(asking, key=lambda key: (fair.is_over(key), generator.random()))
        for key in first[:1]:
            fair.spend(key, 1.0, now_s)
            if step >= 1000:
                got[key] += 1.0
    total = sum(got)
    assert [amount / total for amount in got] == pytest.approx(shares, abs=0.06)
    assert fair.share(0) == pytest.approx(shares[0], abs=0.1)


def test_old_amounts_fade_and_absent_keys_take_no_part() -> None:
    fair: FairShares[str] = FairShares()
    for key in "ab":
        fair.ask(key, 0.0)
    fair.spend("a", 100.0, 0.0)
    assert fair.is_over("a")
    assert not fair.is_over("b")
    later_s = 8 * MEMORY_S
    for key in "ab":
        fair.ask(key, later_s)
    fair.spend("b", 1.0, later_s)
    assert fair.is_over("b"), "100 is 0.03 by now"
    fair.ask("b", later_s + ASKS_S + 1)
    assert len(fair) == 1
    assert not fair.is_over("b"), "alone"


def test_the_scale_starts_anew_without_a_jump() -> None:
    fair: FairShares[str] = FairShares()
    for second in range(10_000):
        for key in "ab":
            fair.ask(key, float(second))
        fair.spend("a", 3.0, float(second))
        fair.spend("b", 1.0, float(second))
    assert fair.share("a") == pytest.approx(0.75, abs=1e-6)


def test_keys_are_bounded() -> None:
    fair: FairShares[int] = FairShares()
    for key in range(MOST_KEYS + 100):
        fair.ask(key, 1.0)
    assert len(fair) == MOST_KEYS


def test_one_lane_until_there_was_traffic() -> None:
    lanes = LengthLanes()
    assert lanes.lane(1.0) == lanes.lane(1e6) == 0


def test_lanes_hold_the_same_work() -> None:
    lanes = LengthLanes()
    generator = random.Random(2)
    work = [0.0] * len(LANES)
    for n in range(200 * CUT_AFTER):
        ms = generator.lognormvariate(5.0, 1.5)
        lane = lanes.offer(ms)
        if n >= 10 * CUT_AFTER:
            work[lane] += ms
    total = sum(work)
    assert all(0.2 < part / total < 0.5 for part in work)
    assert lanes.lane(1.0) == 0
    assert lanes.lane(1e6) == 2


def test_borders_follow_the_traffic() -> None:
    lanes = LengthLanes()
    for n in range(4 * CUT_AFTER):
        lanes.offer(10.0 if n % 2 else 100.0)
    assert lanes.lane(10.0) == 0
    assert lanes.lane(100.0) > 0
    for n in range(40 * CUT_AFTER):
        lanes.offer(100.0 if n % 2 else 5000.0)
    assert lanes.lane(100.0) == 0
    assert lanes.lane(5000.0) > 0
