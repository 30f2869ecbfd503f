"""The simulator: conserves requests, agrees with arithmetic, survives failures, shows what it did."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner_replay import STEP_MS
from kvrouter.deadline import Order
from kvrouter.router import Choice
from planner.fit_times import fit_step
from planner.observation import Decision, Observation
from planner.settings import Targets
from planner.sim_cluster import Cluster
from planner.sim_policies import MeanThroughput, Planner, RequestCount, Static
from planner.sim_report import Criterion, anti_phase, summary
from planner.sim_setup import Policy, SimSetup
from planner.sim_worker import EngineTimes, Job, SimWorker
from planner.simulate import main, settings_for
from planner.workload import TraceRequest, load_trace, made_up, servegen_day

TIMES = EngineTimes(prefill=(0.0, 0.1, 0.0), step=(20.0, 0.5, 0.0), move_ms=0.0)
TARGETS = Targets(1000, 100, 40, 95)
CRITERION = Criterion(TARGETS)


def simulated(policy: Policy, requests: list[TraceRequest], **changes: object) -> Cluster:
    setup = SimSetup(TIMES, **{"initial": (1, 1), "startup_s": 20.0, **changes})  # type: ignore[arg-type]
    run = Cluster(setup, policy)
    run.run(requests)
    return run


def planner(budget: int = 16, **changes: object) -> Planner:
    return Planner(settings_for(TARGETS, startup_s=20.0, budget=budget, **changes))


# ------------------------------------------------------------ workers


def worker(order: Order = Order.DEADLINE) -> SimWorker:
    return SimWorker("w", TIMES, order, lambda *_: None)


def finish(engine: SimWorker) -> list[tuple[float, list[Job], list[Job]]]:
    happened = []
    while (at_s := engine.next_event_s()) is not None:
        computed, ended = engine.advance(at_s)
        happened.append((at_s, computed, ended))
    return happened


def job(number: int, prompt: int, output: int = 1, at_s: float = 0.0) -> Job:
    return Job(TraceRequest(at_s, prompt, output), prompt, output, attempt=number)


def test_a_prompt_takes_its_prefill_time() -> None:
    engine = worker()
    engine.submit(job(1, 3000), 0.0)
    assert finish(engine)[-1][0] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("order", "short_done_s"),
    [pytest.param(Order.DEADLINE, 0.16, id="deadline"), pytest.param(Order.FIFO, 1.01, id="fifo")],
)
def test_a_short_prompt_passes_a_long_one_at_a_chunks_end(order: Order, short_done_s: float) -> None:
    engine = worker(order)
    engine.submit(job(1, 10_000), 0.0)
    engine.submit(job(2, 100), 0.12)
    done = {j.attempt: at_s for at_s, computed, _ in finish(engine) for j in computed}
    assert done == {1: pytest.approx(1.01), 2: pytest.approx(short_done_s)} or done[2] == pytest.approx(
        short_done_s
    )
    assert done[2] == pytest.approx(short_done_s)
    assert max(done.values()) == pytest.approx(1.01)


def test_a_batch_steps_together() -> None:
    """Two decodes of 11 tokens: ten steps of 21 ms."""
    engine = worker()
    for number in (1, 2):
        engine.hand_over(job(number, 100, 11), 0.0)
    happened = finish(engine)
    assert happened[-1][0] == pytest.approx(0.21)
    assert sum(len(ended) for *_, ended in happened) == 2


def test_a_prompt_beside_decodes_slows_both() -> None:
    """Steps of 20.5 + 25 ms: half of each second or so is the prompt's."""
    engine = worker()
    engine.hand_over(job(1, 100, 1000), 0.0)
    engine.submit(job(2, 1000), 0.0)
    at_s = next(at for at, computed, _ in finish(engine) if computed)
    assert at_s == pytest.approx(0.1 * (20.5 + 25) / 25, rel=0.01)


def test_decodes_wait_for_kv_room() -> None:
    times = EngineTimes(prefill=TIMES.prefill, step=TIMES.step, kv_tokens=250)
    engine = SimWorker("w", times, Order.DEADLINE, lambda *_: None)
    for number in (1, 2):
        engine.hand_over(job(number, 100, 50), 0.0)
    ends = [at_s for at_s, _, ended in finish(engine) for _ in ended]
    assert ends[1] == pytest.approx(2 * ends[0])


# ------------------------------------------------------------ runs


def test_every_request_is_answered_once_and_costs_add_up() -> None:
    requests = made_up(5.0, 120.0, 1000, 50, seed=2)
    run = simulated(Static(2, 2), requests, initial=(2, 2))
    assert len(run.jobs) == len(requests)
    assert all(j.finished_s is not None and j.first_token_s is not None for j in run.jobs)
    assert run.gpu_s == pytest.approx(4 * run.end_s)
    row = summary(run, CRITERION)
    assert row["attainment"] > 0.9
    assert row["scale_events"] == 0


