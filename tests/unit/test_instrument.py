"""A client that measures on the machine it measures."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.instrument import PRIORITY, Lateness, ahead_of_the_server

AUTOGROUP = Path("/proc/self/autogroup")
# A kernel without autogroups lacks the file; a process in none (a container's first) reads "" from it.
IN_AUTOGROUP = AUTOGROUP.exists() and AUTOGROUP.read_text() != ""
NICENESS = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"


async def test_a_blocked_loop_is_late_by_what_blocked_it():
    lateness = Lateness()
    lateness.start()
    await asyncio.sleep(0.02)
    time.sleep(0.08)
    await asyncio.sleep(0.02)
    assert lateness.stop() >= 75


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may come first")
def test_the_client_comes_first_and_what_it_starts_does_not():
    with ahead_of_the_server():
        assert os.getpriority(os.PRIO_PROCESS, 0) == PRIORITY
        if IN_AUTOGROUP:
            assert f"nice {PRIORITY}" in AUTOGROUP.read_text()
        command = ["python3", "-c", NICENESS]
        started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout.strip() == "0"
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
    if IN_AUTOGROUP:
        assert "nice 0" in AUTOGROUP.read_text()


def test_without_permission_the_client_runs_as_it_is(monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError

    for name in ("sched_setscheduler", "setpriority"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr("benchmarks.instrument._AUTOGROUP", Path("/proc/self/none"))
    with ahead_of_the_server():
        assert os.getpriority(os.PRIO_PROCESS, 0) == 0
