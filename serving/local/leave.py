"""Run as `python -m serving.local.leave` on a node: its Ray drains and ends; returns when it has.

For supervisors that cannot send SIGTERM to `ray start --block` itself, as a container's preStop hook: in
the containers that KubeRay makes a shell is in front of it, and shells hand no signal on. `ray stop` is no
substitute: it ends workers at once. The time there is: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S.

Where several Rays share the node nothing is ended unless --all or --pid says which. Those of `kvrelay
serve` and of tests are none of a node's: they are passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from serving.local.environment import marker_of


def ray_start() -> list[psutil.Process]:
    """The `ray start --block` of this node; two of them only where two Rays share it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if is_ray_start(process.cmdline()) and not _is_local_cluster(process):
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


def _is_local_cluster(process: psutil.Process) -> bool:
    """Its owner, `kvrelay serve` or a test, ends it."""
    with suppress(OSError):
        return marker_of(process.pid) is not None
    return False  # another user's


def chosen(nodes: list[psutil.Process], *, everything: bool, pid: int | None) -> list[psutil.Process] | str:
    """Those of `nodes` that shall end, or why none does."""
    if pid is not None:
        return [process for process in nodes if process.pid == pid] or (
            f"pid {pid} is no `ray start --block` that this may end; there are: {_listed(nodes)}"
        )
    if not nodes:
        return "no `ray start --block` runs here"
    if len(nodes) > 1 and not everything:
        return f"{len(nodes)} Rays run here ({_listed(nodes)}): say which with --pid, or --all"
    return nodes


def _listed(nodes: list[psutil.Process]) -> str:
    return ", ".join(f"pid {process.pid}" for process in nodes) or "none"


def main(argv: Sequence[str] | None = None) -> int:
    """0: ended; 1: nothing was ended, stderr says why; 2: an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.local.leave",
        description="Drain and end the Ray of this node (`ray start --block`), and wait for its end.",
        epilog="Clusters that `kvrelay serve` or a test started are passed over.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every Ray of this node, where there are several")
    which.add_argument("--pid", type=int, help="the one `ray start --block` with this process id")
    options = parser.parse_args(argv)
    nodes = chosen(ray_start(), everything=options.all, pid=options.pid)
    if isinstance(nodes, str):
        print(nodes, file=sys.stderr)
        return 1
    for process in nodes:
        with suppress(psutil.NoSuchProcess):
            print(f"draining pid {process.pid}: {' '.join(process.cmdline())[:160]}", flush=True)
            process.terminate()
    psutil.wait_procs(nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