def test_an_mm1_queue_waits_as_the_formula_says() -> None:
    """M/M/1 at load 0.7, first come first served: mean wait = rho / (mu - lambda)."""
    generator = np.random.default_rng(5)
    at, requests = 0.0, []
    for _ in range(20_000):
        at += generator.exponential(1 / 7.0)
        requests.append(TraceRequest(at, max(round(generator.exponential(1000)), 1), 1))
    run = simulated(Static(1, 1), requests, order=Order.FIFO, local_prefill=False)
    waits = [(j.first_token_s or 0.0) - j.request.arrival_s - j.first_own_ms / 1e3 for j in run.jobs]
    assert np.mean(waits) == pytest.approx(0.7 / (10.0 - 7.0), rel=0.15)


def test_the_planner_follows_a_wave_and_costs_less_than_its_peak() -> None:
    requests = made_up(8.0, 2400.0, 1500, 100, wave=0.8, wave_s=2400.0, seed=3)
    run = simulated(planner(), requests)
    row = summary(run, CRITERION)
    most = max(sum(sample.targets) for sample in run.samples)
    assert row["attainment"] > 0.93
    assert row["gpu_hours"] < 0.85 * most * run.end_s / 3600
    assert row["scale_events"] < 40


def test_a_burst_is_recovered_without_anti_phase() -> None:
    requests = made_up(3.0, 600.0, 1000, 50, burst=(300.0, 30.0, 8.0), seed=4)
    run = simulated(planner(40), requests, initial=(2, 2))
    late = [j for j in run.jobs if j.request.arrival_s > 300 + 30 + 2 * 20]
    assert sum(CRITERION.ttft_ok(j) for j in late) / len(late) > 0.95
    assert anti_phase(run) == 0


def test_workers_that_fail_lose_no_request() -> None:
    requests = made_up(6.0, 300.0, 800, 60, seed=6)
    run = simulated(Static(3, 3), requests, initial=(3, 3), mean_time_to_failure_s=120.0)
    assert run.failures > 2
    assert sum(j.resumed for j in run.jobs) > 0
    assert all(j.finished_s is not None for j in run.jobs)


def test_a_cluster_without_room_places_no_more() -> None:
    requests = made_up(20.0, 120.0, 1000, 20, seed=7)
    run = simulated(planner(), requests, capacity=3)
    assert max(sum(sample.ready) for sample in run.samples) <= 3
    assert all(j.finished_s is not None for j in run.jobs)


def test_to_zero_and_from_zero() -> None:
    early = made_up(2.0, 60.0, 500, 20, seed=8)
    late = [TraceRequest(r.arrival_s + 500, r.prompt_tokens, r.output_tokens) for r in early]
    run = simulated(planner(idle_to_zero_s=60.0), early + late)
    assert any(sample.targets == (0, 0) for sample in run.samples)
    assert all(j.finished_s is not None for j in run.jobs)


class OnlyShort:
    def admit(self, job: Job, choice: Choice, now_s: float) -> bool:
        return job.request.prompt_tokens < 500

    def ended(self, output_tokens: int) -> None:
        assert output_tokens >= 1


def test_an_injected_admission_refuses() -> None:
    requests = made_up(10.0, 30.0, 500, 10, seed=9)
    run = Cluster(SimSetup(TIMES), Static(1, 1), lambda router: OnlyShort())
    run.run(requests)
    row = summary(run, CRITERION)
    assert 0 < row["rejected"] < len(requests)
    assert row["attainment"] <= 1 - row["rejected"] / len(requests) + 1e-4


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(MeanThroughput(TARGETS, (1, 1), 8), id="mean throughput"),
        pytest.param(RequestCount(TARGETS, (1, 1), 8), id="request count"),
    ],
)
def test_other_rules_run_and_scale(policy: Policy) -> None:
    run = simulated(policy, made_up(12.0, 900.0, 1500, 100, seed=10))
    assert max(sum(sample.targets) for sample in run.samples) > 2
    assert all(sum(sample.targets) <= 8 for sample in run.samples)


# ------------------------------------------------------------ traces


def test_traces_are_read_in_order(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 3]},
    ]
    with gzip.open(tmp_path / "mooncake_conversation.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    first, second = load_trace("conversation", tmp_path, speed=2.0)
    assert (first.arrival_s, first.hashes) == (0.0, (1, 3))
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (1.5, 700, 5)
    with gzip.open(tmp_path / "azure2023_code.csv.gz", "wt", newline="") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
        file.write("2023-11-16 18:15:50.6805900,10,0\n")
    azure = load_trace("azure-code", tmp_path)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in azure] == [
        (0.0, 374, 44),
        (4.0, 10, 1),
    ]


