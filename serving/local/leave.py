"""Run as `python -m serving.local.leave` on a node: its Ray drains and ends; returns when it has.

For supervisors that cannot send SIGTERM to `ray start --block` itself, as a container's preStop hook: in
the containers that KubeRay makes a shell is in front of it, and shells hand no signal on. `ray stop` is no
substitute: it ends workers at once. The time there is: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil


def ray_start() -> list[psutil.Process]:
    """The `ray start --block` of this node; two of them only where two Rays share it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if is_ray_start(process.cmdline()):
                found.append(process)
    return found


def is_ray_start(command: list[str]) -> bool:
    """`python .../ray start --block ...`; not a shell that runs it."""
    if not command or not Path(command[0]).name.startswith("python"):
        return False
    program = [Path(part).name for part in command[1:]]
    if program[:2] == ["-m", "ray.scripts.scripts"]:
        program = ["ray", *program[2:]]
    return program[:2] == ["ray", "start"] and "--block" in program


def main() -> int:
    nodes = ray_start()
    if not nodes:
        print("no `ray start --block` runs here", file=sys.stderr)
        return 1
    for process in nodes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
