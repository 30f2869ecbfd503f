"""What do clients notice when something breaks?

    python -m benchmarks.faults [--json] [--only NAME[,NAME]] [--list]

24 live streams of 250 tokens, one every 20 ms, from `sim` workers with real NIXL (two prefill, three
decode) and two frontends; then one fault at a time. Every token is compared by position with the answer of
an engine that nothing happens to. Per fault:

    streams, completed   asked for, and ended whole
    lost, repeated       tokens, over all streams
    wrong_usage          streams whose usage is not that of an undisturbed one
    max_gap_ms           longest wait within a stream
    other_errors         of the short requests that go out every 50 ms beside the streams
    leaked_blocks        KV blocks that are still held when everything is over

A missed target is one line on stderr, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fault_app import STEP_MS, App, Setup
from benchmarks.fault_reference import SimReference
from benchmarks.fault_run import fault_asks, run_fault
from benchmarks.fault_scenarios import FAULTS, UNDISTURBED, Fault
from benchmarks.report import Progress
from serving.local_cluster import LocalCluster

KILL_GAP_MS = 150.0  # over a step
FREEZE_GAP_MS = 150.0  # over the silence deadline
MIGRATION_PAUSE_MS = 30.0  # over a step
TCP = {"UCX_TLS": "tcp,self"}  # as between hosts; shared memory would hide what a frozen peer does
# Small socket buffers: a read gets through at about 35 MB a second.
SLOW_TCP = {**TCP, "UCX_TCP_SNDBUF": "16k", "UCX_TCP_RCVBUF": "16k"}
SLOW_SETUP = Setup(kv_bytes_per_token=8192, kv_bytes=768 << 20)
ZERO = (
    "lost",
    "repeated",
    "wrong_usage",
    "other_errors",
    "leaked_blocks",
    "left_in_flight",
    "content_errors",
    "replaced_replicas",
)
COLUMNS = (
    "streams",
    "completed",
    "lost",
    "repeated",
    "wrong_usage",
    "max_gap_ms",
    "other_errors",
    "leaked_blocks",
)


def misses(fault: Fault, row: dict[str, Any], setup: Setup) -> list[str]:
    """One line per target that `row` does not meet."""
    if "skipped" in row:
        return []
    found = [f"{name} = {row[name]}; target 0" for name in ZERO if row.get(name)]
    if row["completed"] != row["streams"]:
        found.append(f"completed = {row['completed']} of {row['streams']} streams")
    if not row["nixl_bytes"]:
        found.append("nixl_bytes = 0: nothing was handed over")
    if not row["at_strength"]:
        found.append("the application did not get back to its strength")
    limit = {
        "kill": STEP_MS + KILL_GAP_MS,
        "freeze": setup.deadlines.silence_ms + FREEZE_GAP_MS,
    }.get(fault.gap)
    if limit is not None and row["max_gap_ms"] > limit:
        found.append(f"max_gap_ms = {row['max_gap_ms']}; target {limit:g}")
    pause = row.get("migration_pause_ms_p99")
    if pause is not None and pause > MIGRATION_PAUSE_MS + STEP_MS:
        found.append(f"migration_pause_ms_p99 = {pause}; target {MIGRATION_PAUSE_MS + STEP_MS:g}")
    if row.get("lowest_target", 4) < 4:
        found.append(f"lowest_target = {row['lowest_target']}; target 4")
    return [f"{fault.name}: {line}" for line in found]


async def measure(faults: Sequence[Fault], progress: Progress) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    missed: list[str] = []
    reference = SimReference()
    for where, env, setup in (("local", TCP, Setup()), ("slow", SLOW_TCP, SLOW_SETUP)):
        here = [fault for fault in faults if fault.where == where]
        if not here:
            continue
        progress.say(f"starting the application ({where})")
        with LocalCluster(cpus=8, dashboard=True, env=env) as cluster:
            cluster.serve(setup.config(), timeout_s=180)
            app = App(cluster, setup)
            for fault in [UNDISTURBED, *here] if where == "local" else here:
                progress.say(f"{fault.name}: {fault.says}")
                rows[fault.name] = row = await _row(app, fault, reference)
                missed += (
                    misses(fault, row, setup) if "failed" not in row else [f"{fault.name}: {row['failed']}"]
                )
    reference.stop()
    undisturbed = rows.pop(UNDISTURBED.name, None)
    return {"undisturbed": undisturbed, "faults": rows, "missed": missed}


async def _row(app: App, fault: Fault, reference: SimReference) -> dict[str, Any]:
    """A fault that cannot be brought about is a failure; the others still run."""
    try:
        return await run_fault(app, fault, reference, fault_asks(fault.tokens))
    except (TimeoutError, RuntimeError, OSError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def print_table(report: dict[str, Any]) -> None:
    table = Table(title="faults")
    table.add_column("fault")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    rows = {"(undisturbed)": report["undisturbed"] or {}, **report["faults"]}
    for fault, row in rows.items():
        table.add_row(fault, *(str(row.get(name, "")) for name in COLUMNS))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these alone")
    parser.add_argument("--list", action="store_true", help="what there is, and nothing else")
    args = parser.parse_args(argv)
    if args.list:
        for fault in FAULTS:
            print(f"{fault.name:<30} {fault.says}")
        return 0
    known = {fault.name: fault for fault in FAULTS}
    names = list(known) if args.only is None else args.only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}; see --list")
    report = asyncio.run(measure([known[name] for name in names], Progress(quiet=args.json)))
    if args.json:
        print(json.dumps(report))
    else:
        print_table(report)
    for line in report["missed"]:
        print(line, file=sys.stderr)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