@pytest.mark.parametrize("pattern", ["Gamma", "Weibull"])
def test_servegen_clients_keep_their_rate(tmp_path: Path, pattern: str) -> None:
    with gzip.open(tmp_path / "servegen_deepseek-r1_clients.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "t_s", "rate_rps", "cv", "pattern", "arg1", "arg2"])
        writer.writerows([0, 600 * n, 4.0, 1.5, pattern, 0, 0] for n in range(6))
    with gzip.open(tmp_path / "servegen_deepseek-r1_lengths.jsonl.gz", "wt") as file:
        tokens = {"0": {"input_tokens": "{45: 0.5, 100: 0.5}", "output_tokens": "{7: 1.0}"}}
        file.write(json.dumps({"client": 0, "dataset": tokens}))
    requests = servegen_day(tmp_path, scale=0.5, seed=1)
    assert len(requests) == pytest.approx(2.0 * 3600, rel=0.1)
    assert {r.prompt_tokens for r in requests} == {45, 100}
    assert {r.output_tokens for r in requests} == {7}


@pytest.mark.parametrize("name", ["conversation", "azure-conv", "servegen-day"])
def test_a_missing_trace_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="is missing; --traces DIR"):
        load_trace(name, tmp_path)


def test_the_benchmarks_step_constants_are_the_fit(request: pytest.FixtureRequest) -> None:
    traces = Path(__file__).parents[3] / "shared" / "data" / "traces"
    path = traces / "engine_timing_splitwise_sim.csv.gz"
    if not path.is_file():
        pytest.skip("the shared traces are not here")
    points = []
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) == ("llama2-70b", "h100-80gb", "4"):
                batch = int(row["batch_size"])
                context = int(row["prompt_size"]) + int(row["token_size"]) / 2
                points.append((batch, round(batch * context), float(row["token_time"])))
    fit = fit_step(points)
    assert fit.coefficients == pytest.approx(STEP_MS, rel=0.01)
    assert fit.spread < 0.02


# ------------------------------------------------------------ command line


def test_the_command_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "what_if"
    code = main(
        f"--trace made-up --rate 2 --duration-s 120 --startup-s 10 --budget 6 --out {out}"
        " --burst 60 20 4 --json".split()
    )
    assert code == 0
    row = json.loads(capsys.readouterr().out)
    written = json.loads(out.with_suffix(".json").read_text())
    assert written["summary"] == row
    assert written["changes"][0]["reason"]
    assert out.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", "conversation", "--traces", str(tmp_path)]
    assert main([*trace, "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------ queues that move


def test_a_prompt_that_waits_can_be_taken_back() -> None:
    engine = worker()
    first, second = job(1, 1000), job(2, 2000)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    assert engine.waiting() == [second]
    engine.withdraw(second, 0.05)
    assert [at for at, _, _ in finish(engine)] == [pytest.approx(0.1)]


def test_what_waits_when_workers_come_is_shared_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst fills the one worker there is; the others come 20 s later."""
    burst = [TraceRequest(0.1 * n, 4000 + n, 4) for n in range(200)]
    shared = simulated(planner(), burst)
    monkeypatch.setattr("planner.sim_cluster.MOST_REQUEUES", 0)
    left_alone = simulated(planner(), burst)

    def longest_s(run: Cluster) -> float:
        return max((job.first_token_s or np.inf) - job.request.arrival_s for job in run.jobs)

    assert longest_s(shared) < 0.7 * longest_s(left_alone)
    assert sum(job.requeued for job in shared.jobs) >= 50
    assert all(job.finished_s is not None for job in shared.jobs)
    assert shared._router.in_flight == 0


class Shrinks(Static):
    """2 + 2, and from the second tick on 2 + 1."""

    def decide(self, observation: Observation, now_s: float) -> Decision:
        return Static(2, 2 if now_s < self.interval_s else 1).decide(observation, now_s)


def test_a_decode_worker_leaves_without_what_has_not_begun() -> None:
    """Forty seconds of prompts wait when it is to go; two of them compute, and one answer is decoded."""
    waiting = [TraceRequest(29.0 + 0.01 * n, 20_000 + n, 4) for n in range(40)]
    run = simulated(Shrinks(2, 2), [TraceRequest(20.0, 100, 400), *waiting], initial=(2, 2))
    (left,) = [w for w in run.workers.values() if w.gone_s is not None]
    assert left.deployment == "decode"
    assert left.gone_s < 30 + 2 * 2 + 1, "the prompts that computed for it: at most two seconds each"
    assert all(j.finished_s is not None and j.resumed == 0 for j in run.jobs)
    assert run._router.in_flight == 0
