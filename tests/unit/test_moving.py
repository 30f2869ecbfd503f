"""The frontend's side of a move: who is asked, what the client sees, and every way it can go wrong."""

from __future__ import annotations

import dataclasses

import pytest

from serving.engine.base import FinishReason, Mode
from serving.errors import WorkerLost
from serving.generation import CollectedText
from serving.moving import MOVE_AGAIN_S, MOVED, MOVES_AT_ONCE
from serving.placement import RESERVE_TOKENS
from serving.run import Run, Stage
from serving.wire import Ended, Step, Submit, unpack_u32
from tests.unit.coordinator_rig import Bench


class Moving:
    """A run that decodes on d0 with tokens 10, 11, 12 out, and d1 beside it."""

    def __init__(self, max_tokens: int = 8, streams: int = 1) -> None:
        self.bench = Bench(decode=1)
        self.runs: list[tuple[Run, CollectedText]] = []
        for _ in range(streams):
            self.runs.append(self.bench.start(max_tokens=max_tokens))
            prefill, decode = self.bench.submits("p0")[-1], self.bench.submits("d0")[-1]
            self.bench.tokens(prefill.attempt, 0, 10)
            self.bench.tokens(decode.attempt, 1, 11, 12)
        self.bench.add("d1", "decode")
        self.run, self.sink = self.runs[0]
        self.source = self.bench.submits("d0")[0].attempt

    def move(self) -> Submit:
        self.bench.coordinator.move_from("d0")
        return self.bench.submits("d1")[-1]

    def ends(
        self, attempt: int, reason: str = "", error: str | None = None, retryable: bool = True
    ) -> None:
        self.bench.coordinator.on_step(Step(ended=[Ended(attempt, reason, error, retryable)]))

    def count(self, outcome: str) -> float:
        return self.bench.coordinator._metrics.migrations.value((outcome,))


def test_the_target_is_told_all_it_needs_and_the_source_nothing() -> None:
    moving = Moving()
    target = moving.move()
    assert target.mode == Mode.DECODE.value
    assert list(unpack_u32(target.tokens)) == [1, 2, 3, 10, 11, 12]
    assert target.n_prompt == 3
    assert target.reserve_tokens == RESERVE_TOKENS
    source = target.handoff
    assert source is not None
    assert (source.ident, source.attempt, source.live) == ("d0", moving.source, True)
    assert moving.bench.cancels("d0") == []
    assert len(moving.bench.submits("d0")) == 1


@pytest.mark.parametrize("order", ["moved first", "token first"])
def test_the_stream_goes_on_without_a_seam(order: str) -> None:
    moving = Moving(max_tokens=7)
    target = moving.move()
    moving.bench.tokens(moving.source, 3, 13, 14)  # the source goes on meanwhile
    if order == "moved first":
        moving.ends(moving.source, MOVED)
        moving.bench.tokens(target.attempt, 5, 15)
    else:
        moving.bench.tokens(target.attempt, 5, 15)
        moving.ends(moving.source, MOVED)
    moving.bench.tokens(target.attempt, 6, 16, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14, 15, 16]
    assert moving.sink.reason is FinishReason.LENGTH
    assert moving.run.placements == 1
    assert moving.count("moved") == 1
    assert moving.bench.coordinator._metrics.migration_gap.count == 1
    assert moving.bench.cancels("d0") == moving.bench.cancels("d1") == []
    moving.bench.check_idle()


def test_the_targets_token_may_overtake_the_sources_last() -> None:
    moving = Moving(max_tokens=6)
    target = moving.move()
    moving.bench.tokens(target.attempt, 4, 14)
    assert moving.sink.tokens == [10, 11, 12]
    moving.bench.tokens(moving.source, 3, 13)
    moving.ends(moving.source, MOVED)
    moving.bench.tokens(target.attempt, 5, 15, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14, 15]
    moving.bench.check_idle()


def test_a_moved_stream_can_move_again() -> None:
    moving = Moving(max_tokens=6)
    target = moving.move()
    moving.ends(moving.source, MOVED)
    moving.bench.tokens(target.attempt, 3, 13)
    moving.bench.coordinator.move_from("d1")
    back = moving.bench.submits("d0")[-1]
    assert list(unpack_u32(back.tokens)) == [1, 2, 3, 10, 11, 12, 13]
    moving.ends(target.attempt, MOVED)
    moving.bench.tokens(back.attempt, 4, 14, 15, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14, 15]
    moving.bench.check_idle()


def test_a_target_that_fails_leaves_the_stream_where_it_is() -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.ends(target.attempt, error="no room")
    assert moving.run.move is None
    assert moving.count("failed") == 1
    moving.bench.coordinator.move_from("d0")
    assert len(moving.bench.submits("d1")) == 1  # not again at once
    moving.bench.now += MOVE_AGAIN_S
    moving.bench.coordinator.move_from("d0")
    assert len(moving.bench.submits("d1")) == 2
    moving.bench.tokens(moving.source, 3, 13, 14, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14]
    assert moving.run.placements == 1
    moving.bench.check_idle()


