"""Shifting traffic between two variants and back, under live streams: is anything lost, how fast, how true?

    python -m benchmarks.canary [--json] [--streams 50] [--dwell 4]

Two variants of a `sim` model behind one door, both warm. Streams run all the time, each followed at once by
the next. `kvrelay admin weights` moves the traffic 0 -> 10 -> 50 -> 100 % and back to 0 in one step. Which
variant answered follows from the decode worker that the answer names.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.fault_client import Answer, Ask, send
from benchmarks.overhead import application
from benchmarks.report import COUNT, POSITIVE, Progress, command, print_report
from serving.local_cluster import LocalCluster

MODEL = "sim"
STEP_MS = 20.0
STREAM_TOKENS = 60
PROBE_TOKENS = 2
PROBES = 8  # that ask all the time for two tokens: enough answers for a share
STAGES = (10, 50, 100)
PUBLISHED_S = 0.1  # after Control answered every frontend has the weights


@dataclass
class Shift:
    """Answers as they were started, in order of time."""

    answers: list[Answer] = field(default_factory=list)
    failed: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


def config() -> dict[str, Any]:
    profile = {"decode_ms": STEP_MS, "prefill_ms_per_token": 0.02, "kv_bytes_per_token": 64}
    engine = {"kind": "sim", "profile": profile, "kv_bytes": 8 << 20, "block_tokens": 32}
    pool = {"replicas": 1, "min_replicas": 1, "max_replicas": 2, "cpus": 0.1}
    common = {"weights": "smollm2-135m", "engine": engine, "prefill": pool, "decode": pool}
    variants = [{"name": "main", **common}, {"name": "canary", **common}]
    return application("serving.app:build", {"models": [{"name": MODEL, "variants": variants}]})


class Door:
    """The operator's side, by the command itself."""

    def __init__(self, url: str, key_file: Path) -> None:
        self._url = url
        self._key_file = key_file

    def weights(self, canary: float) -> None:
        """Returns when Control has published them."""
        key = self._key_file.read_text().strip()
        request = Request(
            f"{self._url}/admin/weights/{MODEL}",
            data=json.dumps({"main": 100 - canary, "canary": canary}).encode(),
            headers={"authorization": f"Bearer {key}"},
            method="PUT",
        )
        with urlopen(request, timeout=10):
            pass

    def variants(self) -> dict[str, str]:
        """Worker -> variant, as `kvrelay admin workers` has it."""
        command = [sys.executable, "-m", "serving.cli", "admin", "--url", self._url]
        command += ["--key-file", str(self._key_file), "--json", "workers"]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return {worker["worker"]: worker["variant"] for worker in told["workers"]}


async def client(run: Shift, port: int, number: int, tokens: int) -> None:
    """One request after the other until `run.over`; the last one still ends."""
    turn = 0
    while not run.over.is_set():
        turn += 1
        ask = Ask((100 + number, 200 + turn, *range(300, 320)), tokens, salt=f"{number}")
        exchange = await send("127.0.0.1", port, ask, MODEL)
        await exchange.ended.wait()
        answer = exchange.answer()
        run.answers.append(answer)
        run.failed += not answer.whole or len(answer.tokens) != tokens


def settled_s(answers: list[Answer], since_s: float, variant: str, of: dict[str, str]) -> float:
    """From the change until no request was given to another variant any more."""
    started = sorted((a for a in answers if a.sent_s >= since_s), key=lambda a: a.sent_s)
    last = [a.sent_s - since_s for a in started if of.get(a.decode_worker) != variant]
    return last[-1] if last else 0.0


async def shift(door: Door, port: int, streams: int, dwell_s: float, progress: Progress) -> dict[str, Any]:
    of = await asyncio.to_thread(door.variants)
    run = Shift()
    stages: list[tuple[int, tuple[float, float]]] = []
    tasks = [asyncio.create_task(client(run, port, n, STREAM_TOKENS)) for n in range(streams)]
    tasks += [asyncio.create_task(client(run, port, 1000 + n, PROBE_TOKENS)) for n in range(PROBES)]

    async def stage(percent: int) -> tuple[float, float]:
        """When it was ordered, and when the order had been answered."""
        progress.say(f"{percent} % to the canary")
        ordered_s = time.monotonic()
        await asyncio.to_thread(door.weights, percent)
        answered_s = time.monotonic()
        await asyncio.sleep(dwell_s)
        stages.append((percent, (answered_s + PUBLISHED_S, time.monotonic())))
        return ordered_s, answered_s

    await stage(0)
    started_s = 0.0
    full_s = 0.0
    for percent in STAGES:
        ordered_s, _ = await stage(percent)
        started_s = started_s or ordered_s
        full_s = ordered_s
    back_s, _ = await stage(0)
    run.over.set()
    await asyncio.gather(*tasks)
    shares = {}
    worst = 0.0
    for percent, span in stages:
        started = [a for a in run.answers if span[0] <= a.sent_s < span[1] and a.decode_worker]
        share = 100 * sum(of.get(a.decode_worker) == "canary" for a in started) / max(len(started), 1)
        shares[f"{percent} %" if f"{percent} %" not in shares else "back to 0 %"] = {
            "requests": len(started),
            "share": round(share, 2),
        }
        worst = max(worst, abs(share - percent))
    return {
        "failed": run.failed,
        "requests": len(run.answers),
        "shift_s": round(settled_s([a for a in run.answers if a.sent_s < back_s], full_s, "canary", of), 3),
        "ramp_s": round(full_s - started_s, 3),
        "rollback_s": round(settled_s(run.answers, back_s, "main", of), 3),
        "share_error_points": round(worst, 2),
        "stages": shares,
        "max_gap_ms": round(max(map(longest_gap_ms, run.answers)), 1),
    }


def longest_gap_ms(answer: Answer) -> float:
    times = answer.times_s
    return max(((b - a) * 1e3 for a, b in pairwise(times)), default=0.0)


def measure(streams: int, dwell_s: float, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "admin.key"
        key_file.write_text("canary-benchmark-admin-key-0123456789\n")
        key_file.chmod(0o600)
        deployed = config()
        deployed["applications"][0]["args"]["security"] = {"admin_key_file": str(key_file)}
        progress.say("a cluster, and two variants on it")
        with LocalCluster(cpus=4) as cluster:
            cluster.serve(deployed)
            door = Door(cluster.url, key_file)
            return asyncio.run(shift(door, cluster.port, streams, dwell_s, progress))


def main() -> None:
    parser = command("canary", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--streams", type=COUNT, default=50)
    parser.add_argument("--dwell", type=POSITIVE, default=4.0, help="seconds at each weight")
    options = parser.parse_args()
    report = measure(options.streams, options.dwell, Progress(quiet=options.json))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report("canary", report)


if __name__ == "__main__":
    main()
