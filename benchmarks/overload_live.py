"""Twice the load, live: `sim` workers, two frontends, HTTP, under Ray (see benchmarks/overload.py)."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.overhead import application
from benchmarks.overload_client import Outcome
from benchmarks.report import Progress
from benchmarks.router_live import write_model
from benchmarks.scrape import scrape_sums
from benchmarks.traces import BLOCK_TOKENS, TraceRequest, load_trace, traces_dir
from serving.local_cluster import LocalCluster

SHORTER = 8  # lengths are so much shorter than the trace's
OUTPUT_SHORTER = 4
TTFT_MS, TTFT_MS_PER_1K, ITL_MS = 800.0, 400.0, 40.0
MS_PER_TOKEN = 0.39  # an eighth of the speed of the simulation
STEP_MS, STEP_MS_PER_SEQUENCE = 6.0, 1.0
CHUNK_TOKENS = 128
STEPPED_MS_PER_TOKEN = MS_PER_TOKEN + (STEP_MS + STEP_MS_PER_SEQUENCE) / CHUNK_TOKENS
CONTEXT_TOKENS = 32_768
RATE_RPS = 7.0  # about twice what the workers can take
WARM_S = 20.0  # at a quarter of the rate, before: workers and frontends learn their times
MAX_INFLIGHT = (2, 3, 4)  # of each of two frontends, swept; beyond that waits are too long


def live_config(model: Path, mode: str, max_inflight: int) -> dict[str, Any]:
    profile = {
        "prefill_ms_per_token": MS_PER_TOKEN,
        "step_ms": STEP_MS,
        "step_ms_per_sequence": STEP_MS_PER_SEQUENCE,
        "context_tokens": CONTEXT_TOKENS,
        "kv_bytes_per_token": 8,
    }
    engine = {
        "kind": "sim",
        "profile": profile,
        "block_tokens": BLOCK_TOKENS // SHORTER,
        "kv_bytes": 3000 * BLOCK_TOKENS // SHORTER * 8,
        "chunk_tokens": CHUNK_TOKENS,
        "max_batch": 128,
    }
    pool = {"replicas": 2, "cpus": 0.1}
    variant = {"name": "main", "weights": str(model), "engine": engine, "prefill": pool, "decode": pool}
    slo = {"ttft_ms": TTFT_MS, "ttft_ms_per_1k_tokens": TTFT_MS_PER_1K, "itl_ms": ITL_MS}
    return application(
        "serving.app:build",
        {
            "models": [{"name": "sim", "slo": slo, "variants": [variant]}],
            "frontend": {"replicas": 2, "max_inflight": max_inflight},
            "router": {"local_prefill": False},
            "admission": {"mode": mode},
        },
    )


def requests_for(trace: Sequence[TraceRequest], rate_rps: float, seconds: float, seed: int) -> list[Any]:
    """Poisson arrivals of the trace's requests, shortened, after a warm-up at a lower rate."""
    generator = random.Random(seed)
    at_s, requests = 0.0, []
    for r in trace:
        rate = rate_rps / 4 if at_s < WARM_S else rate_rps
        at_s += generator.expovariate(rate)
        if at_s > WARM_S + seconds:
            break
        prompt_tokens = max(r.prompt_tokens // SHORTER, 1)
        size = BLOCK_TOKENS // SHORTER
        requests.append(
            {
                "at_s": at_s,
                "blocks": list(r.hashes[: -(-prompt_tokens // size)]),
                "prompt_tokens": prompt_tokens,
                "output_tokens": max(r.output_tokens // OUTPUT_SHORTER, 2),
            }
        )
    return requests


def send(port: int, requests: list[Any], into: Path, timeout_s: float) -> list[Outcome]:
    plan = {
        "host": "127.0.0.1",
        "port": port,
        "model": "sim",
        "block_tokens": BLOCK_TOKENS // SHORTER,
        "requests": requests,
        "into": str(into),
    }
    command = [sys.executable, "-m", "benchmarks.overload_client"]
    done = subprocess.run(
        command, input=orjson.dumps(plan), capture_output=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr[-500:].decode(errors='replace')}")
    return [Outcome(**outcome) for outcome in orjson.loads(into.read_bytes())]


def target_s(request: Any, outcome: Outcome) -> float:
    n_tokens: int = request["prompt_tokens"]
    own_ms = (n_tokens - outcome.cached_tokens) * STEPPED_MS_PER_TOKEN
    return (TTFT_MS + max(TTFT_MS_PER_1K * n_tokens / 1e3, own_ms)) / 1e3


def summary(requests: list[Any], outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Of what was sent after the warm-up; those that came back after a refusal are told apart."""
    measured = [o for o in outcomes if requests[o.number]["at_s"] >= WARM_S]
    first = [o for o in measured if not o.again]
    accepted = [o for o in measured if o.status == 200 and o.ttft_s is not None]
    refused = [o for o in first if o.status == 429]
    of_target, itl, good = [], [], 0
    for o in accepted:
        request = requests[o.number]
        assert o.ttft_s is not None
        pace_ms = ((o.last_s or 0.0) - o.ttft_s) / (request["output_tokens"] - 1) * 1e3
        part = o.ttft_s / target_s(request, o)
        of_target.append(part)
        itl.append(pace_ms)
        good += part <= 1.0 and pace_ms <= ITL_MS
    again = [o for o in measured if o.again]
    return {
        "goodput": round(good / seconds, 3),
        "offered_rps": round(len(first) / seconds, 2),
        "accepted": len(accepted),
        "refused": len(refused),
        "statuses": dict(Counter(str(o.status) for o in measured)),
        "good_of_accepted": round(good / max(len(accepted), 1), 4),
        "accepted_p99_ttft_s": quantile([o.ttft_s or 0.0 for o in accepted], 99),
        "accepted_p99_ttft_of_target": quantile(of_target, 99),
        "accepted_p99_itl_ms": quantile(itl, 99),
        "reject_p50_ms": quantile([(o.head_s or 0.0) * 1e3 for o in refused], 50),
        "reject_p99_ms": quantile([(o.head_s or 0.0) * 1e3 for o in refused], 99),
        "retry_after_s_p50": quantile([o.retry_after_s or 0.0 for o in refused], 50),
        "came_back": len(again),
        "came_back_let_in": round(sum(o.status == 200 for o in again) / max(len(again), 1), 3),
        "client_late_ms_p99": quantile([o.late_s * 1e3 for o in first], 99),
    }


def slowdown(cluster: LocalCluster) -> float:
    """Of prefill steps against what the profile says. Above 1: the machine had no time for its workers."""
    sums = scrape_sums(cluster.url)
    tokens = sums["kvrelay_prompt_tokens_computed_total"]
    busy_ms = sums["kvrelay_prefill_step_seconds_total"] * 1e3
    return round(busy_ms / (tokens * STEPPED_MS_PER_TOKEN), 3)


def quantile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 3) if values else 0.0


def measure(traces: str | None, seconds: float, progress: Progress) -> dict[str, Any]:
    trace = load_trace("conversation", traces_dir(traces), 1.0, 4000)
    static: dict[str, float] = {}
    with LocalCluster(cpus=4) as cluster:
        progress.say("starting the application")
        model = write_model(cluster.directory / "model")

        def run(mode: str, max_inflight: int) -> dict[str, Any]:
            cluster.serve(live_config(model, mode, max_inflight))
            requests = requests_for(trace, RATE_RPS, seconds, seed=1)
            outcomes = send(
                cluster.port, requests, cluster.directory / "outcomes.json", WARM_S + seconds + 120
            )
            return {**summary(requests, outcomes, seconds), "worker_slowdown": slowdown(cluster)}

        progress.say(f"admission, {seconds:g} s")
        ours = run("slo", 1024)
        for limit in MAX_INFLIGHT:
            progress.say(f"at most {limit} at once in each frontend")
            static[str(limit)] = run("off", limit)["goodput"]
    best = max(static, key=lambda limit: static[limit])
    return {
        **ours,
        "best_static_goodput": static[best],
        "ratio": round(ours["goodput"] / max(static[best], 1e-9), 3),
        "best_static_max_inflight": int(best),
        "static": static,
        "ttft_target": f"{TTFT_MS:g} ms + max({TTFT_MS_PER_1K:g} ms per 1k tokens, own prefill)",
        "itl_target_ms": ITL_MS,
        "frontends": 2,
    }
