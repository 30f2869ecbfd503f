"""Circuit breaker and retry budget: when a worker is avoided, and when nothing is tried again."""

from __future__ import annotations

import pytest

from serving.breaker import FIRST_OPEN_S, LONGEST_OPEN_S, THRESHOLD, TRIAL_S, Breakers
from serving.retry_budget import RetryBudget


def fail(breakers: Breakers, times: int = THRESHOLD, at: float = 0.0) -> bool:
    return sum(breakers.failed("w", at) for _ in range(times)) > 0


def test_it_opens_after_failures_in_a_row_only() -> None:
    breakers = Breakers()
    assert not fail(breakers, THRESHOLD - 1)
    breakers.succeeded("w")
    assert not fail(breakers, THRESHOLD - 1)
    assert breakers.avoid(0.0) == frozenset()
    assert breakers.failed("w", 0.0)
    assert breakers.avoid(FIRST_OPEN_S / 2) == {"w"}
    assert breakers.avoid(FIRST_OPEN_S) == frozenset()


def test_failures_of_what_was_placed_before_do_not_lengthen_it() -> None:
    breakers = Breakers()
    assert breakers.failed("w", 0.0) is False
    assert sum(breakers.failed("w", 0.0) for _ in range(50)) == 1
    assert breakers.avoid(FIRST_OPEN_S * 2) == frozenset()


def test_one_trial_at_a_time_and_a_relapse_doubles() -> None:
    breakers = Breakers()
    fail(breakers)
    now = FIRST_OPEN_S
    breakers.placed("w", now)
    assert breakers.avoid(now) == {"w"}  # the trial is out
    assert breakers.avoid(now + TRIAL_S) == frozenset()  # its outcome was waited for
    lengths = []
    for _ in range(8):
        breakers.placed("w", now)
        assert breakers.failed("w", now)
        opened = now
        while "w" in breakers.avoid(now):
            now += 0.25
        lengths.append(now - opened)
    assert lengths == sorted(lengths)
    assert lengths[0] == pytest.approx(2 * FIRST_OPEN_S, abs=0.5)
    assert lengths[-1] == pytest.approx(LONGEST_OPEN_S, abs=0.5)


def test_a_success_closes_it() -> None:
    breakers = Breakers()
    fail(breakers)
    breakers.succeeded("w")
    assert breakers.avoid(0.0) == frozenset()
    assert not breakers.failed("w", 0.0)  # counts anew


def test_workers_do_not_mix_and_are_forgotten() -> None:
    breakers = Breakers()
    fail(breakers)
    assert not breakers.failed("other", 0.0)
    breakers.forget("w")
    assert breakers.avoid(0.0) == frozenset()


def test_every_live_stream_may_be_retried_at_once_and_then_the_rate_binds() -> None:
    budget = RetryBudget(8, ratio=0.25, per_s=2.0)
    assert [budget.spend(0.0) for _ in range(9)] == [True] * 8 + [False]
    assert budget.refused == 1
    for _ in range(4):
        budget.earn()
    assert [budget.spend(0.0), budget.spend(0.0)] == [True, False]
    assert [budget.spend(1.0), budget.spend(1.0), budget.spend(1.0)] == [True, True, False]
    assert [budget.spend(1e6) for _ in range(9)] == [True] * 8 + [False]  # never more than the burst
