"""What would the planner do? The live router and the planner over a trace, on a virtual clock.

    python -m planner.simulate --trace conversation --ttft-ms 1500 --itl-ms 50 --budget 16 --startup-s 60
    python -m planner.simulate --trace made-up --rate 5 --burst 600 60 10 --admission slo --out burst

Prints a summary and writes OUT.json and OUT.png. Engine times come from --profile, a file that
`python -m planner.profile` has made; without it from those of a 70B model on H100s (the constants here).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrouter.policy_router import PolicyRouter
from planner.observation import to_json
from planner.options import Number, Option, OptionParser
from planner.predictors import PREDICTORS
from planner.settings import PoolLimits, Settings, Targets, VariantSettings
from planner.sim_admission import MODES, admission_for
from planner.sim_cluster import Cluster
from planner.sim_policies import MeanThroughput, Planner, RequestCount, Static
from planner.sim_report import Criterion, draw, summary
from planner.sim_setup import VARIANT, Admit, Policy, SimSetup
from planner.sim_worker import EngineTimes
from planner.timing_profile import load_profile
from planner.workload import MOST_REQUESTS, TRACE_NAMES, TraceRequest, load_trace, made_up, traces_dir
from serving.config import AdmissionConfig
from serving.errors import KVRelayError

__all__ = ["H100", "settings_for", "simulate"]

# Prefill of a 32B model on two H100 (20,480 tokens/s, linear). Step: least squares over the llama2-70b
# rows, four H100, of the timings that splitwise-sim publishes (1.7 % mean error up to batch 64).
H100 = EngineTimes(prefill=(0.0, 1e3 / 20_480, 0.0), step=(28.9, 0.272, 7.86e-5))

MADE_UP = "made-up"
POLICIES = ("kvrelay", "static", "mean_throughput", "request_count")


def settings_for(targets: Targets, *, startup_s: float, budget: float, **changes: Any) -> Settings:
    """The planner's settings of a simulated application with one variant, workers of one GPU."""
    flips = changes.pop("flips", True)
    idle_s = changes.pop("idle_to_zero_s", None)
    least = 0 if idle_s is not None else 1
    limits = PoolLimits(min_replicas=least, max_replicas=int(budget))
    variant = VariantSettings(
        targets, prefill=limits, decode=limits, startup_s=startup_s, flips=flips, idle_to_zero_s=idle_s
    )
    return Settings({VARIANT: variant}, budget=budget, **changes)


def simulate(
    requests: list[TraceRequest],
    policy: Policy,
    setup: SimSetup,
    *,
    admission: Callable[[PolicyRouter], Admit] | None = None,
    title: str = "",
    quiet: bool = True,
) -> Cluster:
    """One run, with a bar on stderr unless `quiet`."""
    run = Cluster(setup, policy, admission)
    if quiet:
        run.run(requests)
        return run
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        task = bars.add_task(title or "simulating", total=1.0)
        run.run(requests, lambda share: bars.update(task, completed=share))
    return run


# ------------------------------------------------------------ command line

WITH_MADE_UP = f"--trace {MADE_UP}"
WITH_TRACE = "the --trace of a public one"
WITH_WAVE = "--wave above 0"
WITH_PLANNER = "--policy kvrelay"
WITH_MEAN = "--policy mean_throughput"

