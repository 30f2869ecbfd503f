"""What planning is worth: the planner beside other rules, over public traces, on a virtual clock.

    python -m benchmarks.planner_replay [--json] [--only conversation startup_30 ...]

Everything but the rule is the same for all: the live router, deadline order on prefill, worker times, the
pools at the start (those of `static_peak`: a service that runs when the hour begins).

    conversation    one hour as it is (requests come in steps of 3 s), start-up 60 s
    startup_30      the same with a start-up of 30 s
    cold_start      the same from one worker a pool
    servegen_day    a day of ServeGen's deepseek-r1 at a tenth of its rate, start-up 300 s
    burst           ten times the rate for 60 s, at budgets of 64, 24, 16 and 12: the last two bind

Worker: prefill 20,480 tokens/s, linear in uncached tokens. A decode step takes d + e * batch + f * KV
tokens; the constants are the least-squares fit to the llama2-70b rows on four H100 of
engine_timing_splitwise_sim.csv.gz (`STEP_MS`; checked by a test). A request attains when its TTFT is
within 1.5 s plus its own uncached prefill time and its mean ITL within 50 ms. kvrelay plans for
percentile 98 (`TARGETS`), not for a configuration's default of 95: it is held to 97 and 99 %.

    kvrelay          this planner
    peer_throughput  the strongest peer's throughput rule with its defaults
    peer_matched     the same with the smallest fixed head-room factor that attains what kvrelay attains
    static_peak      the smallest constant pools that attain 99 %
    static_mean      what the mean demand needs
    serve_requests   Ray Serve's rule on ongoing requests
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before numpy: its threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from kvrouter.policy_router import PolicyRouter
from kvrouter.router import Choice
from planner.observation import FittedTimes
from planner.predict import ForecastState, forecast, record
from planner.predictors import PREDICTORS
from planner.settings import Targets
from planner.sim_cluster import Cluster
from planner.sim_policies import Means, MeanThroughput, Planner, RequestCount, Static, mean_pools
from planner.sim_report import Criterion, draw, summary
from planner.sim_setup import MOST_OUTPUT_TOKENS, Policy, SimSetup
from planner.sim_worker import EngineTimes, Job
from planner.simulate import settings_for
from planner.workload import TraceRequest, load_trace, made_up, servegen_day, traces_dir
from serving.admission import Admission, Ask
from serving.config import AdmissionConfig, Slo

TOKENS_PER_S = 20_480
STEP_MS = (28.894, 0.27205, 7.8604e-5)  # d, e, f
TIMES = EngineTimes(prefill=(0.0, 1e3 / TOKENS_PER_S, 0.0), step=STEP_MS)
TARGETS = Targets(ttft_ms=1500, ttft_ms_per_1k_tokens=1e6 / TOKENS_PER_S, itl_ms=50, percentile=98)
CRITERION = Criterion(TARGETS, own_prefill=True)
BUDGET = 32
QUANTILE = 0.8  # of forecast errors, planner.settings' default
ATTAINMENT = 0.99  # of static_peak
COARSE, FINE = 0.2, 0.05  # steps of the head-room factor
MOST_HEADROOM = 4.0
DAY_SCALE = 0.1  # of ServeGen's rates: the day then peaks at a dozen workers
DAY_STARTUP_S = 300.0
BURST = (900.0, 60.0, 10.0)  # begin, length, factor
BURST_BUDGETS = (64, 24, 16, 12)
SECTIONS = ("conversation", "startup_30", "cold_start", "servegen_day", "burst")

Say = Callable[[str], None]
Row = dict[str, Any]


def run(requests: Sequence[TraceRequest], policy: Policy, setup: SimSetup) -> tuple[Row, Cluster]:
    began = time.perf_counter()
    cluster = Cluster(setup, policy)
    cluster.run(requests)
    return summary(cluster, CRITERION) | {"wall_s": round(time.perf_counter() - began, 1)}, cluster


def planner(startup_s: float, predictor: str = "blend", budget: int = BUDGET) -> Planner:
    return Planner(settings_for(TARGETS, startup_s=startup_s, budget=budget, predictor=predictor))


# ------------------------------------------------------------ in worker processes

_requests: list[TraceRequest] = []


def _load(name: str, folder: str | None) -> None:
    _requests[:] = trace(name, folder)


def trace(name: str, folder: str | None) -> list[TraceRequest]:
    if name == "servegen_day":
        return servegen_day(traces_dir(folder), DAY_SCALE)
    if name == "burst":
        return made_up(2.0, 1800.0, 4000, 200, burst=BURST, seed=1)
    return load_trace("conversation", traces_dir(folder))


def _static(pools: tuple[int, int]) -> Row:
    return run(_requests, Static(*pools), SimSetup(TIMES, initial=pools))[0]


def _matched(headroom: float, initial: tuple[int, int], startup_s: float) -> Row:
    policy = MeanThroughput(TARGETS, initial, BUDGET, headroom)
    return run(_requests, policy, SimSetup(TIMES, initial=initial, startup_s=startup_s))[0] | {
        "headroom": headroom
    }


# ------------------------------------------------------------ searches


def mean_demand(requests: Sequence[TraceRequest]) -> tuple[int, int]:
    """Pools for the mean rate and the mean lengths, without a cache."""
    n = len(requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    prompt = sum(r.prompt_tokens for r in requests) / n
    means = Means(n / span_s, prompt, prompt, sum(r.output_tokens for r in requests) / n)
    return mean_pools(means, FittedTimes(TIMES.prefill, TIMES.step), TARGETS)


def static_peak(pool: ProcessPoolExecutor, least: tuple[int, int], say: Say) -> tuple[tuple[int, int], Row]:
    """The fewest workers, in any split, that attain; of equal ones the best."""
    total = sum(least)
    while True:
        say(f"static_peak: {total} workers")
        splits = [(p, total - p) for p in range(max(least[0], 1), total) if total - p >= least[1]]
        rows = list(pool.map(_static, splits))
        best = max(range(len(splits)), key=lambda i: rows[i]["attainment"])
        if rows[best]["attainment"] >= ATTAINMENT:
            return splits[best], rows[best]
        total += 1


def matched(
    pool: ProcessPoolExecutor, attainment: float, initial: tuple[int, int], startup_s: float, say: Say
) -> Row:
    """The smallest factor, in steps, whose run attains as much; else the one that attains most.

    Coarse steps up to the first that does, two at a time, then every fine one below it.
    """
    tried: dict[float, Row] = {}

    def attempt(factors: list[float]) -> None:
        say(f"peer_matched: head-room {', '.join(f'{factor:g}' for factor in factors)}")
        n = len(factors)
        for factor, row in zip(
            factors, pool.map(_matched, factors, [initial] * n, [startup_s] * n), strict=True
        ):
            tried[factor] = row

    factor = 1.0
    while factor <= MOST_HEADROOM and not _good(tried, attainment):
        attempt([round(factor + i * COARSE, 2) for i in range(2)])
        factor += 2 * COARSE
    good = _good(tried, attainment)
    if not good:
        return max(tried.values(), key=lambda row: row["attainment"]) | {"reached": False}
    attempt([round(good[0] - i * FINE, 2) for i in range(1, round(COARSE / FINE))])
    return tried[_good(tried, attainment)[0]] | {"reached": True}


def _good(tried: dict[float, Row], attainment: float) -> list[float]:
    return sorted(factor for factor, row in tried.items() if row["attainment"] >= attainment)


# ------------------------------------------------------------ sections


def hour(
    startup_s: float, folder: str | None, say: Say, pools: tuple[tuple[int, int], Row] | None, picture: bool
) -> tuple[Row, tuple[tuple[int, int], Row]]:
    requests = trace("conversation", folder)
    least = mean_demand(requests)
    with ProcessPoolExecutor(2, initializer=_load, initargs=("conversation", folder)) as pool:
        if pools is None:
            pools = static_peak(pool, least, say)
        initial, peak = pools
        setup = SimSetup(TIMES, initial=initial, startup_s=startup_s)
        say("kvrelay")
        ours, cluster = run(requests, planner(startup_s), setup)
        if picture:
            title = f"kvrelay, conversation trace, start-up {startup_s:g} s"
            draw(cluster, CRITERION, title, Path("planner_replay.png"), ours)
        rows = {"kvrelay": ours}
        say("peer_throughput")
        rows["peer_throughput"] = run(requests, MeanThroughput(TARGETS, initial, BUDGET), setup)[0]
        rows["peer_matched"] = matched(pool, ours["attainment"], initial, startup_s, say)
        rows["static_peak"] = peak | {"pools": initial}
        rows["static_mean"] = run(requests, Static(*least), SimSetup(TIMES, initial=least))[0] | {
            "pools": least
        }
        say("serve_requests")
        rows["serve_requests"] = run(requests, RequestCount(TARGETS, initial, BUDGET), setup)[0]
    return {"policies": rows, "initial": initial, "startup_s": startup_s}, pools


def cold_start(folder: str | None, say: Say) -> Row:
    requests = trace("conversation", folder)
    rows: Row = {}
    for startup_s in (30.0, 60.0):
        say(f"cold_start, {startup_s:g} s")
        setup = SimSetup(TIMES, initial=(1, 1), startup_s=startup_s)
        rows[f"kvrelay_{startup_s:g}"] = run(requests, planner(startup_s), setup)[0]
    setup = SimSetup(TIMES, initial=(1, 1), startup_s=60.0)
    rows["peer_throughput_60"] = run(requests, MeanThroughput(TARGETS, (1, 1), BUDGET), setup)[0]
    return {"policies": rows, "initial": (1, 1)}


def day(folder: str | None, say: Say) -> Row:
    say("servegen_day: drawing requests")
    requests = trace("servegen_day", folder)
    initial = 3, 6
    setup = SimSetup(TIMES, initial=initial, startup_s=DAY_STARTUP_S)
    rows: Row = {}
    say(f"servegen_day: kvrelay, {len(requests):,} requests")
    rows["kvrelay"] = run(requests, planner(DAY_STARTUP_S), setup)[0]
    say("servegen_day: peer_throughput")
    rows["peer_throughput"] = run(requests, MeanThroughput(TARGETS, initial, BUDGET), setup)[0]
    say("servegen_day: predictors")
    return {
        "policies": rows,
        "initial": initial,
        "startup_s": DAY_STARTUP_S,
        "rate_scale": DAY_SCALE,
        "predictors": {name: walk_forward(requests, name) for name in PREDICTORS},
    }


def walk_forward(requests: Sequence[TraceRequest], predictor: str) -> Row:
    """Forecasts of the day's rate at `DAY_STARTUP_S`, by the minute, beside what came."""
    counts: dict[int, int] = {}
    for request in requests:
        minute = int(request.arrival_s // 60)
        counts[minute] = counts.get(minute, 0) + 1
    lead = round(DAY_STARTUP_S / 60)
    minutes = max(counts) + 1
    state = ForecastState()
    errors, short, given = [], [], []
    for minute in range(minutes - lead - 2):
        now_s = (minute + 1) * 60.0
        arrivals = counts.get(minute, 0)
        state = record(state, 60.0, arrivals, predictor=predictor, lead_s=DAY_STARTUP_S, now_s=now_s)
        made = forecast(state, predictor, QUANTILE, lead_s=DAY_STARTUP_S, now_s=now_s)
        actual = sum(counts.get(minute + lead + k, 0) for k in (-1, 0, 1, 2)) / 240.0
        if minute >= 60 and actual > 0:
            errors.append(abs(made.expected - actual) / actual)
            short.append(made.expected * made.headroom < actual)
            given.append(made.expected * made.headroom / actual)
    n = len(errors)
    return {
        "mape": round(sum(errors) / n, 4),
        "under_provisioned": round(sum(short) / n, 4),
        "provision_over_actual": round(sum(given) / n, 4),
    }


class Door:
    """The live admission, in front of the simulated workers."""

    def __init__(self, router: PolicyRouter) -> None:
        slo = Slo(
            ttft_ms=TARGETS.ttft_ms,
            ttft_ms_per_1k_tokens=TARGETS.ttft_ms_per_1k_tokens,
            itl_ms=TARGETS.itl_ms,
        )
        self._admission = Admission(slo, AdmissionConfig(), router.load_of)

    def admit(self, job: Job, choice: Choice, now_s: float) -> bool:
        ask = Ask(job.context_tokens, MOST_OUTPUT_TOKENS)
        return self._admission.decide(ask, choice, now_s).reason is None

    def ended(self, output_tokens: int) -> None:
        self._admission.ended(output_tokens)


def burst(folder: str | None, say: Say) -> Row:
    startup_s = 60.0
    setup = SimSetup(TIMES, initial=(2, 2), startup_s=startup_s)
    requests = trace("burst", folder)
    begin_s, length_s, _ = BURST
    rows: Row = {}
    for budget in BURST_BUDGETS[1:]:
        say(f"burst, budget {budget}")
        row, cluster = run(requests, planner(startup_s, budget=budget), setup)
        rows[f"kvrelay_budget_{budget}"] = row | {"recovered_after_s": _recovered_s(cluster)}
    say("burst, with admission")
    refusing = Cluster(setup, planner(startup_s, budget=BURST_BUDGETS[0]), Door)
    refusing.run(requests)
    rows["kvrelay_with_admission"] = summary(refusing, CRITERION)
    say(f"burst, budget {BURST_BUDGETS[0]}")
    row, cluster = run(requests, planner(startup_s, budget=BURST_BUDGETS[0]), setup)
    recovered_s = _recovered_s(cluster)
    done = [job.finished_s for job in cluster.jobs if job.finished_s is not None]
    during = [
        sum(1 for at_s in done if begin_s + k * 30 <= at_s < begin_s + (k + 1) * 30) / 30 for k in range(6)
    ]
    return {
        "policies": {"kvrelay": row, **rows},
        "startup_s": startup_s,
        "recovered_after_s": recovered_s,
        "recovers_within_two_startups": recovered_s <= length_s + 2 * startup_s,
        "answers_per_s_by_30_s": [round(rate, 2) for rate in during],
        "peak_roles": max(sum(sample.targets) for sample in cluster.samples),
    }


def _recovered_s(cluster: Cluster) -> float:
    """Seconds after the burst began, from which on 95 % of the requests of each ten seconds attain."""
    begin_s = BURST[0]
    bins: dict[int, list[bool]] = {}
    for job in cluster.jobs:
        met = CRITERION.ttft_ok(job) and CRITERION.itl_ok(job)
        bins.setdefault(int(job.request.arrival_s // 10), []).append(met)
    bad = [number for number, met in bins.items() if sum(met) / len(met) < 0.95]
    bad = [number for number in bad if number * 10 >= begin_s]
    return (max(bad) + 1) * 10 - begin_s if bad else 0.0


def targets_met(result: Row) -> Row:
    """The claims, each with its figures."""
    met: Row = {}
    main = result.get("conversation")
    if main is not None:
        rows = main["policies"]
        ours, peer = rows["kvrelay"], rows["peer_matched"]
        met["attainment_60s"] = [ours["attainment"], ours["attainment"] >= 0.97]
        met["above_peer_throughput"] = ours["attainment"] > rows["peer_throughput"]["attainment"]
        saved = 1 - ours["gpu_hours"] / peer["gpu_hours"]
        met["gpu_hours_saved_over_peer_matched"] = [round(saved, 4), saved >= 0.10]
        ratio = ours["p99_ttft_s"] / rows["static_peak"]["p99_ttft_s"]
        met["p99_ttft_over_static_peak"] = [round(ratio, 3), ratio <= 2]
        met["scale_events"] = [ours["scale_events"], ours["scale_events"] < 60]
    if "startup_30" in result:
        value = result["startup_30"]["policies"]["kvrelay"]["attainment"]
        met["attainment_30s"] = [value, value >= 0.99]
    if "servegen_day" in result:
        value = result["servegen_day"]["policies"]["kvrelay"]["attainment"]
        met["attainment_day_300s"] = [value, value >= TARGETS.percentile / 100]
    if "burst" in result:
        section = result["burst"]
        met["burst_recovers"] = section["recovers_within_two_startups"]
        for name, row in section["policies"].items():
            met[f"burst_anti_phase, {name}"] = [row["anti_phase"], row["anti_phase"] == 0]
    return met


def print_tables(result: Row) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = {
        "attainment": "attains",
        "p90_ttft_s": "p90 TTFT s",
        "p99_ttft_s": "p99 TTFT s",
        "gpu_hours": "GPU-hours",
        "scale_events": "events",
    }
    for name, section in result.items():
        if name == "targets":
            continue
        table = Table(title=f"{name}, start-up {section.get('startup_s', '-')} s")
        table.add_column("policy")
        for head in heads.values():
            table.add_column(head, justify="right")
        for policy, row in section["policies"].items():
            table.add_row(policy, *(f"{row[key]:g}" for key in heads))
        Console().print(table)
    for claim, value in result["targets"].items():
        print(f"{claim}: {value}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_replay", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--traces", help="folder of the traces")
    parser.add_argument("--picture", action="store_true", help="also write planner_replay.png")
    args = parser.parse_args(argv)

    def say(what: str) -> None:
        if sys.stderr.isatty() or not args.json:
            print(f".. {what}", file=sys.stderr, flush=True)

    result: Row = {}
    pools = None
    try:
        for name in args.only:
            if name in ("conversation", "startup_30"):
                startup_s = 30.0 if name == "startup_30" else 60.0
                picture = args.picture and name == "conversation"
                result[name], pools = hour(startup_s, args.traces, say, pools, picture)
            elif name == "cold_start":
                result[name] = cold_start(args.traces, say)
            elif name == "servegen_day":
                result[name] = day(args.traces, say)
            else:
                result[name] = burst(args.traces, say)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    result["targets"] = targets_met(result)
    if args.json:
        flat = {"policies": result["conversation"]["policies"]} if "conversation" in result else {}
        print(json.dumps(flat | result))
    else:
        print_tables(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
