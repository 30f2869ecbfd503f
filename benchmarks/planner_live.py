"""The planner acting on a live application: do the pools follow, is anything lost?

    python -m benchmarks.planner_live [--json] [--real] [--quick]

Load steps up and down on `sim` workers (with --real: on embedded workers with a real model) while the
planner scales the pools through Serve. The same arrivals then go through the simulator, with the start-up
time that was seen. Both agree at a tick if the simulator wants the same replicas at that tick or at a
neighbouring one.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.fault_client import Answer, Ask, send
from benchmarks.instrument import ahead_of_the_server
from benchmarks.overhead import application
from benchmarks.report import Progress, command, print_report
from planner.observation import FittedTimes
from planner.sim_cluster import Cluster
from planner.sim_policies import Planner
from planner.sim_setup import VARIANT, SimSetup
from planner.sim_worker import EngineTimes
from planner.timing_profile import Profile, Provenance, save_profile
from planner.workload import TraceRequest
from serving.config import load_config
from serving.live_settings import LivePlanner
from serving.local_cluster import LocalCluster
from serving.planner_settings import planner_settings

MODEL = "sim"
KEY = "planner-benchmark-admin-key-0123456789"
STEP_MS = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`phases`: (seconds, requests a second)."""

    phases: tuple[tuple[float, float], ...]
    prompt_tokens: int
    output_tokens: int
    prefill_ms_per_token: float
    interval_s: float = 2.0
    down_window_s: float = 30.0
    most: int = 4  # replicas of a pool
    budget: float = 6.0
    first: tuple[int, int] = (1, 1)  # replicas to begin with: prefill, decode
    flips: bool = False
    ttft_ms: float = 1000
    itl_ms: float = 50
    named_tokens: bool = False  # how to count them; see Ask

    def arrivals(self, seed: int = 1) -> list[float]:
        """Poisson within each phase."""
        draw = random.Random(seed)
        times, start = [], 0.0
        for seconds, rps in self.phases:
            at = start + draw.expovariate(rps)
            while at < start + seconds:
                times.append(at)
                at += draw.expovariate(rps)
            start += seconds
        return times


SIM = Plan(((40, 1.0), (60, 5.0), (280, 1.0)), 800, 40, 0.4)  # the forecast's mean is of four minutes
QUICK = replace(SIM, phases=((15, 1.0), (30, 5.0), (45, 1.0)))
REAL = Plan(
    ((30, 0.3), (50, 1.5), (280, 0.3)),
    300,
    16,
    0.0,
    most=2,
    budget=3.0,
    ttft_ms=3000,
    itl_ms=400,
    named_tokens=True,
)


def config(plan: Plan, key_file: Path, profile: Path | None, real: bool) -> dict[str, Any]:
    if real:
        engine: dict[str, Any] = {"kind": "torch", "kv_bytes": 128 << 20}
    else:
        shape = {"decode_ms": STEP_MS, "prefill_ms_per_token": plan.prefill_ms_per_token}
        engine = {"kind": "sim", "profile": shape, "kv_bytes": 16 << 20, "chunk_tokens": 1024}
    prefill, decode = (
        {"replicas": first, "min_replicas": 1, "max_replicas": plan.most, "cpus": 1} for first in plan.first
    )
    pools = {"prefill": prefill, "decode": decode}
    variant = {"name": "main", "weights": "smollm2-135m", "engine": engine, **pools}
    if profile is not None:
        variant["times"] = str(profile)
    slo = {"ttft_ms": plan.ttft_ms, "ttft_ms_per_1k_tokens": 500, "itl_ms": plan.itl_ms}
    args = {
        "models": [{"name": MODEL, "slo": slo, "variants": [variant]}],
        "router": {"local_prefill": False},
        "admission": {"mode": "off"},
        "planner": {
            "mode": "act",
            "interval_s": plan.interval_s,
            "budget": {"cpus": plan.budget},
            "startup_s": 8,
            "down_window_s": plan.down_window_s,
            "flips": plan.flips,
        },
        "security": {"admin_key_file": str(key_file)},
    }
    deployed = application("serving.app:build", args)
    deployed["applications"][0]["external_scaler_enabled"] = True
    return deployed


def write_profile(plan: Plan, directory: Path) -> Path:
    """Of the simulated engines."""
    profile = directory / "times.json"
    made = Provenance(MODEL, "", "sim", "", "", "", "")
    fitted = FittedTimes((0.0, plan.prefill_ms_per_token, 0.0), (STEP_MS, 0.0, 0.0), samples=100)
    save_profile(Profile(made, fitted), profile)
    return profile


def write_key(directory: Path) -> Path:
    key_file = directory / "admin.key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    return key_file


def told(url: str) -> dict[str, Any]:
    request = Request(f"{url}/planner", headers={"authorization": f"Bearer {KEY}"})
    with urlopen(request, timeout=10) as response:
        found = json.load(response)
    assert isinstance(found, dict)
    return found


