"""The gate over a real router: where a request may go, and what its client is told if nowhere."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest

from kvrouter.events import CacheEvents
from kvrouter.index import PrefixIndex
from kvrouter.perf_model import WorkerModels
from kvrouter.policy_router import build_router
from kvrouter.router import Choice, RouterRequest, WorkerView
from serving.config import AdmissionConfig, Deadlines, Slo, SloClass
from serving.engine.base import SamplingParams
from serving.errors import ContextLengthExceeded
from serving.frontend_metrics import FrontendMetrics
from serving.gate import Gate, Refused, TimeoutTooShort
from serving.generation import GenerationRequest
from serving.metrics import Registry
from tests.unit.router_rig import Report

BLOCK = 16
LONG = tuple(range(1, 1001))  # hashes of 16,000 tokens
SLO = Slo(ttft_ms=800, ttft_ms_per_1k_tokens=50, itl_ms=40)


class Bench:
    """Prefill workers of 0.2 ms a token, decode workers of 10 ms a step and 1 ms a sequence."""

    def __init__(
        self,
        prefill: str = "AB",
        decode: str = "D",
        mode: Any = "slo",
        slo: Slo = SLO,
        blocks: int = 10_000,
    ) -> None:
        self.index = PrefixIndex()
        self.router = build_router(
            seed=1,
            caches=CacheEvents(self.index),
            models=lambda: WorkerModels.from_priors((0.0, 0.2, 0.0), (10.0, 1.0, 0.0), evidence=100),
            local=False,
        )
        for role, idents in (("prefill", prefill), ("decode", decode)):
            for ident in idents:
                self.router.add_worker(WorkerView(ident, role, BLOCK, blocks, 256))
        self.metrics = FrontendMetrics(Registry({}))
        self.gate = Gate(
            slo,
            AdmissionConfig(mode=mode),
            Deadlines(),
            load_of=self.router.load_of,
            loads=self.router.loads,
            metrics=self.metrics,
        )
        self.now_s = 100.0
        self.attempts = 0
        self.chosen: list[Choice] = []

    def choose(self, wanted: RouterRequest) -> Choice:
        self.chosen.append(self.router.choose(wanted, self.now_s))
        return self.chosen[-1]

    def ask(
        self, tokens: int, hashes: tuple[int, ...] = (), *, min_tokens: int = 0, **asked: Any
    ) -> tuple[Choice, float]:
        """Where it may go, and how long its first token may take. Books nothing."""
        wanted = RouterRequest(array("I", bytes(4 * tokens)), 0, max_tokens=200, hashes=hashes)
        params = SamplingParams(max_tokens=200, seed=1, min_tokens=min_tokens)
        request = GenerationRequest("r", "m", wanted.tokens, params, **asked)
        self.chosen = []

        def again(short: frozenset[str]) -> Choice:
            wanted.avoid |= short
            return self.choose(wanted)

        choice = self.gate.check(request, wanted, self.choose(wanted), self.now_s, again)
        assert wanted.choice is choice, "what is booked is what was let in"
        return choice, wanted.limit_s - self.now_s

    def queue(self, worker: str, ms: int, each_ms: int = 20) -> None:
        """Prompts that go before any that takes as long as one of them."""
        for _ in range(ms // each_ms):
            self.attempts += 1
            wanted = RouterRequest(array("I", bytes(4 * 5 * each_ms)), 0, max_tokens=200, hashes=())
            self.router.book(self.attempts, worker, wanted, self.now_s)

    def caches(self, worker: str, tokens: int) -> None:
        self.index.store(worker, None, list(LONG[: tokens // BLOCK]))

    def decodes(self, worker: str, n: int) -> None:
        report = Report(n, free_blocks=10_000, total_blocks=10_000, step_ms=10.0 + n)
        self.router.on_load(worker, report, self.now_s)


# ---------------------------------------------------------------- where it may go


@pytest.mark.parametrize(
    ("busy_ms", "goes_to", "choices"),
    [
        pytest.param(2500, "A", 1, id="in time where its prefix is"),
        pytest.param(3500, "B", 2, id="too late there, in time on an idle worker"),
        pytest.param(6000, "B", 1, id="the router goes elsewhere by itself"),
    ],
)
def test_an_idle_worker_is_asked_before_anybody_is_refused(
    busy_ms: int, goes_to: str, choices: int
) -> None:
    bench = Bench()
    bench.caches("A", 11_040)
    bench.queue("A", busy_ms, 500)
    choice, limit_s = bench.ask(16_000, LONG)
    assert (choice.prefill, len(bench.chosen)) == (goes_to, choices)
    # The same on either: 800 ms and the 3.2 s that its prompt takes where nothing is cached.
    assert limit_s == pytest.approx(4.0)


def test_a_slow_decode_worker_is_left_as_well() -> None:
    bench = Bench(prefill="A", decode="DE")
    for worker in "DE":
        bench.decodes(worker, 20)
    first = bench.router.choose(RouterRequest(array("I", bytes(400)), 0, 200, hashes=()), bench.now_s)
    full = bench.router.load_of(first.decode)
    full.view.max_batch = 20  # and the router does not look at it
    choice, _ = bench.ask(100)
    assert choice.decode != full.view.ident


def test_after_one_more_choice_it_is_refused() -> None:
    bench = Bench(prefill="ABC")
    for worker, ms in (("A", 2000), ("B", 3000), ("C", 5000)):
        bench.queue(worker, ms)
    with pytest.raises(Refused) as refused:
        bench.ask(100)
    assert [choice.prefill for choice in bench.chosen] == ["A", "B"]
    assert refused.value.retry_after_s == 2  # 2 s of work there, of 0.8 s that it may wait
    assert refused.value.uncached_tokens == 100
    assert bench.metrics.rejects.value(("ttft",)) == 1


def test_of_one_worker_the_only_choice_is_judged_once() -> None:
    bench = Bench(prefill="A")
    bench.queue("A", 2000)
    with pytest.raises(Refused):
        bench.ask(100)
    assert bench.metrics.predicted_wait.count == 1


def test_a_refusal_with_many_workers_is_fast() -> None:
    bench = Bench(prefill=PREFILL, decode=DECODE)
    for worker in PREFILL:
        bench.queue(worker, 2000)
    took_s = []
    for _ in range(20):
        began_s = time.thread_time()
        with pytest.raises(Refused):
            bench.ask(4000, LONG[:250])
        took_s.append(time.thread_time() - began_s)
    assert sorted(took_s)[10] < 0.02


PREFILL = "".join(chr(0x400 + i) for i in range(32))
DECODE = "".join(chr(0x500 + i) for i in range(32))


# ---------------------------------------------------------------- what nobody can do


@pytest.mark.parametrize("mode", ["slo", "deadline"])
@pytest.mark.parametrize(
    ("tokens", "min_tokens", "timeout_ms", "least_ms"),
    [(50_000, 0, 1000.0, 10_000), (500, 200, 1000.0, 100 + 199 * 11)],
    ids=["the prompt alone takes longer", "so many tokens take longer"],
)
def test_a_time_out_that_no_worker_can_meet_is_the_clients_to_change(
    mode: str, tokens: int, min_tokens: int, timeout_ms: float, least_ms: int
) -> None:
    bench = Bench(mode=mode, blocks=100_000)
    with pytest.raises(TimeoutTooShort) as refused:
        bench.ask(tokens, min_tokens=min_tokens, timeout_ms=timeout_ms)
    error = refused.value
    assert (error.status, error.param, error.retry_after_s) == (400, "x-request-timeout-ms", None)
    assert f"about {least_ms} ms" in error.message
    assert bench.metrics.rejects.value(("timeout",)) == 1
    bench.ask(tokens, min_tokens=min_tokens, timeout_ms=least_ms + 1.0)


def test_a_time_out_that_a_busy_worker_could_meet_is_only_bad_luck() -> None:
    """Where its prefix is it would take 1 s, in a while."""
    bench = Bench()
    bench.caches("A", 11_040)
    bench.queue("A", 3500, 500)
    with pytest.raises(Refused) as refused:
        bench.ask(16_000, LONG, timeout_ms=2000.0)
    assert refused.value.retry_after_s == 3  # 3.5 s of work, and 1 s after it, in 2 s less a margin


def test_the_limit_of_the_first_token_is_at_most_the_time_out() -> None:
    bench = Bench()
    assert bench.ask(500, timeout_ms=500.0)[1] == pytest.approx(0.5)
    assert bench.ask(500, timeout_ms=5000.0)[1] == pytest.approx(0.9)


@pytest.mark.parametrize("mode", ["off", "deadline", "slo"])
def test_a_prompt_that_no_kv_pool_holds_is_refused_for_good(mode: str) -> None:
    bench = Bench(mode=mode, blocks=1000)
    bench.decodes("D", 3)
    with pytest.raises(ContextLengthExceeded, match="the KV of the largest decode worker holds 16000"):
        bench.ask(16_000)  # one more token is to come
    bench.ask(15_999)
    bench.router.add_worker(WorkerView("E", "decode", BLOCK, 2000, 256))
    bench.ask(16_000)


# ---------------------------------------------------------------- live targets


def test_targets_change_live() -> None:
    bench = Bench(prefill="A", slo=Slo(ttft_ms=800, itl_ms=40, classes={"chat": SloClass(ttft_ms=300)}))
    bench.queue("A", 500)
    assert bench.ask(100)[1] == pytest.approx(0.82)
    bench.gate.retarget(Slo(ttft_ms=200, itl_ms=40, classes={"chat": SloClass(ttft_ms=900)}))
    with pytest.raises(Refused):
        bench.ask(100)
    assert bench.ask(100, slo_class="chat")[1] == pytest.approx(0.92)


def test_by_deadline_targets_do_not_count_whether_they_change_or_not() -> None:
    bench = Bench(mode="deadline")
    bench.gate.retarget(Slo(ttft_ms=1))
    assert bench.ask(100)[1] == pytest.approx(60.02)
