"""Does an application that keeps being hurt stay whole?

    python -m benchmarks.soak [--json] [--minutes 15] [--every 20] [--seed 1]

Mixed load on `sim` workers with real NIXL: streams and whole answers of many lengths, repeated prompts,
clients that hang up. Every 20 s something breaks: a worker, a frontend or Serve's controller is killed, a
worker freezes for a while, the decode pool shrinks or grows. Every answer is compared with the undisturbed
one; a client whose stream is cut because its frontend was killed asks again. Reported:

    requests, failed     failed: did not get exactly their answer
    rss_growth           MiB, of the process that grew most from when it had warmed up; `fd_growth` likewise
    conserved            at the end nothing is in flight, and every KV block is free or cached
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import psutil

from benchmarks.fault_app import App, Setup, held_blocks, in_flight
from benchmarks.fault_load import varied
from benchmarks.fault_reference import SimReference
from benchmarks.report import Progress, print_report
from benchmarks.soak_load import SoakLoad, soak_asks
from serving.local.environment import tcp_alone
from serving.local_cluster import LocalCluster

# A small pool: it is soon touched whole, so that what grows later is something else.
SETUP = Setup(kv_bytes_per_token=1024, kv_bytes=24 << 20)
FROZEN_S = 4.0  # longer than a link waits for a beat
DECODE_WORKERS = (2, 4)  # fewest and most
STRENGTH_S = 60.0
IDLE_S = 90.0
WARM_S = 25.0  # age of a process when its memory is first looked at
LOOK_S = 5.0
LOOKS = 6  # that tell how many file descriptors a process has
# What a process may grow by from its 25th second on. Its KV pool (24 MiB) may be untouched by then, and
# whole at the end; 8 more for caches that fill up. Measured in 15 minutes: 12.6 MiB, 3 descriptors.
RSS_GROWTH_MIB = 32.0
FD_GROWTH = 12  # links to those that just replace each other


# ---------------------------------------------------------------- what breaks


async def strike(app: App, load: SoakLoad, name: str, numbers: random.Random) -> None:
    """Returns when it is over; replacements may still start."""
    verb, _, target = name.partition("_")
    if verb == "scale":
        await asyncio.to_thread(app.scale, app.pool("decode"), numbers.randint(*DECODE_WORKERS))
    elif target == "controller":
        assert isinstance(app.cluster, LocalCluster)
        for process in app.cluster.processes():
            with suppress(psutil.Error):
                if "ServeController" in " ".join(process.cmdline()):
                    process.kill()
    else:
        deployment = "Frontend" if target == "frontend" else app.pool(target)
        victim = numbers.choice(await asyncio.to_thread(app.replicas, deployment))
        if verb == "freeze":
            victim.signal(SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            with suppress(ProcessLookupError):
                victim.signal(SIGCONT)
            return
        if target == "frontend":
            load.frontend_killed_s = time.monotonic()
        victim.signal(SIGKILL)


FAULTS = (
    "kill_decode",
    "kill_prefill",
    "kill_frontend",
    "kill_controller",
    "freeze_decode",
    "freeze_prefill",
    "scale_decode",
)


# ---------------------------------------------------------------- what grows


@dataclass(slots=True)
class Seen:
    """One process: MiB and file descriptors at every look."""

    title: str
    rss_mib: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)


class Growth:
    """Memory and file descriptors of the application's processes, from when each had warmed up."""

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, Seen] = {}

    @property
    def rss(self) -> tuple[float, str]:
        """(MiB, title) of the process that grew most."""
        return max((round(s.rss_mib[-1] - s.rss_mib[0], 1), s.title) for s in self._seen.values())

    @property
    def fds(self) -> tuple[int, str]:
        """The same by the fewest of the first and the last looks: clients and peers come and go."""
        return max((min(s.fds[-LOOKS:]) - min(s.fds[:LOOKS]), s.title) for s in self._seen.values())

    def look(self, cluster: LocalCluster) -> None:
        for process in cluster.processes():
            with suppress(psutil.Error):
                title = " ".join(process.cmdline()).strip()
                if "ray::Serve" not in title or time.time() - process.create_time() < WARM_S:
                    continue
                rss_mib, fds = process.memory_info().rss / (1 << 20), process.num_fds()
                seen = self._seen.setdefault(process, Seen(title))
                seen.rss_mib.append(rss_mib)
                seen.fds.append(fds)

    async def watch(self, cluster: LocalCluster) -> None:
        while True:
            await asyncio.to_thread(self.look, cluster)
            await asyncio.sleep(LOOK_S)


