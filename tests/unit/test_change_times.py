"""serving.change_times: what a start and a change of role took."""

from __future__ import annotations

from dataclasses import replace

from planner.observation import PoolSeen
from planner.scaling import PoolWorker
from serving.change_times import KEPT_S, ChangeTimes

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


def test_the_slowest_start_and_the_usual_flip_of_the_last_hour() -> None:
    took = ChangeTimes()
    for n, seconds in enumerate((40.0, 2.0, 3.0)):
        at_s = 100.0 * n
        took.turns(KEY, "d1", "prefill", at_s)
        took.see_workers(KEY, [worker("prefill")], at_s + seconds)
        took.grows(KEY, "decode", PoolSeen(ready=n), at_s)
        took.see_pool(KEY, "decode", PoolSeen(ready=n + 1), at_s + seconds)
    assert (took.flips_s, took.startups_s) == ({KEY: 3.0}, {KEY: 40.0})
    took.tick(60.0 + KEPT_S, 5.0)
    assert (took.flips_s, took.startups_s) == ({KEY: 2.5}, {KEY: 3.0})
    took.tick(1e6, 5.0)
    assert (took.flips_s, took.startups_s) == ({}, {})


def test_nothing_is_measured_across_ticks_that_were_left_out() -> None:
    """The planner was off for an hour: it would believe that a flip takes one."""
    took = ChangeTimes()
    took.tick(100.0, 5.0)
    took.turns(KEY, "d1", "prefill", 100.0)
    took.grows(KEY, "prefill", PoolSeen(ready=1), 100.0)
    took.tick(105.0, 5.0)
    took.tick(3700.0, 5.0)
    took.see_workers(KEY, [worker("prefill")], 3700.0)
    took.see_pool(KEY, "prefill", PoolSeen(ready=2), 3700.0)
    assert (took.flips_s, took.startups_s) == ({}, {})


def test_a_worker_that_an_operator_drains_is_no_slow_flip() -> None:
    took = ChangeTimes()
    took.turns(KEY, "d1", "prefill", 100.0)
    took.see_workers(KEY, [replace(worker("prefill", draining=True), set_aside=True)], 105.0)
    took.see_workers(KEY, [worker("prefill")], 900.0)
    assert took.flips_s == {}
