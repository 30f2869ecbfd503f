"""serving.change_times: what a start and a change of role took."""

from __future__ import annotations

import pytest

from planner.observation import PoolSeen
from planner.scaling import PoolWorker
from serving.change_times import KEPT, ChangeTimes

KEY, OTHER = ("m", "main"), ("m", "small")


def worker(role: str, *, draining: bool = False, ident: str = "d1") -> PoolWorker:
    return PoolWorker(ident, "decode", role, draining, 0)


def test_a_start_lasts_until_one_more_is_ready() -> None:
    took = ChangeTimes()
    took.grows(KEY, "prefill", PoolSeen(ready=1), 100.0)
    took.see_pool(KEY, "prefill", PoolSeen(ready=1, starting=2), 105.0)
    assert took.startups_s == {}
    took.see_pool(KEY, "prefill", PoolSeen(ready=2, starting=1), 112.0)
    took.see_pool(KEY, "prefill", PoolSeen(ready=3), 130.0)
    assert took.startups_s == {KEY: 12.0}


def test_a_start_that_was_taken_back_is_none() -> None:
    took = ChangeTimes()
    took.grows(KEY, "prefill", PoolSeen(ready=1), 100.0)
    took.see_pool(KEY, "prefill", PoolSeen(ready=1), 105.0)
    took.see_pool(KEY, "prefill", PoolSeen(ready=2), 900.0)
    assert took.startups_s == {}


def test_a_flip_lasts_until_the_worker_plays_the_role_and_takes_requests() -> None:
    took = ChangeTimes()
    took.turns(KEY, "d1", "prefill", 100.0)
    took.see_workers(OTHER, [], 100.5)
    took.see_workers(KEY, [worker("decode", draining=True)], 101.0)
    took.see_workers(KEY, [worker("prefill", draining=True)], 102.0)
    assert took.flips_s == {}
    took.see_workers(KEY, [worker("prefill")], 103.0)
    took.see_workers(KEY, [worker("prefill")], 140.0)
    assert took.flips_s == {KEY: 3.0}


def test_a_worker_that_left_says_nothing_when_it_is_back() -> None:
    took = ChangeTimes()
    took.turns(KEY, "d1", "prefill", 100.0)
    took.see_workers(KEY, [], 101.0)
    took.see_workers(KEY, [worker("prefill")], 400.0)
    assert took.flips_s == {}


@pytest.mark.parametrize("more", [0, 3])
def test_the_slowest_of_the_last_ones_counts(more: int) -> None:
    took = ChangeTimes()
    for n in range(1 + KEPT - 1 + more):
        took.turns(KEY, "d1", "prefill", 100.0 * n)
        took.see_workers(KEY, [worker("prefill")], 100.0 * n + (50 if n == 0 else 2))
    assert took.flips_s == {KEY: 50.0 if more == 0 else 2.0}
