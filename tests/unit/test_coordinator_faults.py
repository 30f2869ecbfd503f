"""The coordinator when workers fail, are lost or take too long: who goes on, who is blamed, what ends."""

from __future__ import annotations

import pytest

from serving.breaker import THRESHOLD
from serving.coordinator import MAX_TRIES
from serving.engine.base import FinishReason, Mode
from serving.errors import DeadlineExceeded, EngineFailure, NoWorker, Overloaded, WorkerLost
from serving.lateness import COME_BACK_S
from serving.wire import STEP, Begun, Ended, Step, unpack_u32
from tests.unit.coordinator_rig import Bench


@pytest.mark.parametrize("sent", [0, 1, 3], ids=["before-any-token", "after-prefill", "mid-decode"])
def test_a_lost_decode_worker_resumes_elsewhere_without_loss_or_repeat(sent):
    bench = Bench(decode=2)
    _, sink = bench.start(max_tokens=6)
    prefill = bench.submits("p0")[0]
    first = "d0" if bench.submits("d0") else "d1"
    other = "d1" if first == "d0" else "d0"
    decode = bench.submits(first)[0]
    if sent:
        bench.tokens(prefill.attempt, 0, 10)
    if sent > 1:
        bench.tokens(decode.attempt, 1, 11, 12)
    bench.lose(first)
    again = bench.submits("p0")[1]
    assert list(unpack_u32(again.tokens)) == [1, 2, 3, *range(10, 10 + sent)]
    assert again.n_prompt == 3
    bench.tokens(decode.attempt, sent, 99)  # a late frame of the dead attempt
    bench.tokens(again.attempt, sent, 10 + sent)
    last = bench.submits(other)[0]
    bench.tokens(last.attempt, sent + 1, *range(11 + sent, 16), ended="length")
    assert sink.tokens == list(range(10, 16))
    assert sink.reason is FinishReason.LENGTH
    bench.check_idle()


