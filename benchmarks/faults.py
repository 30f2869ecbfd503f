"""What do clients notice when something breaks?

    python -m benchmarks.faults [--json] [--only NAME[,NAME]] [--list] [--model smollm2 [--dtype bfloat16]]

24 live streams of 250 tokens, one every 20 ms, from `sim` workers with real NIXL (two prefill, three
decode) and two frontends; then one fault at a time. A quarter of them end by a stop string, a quarter want
logprobs. Every token is compared by position with the answer of an engine that nothing happens to:

    streams, completed   asked for, and ended whole
    lost, repeated       tokens, over all streams
    wrong_usage          streams whose usage is not that of an undisturbed one
    max_gap_ms           longest wait within a stream
    other_errors         of the short requests that go out every 50 ms beside the streams
    leaked_blocks        KV blocks that are still held when everything is over
    late_wait_ms         longest wait, from the fault on, of the long prompts that it was to hit
    migrations_moved     streams that changed their decode worker with their KV
    client_late_ms       how late the client itself ever was: of max_gap_ms, so much may be its own

The client comes first for the CPU where it may: a dozen processes that start take its time as well.

Beside the faults: a stream of 150 s and an answer of 30 s while frontends come and go. Faults of hosts and
of their network need namespaces (root); where there are none they are skipped, which is a miss as well
unless --only did not ask for them.

`--model smollm2`: the same with a real model, 6 streams, and the longest gap beside the time that the lost
prompts take anew. A missed target is one line on stderr, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fault_app import App, Setup
from benchmarks.fault_client import Ask
from benchmarks.fault_load import Reference
from benchmarks.fault_real import MODEL as REAL_MODEL
from benchmarks.fault_real import UndisturbedAnswers, real_asks, real_setup, reprefill_ms
from benchmarks.fault_reference import SimReference
from benchmarks.fault_run import fault_asks, run_fault
from benchmarks.fault_scenarios import FAULTS, LONG_PROMPTS, UNDISTURBED, Fault
from benchmarks.fault_targets import COLUMNS, long_misses, misses
from benchmarks.long_answers import long_answers
from benchmarks.network_faults import NETWORK_FAULTS, NODES, node_setup
from benchmarks.report import Progress
from serving.errors import KVRelayError
from serving.local.environment import tcp_alone
from serving.local.namespaces import NamespaceCluster
from serving.local.network import why_not
from serving.local_cluster import LocalCluster

LONG = "long_answers"
ON_NODES = ("node_removed", "partition_5s", "delay_50ms")  # benchmarks/multi_node.py has more
ALL = [*FAULTS, *(fault for fault in NETWORK_FAULTS if fault.name in ON_NODES)]
TCP = tcp_alone()  # as between hosts; shared memory would hide what a frozen peer does
# Small socket buffers: a read gets through at about 35 MB a second.
SLOW_TCP = {**TCP, "UCX_TCP_SNDBUF": "16k", "UCX_TCP_RCVBUF": "16k"}
SLOW_SETUP = Setup(kv_bytes_per_token=8192, kv_bytes=768 << 20, network_bytes_per_s=35e6)

AskFor = Callable[[Fault], Sequence[Ask]]


class Bench:
    """Runs faults and collects their rows. What cannot be brought about is a miss; the rest still runs."""

    def __init__(self, progress: Progress) -> None:
        self.rows: dict[str, Any] = {}
        self.missed: list[str] = []
        self._progress = progress

    async def run(
        self,
        app: App,
        faults: Sequence[Fault],
        reference: Reference,
        ask_for: AskFor,
        predict: Callable[[int, int | None], Awaitable[float]] | None = None,
    ) -> None:
        """`predict`: how long so many prompts take, of that many tokens or of streams', in ms."""
        for fault in faults:
            self._progress.say(f"{fault.name}: {fault.says}")
            try:
                row = await run_fault(app, fault, reference, ask_for(fault))
                if predict is not None and "struck_streams" in row:
                    row["predicted_reprefill_ms"] = await predict(row["struck_streams"], None)
                if predict is not None and fault.late:
                    tokens = app.setup.long_prompt_tokens
                    row["predicted_late_ms"] = await predict(LONG_PROMPTS, tokens)
            except (TimeoutError, RuntimeError, OSError, KVRelayError) as error:
                row = {"failed": f"{type(error).__name__}: {error}"}
            self.rows[fault.name] = row
            self.missed += misses(fault, row, app.setup)

    @contextmanager
    def reported(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Where their cluster does not start, they failed; what ran before is still reported."""
        try:
            yield
        except KVRelayError as error:
            for fault in faults:
                if fault.name not in self.rows:
                    self.rows[fault.name] = row = {"failed": f"{type(error).__name__}: {error}"}
                    self.missed += misses(fault, row, Setup())

    def skip(self, names: Iterable[str], why: str) -> None:
        """They were asked for, so each is a miss."""
        for name in names:
            self.rows[name] = {"skipped": why}
            self.missed.append(f"{name}: skipped: {why}")

    def report(self, **more: Any) -> dict[str, Any]:
        undisturbed = self.rows.pop(UNDISTURBED.name, None)
        return {"undisturbed": undisturbed, "faults": self.rows, **more, "missed": self.missed}


def sim_asks(fault: Fault) -> list[Ask]:
    return fault_asks(fault.tokens)


async def measure_sim(names: Sequence[str], progress: Progress) -> dict[str, Any]:
    bench, reference, more = Bench(progress), SimReference(), {}
    faults = {
        where: [fault for fault in ALL if fault.where == where and fault.name in names]
        for where in ("local", "slow", "nodes")
    }
    if faults["local"] or LONG in names:
        progress.say("starting the application")
        with LocalCluster(cpus=8, dashboard=True, env=TCP) as cluster:
            app = deployed(cluster, Setup())
            await bench.run(app, [UNDISTURBED, *faults["local"]], reference, sim_asks)
            if LONG in names:
                progress.say("long answers while frontends come and go")
                more = await long_answers(app, reference)
                bench.missed += long_misses(more)
    if faults["slow"]:
        progress.say("starting the application over a slow network")
        with (
            bench.reported(faults["slow"]),
            LocalCluster(cpus=8, dashboard=True, env=SLOW_TCP) as cluster,
        ):
            await bench.run(deployed(cluster, SLOW_SETUP), faults["slow"], reference, sim_asks)
    reason = why_not()
    if faults["nodes"] and reason is not None:
        bench.skip((fault.name for fault in faults["nodes"]), reason)
    elif faults["nodes"]:
        progress.say("starting the application on five nodes")
        with bench.reported(faults["nodes"]), NamespaceCluster(NODES) as nodes:
            setup = node_setup()
            nodes.deploy(setup.config(), timeout_s=240)
            await bench.run(App(nodes, setup), faults["nodes"], reference, sim_asks)
    reference.stop()
    return bench.report(**more)


async def measure_real(names: Sequence[str], dtype: str, device: str, progress: Progress) -> dict[str, Any]:
    """The faults of one host; others are skipped."""
    bench = Bench(progress)
    faults = [fault for fault in ALL if fault.where != "nodes" and fault.name in names]
    bench.skip(sorted({*names} - {fault.name for fault in faults}), "with `sim` only")
    asks, exact = real_asks(), dtype == "float32"
    for env, here in (
        (TCP, [UNDISTURBED, *(fault for fault in faults if fault.where == "local")]),
        (SLOW_TCP, [fault for fault in faults if fault.where == "slow"]),
    ):
        if not here:
            continue
        progress.say(f"starting {REAL_MODEL} in {dtype} on {device}")
        with LocalCluster(cpus=8, dashboard=True, env=env) as cluster:
            app = deployed(cluster, real_setup(dtype, device))
            reference = UndisturbedAnswers(app, exact=exact)
            reference.learn(asks)
            await bench.run(app, here, reference, lambda fault: asks, partial(reprefill_ms, app, asks))
    return bench.report(model=REAL_MODEL, dtype=dtype, device=device)


def deployed(cluster: LocalCluster, setup: Setup) -> App:
    cluster.serve(setup.config(), timeout_s=300)
    return App(cluster, setup)


def print_table(report: dict[str, Any]) -> None:
    table = Table(title="faults")
    table.add_column("fault")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    rows = {"(undisturbed)": report["undisturbed"] or {}, **report["faults"]}
    for fault, row in rows.items():
        why = next((f"{word}: {row[word]}" for word in ("skipped", "failed") if word in row), None)
        if why is not None:
            table.add_row(fault, why)
        else:
            table.add_row(fault, *(str(row.get(name, "")) for name in COLUMNS))
    console = Console()
    console.print(table)
    for name in ("long_stream", "long_answer"):
        if name in report:
            console.print(name, report[name])


def asked_for(known: Iterable[str], model: str) -> list[str]:
    """Where nobody says which: all; with a real model those of one host."""
    elsewhere = {LONG, *ON_NODES} if model == REAL_MODEL else set()
    return [name for name in known if name not in elsewhere]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these alone")
    parser.add_argument("--list", action="store_true", help="what there is, and nothing else")
    parser.add_argument("--model", choices=["sim", REAL_MODEL], default="sim")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of a real model"
    )
    parser.add_argument("--device", default="cpu", help="of a real model; cuda: one GPU for all workers")
    args = parser.parse_args(argv)
    known = {fault.name: fault.says for fault in ALL}
    known[LONG] = "a stream of 150 s and an answer of 30 s while frontends come and go"
    if args.list:
        for name, says in known.items():
            print(f"{name:<30} {says}")
        return 0
    names = asked_for(known, args.model) if args.only is None else args.only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}; see --list")
    progress = Progress(quiet=args.json)
    if args.model == "sim":
        report = asyncio.run(measure_sim(names, progress))
    else:
        report = asyncio.run(measure_real(names, args.dtype, args.device, progress))
    if args.json:
        print(json.dumps(report))
    else:
        print_table(report)
    for line in report["missed"]:
        print(line, file=sys.stderr)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