async def load(port: int, plan: Plan, model: str) -> tuple[list[Answer], float]:
    """Every arrival at its time; the answers, and the wall clock at time 0."""
    arrivals = plan.arrivals()
    began_s, wall_s = time.monotonic(), time.time()

    async def one(number: int, at_s: float) -> Answer:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        draw = random.Random(number)
        prompt = tuple(draw.randrange(100, 40_000) for _ in range(plan.prompt_tokens))
        ask = Ask(prompt, plan.output_tokens, named_tokens=plan.named_tokens)
        exchange = await send("127.0.0.1", port, ask, model)
        await exchange.ended.wait()
        return exchange.answer()

    answers = await asyncio.gather(*(one(n, at) for n, at in enumerate(arrivals)))
    left_s = sum(seconds for seconds, _ in plan.phases) - (time.monotonic() - began_s)
    await asyncio.sleep(max(left_s, 0.0))
    return answers, wall_s


def targets_of(history: list[dict[str, Any]], wall_s: float) -> list[tuple[float, int, int]]:
    """(seconds since the load began, prefill, decode) at every tick."""
    rows = []
    for line in history:
        (wanted,) = line["variants"].values()
        rows.append((line["at_s"] - wall_s, wanted["prefill"], wanted["decode"]))
    return [row for row in rows if row[0] >= 0]


def foreseen(
    plan: Plan, deployed: dict[str, Any], startup_s: float, tick_s: float
) -> list[tuple[float, int, int]]:
    """What the simulator wants for the same arrivals when one of its ticks is at `tick_s`: what it orders
    depends on how much of a step of load a tick has seen."""
    live = planner_settings(load_config(deployed["applications"][0]["args"]), LivePlanner())
    (variant,) = live.variants.values()
    settings = replace(live, variants={VARIANT: replace(variant, startup_s=startup_s)})
    times = EngineTimes(
        prefill=(0.0, plan.prefill_ms_per_token, 0.0),
        step=(STEP_MS, 0.0, 0.0),
        move_ms=3.0,
        mixed_chunk_ms=0.0,
    )
    late_s = -tick_s % plan.interval_s
    requests = [TraceRequest(at + late_s, plan.prompt_tokens, plan.output_tokens) for at in plan.arrivals()]
    cluster = Cluster(SimSetup(times, startup_s=startup_s, local_prefill=False), Planner(settings))
    cluster.run(requests)
    return [(sample.at_s - late_s, *sample.targets) for sample in cluster.samples]


def agreement(
    live: list[tuple[float, int, int]], simulated: list[tuple[float, int, int]], interval_s: float
) -> float:
    """Share of live ticks that the simulator matches, give or take a tick."""
    matched = 0
    for at_s, *wanted in live:
        near = [row[1:] for row in simulated if abs(row[0] - at_s) <= 1.5 * interval_s]
        matched += tuple(wanted) in near
    return matched / max(len(live), 1)


def measure(plan: Plan, real: bool, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        key_file = write_key(Path(directory))
        profile = None if real else write_profile(plan, Path(directory))
        deployed = config(plan, key_file, profile, real)
        progress.say("a cluster, one prefill and one decode worker on it, the planner acting")
        with LocalCluster(cpus=plan.most * 2 + 2) as cluster:
            cluster.serve(deployed)
            progress.say(f"load steps: {plan.phases}")
            with ahead_of_the_server():
                answers, wall_s = asyncio.run(load(cluster.port, plan, MODEL))
            found = told(cluster.url)
        live = targets_of(found["history"], wall_s)
        failed = [a for a in answers if not a.whole or len(a.tokens) != plan.output_tokens]
        ttft = sorted(a.times_s[0] - a.sent_s for a in answers if a.times_s)
        report = {
            "requests": len(answers),
            "failed": len(failed),
            "errors": sorted({str(a.error or a.status) for a in failed}),
            "ttft_p50_s": round(ttft[len(ttft) // 2], 3),
            "ttft_p95_s": round(ttft[int(len(ttft) * 0.95)], 3),
            "startup_s": found.get("startup_s"),
            "most_replicas": [max(row[1] for row in live), max(row[2] for row in live)],
            "last_replicas": list(live[-1][1:]),
            "changes": changes(live),
            "reasons": [line["variants"][f"{MODEL}/main"]["reason"] for line in found["history"]][-3:],
        }
        if not real:
            startup_s = max((found.get("startup_s") or {}).values(), default=8.0)
            simulated = foreseen(plan, deployed, startup_s, live[0][0])
            report["simulated_changes"] = changes(simulated)
            report["agreement"] = round(agreement(live, simulated, plan.interval_s), 3)
        return report


def changes(rows: list[tuple[float, int, int]]) -> list[list[float]]:
    """[seconds, prefill, decode] whenever one of them changed."""
    kept: list[list[float]] = []
    for at_s, prefill, decode in rows:
        if not kept or kept[-1][1:] != [prefill, decode]:
            kept.append([round(at_s, 1), prefill, decode])
    return kept


def main() -> None:
    parser = command("planner_live", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--real", action="store_true", help="embedded workers with a real model")
    parser.add_argument("--quick", action="store_true", help="shorter phases")
    options = parser.parse_args()
    plan = REAL if options.real else QUICK if options.quick else SIM
    report = measure(plan, options.real, Progress(quiet=options.json))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report("planner, live", report)


if __name__ == "__main__":
    main()
