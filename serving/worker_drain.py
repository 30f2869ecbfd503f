"""How long a worker that leaves stays: until nobody needs it, or its engine hangs and it helps nobody."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from serving.canary import UNFIT_DRAIN_S
from serving.wire import Beat

log = logging.getLogger("kvrelay.worker")

POLL_S = 0.05
QUIET_S = 0.25  # nothing came for so long: submits may be on their way


class Leaving(Protocol):
    """The worker that drains."""

    @property
    def busy(self) -> bool:
        """Somebody waits for its tokens, reads its KV or may still write into it."""

    def beat(self) -> Beat: ...


async def until_unneeded(worker: Leaving, limit_s: float) -> None:
    """At most `limit_s`; an engine that has work and makes no step gets what an unfit worker gets."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    quiet_since_s = stepped_s = loop.time()
    step = worker.beat().step
    while loop.time() < deadline_s and loop.time() - quiet_since_s < QUIET_S:
        await asyncio.sleep(POLL_S)
        if worker.busy:
            quiet_since_s = loop.time()
        beat = worker.beat()
        if beat.step != step or not beat.runnable:
            step, stepped_s = beat.step, loop.time()
        elif loop.time() - stepped_s > UNFIT_DRAIN_S:
            log.error("the engine made no step for %g s: its requests are given up", UNFIT_DRAIN_S)
            return