# ---------------------------------------------------------------- the run


async def soak(
    app: App, cluster: LocalCluster, *, minutes: float, every_s: float, seed: int, progress: Progress
) -> dict[str, Any]:
    """One run on a deployed application, and what came of it."""
    reference, asks = SimReference(), soak_asks(seed)
    reference.learn(asks)
    asks = varied(asks, reference)
    load, numbers, growth = SoakLoad(app, asks, reference, seed), random.Random(seed), Growth()
    struck: Counter[str] = Counter()
    until_s = time.monotonic() + minutes * 60
    load.start()
    watching = asyncio.create_task(growth.watch(cluster))
    try:
        while time.monotonic() + every_s < until_s:
            await asyncio.sleep(every_s)
            # One fault at a time: somebody has to be left.
            await asyncio.to_thread(app.wait_until, "all replicas run", app.at_strength, STRENGTH_S)
            name = numbers.choice(FAULTS)
            progress.say(
                f"{until_s - time.monotonic():4.0f} s left; {load.answered} answered, "
                f"{load.failed} failed; {name}"
            )
            struck[name] += 1
            await strike(app, load, name, numbers)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
    finally:
        await load.finish()
        watching.cancel()
        reference.stop()
    await asyncio.to_thread(app.wait_until, "all replicas run", app.at_strength)
    return {
        "minutes": minutes,
        "requests": load.answered,
        "failed": load.failed,
        "faults": struck.total(),
        "rss_growth": growth.rss[0],
        "fd_growth": growth.fds[0],
        "conserved": await asyncio.to_thread(conserved, app),
        "reconnects": load.reconnects,
        "hang_ups": load.hang_ups,
        "grew_most": {"rss": growth.rss[1], "fds": growth.fds[1]},
        "by_fault": dict(sorted(struck.items())),
        "errors": load.errors,
    }


def conserved(app: App) -> bool:
    """Nothing is held or in flight, or soon will be."""

    def idle() -> bool:
        samples = app.samples()
        return held_blocks(samples) == 0 and in_flight(samples) == 0

    with suppress(TimeoutError):
        app.wait_until("nothing is held", idle, IDLE_S)
        return True
    return False


def misses(report: dict[str, Any]) -> list[str]:
    """One line per target that the report does not meet."""
    found = []
    if report["failed"]:
        found.append(f"failed = {report['failed']} of {report['requests']}; target 0")
    if report["rss_growth"] > RSS_GROWTH_MIB:
        found.append(f"rss_growth = {report['rss_growth']} MiB; target {RSS_GROWTH_MIB:g}")
    if report["fd_growth"] > FD_GROWTH:
        found.append(f"fd_growth = {report['fd_growth']}; target {FD_GROWTH}")
    if not report["conserved"]:
        found.append("something is still held or in flight at the end")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="between faults")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    progress = Progress(quiet=args.json)
    progress.say("starting the application")
    with LocalCluster(cpus=8, dashboard=True, env=tcp_alone()) as cluster:
        cluster.serve(SETUP.config(), timeout_s=300)
        report = asyncio.run(
            soak(
                App(cluster, SETUP),
                cluster,
                minutes=args.minutes,
                every_s=args.every,
                seed=args.seed,
                progress=progress,
            )
        )
    missed = misses(report)
    if args.json:
        print(json.dumps({**report, "missed": missed}))
    else:
        print_report("soak", report)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
