"""A minute of mixed load with a fault every ten seconds."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.fault_app import App
from benchmarks.report import Progress
from benchmarks.soak import FD_GROWTH, soak
from serving.local_cluster import LocalCluster
from tests.faults.one_host.conftest import SETUP

pytestmark = pytest.mark.timeout(300)


def test_a_minute_of_faults_fails_nobody(local_cluster: LocalCluster, local_app: App) -> None:
    report = asyncio.run(
        soak(local_app, local_cluster, minutes=1, every_s=10, seed=3, progress=Progress(quiet=True))
    )
    assert report["failed"] == 0, report
    assert report["requests"] > 100
    assert report["faults"] >= 3
    assert report["conserved"], report
    assert report["fd_growth"] <= FD_GROWTH
    assert report["rss_growth"] < 64 + SETUP.kv_bytes / (1 << 20), "MiB: the pool is touched bit by bit"
