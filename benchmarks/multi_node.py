"""Prefill, decode and frontends on hosts of their own: what crosses the network, and what breaks with it.

    python -m benchmarks.multi_node [--json] [--only NAME ...]

Six hosts made of network namespaces (serving/local/namespaces.py; root): two frontends, one on Ray's head,
two prefill and two decode nodes. Models are simulated; KV, NIXL over TCP, Ray, Serve, HAProxy are real.
`handoffs`: streams one after another; every byte that NIXL says it read must have left a prefill node by
its cable. Then the faults of benchmarks/network_faults.py, each reported as benchmarks/faults.py does.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.fault_app import App
from benchmarks.fault_client import Answer, send
from benchmarks.fault_load import ended, stream_asks
from benchmarks.fault_reference import SimReference
from benchmarks.fault_run import fault_asks, run_fault
from benchmarks.fault_scenarios import UNDISTURBED
from benchmarks.fault_verdict import Row, judge
from benchmarks.network_faults import NETWORK_FAULTS, NODES, node_setup
from benchmarks.report import Progress, command, print_report
from serving.errors import KVRelayError
from serving.local.namespaces import NamespaceCluster
from serving.local.network import why_not

HANDOFFS = 20
HANDOFF_PROMPT_TOKENS = 1000
# Without it NIXL would have read from something else than the network.
ON_THE_CABLE = 1.0


async def handoffs(app: App, reference: SimReference, count: int = HANDOFFS) -> dict[str, Any]:
    """`count` streams one by one: what NIXL read, what the cables carried, when the first token came."""
    cluster = app.cluster
    assert isinstance(cluster, NamespaceCluster)
    asks = stream_asks(count, prompt_tokens=HANDOFF_PROMPT_TOKENS, max_tokens=16, seed=7)
    reference.learn(asks)
    before = {node: cluster.counters(node) for node in cluster.nodes}
    read_before = await asyncio.to_thread(app.total, "kvrelay_handoff_bytes_total")
    answers: list[Answer] = []
    for ask in asks:
        exchange = await send(app.host, app.port, ask, app.model)
        await ended(exchange)
        answers.append(exchange.answer())
    read = await asyncio.to_thread(app.total, "kvrelay_handoff_bytes_total") - read_before
    sent = {node: cluster.counters(node).sent_bytes - before[node].sent_bytes for node in cluster.nodes}
    by_prefill = sum(count for node, count in sent.items() if node.startswith("p"))
    row = Row()
    row.add(judge(answer, reference.answer(answer.ask)) for answer in answers)
    ttfts_ms = [(answer.times_s[0] - answer.sent_s) * 1e3 for answer in answers if answer.times_s]
    return {
        "streams": row.streams,
        "completed": row.completed,
        "lost": row.lost,
        "repeated": row.repeated,
        "ttft_ms_p50": round(statistics.median(ttfts_ms), 2),
        "ttft_ms_max": round(max(ttfts_ms), 2),
        "nixl_bytes": round(read),
        "prefill_nodes_sent_bytes": by_prefill,
        "on_the_cable": round(by_prefill / read, 3) if read else None,
        "head_sent_bytes": sent["head"],
    }


async def measure(names: list[str], progress: Progress) -> dict[str, Any]:
    began_s = time.monotonic()
    reference = SimReference()
    progress.say("starting six nodes")
    with NamespaceCluster(NODES) as cluster:
        report: dict[str, Any] = {"nodes": len(NODES), "up_s": round(time.monotonic() - began_s, 1)}
        began_s = time.monotonic()
        setup = node_setup()
        cluster.deploy(setup.config())
        report |= {"deployed_s": round(time.monotonic() - began_s, 1), "placed": cluster.replicas()}
        app = App(cluster, setup)
        progress.say("hand-offs")
        report["handoffs"] = await handoffs(app, reference)
        report["faults"] = {}
        for fault in [UNDISTURBED, *(fault for fault in NETWORK_FAULTS if fault.name in names)]:
            progress.say(f"{fault.name}: {fault.says}")
            try:
                row = await run_fault(app, fault, reference, fault_asks(fault.tokens))
            except (KVRelayError, RuntimeError, OSError) as error:  # the others still run
                row = {"failed": f"{type(error).__name__}: {error}"}
            report["faults"][fault.name] = row
    reference.stop()
    return report


def main() -> int:
    names = [fault.name for fault in NETWORK_FAULTS]
    parser = command("multi_node", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these faults alone")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"benchmarks.multi_node: {reason}", file=sys.stderr)
        return 1
    report = asyncio.run(measure(options.only, Progress(quiet=options.json)))
    print(json.dumps(report)) if options.json else print_report("multi-node", report)
    carried = report["handoffs"]["on_the_cable"]
    return 0 if carried is not None and carried >= ON_THE_CABLE else 1


if __name__ == "__main__":
    sys.exit(main())
