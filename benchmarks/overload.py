"""Twice the load that the workers can take: what admission makes of it, against the best fixed limit.

    python -m benchmarks.overload [--json] [--only simulated|live]

Simulated: the lengths and prefixes of the conversation trace, Poisson arrivals, two frontends, on a virtual
clock (benchmarks/overload_replay.py); once bound by prefill, once by decode. The fixed limits in front of
the same workers, requests at once or a second, are swept; the best of all is what admission is held to. A
request is good when it meets both its targets; ratio = goodput / best_static_goodput.

Live: lengths an eighth of the trace's, `sim` workers, two frontends and HTTP under Ray. The fixed limit is
`frontend.max_inflight`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import overload_live
from benchmarks.overload_replay import (
    AtMost,
    Gate,
    OverloadReplay,
    Predicted,
    Rate,
    predicted,
    shared,
)
from benchmarks.report import COUNT, POSITIVE, Progress, command, print_report
from benchmarks.router_replay import Setup
from benchmarks.traces import TraceRequest, load_trace, traces_dir
from kvrouter.deadline import Order
from kvrouter.policy_router import PolicyRouter
from serving.config import AdmissionConfig, Slo

AT_MOST = (30, 40, 50, 60, 70)
RATES = (5.0, 6.0, 6.5, 7.0, 7.5)
TTFT_MS, TTFT_MS_PER_1K = 800.0, 50.0
# The pace asked for decides which pool is short; about twice what the workers can take then.
SCENARIOS = {"prefill_bound": (40.0, 4.2), "decode_bound": (21.0, 3.6)}  # itl_ms, speed of the trace
FAIR_SHARE_ASKED = 5  # one request in so many is the small tenant's


def poisson(trace: Sequence[TraceRequest], seed: int = 1) -> list[TraceRequest]:
    """The same requests in the same order at the same mean rate; the trace itself has steps of 3 s."""
    generator = random.Random(seed)
    rate = len(trace) / trace[-1].arrival_s
    at_s, requests = 0.0, []
    for r in trace:
        at_s += generator.expovariate(rate)
        requests.append(TraceRequest(at_s, r.prompt_tokens, r.output_tokens, r.hashes))
    return requests


def two_tenants(number: int) -> str:
    """Of a request. In steps of two, so that both frontends have requests of both."""
    return "small" if number // 2 % FAIR_SHARE_ASKED == 0 else "large"


class Simulation:
    def __init__(
        self, traces: str | None, requests: int | None, frontends: int, progress: Progress
    ) -> None:
        self._traces = traces_dir(traces)
        self._limit = requests
        self._frontends = frontends
        self._progress = progress

    def run(
        self,
        itl_ms: float,
        speed: float,
        gates: Callable[[Slo], Callable[[PolicyRouter], Gate]],
        *,
        prior_factor: float = 1.0,
        tenants: bool = False,
    ) -> OverloadReplay:
        slo = Slo(ttft_ms=TTFT_MS, ttft_ms_per_1k_tokens=TTFT_MS_PER_1K, itl_ms=itl_ms)
        setup = Setup(
            workers=4,
            blocks=3000,
            separate=True,
            fixed_decode=False,
            frontends=self._frontends,
            order=Order.DEADLINE,
            prior_factor=prior_factor,
        )
        trace = load_trace("conversation", self._traces, speed, self._limit)
        replay = OverloadReplay(setup, slo, gates(slo), two_tenants if tenants else lambda number: None)
        replay.run(poisson(trace))
        return replay

    def overload(self, name: str) -> dict[str, Any]:
        """One scenario: admission, and the best fixed limit."""
        itl_ms, speed = SCENARIOS[name]
        static: dict[str, float] = {}
        for n in AT_MOST:
            self._progress.say(f"{name}: at most {n} at once")
            run = self.run(itl_ms, speed, lambda slo, n=n: shared(AtMost(n)))  # type: ignore[misc]
            static[f"at_most_{n}"] = run.summary()["goodput_rps"]
        for rate in RATES:
            self._progress.say(f"{name}: {rate:g} a second")
            run = self.run(itl_ms, speed, lambda slo, rate=rate: shared(Rate(rate)))  # type: ignore[misc]
            static[f"rate_{rate:g}"] = run.summary()["goodput_rps"]
        best = max(static, key=lambda limit: static[limit])
        self._progress.say(f"{name}: admission")
        replay = self.run(itl_ms, speed, admission)
        result = replay.summary()
        return {
            "goodput": result["goodput_rps"],
            "best_static_goodput": static[best],
            "ratio": round(result["goodput_rps"] / static[best], 3),
            "best_static": best,
            "static": static,
            "offered_rps": result["offered_rps"],
            "minutes": round(replay.jobs[-1].request.arrival_s / 60, 1),
            "good_of_accepted": result["good_of_accepted"],
            "ttft_target": f"{TTFT_MS:g} ms + max({TTFT_MS_PER_1K:g} ms per 1k tokens, own prefill)",
            "accepted_p99_ttft_s": result["accepted_p99_ttft_s"],
            "accepted_p99_ttft_of_target": result["accepted_p99_ttft_of_target"],
            "itl_target_ms": itl_ms,
            "accepted_p99_itl_ms": result["accepted_p99_itl_ms"],
            "refused": result["refused"],
            "let_in_by_lane": replay.by_lane(),
            "retry_after_error": retry_error(replay.retry_errors_s),
        }

    def fair(self) -> dict[str, Any]:
        """Two tenants, one of which asks for four times as much: the other one gets nearly all it wants."""
        itl_ms, speed = SCENARIOS["prefill_bound"]
        replay = self.run(itl_ms, speed, admission, tenants=True)
        tokens = {
            name: sum(j.request.prompt_tokens for j in replay.jobs if replay.tenants[j.attempt] == name)
            for name in ("small", "large")
        }
        accepted = sum(replay.tenants[job.attempt] == "small" for job in replay.jobs)
        asked = (len(replay.jobs) + len(replay.refused)) / FAIR_SHARE_ASKED
        return {
            "small_tenant_let_in": round(accepted / asked, 3),
            "all_let_in": round(len(replay.jobs) / (len(replay.jobs) + len(replay.refused)), 3),
            "small_tenants_share_of_work": round(tokens["small"] / sum(tokens.values()), 3),
        }

    def harmless(self) -> dict[str, Any]:
        """Share refused at half of what the workers can take, also by routers that know nothing yet."""
        shares = {}
        for factor in (1.0, 0.25, 4.0):
            replay = self.run(40.0, 1.2, admission, prior_factor=factor)
            n = len(replay.jobs) + len(replay.refused)
            shares[f"refused_at_half_load_prior_x{factor:g}"] = round(len(replay.refused) / n, 4)
        return shares

    def unfitted(self) -> dict[str, Any]:
        """Overload from the first second on, by routers whose first guesses are wrong."""
        itl_ms, speed = SCENARIOS["prefill_bound"]
        results = {}
        for factor in (0.25, 4.0):
            result = self.run(itl_ms, speed, admission, prior_factor=factor).summary()
            keys = ("goodput_rps", "good_of_accepted", "accepted_p99_ttft_of_target")
            results[f"prior_x{factor:g}"] = {key: result[key] for key in keys}
        return results


def admission(slo: Slo) -> Callable[[PolicyRouter], Gate]:
    return predicted(slo, AdmissionConfig(mode="slo"))


def retry_error(errors: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of refused requests that were asked about until they would have been let in: told against true."""
    told, true = (np.array(column) for column in zip(*errors, strict=True))
    return {
        "samples": len(told),
        "told_s_p50": round(float(np.median(told)), 3),
        "true_s_p50": round(float(np.median(true)), 3),
        "told_s_mean": round(float(np.mean(told)), 3),
        "true_s_mean": round(float(np.mean(true)), 3),
        "error_s_p50": round(float(np.median(np.abs(told - true))), 3),
        # What the client sees is rounded up to whole seconds: would it be let in at some time until then?
        "let_in_by_then": round(float(np.mean(np.maximum(np.ceil(told), 1) >= true)), 3),
    }


