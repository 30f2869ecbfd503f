"""The coordinator against scripted workers: order, repeats, holes, ends, faults, deadlines, bookings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvrouter.policy_router import build_router
from kvrouter.router import WorkerView
from serving.breaker import THRESHOLD
from serving.config import Deadlines
from serving.coordinator import MAX_TRIES, Coordinator
from serving.engine.base import Capabilities, FinishReason, Mode, SamplingParams
from serving.errors import (
    DeadlineExceeded,
    EngineFailure,
    NoWorker,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from serving.frontend_metrics import FrontendMetrics
from serving.generation import CollectedText, GenerationRequest
from serving.metrics import Registry
from serving.run import Stage, WorkerEntry
from serving.wire import (
    STEP,
    Begun,
    Cancel,
    Ended,
    Logprobs,
    Message,
    Step,
    Submit,
    Tokens,
    pack_u32,
    pack_u64,
    unpack_u32,
)


class Bench:
    """A coordinator over workers that record what they were sent."""

    def __init__(
        self, prefill: int = 1, decode: int = 1, max_inflight: int = 100, policy: str = "least_tokens"
    ) -> None:
        self.now = 100.0
        self.sent: dict[str, list[Message]] = {}
        self.router = build_router(policy, local=False)
        self.entries: dict[str, WorkerEntry] = {}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                self.add(f"{role[0]}{index}", role)
        self.coordinator = Coordinator(
            model="m",
            router=self.router,
            workers=self.entries,
            deadlines=Deadlines(),
            max_inflight=max_inflight,
            capabilities=Capabilities(migrate_kv=True),
            metrics=FrontendMetrics(Registry({})),
            clock=lambda: self.now,
        )

    def add(self, ident: str, role: str) -> None:
        self.sent[ident] = []
        self.entries[ident] = WorkerEntry(ident, 1, f"host:{ident}", self.sent[ident].append)
        self.router.add_worker(WorkerView(ident, role, 32, 100, 64))

    def lose(self, ident: str) -> None:
        del self.entries[ident]
        self.router.remove_worker(ident)
        self.coordinator.on_worker_lost(ident)

    def start(
        self,
        max_tokens: int = 4,
        logprobs: int | None = None,
        temperature: float = 1.0,
        prompt: Sequence[int] = (1, 2, 3),
    ):
        sink = CollectedText()
        request = GenerationRequest(
            "r",
            "m",
            array("I", prompt),
            SamplingParams(max_tokens=max_tokens, seed=1, logprobs=logprobs, temperature=temperature),
        )
        return self.coordinator.start(request, sink), sink

    def submits(self, ident: str) -> list[Submit]:
        return [m for m in self.sent[ident] if isinstance(m, Submit)]

    def cancels(self, ident: str) -> list[int]:
        return [m.attempt for m in self.sent[ident] if isinstance(m, Cancel)]

    def tokens(self, attempt: int, first: int, *tokens: int, ended: str | None = None) -> None:
        n = len(tokens)
        self.coordinator.on_step(
            Step(
                tokens=Tokens(
                    pack_u64([attempt] * n), pack_u32(list(range(first, first + n))), pack_u32(list(tokens))
                ),
                ended=[Ended(attempt, ended)] if ended else None,
            )
        )

    def check_idle(self) -> None:
        assert self.coordinator.in_flight == 0
        assert self.coordinator.attempts_in_flight == 0
        assert self.router.in_flight == 0


def test_prefill_first_token_then_decode():
    bench = Bench()
    run, sink = bench.start()
    (prefill,), (decode,) = bench.submits("p0"), bench.submits("d0")
    assert (prefill.mode, decode.mode) == (Mode.PREFILL, Mode.DECODE)
    assert decode.handoff is not None
    assert decode.handoff.attempt == prefill.attempt
    assert list(unpack_u32(prefill.tokens)) == [1, 2, 3]
    bench.coordinator.on_step(Step(begun=[Begun(prefill.attempt, 2)]))
    bench.tokens(prefill.attempt, 0, 10)
    bench.tokens(decode.attempt, 1, 11, 12)
    bench.tokens(decode.attempt, 3, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    assert sink.reason is FinishReason.LENGTH
    assert run.info.cached_tokens == 2
    assert bench.cancels("p0") == bench.cancels("d0") == []
    bench.check_idle()


def test_decodes_second_token_may_overtake_prefills_first():
    bench = Bench()
    _, sink = bench.start()
    prefill, decode = bench.submits("p0")[0], bench.submits("d0")[0]
    bench.tokens(decode.attempt, 1, 11, 12, 13, ended="length")
    assert sink.tokens == []
    assert sink.reason is None
    bench.tokens(prefill.attempt, 0, 10)
    assert sink.tokens == [10, 11, 12, 13]
    assert sink.reason is FinishReason.LENGTH
    bench.check_idle()


def test_max_tokens_one_exact_never_calls_decode():
    bench = Bench()
    _, sink = bench.start(max_tokens=1)
    assert bench.submits("d0") == []
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10, ended="length")
    assert (sink.tokens, sink.reason) == ([10], FinishReason.LENGTH)
    bench.check_idle()


def test_prefill_end_skips_decode():
    """EOS on the first token: decode's reservation is cancelled, the request ends."""
    bench = Bench()
    _, sink = bench.start()
    decode = bench.submits("d0")[0]
    bench.tokens(bench.submits("p0")[0].attempt, 0, 2, ended="stop")
    assert (sink.tokens, sink.reason) == ([2], FinishReason.STOP)
    assert bench.cancels("d0") == [decode.attempt]
    bench.check_idle()


