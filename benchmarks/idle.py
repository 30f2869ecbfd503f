"""What the whole application costs while nobody asks anything.

    python -m benchmarks.idle [--json] [--seconds 20] [--config configs/quickstart.yaml]

`cores`: CPU of all processes of the application (replicas of Control, frontends and workers, HAProxy) as a
share of one core; `ray_cores`: that of Ray's and Serve's own daemons beside it.
"""

from __future__ import annotations

import json
import time

import psutil

from benchmarks.report import POSITIVE, Progress, command, print_report
from serving.local_cluster import LocalCluster

SETTLE_S = 10.0  # start-up work of Ray goes on for a while after the application answers
OURS = ("ServeReplica:", "haproxy")


def cpu_by_owner(cluster: LocalCluster) -> dict[str, float]:
    """CPU seconds so far, by process title."""
    seconds: dict[str, float] = {}
    for process in cluster.processes():
        try:
            title = " ".join(process.cmdline()).strip()
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds[f"{process.pid} {title}"] = times.user + times.system
    return seconds


def main() -> None:
    parser = command("idle", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=POSITIVE, default=20.0)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    options = parser.parse_args()
    progress = Progress(quiet=options.json)
    progress.say("starting the application")
    with LocalCluster() as cluster:
        cluster.serve(options.config)
        progress.say(f"settling for {SETTLE_S:.0f} s, then watching for {options.seconds:.0f} s")
        time.sleep(SETTLE_S)
        before = cpu_by_owner(cluster)
        began = time.monotonic()
        time.sleep(options.seconds)
        after = cpu_by_owner(cluster)
        seconds = time.monotonic() - began
    spent = {name: (total - before.get(name, 0.0)) / seconds for name, total in after.items()}
    ours = {name: cores for name, cores in spent.items() if any(mark in name for mark in OURS)}
    report = {
        "cores": round(sum(ours.values()), 4),
        "ray_cores": round(sum(spent.values()) - sum(ours.values()), 4),
        "by_process": {
            name.split(" ")[1].removeprefix("ray::").rsplit("/", 1)[-1]: round(cores, 4)
            for name, cores in sorted(ours.items(), key=lambda item: -item[1])
        },
    }
    if options.json:
        print(json.dumps(report))
    else:
        print_report("Idle application", report)


if __name__ == "__main__":
    main()
