"""What a router makes of a worker that names its prompts: others' places, ours corrected, times learnt."""

from __future__ import annotations

from functools import partial
from math import inf

import pytest

from kvrouter.backlog import Backlog
from kvrouter.deadline import SLACK_MS, Order
from kvrouter.load import Booking, WorkerLoad
from kvrouter.perf_model import WorkerModels
from kvrouter.policy_router import build_router
from kvrouter.router import WorkerView
from tests.unit import router_rig

Report = partial(router_rig.Report, free_blocks=100, total_blocks=100, step_ms=50.0)


def worker(frontends: int = 2) -> WorkerLoad:
    """1 ms a token."""
    models = WorkerModels.from_priors((0.0, 1.0, 0.0))
    return WorkerLoad(WorkerView("p", "prefill", 16, 100, 64), models, Order.DEADLINE, frontends)


def booking(attempt: int, tokens: int, at_s: float, limit_s: float = inf) -> Booking:
    return Booking(attempt, True, tokens, tokens, float(tokens), 0, 0, at_s, tokens, limit_s)


def due_ms(own_ms: int) -> int:
    return int(SLACK_MS) + own_ms


def test_others_stand_where_they_are_due() -> None:
    load = worker()
    load.report(Report(waiting_tokens=3100, queue=[(7, 100, due_ms(100)), (8, 3000, due_ms(3000))]), 10.0)
    assert load.wait_ms(load.due_s(500.0, 10.0), 10.0) == pytest.approx(100, abs=1)
    assert load.wait_ms(load.due_s(5000.0, 10.0), 10.0) == pytest.approx(3100, abs=1)
    load.report(Report(queue=[]), 11.0)
    assert load.wait_ms(load.due_s(5000.0, 11.0), 11.0) == 0


def test_ours_are_corrected_and_not_counted_twice() -> None:
    load = worker()
    load.book(booking(1, 1000, 10.0), 10.0)
    load.book(booking(2, 1000, 10.0), 10.0)
    load.report(Report(waiting_tokens=400, queue=[(2, 400, due_ms(400))]), 10.5)
    assert load.backlog_ms(10.5) == pytest.approx(400, abs=1), "the first is done"
    assert load.queued_tokens == 2000, "until its token comes"


def test_a_prompt_that_was_told_counts_until_a_report_can_know_it() -> None:
    load = worker()
    load.report(Report(queue=[]), 10.0)
    load.told(9, 800, 10.01)
    assert load.backlog_ms(10.01) == pytest.approx(800, abs=1)
    load.report(Report(queue=[]), 10.05)  # of a step that began before
    assert load.backlog_ms(10.05) == pytest.approx(800, abs=50)
    load.report(Report(waiting_tokens=700, queue=[(9, 700, due_ms(700))]), 10.2)
    assert load.backlog_ms(10.2) == pytest.approx(700, abs=1), "named: once"
    load.told(10, 800, 10.21)
    load.report(Report(queue=[]), 10.5)
    assert load.backlog_ms(10.5) == 0, "done, or cancelled"


def test_what_a_worker_tells_is_not_expected_once_more() -> None:
    guessed, told = worker(), worker()
    told.report(Report(queue=[]), 10.0)
    for load in (guessed, told):
        load.book(booking(1, 1000, 10.1), 10.1)
    assert guessed.backlog_ms(10.1) == pytest.approx(2000, abs=1)
    for tokens, backlog_ms in ((400, 2000), (600, 2000), (500, 2500)):  # then more than we sent ourselves
        told.told(99 + tokens, tokens, 10.1)
        assert told.backlog_ms(10.1) == pytest.approx(backlog_ms, abs=1)


def test_times_are_learnt_from_everybodys_work() -> None:
    """Two frontends send as much; the worker needs 2 ms a token, not 1 and not 4."""
    load, now_s, computed = worker(), 10.0, 0
    load.report(Report(queue=[], computed_tokens=0), now_s)
    for attempt in range(1, 40):
        load.book(booking(attempt, 100, now_s), now_s)
        for _ in range(2):  # steps of 100 tokens: one of ours, one of the other's
            now_s += 0.2
            computed += 100
            load.report(Report(step_ms=200.0, queue=[(1000, 100, 0)], waiting_tokens=100,
                               computed_tokens=computed), now_s)  # fmt: skip
            load.begun(attempt, 0, now_s)
        load.computed(attempt, now_s)
        load.release(attempt)
    assert load.models.prefill.linear.evidence > 20
    assert load.models.prefill.ms(1000, 1000) == pytest.approx(2000, rel=0.05)


