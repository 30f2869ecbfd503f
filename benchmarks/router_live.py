"""Does the replay tell the truth? One slice of a trace live through the whole application, and replayed.

    python -m benchmarks.router_live [--json] [--trace conversation] [--speed 1.5] [--seconds 300]

Live: `sim` prefill workers of the replay's speed and cache and one decode worker under Ray, real HTTP,
tokens, hashes, KV events, load reports and hand-offs; the router knows of the workers only what they say.
Replay: the same requests and set-up, where every prediction is exact and nothing else takes time. (For this
it fills a prefill step up from the next prompt, as the engine does; benchmarks/router_replay.py does not.)
`hit` is the share of prompt tokens found in the cache. Answers are cut short: this is about TTFT.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from benchmarks.overhead import application
from benchmarks.replay_workers import CHUNK_S, TOKENS_PER_S
from benchmarks.report import COUNT, POSITIVE, Progress, command, print_report
from benchmarks.router_replay import Replay, Setup
from benchmarks.scrape import scrape_sums
from benchmarks.trace_client import CONTEXT_TOKENS, Outcome, first_seconds
from benchmarks.traces import BLOCK_TOKENS, TRACE_NAMES, TraceRequest, load_trace, traces_dir
from kvrouter.deadline import Order
from kvrouter.policies.registry import POLICY_NAMES
from planner.options import Number
from serving.local_cluster import LocalCluster
from serving.manifest import resolve_weights

TOKENIZER = "smollm2-135m"
KV_BYTES_PER_TOKEN = 8
ENGINE_BLOCK_TOKENS = 128
PATIENCE_MS = 600_000  # no deadline may end a request: the replay has none
# Whose CPU is told apart: what a process's title contains.
ROLES = {
    "frontends": "Frontend",
    "prefill_workers": "-prefill",
    "decode_workers": "-decode",
    "haproxy": "haproxy",
}


def write_model(folder: Path) -> Path:
    """A model of a real one's tokenizer, with the context that the traces' longest prompts need; `sim`
    engines read no weights, but a directory of a model has some."""
    folder.mkdir()
    (folder / "none.safetensors").write_bytes(bytes(8))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(resolve_weights(TOKENIZER) / name, folder)
    card = json.loads((resolve_weights(TOKENIZER) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**card, "max_position_embeddings": CONTEXT_TOKENS}))
    return folder


def live_config(setup: Setup, policy: str, model: Path) -> dict[str, Any]:
    """The replay's set-up, as an application has it; `model`: of `write_model`."""
    profile = {
        "prefill_ms_per_token": 1e3 / TOKENS_PER_S,
        "context_tokens": CONTEXT_TOKENS,
        "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
    }
    engine = {
        "kind": "sim",
        "profile": profile,
        "block_tokens": ENGINE_BLOCK_TOKENS,
        "kv_bytes": setup.blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        "chunk_tokens": round(CHUNK_S * TOKENS_PER_S),
        "max_batch": 512,
    }
    variant = {
        "name": "main",
        "weights": str(model),
        "engine": engine,
        "prefill": {"replicas": setup.workers, "max_replicas": setup.workers, "cpus": 0.1},
        "decode": {"replicas": 1, "cpus": 0.1},
    }
    stages = ("request_ms", "queue_ms", "prefill_ms", "first_token_ms", "transfer_ms")
    return application(
        "serving.app:build",
        {
            "models": [{"name": "sim", "variants": [variant]}],
            "frontend": {"replicas": setup.frontends},
            "router": {
                "policy": policy,
                "regret_weight": setup.regret_weight,
                "local_prefill": False,  # the replay's decode workers only decode
            },
            "deadlines": dict.fromkeys(stages, PATIENCE_MS),
        },
    )


