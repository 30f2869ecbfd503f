"""A client that measures on the machine it measures: what is its own lateness, and what the server's?

Clients have machines of their own. Here a dozen processes that start take the client's CPU as well, and
what it waits for looks like the server's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIORITY = -10  # niceness; the server is at 0
_AUTOGROUP = Path("/proc/self/autogroup")  # where there is one, niceness counts within a session only
TICK_S = 0.005


@contextmanager
def ahead_of_the_server() -> Iterator[None]:
    """This thread and its session come first for the CPU, if the user may have that (root may).

    What is started within is at 0 again, sessions of their own as well: servers, their supervisors.
    """
    _renice(PRIORITY)
    try:
        yield
    finally:
        _renice(0)


def _renice(niceness: int) -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):
        _AUTOGROUP.write_text(str(niceness))


class Lateness:
    """How late this process's event loop ever was. `start` within it, then `stop`."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> float:
        """Milliseconds."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        return round(self.longest_s * 1e3, 1)

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due_s = now() + TICK_S
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, now() - due_s)
