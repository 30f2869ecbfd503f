"""The coordinator against scripted workers: order, repeats, holes, ends, cancels, stages."""

from __future__ import annotations

import pytest

from serving.engine.base import FinishReason, Mode
from serving.errors import NoWorker, Overloaded, Unavailable
from serving.run import Stage
from serving.wire import Begun, Ended, Logprobs, Step, Tokens, pack_u32, pack_u64, unpack_u32
from tests.unit.coordinator_rig import Bench


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
