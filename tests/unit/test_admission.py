"""Admission alone: what is let in, what is refused and why, and when it would be let in."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.deadline import Order
from kvrouter.load import Booking, WorkerLoad
from kvrouter.perf_model import WorkerModels
from kvrouter.router import Choice, WorkerView
from serving.admission import PRESSURE_RATE, Admission, Ask, Verdict
from serving.config import AdmissionConfig, Slo
from tests.unit.router_rig import Report

BLOCK = 16
SLO = Slo(ttft_ms=800, ttft_ms_per_1k_tokens=50, itl_ms=40)
REMOTE = Choice(decode="d", prefill="p")


class Bench:
    """One prefill worker of 1 ms a token and one decode worker of 10 ms a step and 1 ms a sequence."""

    def __init__(
        self,
        *,
        evidence: int = 100,
        slo: Slo = SLO,
        max_batch: int = 256,
        mode: Literal["deadline", "slo"] = "slo",
        slack: float = 1.0,
        reserve: float = 0.25,
    ) -> None:
        models = [
            WorkerModels.from_priors((0.0, 1.0, 0.0), (10.0, 1.0, 0.0), evidence=evidence) for _ in "pd"
        ]
        self.p = WorkerLoad(WorkerView("p", "prefill", BLOCK, 1000, 256), models[0], Order.DEADLINE)
        self.d = WorkerLoad(WorkerView("d", "decode", BLOCK, 1000, max_batch), models[1], Order.DEADLINE)
        self.admission = Admission(
            slo,
            AdmissionConfig(mode=mode, slack=slack, reserve=reserve),
            {"p": self.p, "d": self.d}.__getitem__,
        )
        self.now_s = 100.0
        self.attempts = 0
        self.limits: dict[int, float] = {}

    def look(self, tokens: int = 100, max_tokens: int = 100, **ask: object) -> Verdict:
        return self.admission.look(Ask(tokens, max_tokens, **ask), REMOTE, self.now_s)  # type: ignore[arg-type]

    def decide(self, tokens: int = 100, max_tokens: int = 100, **ask: object) -> Verdict:
        """Books what is let in."""
        verdict = self.admission.decide(
            Ask(tokens, max_tokens, **ask),  # type: ignore[arg-type]
            REMOTE,
            self.now_s,
        )
        if verdict.reason is None:
            self.book(tokens, verdict.limit_s)
        return verdict

    def book(self, tokens: int, limit_s: float = inf) -> None:
        self.attempts += 1
        self.limits[self.attempts] = limit_s
        self.p.book(
            Booking(self.attempts, True, tokens, tokens, float(tokens), 0, 0, self.now_s, tokens, limit_s),
            self.now_s,
        )

    def queue(self, ms: int) -> None:
        """Prompts that are due before any of 100 tokens."""
        for _ in range(ms // 50):
            self.book(50)

    def decodes(self, n: int, free_blocks: int = 1000) -> None:
        self.d.report(Report(n, free_blocks=free_blocks, total_blocks=1000, step_ms=0.0), self.now_s)


# ---------------------------------------------------------------- each rule


@pytest.mark.parametrize(
    ("queued", "tokens", "reason"),
    [
        pytest.param([], 100, None, id="idle"),
        pytest.param([], 50_000, None, id="idle, however long"),
        pytest.param([90] * 6, 100, None, id="within the target"),
        pytest.param([90] * 9, 100, "ttft", id="beyond it"),
        pytest.param([700, 700], 2000, "ttft", id="a long one waits for all shorter ones"),
        pytest.param([20_000], 100, None, id="a short one overtakes a long one"),
    ],
)
def test_the_first_token_must_come_in_time(queued: list[int], tokens: int, reason: str | None) -> None:
    bench = Bench()
    for other in queued:
        bench.book(other)
    assert bench.look(tokens).reason == reason


def test_the_target_grows_with_the_prompt() -> None:
    bench = Bench(slo=Slo(ttft_ms=800, ttft_ms_per_1k_tokens=5000))
    bench.queue(1350)
    assert bench.look(100).reason == "ttft"
    assert bench.look(1500).reason is None  # 800 + 7500 ms, of which 1500 are its own


def test_overtaking_must_not_make_others_late() -> None:
    bench = Bench()
    assert bench.decide(5000).reason is None
    assert bench.look(600).reason is None
    assert bench.decide(400).reason is None
    verdict = bench.look(600)
    assert verdict.reason == "ttft"
    assert verdict.wait_ms < 500  # by itself it could have been in time


def test_a_client_with_less_time_is_held_to_it() -> None:
    bench = Bench()
    bench.queue(500)
    assert bench.look(100).reason is None
    assert bench.look(100, timeout_ms=400).reason == "ttft"
    assert Bench().look(100, timeout_ms=101).reason is None, "nothing is in its way"


@pytest.mark.parametrize("mode", ["deadline", "slo"])
def test_what_no_worker_could_do_in_its_clients_time_is_refused_in_an_idle_queue_too(mode: Any) -> None:
    bench = Bench(mode=mode)
    verdict = bench.look(10_000, timeout_ms=1000)
    assert (verdict.reason, verdict.least_ms, verdict.retry_after_s) == ("timeout", 10_000, 0)
    assert Bench(mode=mode, evidence=2).look(10_000, timeout_ms=1000).reason is None, "who knows"
    # The first token in time is all that is known to be possible, unless more are asked for at least.
    assert bench.look(100, 2000, timeout_ms=500).reason is None
    assert bench.look(100, 2000, min_tokens=50, timeout_ms=500).reason == "timeout"


def test_what_no_worker_could_do_is_no_sign_of_pressure() -> None:
    bench = Bench()
    bench.decide(10_000, timeout_ms=1000)
    assert bench.admission._refused == 0


@pytest.mark.parametrize(
    ("tokens", "cached", "timeout_ms", "slack", "limit_ms"),
    [
        pytest.param(100, 0, None, 1.0, 900, id="the target and its own work"),
        pytest.param(100, 64, None, 1.0, 900, id="wherever a part of it is cached"),
        pytest.param(100, 0, None, 2.0, 1700, id="slack is for the target"),
        pytest.param(100, 0, 500.0, 2.0, 500, id="no later than its client waits"),
        pytest.param(100, 0, 5000.0, 1.0, 900, id="a patient client"),
    ],
)
def test_one_limit_for_the_first_token(
    tokens: int, cached: int, timeout_ms: float | None, slack: float, limit_ms: float
) -> None:
    bench = Bench(slack=slack)
    choice = Choice(decode="d", prefill="p", cached_tokens=cached)
    verdict = bench.admission.look(Ask(tokens, 100, timeout_ms=timeout_ms), choice, bench.now_s)
    assert verdict.limit_s - bench.now_s == pytest.approx(limit_ms / 1e3)


@pytest.mark.parametrize(
    ("decodes", "max_tokens", "reason"),
    [
        pytest.param(0, 100, None, id="idle"),
        pytest.param(20, 100, None, id="room"),
        pytest.param(40, 100, "itl", id="steps would be too long"),
        pytest.param(40, 1, None, id="no decode wanted"),
    ],
)
def test_the_pace_must_hold(decodes: int, max_tokens: int, reason: str | None) -> None:
    bench = Bench()
    bench.decodes(decodes)
    assert bench.look(100, max_tokens).reason == reason


def test_decodes_that_will_have_ended_do_not_count() -> None:
    bench = Bench()
    bench.decodes(34)
    for _ in range(200):
        bench.admission.ended(40)  # answers are short: half of the batch ends within 1.2 s
    assert bench.look(100).reason == "itl"
    assert bench.look(2000).reason is None, "its prompt takes 2 s"


def test_a_pace_out_of_reach_refuses_nobody() -> None:
    bench = Bench(slo=Slo(itl_ms=5))
    bench.decodes(40)
    assert bench.look().reason is None


def test_room_for_the_context() -> None:
    bench = Bench()
    for _ in range(300):
        bench.admission.ended(4000)
    bench.decodes(2, free_blocks=2)
    verdict = bench.look(100)
    assert verdict.reason == "kv"
    assert verdict.retry_after_s > 0
    bench.decodes(2, free_blocks=1000)
    assert bench.look(16_000).reason is None, "all of the room is there, its answer has to see"
    bench.decodes(0, free_blocks=2)
    assert bench.look(100).reason is None, "what an idle worker holds will go"


def test_a_full_batch() -> None:
    bench = Bench(max_batch=8)
    bench.decodes(8)
    assert bench.look().reason == "itl"


def test_without_evidence_nobody_is_refused() -> None:
    bench = Bench(evidence=0)
    bench.decodes(40)
    for _ in range(20):
        assert bench.decide(1000).reason is None


def test_slack_loosens() -> None:
    bench = Bench(slack=3.0)
    bench.queue(1000)
    bench.decodes(40)
    assert bench.look(100).reason is None


def test_by_deadline_only_the_first_token_counts() -> None:
    bench = Bench(mode="deadline", slo=Slo(ttft_ms=60_000, ttft_ms_per_1k_tokens=0))
    bench.decodes(200, free_blocks=0)
    bench.queue(1000)
    assert bench.look(100).reason is None
    assert bench.look(100, timeout_ms=900).reason == "ttft"
    assert bench.look(100, timeout_ms=3000).reason is None, "the margin is for it and not for the longest"
    bench.queue(60_000)
    assert bench.look(100).reason == "ttft"


# ---------------------------------------------------------------- claims


def under_pressure(bench: Bench) -> None:
    bench.admission._refused = 0.5


def test_no_claim_counts_before_anybody_was_refused() -> None:
    bench = Bench()
    bench.decide(100, tenant="a")
    bench.decide(100, tenant="b", priority=1)
    bench.queue(500)
    assert bench.look(100, tenant="a").reason is None


def test_pressure_comes_with_refusals_and_goes_without() -> None:
    bench = Bench()
    bench.queue(2000)
    for _ in range(5):
        assert bench.decide(100).reason == "ttft"
    assert bench.admission._refused > 0
    bench.now_s += 1000
    before = bench.admission._refused
    bench.decide(1)
    assert bench.admission._refused == pytest.approx(before * (1 - PRESSURE_RATE))


def test_a_tenant_over_its_share_leaves_room() -> None:
    bench = Bench(reserve=0.5)
    under_pressure(bench)
    assert bench.decide(300, tenant="greedy").reason is None
    bench.decide(10, tenant="modest")
    bench.queue(400)  # beyond half of the time there is
    refused = bench.look(100, tenant="greedy")
    assert refused.reason == "share"
    assert refused.retry_after_s > 0
    assert bench.look(100, tenant="modest").reason is None


def test_a_lower_priority_leaves_room() -> None:
    bench = Bench(reserve=0.25)
    under_pressure(bench)
    bench.decide(10, priority=2)
    bench.queue(500)
    assert bench.look(100, priority=0).reason == "priority"
    assert bench.look(100, priority=2).reason is None
    bench.now_s += 60  # nobody of the higher one has asked for long
    bench.queue(500)
    assert bench.look(100, priority=0).reason is None


def test_a_lane_over_its_share_leaves_room() -> None:
    bench = Bench(reserve=0.5)
    for _ in range(64):
        bench.admission.lengths.offer(10)
    for _ in range(64):
        bench.admission.lengths.offer(640)
    under_pressure(bench)
    assert bench.decide(640).reason is None
    bench.decide(10)
    bench.now_s += 0.65
    bench.queue(400)
    assert bench.look(640).reason == "lane"
    assert bench.look(100).reason is None


# ---------------------------------------------------------------- properties

sizes = st.integers(1, 6000)


@given(st.lists(st.tuples(sizes, st.integers(0, 800)), max_size=40), st.sampled_from([0.0, 0.25, 0.5]))
@settings(deadline=None, max_examples=60)
def test_what_is_let_in_fits(arrivals: list[tuple[int, int]], reserve: float) -> None:
    """Served in due order by a worker as fast as predicted, all that was admitted meets its limit."""
    bench = Bench(reserve=reserve)
    for tokens, pause_ms in arrivals:
        bench.now_s += pause_ms / 1e3
        bench.decide(tokens)
        done_s = bench.now_s
        by_attempt = {id(prompt): attempt for attempt, prompt in bench.p._backlog._by_attempt.items()}
        bench.p._backlog._work_off(bench.now_s)
        for prompt in bench.p._backlog._queue:
            done_s += prompt.left_ms / 1e3
            if prompt.left_ms > 0:
                assert done_s <= bench.limits[by_attempt[id(prompt)]] + 1e-6


@given(st.lists(sizes, max_size=12), st.integers(1, 3000), st.integers(1, 20_000), st.integers(0, 20_000))
@settings(deadline=None, max_examples=100)
def test_who_is_refused_had_the_least_hope(
    queued: list[int], tokens: int, timeout_ms: int, less_ms: int
) -> None:
    """Of two that differ only in the time they have, never the one with more is refused alone."""
    bench = Bench()
    for other in queued:
        bench.decide(other)
    if bench.look(tokens, timeout_ms=float(timeout_ms)).reason is None:
        assert bench.look(tokens, timeout_ms=float(timeout_ms + less_ms)).reason is None


@given(st.lists(sizes, min_size=1, max_size=30), sizes, st.integers(0, 60))
@settings(deadline=None, max_examples=100)
def test_retry_after_is_true(queued: list[int], tokens: int, decodes: int) -> None:
    """If nobody else comes it is let in by then, and where it waits for prompts not much earlier."""
    bench = Bench(reserve=0.0)
    for other in queued:
        bench.decide(other)
    verdict = bench.look(tokens)
    if verdict.reason is None:
        return
    began_s = bench.now_s
    bench.now_s = began_s + verdict.retry_after_s + 1e-3
    assert bench.look(tokens).reason is None or bench.look(tokens).retry_after_s < verdict.retry_after_s
    while bench.look(tokens).reason is not None:
        bench.now_s += 0.05
        assert bench.now_s < began_s + 2 * verdict.retry_after_s + 0.1


def test_retry_after_of_a_full_batch_is_true_on_average() -> None:
    """It says when so many of the batch will have ended, at their mean rate."""
    bench = Bench()
    bench.decodes(40)
    verdict = bench.look(1)
    life_s = 256 * 50 / 1e3
    assert 0.1 * life_s < verdict.retry_after_s < 0.5 * life_s
    bench.decodes(28)
    assert bench.look(1).reason is None
    bench.decodes(30)
    assert bench.look(1).retry_after_s < verdict.retry_after_s
