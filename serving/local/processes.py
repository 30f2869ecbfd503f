"""Find and end the processes of one local cluster, and no others."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import psutil

from serving.local.environment import marker_of


class Family:
    """The processes of one cluster: those whose environment carries its marker, and all their descendants.

    The marker survives any number of forks, sessions and re-parentings. A process that renames itself
    (Ray's workers do) may overwrite its own; then descent counts, and a process once seen stays known.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._hurry = threading.Event()
        self._known: set[psutil.Process] = set()  # psutil compares pid and creation time

    def living(self) -> list[psutil.Process]:
        """All living processes of the family, oldest first."""
        children: dict[int, list[psutil.Process]] = {}
        members: set[psutil.Process] = {process for process in self._known if process.is_running()}
        for process in psutil.process_iter():
            # Another user's process, or one that just ended: not ours.
            with suppress(psutil.Error, OSError):
                children.setdefault(process.ppid(), []).append(process)
                if process.pid != os.getpid() and marker_of(process.pid) == self._marker:
                    members.add(process)
        waiting = list(members)
        while waiting:
            for child in children.get(waiting.pop().pid, ()):
                if child not in members:
                    members.add(child)
                    waiting.append(child)
        self._known = members
        return sorted(filter(_is_alive, members), key=lambda process: process.create_time())

    def hurry(self) -> None:
        """Let an `end` that waits, now or later, kill at once."""
        self._hurry.set()

    def hurried(self) -> bool:
        return self._hurry.is_set()

    def end(self, *, grace_s: float, kill_s: float = 3.0) -> None:
        """Ask every process to end, newest first, wait up to `grace_s`, then kill what is left.

        Repeated until none is left: one may be born between looking and ending. Raises TimeoutError if
        a killed process is still there after `kill_s`.
        """
        asked: set[psutil.Process] = set()
        deadline = time.monotonic() + grace_s
        while (left := self.living()) and time.monotonic() < deadline and not self._hurry.is_set():
            for process in reversed(left):
                if process not in asked:
                    asked.add(process)
                    with suppress(psutil.NoSuchProcess):
                        process.terminate()
            psutil.wait_procs(left, timeout=0.1)
        deadline = time.monotonic() + kill_s
        while left := self.living():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {[process.pid for process in left]} do not end")


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
