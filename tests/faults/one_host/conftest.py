"""One application for all faults of one host: two prefill and three decode workers, a slow network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fault_app import App, Setup
from benchmarks.fault_reference import SimReference
from benchmarks.faults import SLOW_TCP
from serving.local_cluster import LocalCluster

# Shorter deadlines than the product's, so that a frozen worker's leases run out while a test can wait.
DEADLINES = {"transfer_ms": 3000, "silence_ms": 4000}
SETUP = Setup(kv_bytes=96 << 20, begun_tokens=25, long_prompt_tokens=3000, args={"deadlines": DEADLINES})


@pytest.fixture(scope="package")
def local_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus=8, dashboard=True, env=SLOW_TCP) as cluster:
        cluster.serve(SETUP.config(), timeout_s=300)
        yield cluster


@pytest.fixture(scope="package")
def local_app(local_cluster: LocalCluster) -> App:
    return App(local_cluster, SETUP)


@pytest.fixture(scope="package")
def sim_reference() -> Iterator[SimReference]:
    reference = SimReference()
    yield reference
    reference.stop()
