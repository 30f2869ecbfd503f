"""What is late, what only waits for room, and who is blamed for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.breaker import THRESHOLD
from serving.config import Deadlines
from serving.engine.base import MOST_PARKED, Mode
from serving.errors import DeadlineExceeded
from serving.run import Run, Stage, WorkerEntry
from serving.wire import Begun, Ended, Step
from tests.unit.coordinator_rig import Bench

LIMITS = Deadlines()
SECOND = 1000.0


def sweeps(bench: Bench, ms: float) -> None:
    until = bench.now + ms / 1e3
    while bench.now < until:
        bench.now = min(bench.now + 0.25, until)
        bench.coordinator.sweep()


def parks(bench: Bench, worker: str, *attempts: int | None) -> None:
    """What the worker last said: these lack only room; None: it does not tell."""
    known = None if attempts == (None,) else frozenset(a for a in attempts if a is not None)
    bench.entries[worker].parked = known


def decode_of(run: Run) -> int:
    return next(a.ident for a in run.attempts.values() if a.mode is Mode.DECODE)


def at(bench: Bench, stage: Stage) -> Run:
    """A run that has just entered the stage; its decode worker is `d0`."""
    run, _ = bench.start(max_tokens=50)
    prefill, decode = bench.submits("p0")[-1].attempt, decode_of(run)
    parks(bench, "d0")
    if stage is not Stage.QUEUE:
        bench.tokens(prefill, 0, 10)
    if stage in (Stage.FIRST_DECODE, Stage.DECODE):
        bench.coordinator.on_step(Step(begun=[Begun(decode, 0)]))
    if stage is Stage.DECODE:
        bench.tokens(decode, 1, 11, 12)
    assert run.stage is stage
    return run


STAGES = {
    Stage.TRANSFER: LIMITS.transfer_ms,
    Stage.FIRST_DECODE: LIMITS.first_token_ms,
    Stage.DECODE: LIMITS.silence_ms,
}


@pytest.mark.parametrize(("stage", "limit_ms"), STAGES.items())
def test_who_lacks_room_is_in_a_queue(stage: Stage, limit_ms: float) -> None:
    bench = Bench()
    run = at(bench, stage)
    parks(bench, "d0", decode_of(run))
    sweeps(bench, LIMITS.queue_ms - SECOND)
    assert run.info.resumes == 0
    parks(bench, "d0")  # there is room now: the stage's own time begins
    sweeps(bench, limit_ms - SECOND if limit_ms > SECOND else limit_ms / 2)
    assert run.info.resumes == 0
    sweeps(bench, 2 * SECOND)
    assert run.info.resumes == 1, f"late in {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_too_long_a_queue_is_left_and_nobody_blamed(stage: Stage) -> None:
    bench = Bench(decode=1)
    for _ in range(2 * THRESHOLD):
        run = at(bench, stage)
        parks(bench, "d0", decode_of(run))
        sweeps(bench, LIMITS.queue_ms + SECOND)
        assert run.info.resumes == 1
        assert "d0" in run.failed_on, "it is placed where there may be room"
        run.cancel()
    assert bench.coordinator._breakers.avoid(bench.now) == frozenset()


def test_a_prompt_that_waits_too_long_blames_nobody_either() -> None:
    bench = Bench()
    for _ in range(2 * THRESHOLD):
        run = at(bench, Stage.QUEUE)
        sweeps(bench, LIMITS.queue_ms + SECOND)
        assert run.info.resumes == 1
        run.cancel()
    assert bench.coordinator._breakers.avoid(bench.now) == frozenset()


@pytest.mark.parametrize(
    ("told", "waiting", "resumes"),
    [
        pytest.param((), 5, 1, id="others_wait_there"),
        pytest.param((None,), 5, 0, id="nobody_tells_who"),
        pytest.param((None,), 0, 1, id="nobody_waits"),
        pytest.param(tuple(range(MOST_PARKED)), 5, 0, id="more_than_are_told"),
    ],
)
def test_silence_is_no_queue_because_something_waits(
    told: tuple[int | None, ...], waiting: int, resumes: int
) -> None:
    bench = Bench()
    run = at(bench, Stage.DECODE)
    parks(bench, "d0", *told)
    bench.entries["d0"].waiting = waiting
    sweeps(bench, LIMITS.silence_ms + SECOND)
    assert run.info.resumes == resumes


def test_the_target_of_a_move_may_lack_room_and_its_source_be_silent() -> None:
    bench = Bench(decode=2)
    run = at(bench, Stage.DECODE)
    source = run.decoding[0]
    other = "d1" if source.worker == "d0" else "d0"
    bench.router.add_worker(replace(bench.router.load_of(source.worker).view, draining=True))
    bench.coordinator.move_from(source.worker)
    assert run.move is not None
    parks(bench, source.worker)
    parks(bench, other, run.move.target)
    sweeps(bench, LIMITS.silence_ms + SECOND)
    assert run.info.resumes == 1


def test_prefill_succeeds_when_its_kv_is_read() -> None:
    """A worker whose KV nobody can read computes prompts as well as any."""
    bench = Bench(prefill=2, decode=3)
    for _ in range(4 * THRESHOLD):
        run, _ = bench.start()
        decode = next(a for a in run.attempts.values() if a.mode is Mode.DECODE)
        prefill = next(a for a in run.attempts.values() if a.mode is Mode.PREFILL)
        bench.tokens(prefill.ident, 0, 10)
        word = Step(begun=[Begun(decode.ident, 0)])
        if prefill.worker == "p0":
            word = Step(ended=[Ended(decode.ident, "", "not read in 10 s", retryable=True)])
        bench.coordinator.on_step(word)
        run.cancel()
    assert bench.coordinator._breakers.avoid(bench.now) == {"p0"}


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.DECODE])
def test_what_fails_after_the_clients_own_deadline_is_nobodys_fault(mode: Mode) -> None:
    bench = Bench()
    for _ in range(2 * THRESHOLD):
        run, sink = bench.start()
        attempt = next(a for a in run.attempts.values() if a.mode is mode)
        run.deadline_s = bench.now + 0.004
        bench.now += 0.005
        bench.coordinator.on_step(Step(ended=[Ended(attempt.ident, "", "too late", retryable=True)]))
        assert isinstance(sink.error, DeadlineExceeded)
        assert run.info.resumes == 0
    assert bench.coordinator._breakers.avoid(bench.now) == frozenset()
    bench.check_idle()


def test_a_worker_that_does_not_tell_parks_nobody() -> None:
    assert not WorkerEntry("d", 1, "host:d", print).parks(1)