def test_a_target_that_is_lost_leaves_the_stream_where_it_is() -> None:
    moving = Moving(max_tokens=4)
    moving.move()
    moving.bench.lose("d1")
    moving.bench.tokens(moving.source, 3, 13, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13]
    assert moving.run.placements == 1
    moving.bench.check_idle()


def test_a_target_that_fails_after_it_took_over_is_resumed_from() -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.ends(moving.source, MOVED)
    moving.ends(target.attempt, error="engine gone")
    assert moving.run.placements == 2
    resumed = moving.bench.submits("p0")[-1]
    assert list(unpack_u32(resumed.tokens)) == [1, 2, 3, 10, 11, 12]
    moving.run.cancel()
    moving.bench.check_idle()


def test_a_target_that_fails_while_the_source_confirms_is_resumed_from() -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.ends(target.attempt, error="engine gone")  # read before the source's word
    moving.ends(moving.source, MOVED)
    assert moving.run.placements == 2
    assert not moving.run.ended
    moving.run.cancel()
    moving.bench.check_idle()


def test_a_source_that_is_lost_is_resumed_from() -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.bench.lose("d0")
    assert moving.bench.cancels("d1") == [target.attempt]
    assert moving.run.placements == 2
    moving.run.cancel()
    moving.bench.check_idle()


def test_an_end_during_the_move_ends_it() -> None:
    moving = Moving(max_tokens=4)
    target = moving.move()
    moving.bench.tokens(moving.source, 3, 13, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13]
    assert moving.bench.cancels("d1") == [target.attempt]
    moving.bench.check_idle()


def test_a_hangup_during_the_move_frees_both() -> None:
    moving = Moving()
    target = moving.move()
    moving.run.cancel()
    assert moving.bench.cancels("d0") == [moving.source]
    assert moving.bench.cancels("d1") == [target.attempt]
    moving.bench.check_idle()


def test_a_move_that_takes_too_long_is_given_up() -> None:
    moving = Moving()
    target = moving.move()
    for step in range(44):  # the source goes on all the time
        moving.bench.now += 0.25
        moving.bench.tokens(moving.source, 3 + step, 13)
        moving.bench.coordinator.sweep()
    assert moving.bench.cancels("d1") == [target.attempt]
    assert moving.run.move is None
    assert moving.run.placements == 1


def test_moves_come_a_few_at_a_time() -> None:
    moving = Moving(streams=MOVES_AT_ONCE + 2)
    assert moving.bench.coordinator.move_from("d0") == MOVES_AT_ONCE + 2
    assert moving.bench.coordinator.move_from("d0") == MOVES_AT_ONCE + 2
    asked = moving.bench.submits("d1")
    assert len(asked) == MOVES_AT_ONCE
    first = asked[0]
    assert first.handoff is not None
    moving.ends(first.handoff.attempt, MOVED)
    assert moving.bench.coordinator.move_from("d0") == MOVES_AT_ONCE + 1
    assert len(moving.bench.submits("d1")) == MOVES_AT_ONCE + 1


@pytest.mark.parametrize("old", ["d0", "d1"])
def test_a_peer_that_is_too_old_is_not_asked(old: str) -> None:
    moving = Moving()
    entry = moving.bench.entries[old]
    moving.bench.entries[old] = dataclasses.replace(entry, wire_version=1)
    moving.bench.coordinator.move_from("d0")
    assert moving.bench.submits("d1") == []
    assert moving.run.move_after_s > moving.bench.now


def test_nobody_to_move_to_leaves_it() -> None:
    moving = Moving()
    moving.bench.lose("d1")
    assert moving.bench.coordinator.move_from("d0") == 1
    assert moving.run.move is None


def test_a_stream_before_its_first_decoded_token_waits() -> None:
    bench = Bench(decode=2)
    run, _ = bench.start()
    (decode,) = bench.submits("d0") or bench.submits("d1")
    worker = "d0" if bench.submits("d0") else "d1"
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    assert run.stage is Stage.TRANSFER
    bench.coordinator.move_from(worker)
    assert run.move is None
    bench.tokens(decode.attempt, 1, 11)
    bench.coordinator.move_from(worker)
    assert run.move is not None


def test_budget_and_limit_end_in_one_error() -> None:
    bench = Bench(decode=2, max_inflight=1)
    run, sink = bench.start()
    for _ in range(2):
        (decode,) = run.decoding
        bench.coordinator.on_step(Step(ended=[Ended(decode.ident, "", "no room", True)]))
    assert isinstance(sink.error, WorkerLost)
    assert bench.coordinator._metrics.retries_refused.value(("budget",)) == 1
    bench.check_idle()


def test_a_silent_stream_is_a_failure_only_where_nothing_waits() -> None:
    moving = Moving()
    for waiting, placements in ((None, 1), (3, 1), (0, 2)):
        moving.bench.entries["d0"].waiting = waiting
        moving.bench.now += 6.0
        moving.bench.coordinator.sweep()
        assert moving.run.placements == placements
    assert moving.bench.coordinator._metrics.deadlines.value(("silence",)) == 1