def test_lateness_is_told_once() -> None:
    load = worker()
    load.book(booking(1, 100, 10.0, limit_s=11.0), 10.0)
    load.book(booking(2, 100, 10.0), 10.0)
    load.computed(1, 11.5)
    load.computed(2, 11.5)
    assert load.take_lateness() == [pytest.approx(0.5)]
    assert load.take_lateness() == []


def test_who_would_be_made_late() -> None:
    queue = Backlog()
    queue.add(1, 5.0, 1000.0, 0.0, limit_s=1.5)
    assert queue.blocked(4.0, 400.0, 0.0, 0.0, 0.0) is None
    assert queue.blocked(4.0, 400.0, 0.0, 200.0, 0.0) is not None, "with a margin"
    assert queue.blocked(6.0, 9000.0, 0.0, 0.0, 0.0) is None, "it overtakes nobody"
    blocked = queue.blocked(4.0, 600.0, 0.0, 0.0, 0.0)
    assert blocked is not None
    assert (blocked.done_ms, blocked.behind_ms) == (1000.0, 1000.0)
    queue.remove(1)
    queue.add(2, 5.0, 1000.0, 0.0, limit_s=0.1)
    assert queue.blocked(4.0, 600.0, 0.0, 0.0, 0.0) is None, "it is lost anyway"
    queue.set_others(0.0, 0.0, [(5.0, 500.0)])
    assert queue.blocked(4.0, 1600.0, 0.0, 0.0, -3000.0) is not None, "others too"


def test_peers_without_samples_follow_the_first_one() -> None:
    """They would look slow for ever, and never get anything to do."""
    router = build_router(models=lambda: WorkerModels.from_priors((0.0, 4.0, 0.0)))
    for ident in ("p0", "p1"):
        router.add_worker(WorkerView(ident, "prefill", 16, 100, 64))
    first, second = (router.load_of(ident) for ident in ("p0", "p1"))
    first.book(booking(1, 1000, 10.0), 10.0)
    router._attempts[1] = "p0"
    router.begun(1, 0, 10.0)
    router.computed(1, 11.0)
    assert first.models.prefill.ms(1000, 1000) == pytest.approx(1000)
    assert second.models.prefill.ms(1000, 1000) == pytest.approx(1000)
    assert second.models.prefill.linear.evidence == 1


def decode_worker() -> WorkerLoad:
    models = WorkerModels.from_priors(step=(10.0, 0.1, 1e-5))
    return WorkerLoad(WorkerView("d", "decode", 16, 1000, 64), models, Order.DEADLINE, 2)


def test_a_step_is_learnt_while_others_wait_for_their_kv() -> None:
    """Behind a backlog of prompts something always waits on the decode workers: nothing was learnt then."""
    load = decode_worker()
    for n in range(40):
        batch, held = 4 + n % 8, 4000 + 500 * (n % 7)
        ms = 20 + 0.5 * batch + 1e-3 * held
        load.report(Report(running=batch, waiting=30, step_ms=ms, decoded=(batch, held)), 10.0 + n)
    assert load.models.step.linear.samples == 40
    assert load.models.step.ms(8, 5500) == pytest.approx(29.5, rel=0.03)


def test_a_step_that_computed_prompts_too_says_nothing_of_decodes() -> None:
    load = decode_worker()
    load.report(Report(running=4, step_ms=80.0, decoded=(0, 0)), 10.0)
    assert load.models.step.linear.samples == 0


def test_an_engine_that_does_not_tell_is_believed_while_nothing_waits() -> None:
    load = decode_worker()
    load.report(Report(running=4, free_blocks=90, waiting=1, step_ms=20.0), 10.0)
    assert load.models.step.linear.samples == 0
    load.report(Report(running=4, free_blocks=90, step_ms=20.0), 11.0)
    assert load.models.step.linear.samples == 1
