"""kvrouter.deadline and kvrouter.backlog: the order of prompts, and the wait that follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.backlog import Backlog
from kvrouter.deadline import LONGEST_MS, Order, due_s


def test_fifo_looks_at_arrival_alone() -> None:
    assert due_s(Order.FIFO, 3.0, 10_000) == 3.0


def test_short_overtakes_long() -> None:
    assert due_s(Order.DEADLINE, 1.0, 100) < due_s(Order.DEADLINE, 0.0, 4000)


def test_nobody_starves() -> None:
    """However long a prompt, what arrives after a bounded time is due later than it."""
    long = due_s(Order.DEADLINE, 0.0, 1e9)
    assert due_s(Order.DEADLINE, LONGEST_MS / 1e3 + 0.001, 0.0) > long


def test_equal_sizes_are_served_in_order_of_arrival() -> None:
    assert due_s(Order.DEADLINE, 1.0, 500) < due_s(Order.DEADLINE, 1.5, 500)


def test_a_class_with_less_slack_goes_first() -> None:
    assert due_s(Order.DEADLINE, 0.5, 500, slack_ms=200) < due_s(Order.DEADLINE, 0.0, 500)


def backlog(*work: tuple[float, float]) -> Backlog:
    """Prompts (due_s, work_ms) that arrive at 0."""
    queue = Backlog()
    for attempt, (due, ms) in enumerate(work):
        queue.add(attempt, due, ms, 0.0)
    return queue


@pytest.mark.parametrize(
    ("due", "ahead", "behind"),
    [(0.5, 0, 3), (1.0, 100, 2), (2.5, 300, 1), (9.0, 600, 0)],
    ids=["before all", "equal goes behind", "between", "after all"],
)
def test_wait_is_the_work_due_before(due: float, ahead: float, behind: int) -> None:
    queue = backlog((3.0, 300), (1.0, 100), (2.0, 200))
    assert queue.ahead_ms(due, 0.0) == ahead
    assert queue.behind(due, 0.0) == behind
    assert queue.total_ms(0.0) == 600


def test_time_works_off_in_order() -> None:
    queue = backlog((2.0, 200), (1.0, 100))
    assert queue.total_ms(0.15) == pytest.approx(150)
    assert queue.ahead_ms(1.0, 0.15) == 0
    assert queue.ahead_ms(2.0, 0.15) == pytest.approx(150)
    assert queue.total_ms(9.0) == 0
    assert len(queue) == 2, "predicted to be done is not done"


def test_corrections_and_removals() -> None:
    queue = backlog((1.0, 100), (2.0, 200))
    queue.correct(0, 40, 0.0)
    assert queue.total_ms(0.0) == 240
    queue.remove(0)
    queue.remove(0)
    queue.correct(0, 1000, 0.0)
    assert queue.total_ms(0.0) == 200


def test_work_of_others_counts_as_ahead_and_takes_turns() -> None:
    queue = backlog((1.0, 100))
    queue.set_others(300, 0.0)
    assert queue.ahead_ms(0.0, 0.0) == 300
    assert queue.total_ms(0.1) == pytest.approx(300)
    assert queue.ahead_ms(0.0, 0.1) == pytest.approx(225), "three quarters of the time were theirs"


def test_a_report_of_less_work_shortens_all_but_the_new() -> None:
    queue = backlog((1.0, 100), (2.0, 200), (3.0, 50))
    queue.cap_own(120, {2}, 0.0)
    assert queue.ahead_ms(2.0, 0.0) == 120
    assert queue.total_ms(0.0) == 170


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.1, 500), st.floats(0, 0.3), st.booleans()), max_size=30
    )
)
def test_the_sum_is_the_total(steps: list[tuple[float, float, float, bool]]) -> None:
    """Against a naive queue that computes the due-first prompt all the time."""
    queue, naive, now = Backlog(), list[tuple[float, int, float]](), 0.0
    for attempt, (due, ms, passed, remove) in enumerate(steps):
        queue.add(attempt, due, ms, now)
        naive.append((due, attempt, ms))
        naive.sort()
        if remove:
            queue.remove(naive[0][1])
            naive.pop(0)
        now += passed
        left = passed * 1e3
        for i, (d, a, m) in enumerate(naive):
            spent = min(m, left)
            naive[i], left = (d, a, m - spent), left - spent
        assert queue.total_ms(now) == pytest.approx(sum(m for _, _, m in naive), abs=1e-6)
        assert queue.ahead_ms(5.0, now) == pytest.approx(sum(m for d, _, m in naive if d <= 5), abs=1e-6)