def test_a_stream_waits_for_a_worker_to_come_back() -> None:
    bench = Bench(decode=1)
    run, sink = bench.start()
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    bench.tokens(bench.submits("d0")[0].attempt, 1, 11)
    bench.lose("d0")
    assert not run.ended
    assert bench.coordinator.attempts_in_flight == 0
    for _ in range(8):
        bench.now += 0.25
        bench.coordinator.sweep()
    bench.add("d1", "decode")
    bench.coordinator.sweep()
    assert list(unpack_u32(bench.submits("p0")[-1].tokens)) == [1, 2, 3, 10, 11]
    bench.tokens(bench.submits("p0")[-1].attempt, 2, 12)
    bench.tokens(bench.submits("d1")[-1].attempt, 3, 13, ended="length")
    assert (sink.tokens, run.info.resumes) == ([10, 11, 12, 13], 1)
    bench.check_idle()


def test_a_stream_does_not_wait_for_ever() -> None:
    bench = Bench(decode=1)
    run, sink = bench.start()
    bench.lose("d0")
    bench.now += 61
    bench.coordinator.sweep()
    assert run.ended
    assert isinstance(sink.error, WorkerLost)
    bench.check_idle()


def test_a_hangup_while_it_waits_ends_it() -> None:
    bench = Bench(decode=1)
    run, _ = bench.start()
    bench.lose("d0")
    run.cancel()
    bench.add("d1", "decode")
    bench.coordinator.sweep()
    assert bench.submits("d1") == []
    bench.check_idle()


def test_tries_count_anew_once_a_token_was_decoded() -> None:
    bench = Bench(decode=8, max_inflight=100)
    run, sink = bench.start(max_tokens=40)
    for turn in range(8):  # a long stream may see many faults
        (decode,) = run.decoding
        prefill = bench.submits("p0")[-1]
        bench.tokens(prefill.attempt, 2 * turn, 1)
        bench.tokens(decode.ident, 2 * turn + 1, 2)
        bench.lose(decode.worker)
    assert sink.error is None
    assert run.waits_after is not None  # nobody is left
    run.cancel()
    bench.check_idle()


@pytest.mark.parametrize(
    ("seeded", "temperature", "marked"), [(True, 1.0, None), (False, 0.0, None), (False, 1.0, 3)]
)
def test_a_resume_that_is_another_draw_is_marked(
    seeded: bool, temperature: float, marked: int | None
) -> None:
    bench = Bench(decode=2)
    bench.coordinator._seeded_resume = seeded
    run, _ = bench.start(temperature=temperature)
    (decode,) = run.decoding
    bench.tokens(bench.submits("p0")[0].attempt, 0, 10)
    bench.tokens(decode.ident, 1, 11, 12)
    bench.lose(decode.worker)
    assert run.info.redrawn_from == marked
    run.cancel()
    bench.check_idle()


def test_a_stream_that_was_taken_over_is_not_moved_again_from_where_it_was() -> None:
    """The target's first token is here, the source's word is still on its way."""
    moving = Moving()
    target = moving.move()
    moving.bench.tokens(target.attempt, 3, 13)
    assert moving.bench.coordinator.move_from("d0") == 1
    assert moving.run.move is None
    assert len(moving.bench.submits("d1")) == 1
    assert moving.run.info.decode_worker == "d1"


@pytest.mark.parametrize("how", ["link lost", "said"])
def test_a_source_that_fails_once_it_is_relieved_is_not_missed(how: str) -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.bench.tokens(target.attempt, 3, 13)
    if how == "said":
        moving.ends(moving.source, error="engine gone")
    else:
        moving.bench.lose("d0")
    assert moving.run.placements == 1
    moving.bench.tokens(target.attempt, 4, 14, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14]
    moving.bench.check_idle()


def test_a_worker_that_is_lost_as_old_source_and_new_target_leaves_the_stream() -> None:
    moving = Moving(max_tokens=5)
    target = moving.move()
    moving.bench.tokens(target.attempt, 3, 13)
    moving.bench.coordinator.move_from("d1")
    assert len(moving.bench.submits("d0")) == 2
    moving.bench.lose("d0")
    assert (moving.run.placements, moving.run.move) == (1, None)
    moving.bench.tokens(target.attempt, 4, 14, ended="length")
    assert moving.sink.tokens == [10, 11, 12, 13, 14]
    moving.bench.check_idle()


def test_a_target_that_is_silent_after_the_source_left_is_to_blame() -> None:
    moving = Moving()
    moving.move()
    moving.ends(moving.source, MOVED)
    for entry in moving.bench.entries.values():
        entry.waiting = 0
    moving.bench.now += 6
    moving.bench.coordinator.sweep()
    assert moving.run.placements == 2
    assert moving.run.failed_on == {"d1"}
    moving.run.cancel()
    moving.bench.check_idle()


def test_engines_that_cannot_are_not_asked() -> None:
    moving = Moving()
    moving.bench.coordinator._mover._able = False
    assert moving.bench.coordinator.move_from("d0") == 1
    assert moving.bench.submits("d1") == []
