"""The application on six hosts of their own (network namespaces): KV crosses cables, no token is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fault_app import App
from benchmarks.fault_reference import SimReference
from benchmarks.fault_run import fault_asks, run_fault
from benchmarks.multi_node import handoffs
from benchmarks.network_faults import NETWORK_FAULTS, NODES, node_setup
from serving.local.namespaces import NamespaceCluster, directory_of
from serving.local.network import VirtualNetwork, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),  # six Ray nodes start in 10 s on a quiet machine
]

STREAMS = 8
FAULTS = {fault.name: fault for fault in NETWORK_FAULTS}
# In this order: the node that is lost comes back as a new one.
LIVED_THROUGH = ["partition_5s", "one_way_5s", "delay_50ms", "node_removed"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[NamespaceCluster]:
    with NamespaceCluster(NODES) as cluster:
        directory, number = cluster.directory, cluster.network.number
        cluster.deploy(node_setup().config(), timeout_s=240)
        yield cluster
    assert not directory.exists()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"kvr{number}-" not in left


@pytest.fixture(scope="module")
def app(cluster: NamespaceCluster) -> App:
    app = App(cluster, node_setup())
    app.wait_until("all workers are linked", app.at_strength)
    return app


@pytest.fixture(scope="module")
def reference() -> Iterator[SimReference]:
    reference = SimReference()
    yield reference
    reference.stop()


def test_labels_place_every_pool(cluster: NamespaceCluster, app: App) -> None:
    placed = {name: sorted(nodes) for name, nodes in cluster.replicas().items()}
    assert placed.pop("Control")[0] in ("head", "f")
    assert placed == {
        "sim-main-prefill": ["p1", "p2"],
        "sim-main-decode": ["d1", "d2"],
        "Frontend": ["f", "head"],
    }


def test_hosts_share_nothing_but_files(cluster: NamespaceCluster, app: App) -> None:
    """Else KV could take a way that real hosts do not have."""
    seen = {
        node: cluster.run(
            node, ["sh", "-c", "readlink /proc/self/ns/*; hostname; ls /dev/shm; ls -d /proc/[0-9]*"]
        )
        for node in ("p1", "d1")
    }
    p1, d1 = (done.stdout.split() for done in seen.values())
    namespaces = [{name for name in said if name.endswith("]")} for said in (p1, d1)]
    shared = {name.partition(":")[0] for name in namespaces[0] & namespaces[1]}
    assert not shared & {"net", "pid", "ipc", "uts", "mnt"}
    assert "p1" in p1
    assert "d1" in d1


def test_every_byte_that_nixl_read_crossed_a_cable(
    cluster: NamespaceCluster, app: App, reference: SimReference
) -> None:
    row = asyncio.run(handoffs(app, reference, 6))
    assert (row["completed"], row["lost"], row["repeated"]) == (6, 0, 0)
    # 6 prompts of 800 tokens or more, whole blocks of 4 KiB a token; headers come on top.
    assert row["nixl_bytes"] >= 6 * 700 * 4096
    assert 1.0 <= row["on_the_cable"] < 1.1


@pytest.mark.parametrize("name", LIVED_THROUGH)
def test_streams_live_through(name: str, app: App, reference: SimReference) -> None:
    asks = fault_asks(FAULTS[name].tokens, streams=STREAMS)
    row = asyncio.run(run_fault(app, FAULTS[name], reference, asks))
    assert row["completed"] == row["streams"] >= STREAMS, json.dumps(row)
    wrong = ("lost", "repeated", "wrong_usage", "other_errors", "leaked_blocks", "left_in_flight")
    assert {key: row[key] for key in wrong} == dict.fromkeys(wrong, 0), json.dumps(row)
    assert row["at_strength"]
    assert row["nixl_bytes"] > 0
    if name in ("partition_5s", "one_way_5s", "node_removed"):
        assert row["resumes"] > 0, "the fault hit nobody"


def test_the_command_finds_a_running_cluster(cluster: NamespaceCluster, app: App) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        network = f"--network={cluster.network.number}"
        return subprocess.run(
            [sys.executable, "-m", "serving.local.namespaces", network, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    assert json.loads(command("replicas").stdout) == cluster.replicas()
    assert set(json.loads(command("counters").stdout)) == set(NODES)
    assert command("exec", "d1", "hostname").stdout == "d1\n"
    assert command("exec", "d1", "false").returncode == 1
    nobody = command("exec", "nobody", "hostname")
    assert (nobody.returncode, nobody.stderr) == (
        1,
        "kvrelay: no node 'nobody'; there are: head, f, p1, p2, d1, d2\n",
    )


def test_files_of_nodes_are_kept_apart(cluster: NamespaceCluster) -> None:
    for node in NODES:
        assert (cluster.directory / node / "ray").is_dir()
    assert Path(cluster.directory / "auth_token").stat().st_mode & 0o077 == 0


OWNER = """
from serving.local.namespaces import NamespaceCluster, directory_of
cluster = NamespaceCluster({"head": {"cpus": 1}})
cluster.start()
print(cluster.network.number, flush=True)
input()
"""


def test_a_killed_owner_takes_its_cluster_along() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        network = VirtualNetwork(int(owner.stdout.readline()))
        assert network.processes("head")
        owner.kill()
    deadline = time.monotonic() + 30
    while network.hosts() or directory_of(network).exists():
        assert time.monotonic() < deadline, network.hosts()
        time.sleep(0.1)