POSITIVE = Number(above=0, most=86_400_000)
LOAD = (
    Option("--trace", (*TRACE_NAMES, MADE_UP), MADE_UP, "requests of a public trace, or drawn ones"),
    Option("--traces", str, None, "folder of the public traces", WITH_TRACE),
    Option("--speed", Number(above=0, most=1000), 1.0, "times the trace's rate", WITH_TRACE),
    Option("--requests", Number(least=1, whole=True), None, "the first so many alone", WITH_TRACE),
    Option("--rate", Number(above=0, most=10_000), 5.0, "requests per second", WITH_MADE_UP),
    Option("--duration-s", Number(above=0, most=31 * 86_400), 3600.0, "of the load", WITH_MADE_UP),
    Option(
        "--prompt-tokens", Number(least=1, most=1_000_000, whole=True), 2000, "their mean", WITH_MADE_UP
    ),
    Option("--output-tokens", Number(least=1, most=1_000_000, whole=True), 200, "their mean", WITH_MADE_UP),
    Option("--wave", Number(least=0, most=1), 0.0, "share of the rate that swings", WITH_MADE_UP),
    Option("--wave-s", Number(least=1, most=31 * 86_400), 3600.0, "period of the swing", WITH_WAVE),
    Option(
        "--burst",
        Number(least=0, most=31 * 86_400),
        None,
        "a time in which the rate is higher",
        WITH_MADE_UP,
        ("AT_S", "FOR_S", "TIMES"),
    ),
)
WHAT_IF = (
    Option("--policy", POLICIES, "kvrelay", "who decides"),
    Option("--ttft-ms", POSITIVE, 1500.0, "target"),
    Option(
        "--ttft-ms-per-1k-tokens",
        Number(least=0, most=86_400_000),
        None,
        "what 1,000 tokens of prompt add to it; without it as much as they take",
    ),
    Option("--itl-ms", POSITIVE, 50.0, "target for a request's mean"),
    Option(
        "--percentile", Number(above=0, below=100), 95.0, "of requests that shall meet both", WITH_PLANNER
    ),
    Option("--admission", MODES, AdmissionConfig().mode, "who is let in; as in a configuration"),
    Option("--budget", Number(least=1, most=100_000, whole=True), 16, "GPUs, one a worker"),
    Option("--startup-s", Number(least=0, most=86_400), 60.0, "from an order to a ready worker"),
    Option("--interval-s", Number(least=0.5, most=300), 5.0, "between two decisions", WITH_PLANNER),
    Option("--predictor", tuple(PREDICTORS), "blend", "of the rate", WITH_PLANNER),
    Option("--no-flips", None, False, "workers keep their role", WITH_PLANNER),
    Option(
        "--to-zero-s",
        Number(least=0, most=31 * 86_400),
        None,
        "scale to zero after so long without a request",
        WITH_PLANNER,
    ),
    Option("--prefill", Number(least=0, whole=True), 1, "workers at the start, and for ever if static"),
    Option("--decode", Number(least=0, whole=True), 1, "the same"),
    Option("--headroom", Number(above=0, most=100), 1.0, "its factor", WITH_MEAN),
    Option("--placeable", Number(least=1, whole=True), None, "workers the cluster has room for"),
    Option("--mttf-s", Number(least=1, most=1_000_000_000), None, "mean time to failure of a worker"),
    Option("--profile", str, None, "engine times: a file of planner.profile"),
    Option("--seed", Number(whole=True), 0, "of all that is drawn"),
)
OUTPUT = (
    Option("--out", str, "simulation", "writes OUT.json and OUT.png"),
    Option("--json", None, False, "print the summary as one JSON object"),
)


def arguments(argv: Sequence[str] | None) -> tuple[OptionParser, argparse.Namespace]:
    """Exits with one line and code 2 on a mistake."""
    parser = OptionParser(prog="python -m planner.simulate", description=(__doc__ or "").splitlines()[0])
    for title, options in (("load", LOAD), ("what if", WHAT_IF), ("output", OUTPUT)):
        parser.table(title, options)
    args = parser.parse_args(argv)
    parser.settle(args, _holds)
    initial = args.prefill + args.decode
    if args.policy != "kvrelay" and 0 in (args.prefill, args.decode):
        parser.wrong("--prefill, --decode", f"0; allowed: at least 1, or 0 with {WITH_PLANNER}")
    if initial > args.budget:
        parser.wrong("--prefill, --decode", f"together {initial}; allowed: at most --budget {args.budget}")
    if args.placeable is not None and initial > args.placeable:
        parser.wrong(
            "--prefill, --decode", f"together {initial}; allowed: at most --placeable {args.placeable}"
        )
    if args.trace == MADE_UP:
        _check_made_up(parser, args)
    return parser, args


def _holds(args: argparse.Namespace) -> dict[str, bool]:
    return {
        WITH_MADE_UP: args.trace == MADE_UP,
        WITH_TRACE: args.trace != MADE_UP,
        WITH_WAVE: args.trace == MADE_UP and bool(args.wave),
        WITH_PLANNER: args.policy == "kvrelay",
        WITH_MEAN: args.policy == "mean_throughput",
    }


