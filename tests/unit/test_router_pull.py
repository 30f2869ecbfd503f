"""From the choice to pull to what the worker is told, and how the router learns what a pull costs."""

from __future__ import annotations

import pytest

from kvrouter.deadline import Order
from kvrouter.router import Choice, RouterRequest
from serving.engine.base import Mode
from serving.wire import Ended, Step
from tests.unit.coordinator_rig import Bench
from tests.unit.router_rig import MS_PER_TOKEN, Report, place, request, router, tell_cached

LONG = 10_000


def busy(target_pull: bool) -> Choice:
    """Of a prompt that p0 has cached while p0 has a lot to do."""
    target = router(prefill=2, decode=1, pull=target_pull, local=False, order=Order.FIFO)
    tell_cached(target, "p0", request(LONG, prefix=LONG))
    for attempt in range(10):
        wanted = request(20_000, own=attempt)
        wanted.choice = Choice("d0", "p0")
        target.book(attempt, "p0", wanted, 0.0)
    return target.choose(request(LONG + 50, prefix=LONG), 0.0)


def test_pull_when_the_owner_is_busy() -> None:
    choice = busy(True)
    assert (choice.prefill, choice.pull_from) == ("p1", "p0")
    assert (choice.cached_tokens, choice.pull_tokens) == (0, LONG)
    assert choice.pull_within_ms == pytest.approx((LONG + 50) * MS_PER_TOKEN)


def test_no_pull_unless_told() -> None:
    assert busy(False).pull_from is None


def test_what_still_computes_cannot_be_pulled() -> None:
    """A burst with one prefix: the second prompt finds it on its way, which is no place to read from."""
    target = router(prefill=2, decode=1, pull=True, local=False)
    place(target, 1, request(LONG, prefix=LONG))
    choice = target.choose(request(LONG + 50, prefix=LONG), 0.0)
    assert choice.pull_from is None


def test_reports_teach_what_a_move_costs() -> None:
    target = router(prefill=2, decode=1, pull=True, local=False)
    move = target.load_of("p1").models.move
    for tokens in (1000, 4000, 2000, 8000):
        target.on_load("p1", Report(moves=2, moved_tokens=2 * tokens, move_ms=2 * (5 + 0.1 * tokens)), 1.0)
    assert move.linear.samples == 4
    assert move.ms(LONG) == pytest.approx(1005, rel=0.05)
    assert target.load_of("p0").models.move.linear.samples == 0
    tell_cached(target, "p0", request(LONG, prefix=LONG))
    target.remove_worker("p0")  # and comes again: taken to be as its peers
    assert target.choose(request(LONG, prefix=LONG), 1.0).pull_from is None


# ---------------------------------------------------------------- what the worker is told


class Pulling(Bench):
    """The router wants p1 to pull from `owner`."""

    def __init__(self, owner: str) -> None:
        super().__init__(prefill=3)
        choose = self.router.choose

        def pull(wanted: RouterRequest, now_s: float) -> Choice:
            choice = choose(wanted, now_s)
            choice.prefill = "p1" if choice.prefill else None
            choice.cached_tokens, choice.pull_from, choice.pull_tokens = 32, owner, 64
            choice.pull_within_ms = 7.9
            return choice

        self.router.choose = pull  # type: ignore[method-assign]


def test_the_attempt_that_computes_is_told_whom_to_ask() -> None:
    bench = Pulling("p0")
    run, _ = bench.start()
    (prefill,), (decode,) = bench.submits("p1"), bench.submits("d0")
    assert prefill.pull is not None
    assert (prefill.pull.address, prefill.pull.ident, prefill.pull.epoch) == ("host:p0", "p0", 1)
    assert (prefill.pull.tokens, prefill.pull.within_ms) == (96, 7)
    assert decode.pull is None
    assert Mode(decode.mode) is Mode.DECODE
    run.cancel()
    bench.check_idle()


def test_an_owner_that_is_not_linked_is_not_asked() -> None:
    bench = Pulling("gone")
    run, _ = bench.start()
    assert bench.submits("p1")[0].pull is None
    run.cancel()


def test_a_resume_does_not_pull() -> None:
    """What failed may have been the pull."""
    bench = Pulling("p0")
    run, _ = bench.start()
    (first,) = bench.submits("p1")
    bench.coordinator.on_step(Step(ended=[Ended(first.attempt, "", "a read failed", retryable=True)]))
    assert bench.submits("p1")[-1].attempt != first.attempt
    assert bench.submits("p1")[-1].pull is None
    run.cancel()
    bench.check_idle()
