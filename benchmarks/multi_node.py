"""Prefill, decode and frontends on hosts of their own: what crosses the network, and what its faults do.

    python -m benchmarks.multi_node [--json] [--only partition_5s ...]

Five hosts made of network namespaces (serving/local/namespaces.py; root): Ray's head with the frontends, two
prefill and two decode nodes. Models are simulated, KV and NIXL are real. First the way of the KV: every
byte that NIXL says it read must have gone over the cables of the hosts. Then the faults, each with live
streams, new ones that start in the middle of it, and short requests twenty times a second:

    node_lost        all processes of a decode node end; their sockets are reset
    power_lost       the same without a reset: nothing is ever heard of it again
    partition_5s     a decode node hears and reaches nobody
    pair_5s          a prefill and a decode node do not hear each other; frontends reach both
    one_way_5s       frontends do not hear a decode node, which hears them
    slow_link        200 Mbit/s to and from a decode node
    delay_50ms       50 ms each way to and from a decode node

Every stream is compared with what the same engine answers undisturbed. `max_gap_ms` is the longest wait between
two events of one stream, `other_errors` counts short requests that failed, `leaked_blocks` what is still held after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fault_app import App, Setup, held_blocks, in_flight
from benchmarks.fault_client import Answer, Ask
from benchmarks.fault_load import Load, failed, stream_asks
from benchmarks.fault_reference import SimReference
from benchmarks.fault_verdict import Row, judge
from benchmarks.report import Progress, print_report
from serving.local.namespaces import NamespaceCluster
from serving.local.network import why_not

NODES: dict[str, dict[str, Any]] = {
    "head": {"labels": {"pool": "frontend"}},
    "p1": {"labels": {"pool": "prefill"}},
    "p2": {"labels": {"pool": "prefill"}},
    "d1": {"labels": {"pool": "decode"}},
    "d2": {"labels": {"pool": "decode"}},
}
VICTIM = "d1"
PARTITION_S = 5.0
CLEAN_S = 30.0  # within which nothing may be held any more
BACK_S = 120.0
PROMPT_TOKENS = 1000
MAX_TOKENS = 150
LATE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Fault:
    """`end` undoes it, `seconds` after `begin`; a fault without `begin` is none."""

    begin: Callable[[NamespaceCluster], None]
    seconds: float
    end: Callable[[NamespaceCluster], None] = lambda cluster: cluster.heal(VICTIM)


def come_back(cluster: NamespaceCluster) -> None:
    """As a supervisor would."""
    cluster.heal(VICTIM)
    cluster.start_node(VICTIM)


FAULTS = {
    "none": Fault(lambda cluster: None, 2.0),
    "slow_link": Fault(lambda cluster: cluster.slow(VICTIM, "200mbit"), 4.0),
    "delay_50ms": Fault(lambda cluster: cluster.delay(VICTIM, 50), 4.0),
    "one_way_5s": Fault(lambda cluster: cluster.cut(VICTIM, "head", one_way=True), PARTITION_S),
    "pair_5s": Fault(lambda cluster: cluster.cut("p1", VICTIM), PARTITION_S),
    "partition_5s": Fault(lambda cluster: cluster.cut(VICTIM), PARTITION_S),
    "node_lost": Fault(lambda cluster: cluster.kill(VICTIM), 8.0, come_back),
    "power_lost": Fault(lambda cluster: cluster.kill(VICTIM, silently=True), 12.0, come_back),
}


def setup() -> Setup:
    """Two frontends on the head, one worker on each other node."""
    plain = Setup(prefill=2, decode=2, frontends=2)
    variant = plain.variant
    for role in ("prefill", "decode"):
        variant[role] = {**variant[role], "max_replicas": 2, "labels": {"pool": role}}
    return plain.changed(
        models=[{"name": "sim", "variants": [variant]}],
        frontend={"replicas": 2, "labels": {"pool": "frontend"}},
    )


class Rehearsal:
    """The application on a running cluster, and what its streams are compared with."""

    def __init__(self, cluster: NamespaceCluster) -> None:
        self.cluster = cluster
        self.app = App(cluster, setup())
        self._reference = SimReference()

    def deploy(self) -> dict[str, list[str]]:
        """Where everything runs."""
        self.cluster.deploy(self.app.setup.config())
        self.app.wait_until("every worker linked", self.app.at_strength)
        return self.cluster.replicas()

    def close(self) -> None:
        self._reference.stop()

    # ---------------------------------------------------------------- the way of the KV

    def handoffs(self, count: int) -> dict[str, Any]:
        """`count` streams one by one: what NIXL read, what the cables carried, and how soon tokens came."""
        asks = stream_asks(count, prompt_tokens=PROMPT_TOKENS, max_tokens=16, seed=7)
        before = {node: self.cluster.counters(node) for node in self.cluster.nodes}
        read_before = self.app.total("kvrelay_handoff_bytes_total")
        answers = asyncio.run(self._one_by_one(asks))
        read = self.app.total("kvrelay_handoff_bytes_total") - read_before
        sent = {
            node: self.cluster.counters(node).sent_bytes - before[node].sent_bytes
            for node in self.cluster.nodes
        }
        ttfts = sorted((answer.times_s[0] - answer.sent_s) * 1e3 for answer in answers if answer.times_s)
        return {
            "streams": count,
            "completed": sum(verdict.completed for verdict in self._verdicts(answers)),
            "ttft_ms_p50": round(statistics.median(ttfts), 2),
            "ttft_ms_max": round(ttfts[-1], 2),
            "nixl_bytes": round(read),
            "sent_by_prefill_nodes_bytes": sum(bytes_ for node, bytes_ in sent.items() if node[0] == "p"),
            "sent_by_head_bytes": sent["head"],
        }

    async def _one_by_one(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = []
        for ask in asks:
            load = Load(self.app, f"way-{time.monotonic()}", [])
            (exchange,) = await load.late([ask])
            await exchange.ended.wait()
            answers.append(exchange.answer())
        return answers

    # ---------------------------------------------------------------- faults

    def suffer(self, name: str, *, streams: int) -> dict[str, Any]:
        """One fault, from a whole cluster to a whole cluster."""
        fault = FAULTS[name]
        asks = stream_asks(streams, prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS)
        late = stream_asks(streams // 2, prompt_tokens=PROMPT_TOKENS, max_tokens=LATE_TOKENS, seed=2)
        heard = asyncio.run(self._live_through(name, fault, asks, late))
        row = Row(other_errors=sum(failed(probe) for probe in heard.probes_answers))
        row.add(self._verdicts(heard.answers))
        whole_s = self.app.wait_until("back at strength", self.app.at_strength, BACK_S)
        row.leaked_blocks = self.left_behind()
        return {**asdict(row), "back_at_strength_s": round(whole_s, 1)}

    async def _live_through(
        self, name: str, fault: Fault, asks: Sequence[Ask], late: Sequence[Ask]
    ) -> _Heard:
        load = Load(self.app, f"{name}-{time.monotonic()}", asks)
        await load.start(tokens=20)
        began_s = time.monotonic()
        await asyncio.to_thread(fault.begin, self.cluster)
        for ask in late:
            await load.late([ask])
            await asyncio.sleep(0.5 * fault.seconds / len(late))
        await asyncio.sleep(max(began_s + fault.seconds - time.monotonic(), 0))
        await asyncio.to_thread(fault.end, self.cluster)
        heard = await load.finish()
        return _Heard(
            [exchange.answer() for exchange in heard.streams + heard.late],
            [probe.answer() for probe in heard.probes],
        )

    def _verdicts(self, answers: Sequence[Answer]) -> list[Any]:
        self._reference.learn([answer.ask for answer in answers])
        return [judge(answer, self._reference.answer(answer.ask)) for answer in answers]

    def left_behind(self) -> int:
        """Blocks that are held, with nothing going on, after `CLEAN_S` at the latest."""

        def clean() -> bool:
            samples = self.app.samples()
            return held_blocks(samples) == 0 and in_flight(samples) == 0

        try:
            self.app.wait_until("nothing held", clean, CLEAN_S)
        except TimeoutError:
            return max(held_blocks(self.app.samples()), 1)
        return 0


@dataclass(frozen=True, slots=True)
class _Heard:
    answers: list[Answer]
    probes_answers: list[Answer]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--only", nargs="*", choices=sorted(FAULTS), help="these faults; default: all")
    parser.add_argument("--streams", type=int, default=12)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"benchmarks.multi_node: {reason}", file=sys.stderr)
        return 1
    progress = Progress(quiet=options.json)
    began_s = time.monotonic()
    with NamespaceCluster(NODES) as cluster:
        report: dict[str, Any] = {"nodes": len(NODES), "up_s": round(time.monotonic() - began_s, 1)}
        rehearsal = Rehearsal(cluster)
        try:
            began_s = time.monotonic()
            report["placed"] = rehearsal.deploy()
            report["deployed_s"] = round(time.monotonic() - began_s, 1)
            progress.say("hand-offs")
            report["handoffs"] = rehearsal.handoffs(20)
            report["faults"] = {}
            for name in options.only or FAULTS:
                progress.say(name)
                report["faults"][name] = rehearsal.suffer(name, streams=options.streams)
        finally:
            rehearsal.close()
    print(json.dumps(report)) if options.json else print_report("multi-node", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
