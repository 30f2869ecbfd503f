"""A replica told to stop by a Serve controller that is no more: the next one must do without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.fault_app import APPLICATION, App
from serving.local_cluster import LocalCluster

# As a controller does that dies right after: nobody else knows of it. Ray's import warns, so not in here.
TELL_TO_STOP = """
import sys, time, ray
ray.init(address="auto", namespace="serve", log_to_driver=False)
actor = ray.get_actor(sys.argv[1])
actor.perform_graceful_shutdown.remote()
time.sleep(1)
"""
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("deployment", ["sim-main-decode", "Frontend", "Control"])
def test_it_is_replaced(local_cluster: LocalCluster, local_app: App, deployment: str) -> None:
    local_app.wait_until("all replicas run", local_app.at_strength)
    told, *others = [replica.ident for replica in local_app.replicas(deployment)]
    name = f"SERVE_REPLICA::{APPLICATION}#{deployment}#{told}"
    subprocess.run(
        [sys.executable, "-c", TELL_TO_STOP, name],
        env=local_cluster.environment,
        check=True,
        capture_output=True,
        timeout=60,
    )

    def replaced() -> bool:
        running = {replica.ident for replica in local_app.replicas(deployment)}
        return told not in running and len(running) == 1 + len(others)

    local_app.wait_until("another one runs in its place", replaced)
    assert {replica.ident for replica in local_app.replicas(deployment)} >= set(others)
