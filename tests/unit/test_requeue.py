"""Prompts that wait on one worker, while another one is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrouter.requeue import MOST_REQUEUES
from serving.breaker import FIRST_OPEN_S, THRESHOLD
from serving.engine.base import Mode
from serving.requeue import LOOKS_A_SWEEP
from serving.wire import Begun, Step, Submit
from tests.unit.coordinator_rig import Bench

LONG = 40_000  # two seconds, by the prior of 20k tokens a second


def long_prompt(index: int) -> range:
    return range(index + 1, index + 1 + LONG + index)


def bench_with_queue(runs: int = 6) -> Bench:
    """All of them on `p0`, the first one begun; no two share a prefix."""
    bench = Bench(policy="ttft_regret")
    for index in range(runs):
        bench.start(prompt=long_prompt(index))
    begin(bench, "p0", 0)
    return bench


def begin(bench: Bench, worker: str, index: int) -> None:
    bench.coordinator.on_step(Step(begun=[Begun(bench.submits(worker)[index].attempt, 0)]))


def sweeps(bench: Bench, seconds: float) -> None:
    until = bench.now + seconds
    while bench.now < until:
        bench.now += 0.25
        bench.coordinator.sweep()


def lengths(submits: list[Submit]) -> list[int]:
    return [len(submit.tokens) // 4 for submit in submits]


def test_a_new_worker_takes_its_part_of_what_already_waits():
    bench = bench_with_queue()
    sweeps(bench, 2)
    assert len(bench.submits("p0")) == 6
    bench.add("p1", "prefill")
    sweeps(bench, 2)
    moved = bench.submits("p1")
    assert 2 <= len(moved) <= 3, "about half of the five that wait"
    assert lengths(moved)[0] == LONG + 2, "the next one is soon begun where it is; the oldest after it goes"
    assert len(bench.cancels("p0")) == len(moved)
    assert bench.coordinator.attempts_in_flight == bench.router.in_flight == 12


def test_pools_are_not_compared_with_each_other():
    """Prefill workers are busy, decode workers have no prompts at all: that is as it should be."""
    bench = Bench(prefill=2, decode=2, policy="ttft_regret")
    for index in range(4):
        bench.start(prompt=long_prompt(index))
    assert not bench.router.is_uneven(1000, bench.now)
    bench.add("p2", "prefill")
    assert bench.router.is_uneven(1000, bench.now)


def test_what_was_moved_is_a_request_like_any_other():
    bench = bench_with_queue(3)
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    (prefill,) = bench.submits("p1")
    decode = bench.submits("d0")[-1]
    assert decode.mode == Mode.DECODE
    assert decode.handoff.attempt == prefill.attempt
    bench.coordinator.on_step(Step(begun=[Begun(prefill.attempt, 0)]))
    bench.tokens(prefill.attempt, 0, 10)
    bench.tokens(decode.attempt, 1, 11, 12, 13, ended="length")
    assert bench.coordinator.in_flight == 2


def test_the_old_workers_late_word_is_about_nobody():
    bench = bench_with_queue(3)
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    (old,) = bench.cancels("p0")
    bench.coordinator.on_step(Step(begun=[Begun(old, 0)]))
    bench.tokens(old, 0, 99)
    assert bench.coordinator.in_flight == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_moves_where_nothing_is_gained(workers: int):
    bench = Bench(prefill=workers, policy="ttft_regret")
    for index in range(8):
        bench.start(prompt=long_prompt(index))
    sweeps(bench, 4)
    assert bench.cancels("p0") == []


def test_what_has_begun_stays():
    """However long it still takes where it is."""
    bench = bench_with_queue(3)
    for index in range(3):
        begin(bench, "p0", index)
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    assert bench.submits("p1") == []


@pytest.mark.parametrize("what", ["early", "final"])
def test_what_decode_speaks_of_has_begun(what: str):
    """Frames of the prefill worker may come after those of the decode worker."""
    bench = bench_with_queue(3)
    decode = bench.submits("d0")[2].attempt
    bench.tokens(decode, 1, 11, 12, 13, ended="length" if what == "final" else None)
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    assert lengths(bench.submits("p1")) == [LONG + 1]


def test_nothing_moves_to_a_worker_that_fails_requests():
    """An idle worker is idle for a reason."""
    bench = bench_with_queue(4)
    sweeps(bench, 1.5)
    bench.add("p1", "prefill")
    for _ in range(THRESHOLD):
        bench.coordinator._breakers.failed("p1", bench.now)
    sweeps(bench, FIRST_OPEN_S - 0.25)
    assert bench.submits("p1") == []
    sweeps(bench, 0.5)
    assert len(bench.submits("p1")) == 1, "one at a time, to see whether it is well again"


def test_nothing_moves_where_the_request_failed():
    bench = bench_with_queue(4)
    for run in bench.coordinator._live:
        run.failed_on.add("p1")
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    assert bench.submits("p1") == []


def test_nothing_moves_where_engines_do_not_tell_what_has_begun():
    bench = bench_with_queue(4)
    bench.coordinator._requeuer._able = False
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    assert bench.submits("p1") == []


def test_a_look_is_no_turn():
    """Policies that take turns, or count what they sent, remember choices that were made."""
    bench = Bench(prefill=2, policy="round_robin")
    before = bench.start()[0].info.prefill_worker
    wanted = bench.coordinator._placer._wanted(next(iter(bench.coordinator._live)), bench.now)
    for _ in range(3):
        bench.router.choose(wanted, bench.now, look=True)
    assert bench.start()[0].info.prefill_worker != before


def test_its_tries_go_on_and_its_time_is_the_new_workers():
    """Else the new worker were blamed for what the old one's queue took."""
    bench = bench_with_queue(16)
    runs = list(bench.coordinator._live)
    bench.now += 20
    bench.add("p1", "prefill")
    sweeps(bench, 3)
    moved = [run for run in runs if run.requeues]
    assert moved
    assert all(run.tries == 1 and run.info.resumes == 0 for run in moved)
    assert all(bench.now - run.stage_s < 3 and run.waited_s > 20 for run in moved)
    sweeps(bench, 10)
    assert not bench.coordinator._breakers.avoid(bench.now)


