"""How soon does a lent worker help, and how soon a new one?

    python -m benchmarks.role_flip [--json] [--real]

One prefill and two decode workers, a budget of three, and more prompts than one prefill worker computes in
time: the planner lends a decode worker to prefill. Then budget and load grow, and a new prefill worker is
started. Both times are from the planner's decision to the first answer whose prompt the worker computed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.fault_client import Answer
from benchmarks.instrument import ahead_of_the_server
from benchmarks.planner_live import (
    KEY,
    MODEL,
    QUICK,
    REAL,
    Plan,
    config,
    load,
    told,
    write_key,
    write_profile,
)
from benchmarks.report import Progress, command, print_report
from serving.local_cluster import LocalCluster

LENT_S, NEW_S = 25.0, 35.0  # phases
FLIP = replace(QUICK, phases=((LENT_S, 4.5), (NEW_S, 7.5)), budget=3.0, first=(1, 2), flips=True)
REAL_FLIP = replace(
    REAL, phases=((LENT_S, 1.5), (NEW_S, 2.5)), first=(1, 2), flips=True, most=3, ttft_ms=400
)
RAISED = 5.0  # the budget of the second phase


async def run(cluster: LocalCluster, plan: Plan) -> tuple[list[Answer], float]:
    async def raise_budget() -> None:
        await asyncio.sleep(plan.phases[0][0])
        await asyncio.to_thread(change_budget, cluster.url, RAISED)

    raising = asyncio.create_task(raise_budget())
    answers, wall_s = await load(cluster.port, plan, MODEL)
    await raising
    return answers, wall_s


def ask(url: str, method: str = "GET", body: bytes | None = None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urlopen(Request(url, data=body, headers=headers, method=method), timeout=10) as response:
        found = json.load(response)
    assert isinstance(found, dict)
    return found


def change_budget(url: str, budget: float) -> None:
    ask(f"{url}/planner", "PATCH", json.dumps({"budget": budget}).encode())


def workers(url: str, pool: str) -> set[str]:
    """Those of a deployment, whatever they play."""
    return {told["worker"] for told in ask(f"{url}/admin/workers")["workers"] if told["pool"] == pool}


def decided_s(history: list[dict[str, Any]], what: str, least: int) -> float | None:
    """When the planner first wanted `what` to be `least` or more."""
    for line in history:
        (wanted,) = line["variants"].values()
        if wanted[what] >= least:
            return float(line["at_s"])
    return None


def first_answer_s(answers: Iterable[Answer], workers: set[str], since_s: float) -> float | None:
    """When one of `workers` first gave a first token after `since_s`."""
    found = [a.times_s[0] for a in answers if a.prefill_worker in workers and a.times_s]
    return min((at for at in found if at > since_s), default=None)


def measure(plan: Plan, real: bool, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        profile = None if real else write_profile(plan, Path(directory))
        deployed = config(plan, write_key(Path(directory)), profile, real)
        progress.say("one prefill and two decode workers")
        with LocalCluster(cpus=8) as cluster:
            cluster.serve(deployed)
            first, lendable = workers(cluster.url, "prefill"), workers(cluster.url, "decode")
            progress.say(f"load: {plan.phases}")
            with ahead_of_the_server():
                answers, _ = asyncio.run(run(cluster, plan))
            found = told(cluster.url)
            new = workers(cluster.url, "prefill") - first
    to_wall_s = time.time() - time.monotonic()
    lent_s = decided_s(found["history"], "lent", 1)
    ordered_s = decided_s(found["history"], "prefill", 2)

    def took_s(helpers: set[str], from_s: float | None) -> float | None:
        if from_s is None:
            return None
        helped_s = first_answer_s(answers, helpers, from_s - to_wall_s)
        return None if helped_s is None else round(helped_s + to_wall_s - from_s, 2)

    return {
        "requests": len(answers),
        "failed": sum(not a.whole or len(a.tokens) != plan.output_tokens for a in answers),
        "lent_helps_s": took_s(lendable, lent_s),
        "new_helps_s": took_s(new, ordered_s),
        "flip_s": found["flip_s"],
        "startup_s": found["startup_s"],
        "interval_s": plan.interval_s,
    }


def main() -> None:
    parser = command("role_flip", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--real", action="store_true", help="embedded workers with a real model")
    options = parser.parse_args()
    plan = REAL_FLIP if options.real else FLIP
    report = measure(plan, options.real, Progress(quiet=options.json))
    print(json.dumps(report)) if options.json else print_report("a lent worker, a new worker", report)


if __name__ == "__main__":
    main()