def _check_made_up(parser: OptionParser, args: argparse.Namespace) -> None:
    most = args.rate * args.duration_s
    if args.burst is not None:
        at_s, for_s, times = args.burst
        if at_s >= args.duration_s or for_s == 0:
            parser.wrong("--burst", f"AT_S {at_s:g}, FOR_S {for_s:g}; allowed: a time within --duration-s")
        if times > 1000:
            parser.wrong("--burst", f"TIMES {times:g}; allowed: at most 1,000")
        most += args.rate * for_s * times
    if most > MOST_REQUESTS:
        parser.wrong("--rate", f"about {most:,.0f} requests in all; allowed: at most {MOST_REQUESTS:,}")


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = arguments(argv)
    parser.will_write("--out", args.out, (".json", ".png"))
    try:
        times = H100 if args.profile is None else _times_of(args.profile)
        requests = _requests(args)
        per_1k = args.ttft_ms_per_1k_tokens
        targets = Targets(
            args.ttft_ms,
            times.prefill_ms(1000, 1000) if per_1k is None else per_1k,
            args.itl_ms,
            args.percentile,
        )
        settings = settings_for(
            targets,
            startup_s=args.startup_s,
            budget=args.budget,
            interval_s=args.interval_s,
            predictor=args.predictor,
            flips=not args.no_flips,
            idle_to_zero_s=args.to_zero_s,
        )
    except (OSError, ValueError, KVRelayError) as error:
        return parser.failed(str(error))
    initial = (args.prefill, args.decode)
    policies: dict[str, Policy] = {
        "kvrelay": Planner(settings),
        "static": Static(*initial),
        "mean_throughput": MeanThroughput(targets, initial, args.budget, args.headroom),
        "request_count": RequestCount(targets, initial, args.budget),
    }
    setup = SimSetup(
        times,
        initial=initial,
        startup_s=args.startup_s,
        capacity=args.placeable,
        mean_time_to_failure_s=args.mttf_s,
        seed=args.seed,
    )
    began = time.perf_counter()
    run = simulate(
        requests,
        policies[args.policy],
        setup,
        admission=admission_for(args.admission, targets),
        title=f"{args.trace}, {args.policy}",
        quiet=args.json,
    )
    criterion = Criterion(targets)
    row = summary(run, criterion) | {"wall_s": round(time.perf_counter() - began, 2)}
    title = (
        f"{args.policy} on {args.trace}: start-up {args.startup_s:g} s, budget {args.budget} GPUs,"
        f" admission {args.admission}"
    )
    Path(f"{args.out}.json").write_text(json.dumps(_written(run, row, args), indent=1))
    draw(run, criterion, title, Path(f"{args.out}.png"), row, budget=args.budget)
    if args.json:
        print(json.dumps(row))
    else:
        _print(row, args.out)
    return 0


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    """Raises FileNotFoundError, ValueError."""
    if args.trace == MADE_UP:
        requests = made_up(
            args.rate,
            args.duration_s,
            args.prompt_tokens,
            args.output_tokens,
            wave=args.wave,
            wave_s=args.wave_s,
            burst=args.burst,
            seed=args.seed,
        )
    else:
        requests = load_trace(args.trace, traces_dir(args.traces), args.speed, args.requests, args.seed)
    if not requests:
        told = f": {args.rate:g} a second for {args.duration_s:g} s" if args.trace == MADE_UP else ""
        raise ValueError(
            f"--trace {args.trace}{told} came to no request; allowed: a load with at least one"
        )
    return requests


def _times_of(path: str) -> EngineTimes:
    profile = load_profile(Path(path))
    return EngineTimes(prefill=profile.times.prefill, step=profile.times.step)


def _written(run: Cluster, row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Arguments, summary, and every tick at which a target changed."""
    changes: list[dict[str, Any]] = []
    for sample in run.samples:
        if not changes or changes[-1]["targets"] != list(sample.targets):
            changes.append(to_json(sample))
    return {"arguments": vars(args), "summary": row, "changes": changes}


def _print(row: dict[str, Any], out: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for key, value in row.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int | float) else _words(value))
    Console().print(table)
    print(f"{out}.png and {out}.json written")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items()) or "-"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