def test_a_prefill_worker_lost_after_its_token_leaves_the_stream_alone():
    bench = Bench()
    _, sink = bench.start()
    prefill, decode = bench.submits("p0")[0], bench.submits("d0")[0]
    bench.tokens(prefill.attempt, 0, 10)
    bench.lose("p0")
    bench.tokens(decode.attempt, 1, 11, 12, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    bench.check_idle()


def test_layout_error_reaches_client():
    """A hand-off that can never work ends the request with an error, in bounded tries."""
    bench = Bench()
    _, sink = bench.start()
    for _ in range(MAX_TRIES):
        attempt = bench.submits("d0")[-1].attempt
        bench.coordinator.on_step(Step(ended=[Ended(attempt, "", "layouts differ", retryable=True)]))
    assert isinstance(sink.error, WorkerLost)
    assert "layouts differ" in sink.error.message
    bench.check_idle()


def test_an_engine_failure_is_final():
    bench = Bench(prefill=0)
    _, sink = bench.start()
    bench.coordinator.on_step(Step(ended=[Ended(bench.submits("d0")[0].attempt, "", "too large")]))
    assert isinstance(sink.error, EngineFailure)
    bench.check_idle()


def test_a_request_that_breaks_two_engines_is_the_one_to_blame():
    bench = Bench(decode=3)
    run, sink = bench.start()
    for _ in range(2):
        assert sink.error is None
        (decode,) = run.decoding
        bench.coordinator.on_step(Step(ended=[Ended(decode.ident, STEP, "it raised", retryable=True)]))
    assert isinstance(sink.error, EngineFailure)
    assert run.placements == 2
    bench.check_idle()


@pytest.mark.parametrize(("begun", "seconds"), [(False, 60.1), (True, 120.1)], ids=["queue", "prefill"])
def test_a_stage_that_is_too_long_is_tried_again_elsewhere(begun, seconds):
    bench = Bench(prefill=2)
    _, _ = bench.start()
    first = "p0" if bench.submits("p0") else "p1"
    other = "p1" if first == "p0" else "p0"
    attempt = bench.submits(first)[0].attempt
    if begun:
        bench.coordinator.on_step(Step(begun=[Begun(attempt, 0)]))
    bench.now += seconds
    bench.coordinator.sweep()
    assert bench.cancels(first) == [attempt]
    assert len(bench.submits(other)) == 1


def test_the_requests_own_deadline_ends_it():
    bench = Bench()
    _, sink = bench.start()
    bench.now += 601
    bench.coordinator.sweep()
    assert isinstance(sink.error, DeadlineExceeded)
    bench.check_idle()


def test_a_resumed_request_keeps_every_deadline():
    """The second placement's hand-off may hang as well as the first one's."""
    bench = Bench(decode=3)
    _, sink = bench.start(max_tokens=9)
    first = next(ident for ident in ("d0", "d1", "d2") if bench.submits(ident))
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    bench.tokens(bench.submits(first)[0].attempt, 1, 11)
    bench.lose(first)
    again = bench.submits("p0")[1].attempt
    bench.tokens(again, 2, 12)
    (second,) = [ident for ident in ("d0", "d1", "d2") if ident != first and bench.submits(ident)]
    hanging = bench.submits(second)[0].attempt
    assert bench.router.in_flight == 1  # prefill's part is done
    bench.now += 40.1
    bench.coordinator.sweep()
    assert bench.cancels(second) == [hanging]
    (third,) = [ident for ident in ("d0", "d1", "d2") if ident not in (first, second)]
    assert list(unpack_u32(bench.submits(third)[0].tokens)) == [1, 2, 3, 10, 11, 12]
    bench.tokens(bench.submits("p0")[2].attempt, 3, 13)
    bench.tokens(bench.submits(third)[0].attempt, 4, 14, 15, 16, 17, 18, ended="length")
    assert sink.tokens == list(range(10, 19))
    bench.check_idle()


def test_a_stuck_lone_worker_is_not_chosen_again():
    """After its first token a local attempt has the same deadline, and its worker the blame."""
    bench = Bench(prefill=0, decode=2)
    bench.start()
    first = "d0" if bench.submits("d0") else "d1"
    bench.tokens(bench.submits(first)[0].attempt, 0, 10)
    bench.now += 40.1
    bench.coordinator.sweep()
    assert len(bench.submits("d1" if first == "d0" else "d0")) == 1


def test_a_resumes_prefill_worker_that_is_lost_before_its_token_is_replaced_at_once():
    bench = Bench(prefill=2, decode=2)
    run, sink = bench.start()
    (decode,) = run.decoding
    first = "p0" if bench.submits("p0") else "p1"
    bench.tokens(bench.submits(first)[0].attempt, 0, 10)
    bench.lose(decode.worker)
    (prefill,) = [a for a in run.attempts.values() if a.mode is Mode.PREFILL]
    bench.lose(prefill.worker)
    assert run.placements == 3
    (prefill,) = [a for a in run.attempts.values() if a.mode is Mode.PREFILL]
    bench.tokens(prefill.ident, 1, 11)
    (decode,) = run.decoding
    bench.tokens(decode.ident, 2, 12, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    bench.check_idle()


@pytest.mark.parametrize("how", ["link lost", "said"])
def test_a_prefill_that_fails_after_its_token_is_its_readers_business(how: str):
    bench = Bench()
    run, sink = bench.start()
    prefill, decode = bench.submits("p0")[0].attempt, bench.submits("d0")[0].attempt
    bench.tokens(prefill, 0, 10)
    if how == "said":
        bench.coordinator.on_step(Step(ended=[Ended(prefill, "", "the lease ran out", retryable=True)]))
    else:
        bench.lose("p0")
    assert run.placements == 1
    bench.tokens(decode, 1, 11, 12, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    bench.check_idle()


def test_a_hand_off_that_fails_is_tried_between_two_others():
    """It may be the fault of either side."""
    bench = Bench(prefill=2, decode=2)
    run, _ = bench.start()
    before = {attempt.worker for attempt in run.attempts.values()}
    (decode,) = run.decoding
    bench.coordinator.on_step(Step(ended=[Ended(decode.ident, "", "the read failed", retryable=True)]))
    assert before.isdisjoint(attempt.worker for attempt in run.attempts.values())


def test_a_prefill_worker_that_answers_is_not_avoided_for_failures_long_ago():
    bench = Bench()
    for _ in range(2 * THRESHOLD):
        run, _ = bench.start()
        for fails in (True, False):
            prefill = bench.submits("p0")[-1].attempt
            if fails:
                bench.coordinator.on_step(Step(ended=[Ended(prefill, "", "it failed", retryable=True)]))
            else:
                bench.tokens(prefill, 0, 10)
                decode = bench.submits("d0")[-1].attempt
                bench.coordinator.on_step(Step(begun=[Begun(decode, 0)]))
        run.cancel()
    assert bench.coordinator._breakers.avoid(bench.now) == frozenset()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_worker_lost_between_the_last_token_and_the_end_takes_nothing_with_it(max_tokens: int):
    bench = Bench(prefill=0)
    run, sink = bench.start(max_tokens=max_tokens)
    bench.tokens(bench.submits("d0")[0].attempt, 0, *range(max_tokens))
    bench.lose("d0")
    assert (sink.reason, run.info.resumes) == (FinishReason.LENGTH, 0)
    bench.check_idle()


# ------------------------------------------------------------ nobody there


def sweeps(bench: Bench, seconds: float) -> None:
    until = bench.now + seconds
    while bench.now < until:
        bench.now += 0.25
        bench.coordinator.sweep()


def test_a_new_request_waits_where_there_were_workers_just_now():
    bench = Bench()
    bench.lose("d0")
    bench.now += COME_BACK_S - 1
    run, sink = bench.start()
    sweeps(bench, COME_BACK_S - 1)
    assert bench.coordinator.in_flight == 1
    bench.add("d1", "decode")
    sweeps(bench, 0.25)
    prefill, decode = bench.submits("p0")[0], bench.submits("d1")[0]
    bench.tokens(prefill.attempt, 0, 10)
    bench.tokens(decode.attempt, 1, 11, 12, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    assert (run.info.resumes, bench.coordinator._metrics.resumes.value()) == (0, 0)
    bench.check_idle()


def test_it_does_not_wait_for_ever():
    bench = Bench()
    bench.lose("d0")
    _, sink = bench.start()
    sweeps(bench, COME_BACK_S + 0.5)
    assert isinstance(sink.error, NoWorker)
    assert len(bench.coordinator.report("m", "main").arrivals) == 1
    bench.check_idle()


def test_where_there_was_nobody_it_is_refused_at_once():
    bench = Bench()
    bench.lose("d0")
    bench.now += COME_BACK_S + 0.1
    with pytest.raises(NoWorker):
        bench.start()
    bench.check_idle()


def test_what_waited_passes_the_gate_when_it_is_placed():
    class Closed:
        def check(self, *_: object) -> None:
            raise Overloaded("too much", retry_after_s=3)

        def ended(self, tokens: int) -> None: ...

    bench = Bench()
    bench.lose("d0")
    _, sink = bench.start()
    bench.coordinator._placer._gate = Closed()  # type: ignore[assignment]
    bench.add("d1", "decode")
    sweeps(bench, 0.25)
    assert isinstance(sink.error, Overloaded)
    bench.check_idle()
