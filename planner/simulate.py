"""What would the planner do? The live router and the planner over a trace, on a virtual clock.

    python -m planner.simulate --trace conversation --ttft-ms 1500 --itl-ms 50 --budget 16 --startup-s 60
    python -m planner.simulate --trace made-up --rate 5 --burst 600 60 10 --out burst

Prints a summary and writes OUT.json and OUT.png. Engine times come from --profile, a file that
`python -m planner.profile` has made; without it from those of a 70B model on H100s (the constants here).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from planner.observation import to_json
from planner.predictors import PREDICTORS
from planner.settings import PoolLimits, Settings, Targets, VariantSettings
from planner.sim_cluster import Cluster
from planner.sim_policies import MeanThroughput, Planner, RequestCount, Static
from planner.sim_report import Criterion, draw, summary
from planner.sim_setup import VARIANT, Policy, SimSetup
from planner.sim_worker import EngineTimes
from planner.timing_profile import load_profile
from planner.workload import TRACE_NAMES, TraceRequest, load_trace, made_up, traces_dir
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
    requests: list[TraceRequest], policy: Policy, setup: SimSetup, *, title: str = "", quiet: bool = True
) -> Cluster:
    """One run, with a bar on stderr unless `quiet`."""
    run = Cluster(setup, policy)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planner.simulate",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    load = parser.add_argument_group("load")
    load.add_argument("--trace", choices=(*TRACE_NAMES, MADE_UP), default=MADE_UP)
    load.add_argument("--traces", help="folder of the public traces")
    load.add_argument("--speed", type=float, default=1.0, help="times the trace's rate")
    load.add_argument("--requests", type=int, help="only the first so many")
    load.add_argument("--rate", type=float, default=5.0, help="made-up: requests per second")
    load.add_argument("--duration-s", type=float, default=3600.0, help="made-up")
    load.add_argument("--prompt-tokens", type=int, default=2000, help="made-up: mean")
    load.add_argument("--output-tokens", type=int, default=200, help="made-up: mean")
    load.add_argument("--wave", type=float, default=0.0, help="made-up: 0..1, share that swings")
    load.add_argument("--wave-s", type=float, default=3600.0, help="made-up: period of the swing")
    load.add_argument(
        "--burst", type=float, nargs=3, metavar=("AT_S", "FOR_S", "TIMES"), help="made-up: a burst"
    )
    what = parser.add_argument_group("what if")
    what.add_argument("--policy", choices=POLICIES, default="kvrelay")
    what.add_argument("--ttft-ms", type=float, default=1500.0)
    what.add_argument("--ttft-ms-per-1k-tokens", type=float, help="default: what 1,000 tokens take")
    what.add_argument("--itl-ms", type=float, default=50.0)
    what.add_argument("--percentile", type=float, default=95.0)
    what.add_argument("--budget", type=int, default=16, help="GPUs, one a worker")
    what.add_argument("--startup-s", type=float, default=60.0)
    what.add_argument("--interval-s", type=float, default=5.0, help="between two decisions")
    what.add_argument("--predictor", choices=tuple(PREDICTORS), default="blend")
    what.add_argument("--no-flips", action="store_true", help="workers keep their role")
    what.add_argument("--to-zero-s", type=float, help="scale to zero after so long without a request")
    what.add_argument("--prefill", type=int, default=1, help="workers at the start, and for ever if static")
    what.add_argument("--decode", type=int, default=1)
    what.add_argument("--headroom", type=float, default=1.0, help="mean_throughput: its factor")
    what.add_argument("--placeable", type=int, help="workers the cluster has room for")
    what.add_argument("--mttf-s", type=float, help="mean time to failure of a worker")
    what.add_argument("--profile", help="engine times: a file of planner.profile")
    what.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="simulation", help="writes OUT.json and OUT.png")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("speed", "rate", "duration_s", "budget", "interval_s", "ttft_ms", "itl_ms"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.traces is not None and args.trace == MADE_UP:
        parser.error("--traces goes with --trace and the name of one")
    if args.prefill + args.decode > args.budget:
        parser.error(
            f"--prefill and --decode start {args.prefill + args.decode} workers; --budget allows less"
        )
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
    except (FileNotFoundError, ValueError, KVRelayError) as error:
        print(error, file=sys.stderr)
        return 2
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
        requests, policies[args.policy], setup, title=f"{args.trace}, {args.policy}", quiet=args.json
    )
    criterion = Criterion.of(targets)
    row = summary(run, criterion) | {"wall_s": round(time.perf_counter() - began, 2)}
    title = (
        f"{args.policy} on {args.trace}: TTFT {args.ttft_ms:g} ms, ITL {args.itl_ms:g} ms,"
        f" start-up {args.startup_s:g} s, budget {args.budget} GPUs"
    )
    Path(f"{args.out}.json").write_text(json.dumps(_written(run, row, args), indent=1))
    draw(run, criterion, title, Path(f"{args.out}.png"), row)
    if args.json:
        print(json.dumps(row))
    else:
        _print(row, args.out)
    return 0


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace == MADE_UP:
        return made_up(
            args.rate,
            args.duration_s,
            args.prompt_tokens,
            args.output_tokens,
            wave=args.wave,
            wave_s=args.wave_s,
            burst=args.burst,
            seed=args.seed,
        )
    return load_trace(args.trace, traces_dir(args.traces), args.speed, args.requests, args.seed)


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
        table.add_row(key, "-" if value is None else f"{value:,}")
    Console().print(table)
    print(f"{out}.png and {out}.json written")


if __name__ == "__main__":
    sys.exit(main())