def row(ttft_s: Sequence[float], cached: Sequence[int], prompts: Sequence[int]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(ttft_s, (50, 90, 99))
    return {
        "hit": round(sum(cached) / sum(prompts), 4),
        "mean_ttft_s": round(float(np.mean(ttft_s)), 4),
        "p50_ttft_s": round(float(p50), 4),
        "p90_ttft_s": round(float(p90), 4),
        "p99_ttft_s": round(float(p99), 4),
    }


def replayed(requests: Sequence[TraceRequest], policy: str, setup: Setup) -> dict[str, float]:
    run = Replay(policy, setup)
    run.run(requests)
    jobs = run.jobs
    return row(
        [job.first_token_s - job.request.arrival_s for job in jobs],
        [min((job.cached_blocks or 0) * BLOCK_TOKENS, job.request.prompt_tokens) for job in jobs],
        [job.request.prompt_tokens for job in jobs],
    )


def cpu_by_role(cluster: LocalCluster) -> dict[str, float]:
    """CPU seconds so far of the application's processes."""
    seconds = dict.fromkeys(ROLES, 0.0)
    for process in cluster.processes():
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        role = next((role for role, mark in ROLES.items() if mark in title), None)
        if role is not None:
            seconds[role] += times.user + times.system
    return seconds


def run_client(cluster: LocalCluster, args: argparse.Namespace) -> tuple[list[Outcome], float]:
    """What every request met, and the client's CPU seconds. Raises RuntimeError if any failed."""
    options = {
        "port": cluster.port,
        "model": "sim",
        "trace": args.trace,
        "speed": args.speed,
        "seconds": args.seconds,
        "output-tokens": args.output_tokens,
    }
    if args.traces is not None:
        options["traces"] = args.traces
    command = [sys.executable, "-m", "benchmarks.trace_client"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, timeout=args.seconds + 600, check=False)
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr[-500:].decode(errors='replace')}")
    told = orjson.loads(done.stdout)
    outcomes = [Outcome(**outcome) for outcome in told["outcomes"]]
    failed = [outcome for outcome in outcomes if outcome.status != 200 or outcome.ttft_s is None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed, the first one: {failed[0]}")
    return outcomes, told["cpu_s"]


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    setup = Setup(
        workers=args.workers,
        blocks=args.blocks,
        regret_weight=args.regret_weight,
        separate=True,
        frontends=args.frontends,
        order=Order.DEADLINE,  # what our engines do, whatever the policy
        packed=True,  # that too
    )
    trace = load_trace(args.trace, traces_dir(args.traces), args.speed)
    requests = first_seconds(trace, args.seconds, args.output_tokens)
    progress.say(f"replaying {len(requests)} requests")
    replay = replayed(requests, args.policy, setup)
    with LocalCluster(cpus=4) as cluster:
        progress.say("starting the application")
        model = write_model(cluster.directory / "model")
        cluster.serve(live_config(setup, args.policy, model))
        cpu_s, began_s = cpu_by_role(cluster), time.monotonic()
        progress.say(f"the same live, {args.seconds:g} s")
        outcomes, client_cpu_s = run_client(cluster, args)
        elapsed_s = time.monotonic() - began_s
        spent_s = {role: s - cpu_s[role] for role, s in cpu_by_role(cluster).items()}
        sums = scrape_sums(cluster.url)
    live = row(
        [outcome.ttft_s or 0.0 for outcome in outcomes],
        [outcome.cached_tokens for outcome in outcomes],
        [outcome.prompt_tokens for outcome in outcomes],
    )
    late_ms = [(outcome.sent_s - outcome.due_s) * 1e3 for outcome in outcomes]
    placed = {o.prefill: sum(1 for p in outcomes if p.prefill == o.prefill) for o in outcomes}
    return {
        "trace": args.trace,
        "speed": args.speed,
        "requests": len(requests),
        "policy": args.policy,
        "frontends": args.frontends,
        "live": live,
        "replay": replay,
        "hit_points": round(100 * (live["hit"] - replay["hit"]), 2),
        **{
            f"{key}_ratio": round(live[f"{key}_ttft_s"] / replay[f"{key}_ttft_s"], 3)
            for key in ("mean", "p50", "p90")
        },
        "requests_by_worker": sorted(placed.values()),
        "predicted_ttft_s_mean": mean_of(sums, "kvrelay_predicted_ttft_seconds"),
        "ttft_error_s_mean": mean_of(sums, "kvrelay_ttft_error_seconds"),
        "frontend_ttft_s_mean": mean_of(sums, "kvrelay_ttft_seconds"),
        # Above 1: the machine was too busy for the workers to be as fast as they should, so TTFTs are not.
        "worker_slowdown": round(
            sums["kvrelay_prefill_step_seconds_total"]
            / (sums["kvrelay_prompt_tokens_computed_total"] / TOKENS_PER_S),
            3,
        ),
        "decision_ms_mean": round(mean_of(sums, "kvrelay_router_decision_seconds") * 1e3, 3),
        "client_late_ms_p99": round(float(np.percentile(late_ms, 99)), 2),
        # Of one core each: near 100 the machine, not the model, makes the TTFT.
        "cpu_percent": {
            role: round(100 * s / elapsed_s, 1) for role, s in {**spent_s, "client": client_cpu_s}.items()
        },
    }


def mean_of(sums: dict[str, float], histogram: str) -> float:
    return round(sums[f"{histogram}_sum"] / max(sums[f"{histogram}_count"], 1), 4)


def main() -> None:
    parser = command("router_live", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", choices=TRACE_NAMES, default="conversation")
    parser.add_argument("--traces", metavar="DIR", help="where the traces are")
    parser.add_argument("--speed", type=POSITIVE, default=1.5, help="times the trace's rate")
    parser.add_argument("--seconds", type=POSITIVE, default=300.0, help="how long to send")
    parser.add_argument("--policy", choices=POLICY_NAMES, default="ttft_regret")
    parser.add_argument("--regret-weight", type=Number(least=0, most=100), default=1.0)
    parser.add_argument("--workers", type=COUNT, default=4)
    parser.add_argument("--blocks", type=COUNT, default=3000, help="cache of a worker, of 512 tokens each")
    parser.add_argument("--frontends", type=COUNT, default=1)
    parser.add_argument("--output-tokens", type=COUNT, default=8, help="longest answer")
    args = parser.parse_args()
    report = measure(args, Progress(quiet=args.json))
    if args.json:
        print(json.dumps(report))
    else:
        print_report("The router live and replayed", report)


if __name__ == "__main__":
    main()