def decision_us(simulation: Simulation) -> float:
    """Mean time of one decision, under overload."""
    times: list[float] = []

    class Timed(Predicted):
        def admit(self, ask, choice, now_s, again):  # type: ignore[no-untyped-def]
            began_s = time.thread_time()  # whatever else the machine does
            verdict = super().admit(ask, choice, now_s, again)
            times.append(time.thread_time() - began_s)
            return verdict

    def gates(slo: Slo) -> Callable[[PolicyRouter], Gate]:
        inner = admission(slo)
        return lambda router: Timed(inner(router).admission)  # type: ignore[attr-defined]

    simulation.run(*SCENARIOS["prefill_bound"], gates)
    return round(float(np.mean(times)) * 1e6, 1)


def simulated(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    simulation = Simulation(args.traces, args.requests, args.frontends, progress)
    scenarios = {name: simulation.overload(name) for name in SCENARIOS}
    worst = min(scenarios.values(), key=lambda scenario: scenario["ratio"])
    progress.say("tenants, low load, wrong first guesses")
    return {
        **{key: worst[key] for key in ("goodput", "best_static_goodput", "ratio")},
        **scenarios,
        "fairness": simulation.fair(),
        "harmless": simulation.harmless(),
        "unfitted": simulation.unfitted(),
        "decision_us_mean": decision_us(simulation),
        "frontends": args.frontends,
    }


def main() -> None:
    parser = command("overload", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=("simulated", "live"))
    parser.add_argument("--traces", metavar="DIR", help="where the traces are")
    parser.add_argument("--requests", type=COUNT, help="simulated: only the first so many")
    parser.add_argument("--frontends", type=COUNT, default=2, help="simulated")
    parser.add_argument("--seconds", type=POSITIVE, default=75.0, help="live: how long to send, each time")
    args = parser.parse_args()
    progress = Progress(quiet=args.json)
    report: dict[str, Any] = {}
    if args.only != "live":
        report["simulated"] = simulated(args, progress)
    if args.only != "simulated":
        report["live"] = overload_live.measure(args.traces, args.seconds, progress)
    if args.json:
        print(json.dumps(report))
    else:
        print_report("Twice the load", report)


if __name__ == "__main__":
    main()
