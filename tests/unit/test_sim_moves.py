"""Simulated decode workers that leave hand their streams over, as live ones do."""

from __future__ import annotations

import pytest

from kvrouter.deadline import Order
from planner.observation import Decision, Observation, VariantDecision
from planner.sim_cluster import Cluster
from planner.sim_setup import VARIANT, SimSetup
from planner.sim_worker import EngineTimes, Job, SimWorker
from planner.workload import TraceRequest, made_up

TIMES = EngineTimes(prefill=(0.0, 0.1, 0.0), step=(20.0, 0.5, 0.001), move_ms=100.0)


class Steps:
    """(prefill, decode, lent) from the given times on."""

    interval_s = 5.0

    def __init__(self, *steps: tuple[float, tuple[int, int, int]]) -> None:
        self._steps = steps

    def decide(self, observation: Observation, now_s: float) -> Decision:
        prefill, decode, lent = [step for at_s, step in self._steps if at_s <= now_s][-1]
        return Decision({VARIANT: VariantDecision(prefill, decode, lent, "as written")})


def simulated(policy: Steps, requests: list[TraceRequest], **changes: object) -> Cluster:
    run = Cluster(SimSetup(TIMES, **{"initial": (1, 2), "startup_s": 20.0, **changes}), policy)  # type: ignore[arg-type]
    run.run(requests)
    assert all(job.finished_s is not None for job in run.jobs)
    assert run._router.in_flight == 0
    assert all(worker.engine.batch == worker.engine.queued == 0 for worker in run.workers.values())
    return run


def test_a_stream_that_leaves_takes_along_what_it_has() -> None:
    """Two of 11 tokens make steps of 21 ms; one leaves in the middle of the third."""
    times = EngineTimes(prefill=(0.0, 0.1, 0.0), step=(20.0, 0.5, 0.0))
    engine = SimWorker("w", times, Order.DEADLINE, lambda *_: None)
    jobs = [Job(TraceRequest(0.0, 100, 11), 100, 11, attempt=n) for n in (1, 2)]
    for job in jobs:
        engine.hand_over(job, 0.0)
    engine.take_away(jobs[0], 2.5 * 0.021)
    assert (jobs[0].context_tokens, jobs[0].left_tokens) == (102, 9), (
        "three of 11 are out, the first counts"
    )
    assert engine.streams() == [jobs[1]]
    assert engine._kv_tokens == pytest.approx(100 + 1 + 2.5)
    assert engine._promised_tokens == 111
    assert engine.next_event_s() == pytest.approx(2.5 * 0.021 + 7.5 * 0.0205)
    engine.hand_over(jobs[0], 0.0525)
    assert engine._kv_tokens == pytest.approx(100 + 1 + 2.5 + 102 + 1)


def test_what_waits_for_room_leaves_as_it_came() -> None:
    engine = SimWorker(
        "w", EngineTimes(TIMES.prefill, TIMES.step, max_batch=1), Order.DEADLINE, lambda *_: None
    )
    jobs = [Job(TraceRequest(0.0, 100, 50), 100, 50, attempt=n) for n in (1, 2)]
    for job in jobs:
        engine.hand_over(job, 0.0)
    engine.take_away(jobs[1], 0.1)
    assert (jobs[1].context_tokens, jobs[1].left_tokens, engine.batch) == (100, 50, 1)


def test_a_decode_worker_leaves_within_a_second() -> None:
    """Its streams of a minute go on at the other one, each after a pause of 100 ms."""
    streams = [TraceRequest(0.1 * n, 100, 2000) for n in range(8)]
    run = simulated(Steps((0, (1, 2, 0)), (30, (1, 1, 0))), streams)
    (left,) = [w for w in run.workers.values() if w.gone_s is not None]
    assert left.deployment == "decode"
    assert left.gone_s == pytest.approx(30.1)
    assert {job.moved for job in run.jobs} == {0, 1}
    assert all(job.resumed == 0 for job in run.jobs)
    assert run.end_s > 50


def test_a_worker_that_is_lent_plays_its_role_within_a_second() -> None:
    streams = [TraceRequest(0.1 * n, 100, 4000) for n in range(8)]
    run = simulated(Steps((0, (1, 2, 0)), (30, (1, 2, 1)), (60, (1, 2, 0))), streams)
    assert [s.ready for s in run.samples if s.at_s in (30, 35, 60, 65)] == [(1, 1), (2, 1), (1, 2), (1, 2)]
    assert sum(job.moved for job in run.jobs) == 4


def test_a_prompt_computed_elsewhere_follows_within_a_second() -> None:
    """It was to be decoded where, when its prompt is computed, nobody stays."""
    long = [TraceRequest(29.0 + 0.01 * n, 15_000, 500) for n in range(4)]
    run = simulated(Steps((0, (1, 2, 0)), (30, (1, 1, 0))), long)
    (left,) = [w for w in run.workers.values() if w.gone_s is not None]
    assert left.gone_s is not None
    computed_s = max(job.first_token_s or 0.0 for job in run.jobs)
    assert left.gone_s < computed_s + 1.5


def test_the_last_decode_worker_keeps_its_streams() -> None:
    run = simulated(Steps((0, (1, 1, 0)), (30, (1, 0, 0))), [TraceRequest(0.0, 100, 2000)], initial=(1, 1))
    (left,) = [w for w in run.workers.values() if w.gone_s is not None]
    assert run.jobs[0].moved == 0
    assert left.gone_s == pytest.approx(run.jobs[0].finished_s)


@pytest.mark.parametrize("seed", range(4))
def test_moves_and_failures_lose_nothing(seed: int) -> None:
    steps = [(10.0 * n, ((2, 3, 0), (2, 2, 1), (3, 3, -1), (1, 1, 0))[n % 4]) for n in range(30)]
    requests = made_up(6.0, 240.0, 800, 200, seed=seed)
    run = simulated(Steps(*steps), requests, initial=(2, 3), mean_time_to_failure_s=60.0, seed=seed)
    assert run.failures > 2
    assert sum(job.moved for job in run.jobs) > 20