def test_a_request_is_not_moved_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Whatever the predictions: another worker that always seems free gets it twice at the most."""
    bench = bench_with_queue(4)
    bench.add("p1", "prefill")
    monkeypatch.setattr(type(bench.router), "is_uneven", lambda *_: True)
    monkeypatch.setattr(type(bench.coordinator._placer), "is_sooner_elsewhere", lambda *_: True)
    sweeps(bench, 20)
    assert [run.requeues for run in bench.coordinator._live] == [0, *[MOST_REQUEUES] * 3]
    assert bench.coordinator.attempts_in_flight == bench.router.in_flight == 8


def test_a_sweep_looks_at_few(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(policy="ttft_regret", max_inflight=1000)
    for index in range(200):
        bench.start(prompt=long_prompt(index))
    bench.now += 2
    bench.add("p1", "prefill")
    looks = []
    placer = bench.coordinator._placer
    monkeypatch.setattr(
        type(placer), "is_sooner_elsewhere", lambda self, run, waiting, now: looks.append(run) and False
    )
    bench.coordinator.sweep()
    assert len(looks) == LOOKS_A_SWEEP
    for _ in range(24):  # six seconds
        bench.now += 0.25
        bench.coordinator.sweep()
    assert len(looks) == len(set(map(id, looks))) == 200, "all have their turn before one has its second"


# ------------------------------------------------------------ a decode worker that leaves


def draining_bench(runs: int = 6, decode: int = 2) -> Bench:
    """All prompts on `p0`, the first one begun; their decode workers take turns."""
    bench = Bench(prefill=1, decode=decode, policy="ttft_regret")
    for index in range(runs):
        bench.start(prompt=long_prompt(index))
    begin(bench, "p0", 0)
    return bench


def leave(bench: Bench, worker: str, times: int = 1) -> int:
    """How many attempts were there at the last call."""
    bench.router.add_worker(replace(bench.router.load_of(worker).view, draining=True))
    return [bench.coordinator.move_from(worker) for _ in range(times)][-1]


def test_a_leaving_decode_worker_need_not_wait_for_prompts_that_have_not_begun():
    bench = draining_bench(20)
    first = bench.submits("p0")[0].tokens
    there = [s for s in bench.submits("d0") if s.tokens != first]
    assert len(there) > LOOKS_A_SWEEP
    assert leave(bench, "d0") == len(bench.submits("d0"))
    assert len(bench.cancels("d0")) == LOOKS_A_SWEEP, "a few at a time: tokens wait meanwhile"
    assert leave(bench, "d0", times=4) == len(bench.submits("d0")) - len(there)
    again = bench.submits("p0")[20:]
    assert sorted(s.tokens for s in again) == sorted(s.tokens for s in there)
    assert {s.handoff.attempt for s in bench.submits("d1")} >= {s.attempt for s in again}
    assert bench.coordinator.attempts_in_flight == bench.router.in_flight == 40


def test_what_has_begun_is_decoded_where_it_was_to_be():
    bench = draining_bench(2)
    begin(bench, "p0", 1)
    before = len(bench.submits("d0"))
    assert leave(bench, "d0", times=3) == before
    assert bench.cancels("d0") == []


def test_the_last_decode_worker_keeps_what_waits():
    bench = draining_bench(4, decode=1)
    assert leave(bench, "d0", times=3) == 4
    assert bench.cancels("d0") == []


def test_a_leaving_prefill_worker_computes_what_it_has():
    """Elsewhere these prompts would be the last ones; here they are the next ones."""
    bench = Bench(prefill=2, policy="ttft_regret")
    for index in range(8):
        bench.start(prompt=long_prompt(index))
    leave(bench, "p0", times=3)
    assert bench.cancels("p0") == []


def test_a_prompt_keeps_its_age_wherever_it_goes():
    bench = bench_with_queue(3)
    bench.add("p1", "prefill")
    assert {s.waited_ms for s in bench.submits("p0")} == {0}
    sweeps(bench, 3)
    (moved,) = bench.submits("p1")
    assert 1000 <= moved.waited_ms <= 3000
    load = bench.router.load_of("p1")
    booking = load.bookings[moved.attempt]
    younger = load.due_s(booking.prefill_ms, booking.booked_s - 0.9)
    assert load.made_to_wait(younger, bench.now) == 0, "what is younger and came there first is after it"
