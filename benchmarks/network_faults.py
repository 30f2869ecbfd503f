"""Faults of hosts and of the network between them, and the cluster they need: one replica a host.

They are `Fault`s as those of fault_scenarios.py, for an App on a NamespaceCluster of `NODES`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.fault_app import MODEL, App, Setup
from benchmarks.fault_load import stream_asks
from benchmarks.fault_scenarios import Fault, Scene
from serving.local.namespaces import NamespaceCluster

# A node that leaves waits so long for a place for its replica elsewhere, over the replica's own 605 s.
NO_PLACE_S = 10
DRAIN = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(605 + NO_PLACE_S)}
NODES: dict[str, dict[str, Any]] = {
    "head": {"labels": {"pool": "frontend"}},
    "f": {"labels": {"pool": "frontend"}, "cpus": 1},
    "p1": {"labels": {"pool": "prefill"}, "cpus": 1},
    "p2": {"labels": {"pool": "prefill"}, "cpus": 1},
    "d1": {"labels": {"pool": "decode"}, "cpus": 1, "env": DRAIN},
    "d2": {"labels": {"pool": "decode"}, "cpus": 1, "env": DRAIN},
}
WORKER_CPUS = 0.9  # one fits a node, as with accelerators: a lost one comes back where the node does
LAX = {"ttft_ms": 60_000, "itl_ms": 1000}  # nobody is refused because this machine is busy
MAX_BATCH = 256  # more requests than gather on a silent worker until its silence is noticed
PARTITION_S = 5.0
IMPAIRED_S = 5.0  # how long a slow or long way lasts
NOTICED_S = 15.0  # by then Ray knows that a silent node is dead
LEFT_S = 90.0
LATE_STREAMS = 6
LATE_PROMPT_TOKENS = 1500  # 6 MB of KV, which must cross the network while it is broken


def node_setup(**fields: Any) -> Setup:
    """A frontend on the head and one on `f`, Control on either, one worker on every other node."""
    plain = Setup(prefill=2, decode=2, frontends=2, **fields)
    variant = plain.variant
    variant["engine"] = {**variant["engine"], "max_batch": MAX_BATCH}
    for role in ("prefill", "decode"):
        variant[role] = {**variant[role], "max_replicas": 2, "cpus": WORKER_CPUS, "labels": {"pool": role}}
    return plain.changed(
        models=[{"name": MODEL, "slo": LAX, "variants": [variant]}],
        frontend={"replicas": 2, "max_per_node": 1, "labels": {"pool": "frontend"}},
    )


def cluster_of(app: App) -> NamespaceCluster:
    assert isinstance(app.cluster, NamespaceCluster), "this fault is for hosts of their own"
    return app.cluster


async def strike(
    scene: Scene, begin: Callable[[NamespaceCluster, str], None], *, seconds: float, heal: bool = True
) -> None:
    """`begin` on the decode node with most streams; new prompts come while it lasts."""
    cluster = cluster_of(scene.app)
    victim = cluster.node_of(scene.load.busiest())
    scene.notes["node"] = victim
    scene.struck_s = time.monotonic()
    await asyncio.to_thread(begin, cluster, victim)
    for ask in stream_asks(LATE_STREAMS, prompt_tokens=LATE_PROMPT_TOKENS, max_tokens=60, seed=2):
        await scene.load.late([ask])
        await asyncio.sleep(seconds / 2 / LATE_STREAMS)
    await asyncio.sleep(max(0.0, scene.struck_s + seconds - time.monotonic()))
    if heal:
        await asyncio.to_thread(cluster.heal, victim)


async def lose_frontend(scene: Scene) -> None:
    """Its streams are cut: their clients ask again, and the other frontend answers."""
    scene.struck_s = time.monotonic()
    await asyncio.to_thread(cluster_of(scene.app).kill, "f")
    await asyncio.sleep(NOTICED_S / 2)


async def drain(scene: Scene) -> None:
    """As `systemctl stop` or a preStop hook: its streams move, then it ends by itself."""
    cluster = cluster_of(scene.app)
    victim = cluster.node_of(scene.load.busiest())
    scene.notes["node"] = victim
    scene.struck_s = time.monotonic()
    await asyncio.to_thread(cluster.leave, victim)
    took_s = await asyncio.to_thread(
        scene.app.wait_until, f"{victim} has left", lambda: not cluster.is_up(victim), LEFT_S
    )
    scene.notes["left_s"] = round(took_s, 1)


def come_back(app: App) -> None:
    """Every node that is gone, as a supervisor starts it again."""
    cluster = cluster_of(app)
    for node in cluster.nodes:
        cluster.heal(node)
        cluster.start_node(node)


def _deaf_to(cluster: NamespaceCluster, node: str) -> None:
    """What `node` sends to frontends does not arrive."""
    for peer in ("head", "f"):
        cluster.cut(node, peer, one_way=True)


def _cut_from_prefill(cluster: NamespaceCluster, node: str) -> None:
    for peer in ("p1", "p2"):
        cluster.cut(node, peer)


NETWORK_FAULTS = [
    Fault(
        "node_removed",
        "all processes of a decode node end; their connections are reset",
        partial(strike, begin=NamespaceCluster.kill, seconds=8.0, heal=False),
        "kill",
        where="nodes",
        restore=come_back,
    ),
    Fault(
        "power_lost",
        "a decode node is gone and nothing is reset",
        partial(strike, begin=partial(NamespaceCluster.kill, silently=True), seconds=NOTICED_S, heal=False),
        where="nodes",
        restore=come_back,
    ),
    Fault(
        "frontend_node_lost",
        "all processes of a frontend's node end; clients ask again",
        lose_frontend,
        where="nodes",
        restore=come_back,
        reconnect=True,
    ),
    Fault("node_drained", "a decode node is asked to leave", drain, where="nodes", restore=come_back),
    Fault(
        "partition_5s",
        "a decode node reaches nobody for 5 s",
        partial(strike, begin=NamespaceCluster.cut, seconds=PARTITION_S),
        where="nodes",
        restore=come_back,
    ),
    Fault(
        "one_way_5s",
        "frontends do not hear a decode node for 5 s, which hears them",
        partial(strike, begin=_deaf_to, seconds=PARTITION_S),
        where="nodes",
        restore=come_back,
    ),
    Fault(
        "pair_5s",
        "a decode node and the prefill nodes do not reach each other for 5 s; frontends reach all",
        partial(strike, begin=_cut_from_prefill, seconds=PARTITION_S),
        where="nodes",
        restore=come_back,
    ),
    Fault(
        "slow_link",
        "200 Mbit/s to and from a decode node",
        partial(strike, begin=partial(NamespaceCluster.slow, rate="200mbit"), seconds=IMPAIRED_S),
        where="nodes",
    ),
    Fault(
        "delay_50ms",
        "50 ms more each way to and from a decode node",
        partial(strike, begin=partial(NamespaceCluster.delay, ms=50), seconds=IMPAIRED_S),
        where="nodes",
    ),
]