def test_without_prefill_workers_decode_does_both():
    bench = Bench(prefill=0)
    _, sink = bench.start()
    (local,) = bench.submits("d0")
    assert local.mode == Mode.LOCAL
    bench.tokens(local.attempt, 0, 10, 11, 12, 13, ended="length")
    assert sink.tokens == [10, 11, 12, 13]
    bench.check_idle()


def test_cancel_frees_both_sides_and_silences_the_sink():
    bench = Bench()
    run, sink = bench.start()
    prefill, decode = bench.submits("p0")[0], bench.submits("d0")[0]
    bench.tokens(prefill.attempt, 0, 10)
    run.cancel()
    run.cancel()
    bench.tokens(decode.attempt, 1, 11, ended="stop")
    assert (sink.tokens, sink.reason, sink.error) == ([10], None, None)
    assert bench.cancels("p0") == [prefill.attempt]
    assert bench.cancels("d0") == [decode.attempt]
    bench.check_idle()


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


def test_no_worker_at_all_is_503_and_nothing_is_booked():
    bench = Bench(prefill=1, decode=0)
    with pytest.raises(NoWorker):
        bench.start()
    bench.check_idle()


def test_over_the_limit_is_429():
    bench = Bench(max_inflight=1)
    bench.start()
    with pytest.raises(Overloaded):
        bench.start()
    assert len(bench.coordinator.report("m", "main").arrivals) == 2  # demand all the same


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


def test_logprobs_stay_with_their_tokens_when_frames_overtake():
    bench = Bench()
    _, sink = bench.start(max_tokens=3, logprobs=1)
    prefill, decode = bench.submits("p0")[0], bench.submits("d0")[0]

    def step(attempt: int, first: int, tokens: list[int]) -> Step:
        n = len(tokens)
        return Step(
            tokens=Tokens(
                pack_u64([attempt] * n), pack_u32(list(range(first, first + n))), pack_u32(tokens)
            ),
            logprobs=[Logprobs(i, -float(t), [(t, -float(t))]) for i, t in enumerate(tokens)],
        )

    bench.coordinator.on_step(step(decode.attempt, 1, [11, 12]))
    bench.coordinator.on_step(step(prefill.attempt, 0, [10]))
    assert [(entry.token, entry.logprob) for entry in sink.logprobs] == [(10, -10), (11, -11), (12, -12)]


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
        run.cancel()
    assert bench.coordinator._breakers.avoid(bench.now) == frozenset()


def test_an_answer_that_a_stop_string_ends_counts_as_one():
    """The planner learns its length, and its worker that it works."""
    bench = Bench(prefill=0)
    run, _ = bench.start()
    failed = bench.submits("d0")[0].attempt
    bench.coordinator.on_step(Step(ended=[Ended(failed, "", "it failed", retryable=True)]))
    bench.tokens(bench.submits("d0")[1].attempt, 0, 10, 11)
    run.cancel("stop")
    assert bench.coordinator.report("m", "main").outputs == [(3, 2)]
    assert bench.coordinator._breakers._breakers == {}
    bench.check_idle()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_worker_lost_between_the_last_token_and_the_end_takes_nothing_with_it(max_tokens: int):
    bench = Bench(prefill=0)
    run, sink = bench.start(max_tokens=max_tokens)
    bench.tokens(bench.submits("d0")[0].attempt, 0, *range(max_tokens))
    bench.lose("d0")
    assert (sink.reason, run.info.resumes) == (FinishReason.LENGTH, 0)
    bench.check_idle()


def test_kv_that_arrives_before_the_first_token_is_not_waited_for_again():
    bench = Bench()
    run, _ = bench.start()
    bench.coordinator.on_step(Step(begun=[Begun(bench.submits("d0")[0].attempt, 0)]))
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    assert run.stage is Stage.FIRST_DECODE


@pytest.mark.parametrize("prefill", [0, 1])
def test_decoded_tokens_in_the_first_frame_make_it_a_stream(prefill: int):
    bench = Bench(prefill=prefill)
    run, _ = bench.start()
    decode = bench.submits("d0")[0].attempt
    if prefill:
        bench.tokens(decode, 1, 11)
        bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    else:
        bench.tokens(decode, 0, 10, 11)
    assert run.stage is Stage.DECODE
    assert run.tries == 0


def test_the_time_in_a_queue_is_that_of_one_placement():
    bench = Bench(prefill=0, decode=2)
    run, _ = bench.start()
    (attempt,) = run.decoding
    bench.coordinator.on_step(Step(begun=[Begun(attempt.ident, 0)]))
    bench.now += 50
    bench.lose(attempt.worker)
    bench.now += 1
    (attempt,) = run.decoding
    bench.coordinator.on_step(Step(begun=[Begun(attempt.ident, 0)]))
    assert bench.coordinator._metrics.queue._sum == 1


def test_stopping_ends_those_that_wait_too():
    bench = Bench()
    _, streaming = bench.start()
    bench.lose("d0")
    bench.add("d1", "decode")
    _, waiting = bench.start()
    bench.lose("d1")
    bench.coordinator.stop()
    assert isinstance(streaming.error, Unavailable)
    assert isinstance(waiting.error, Unavailable)
    bench.check_idle()
