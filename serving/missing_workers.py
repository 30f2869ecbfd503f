"""Workers that Control has no link to. They are on its list, and so are their orders, until Serve says that
they are gone: one that is frozen, or cut off, may come back at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from serving.errors import Unavailable
from serving.wire import Register, WorkerReport

log = logging.getLogger("kvrelay.control")

LOOK_S = 2.0  # how often Serve is asked while any are missing

Listed = Callable[[], Awaitable[Collection[str]]]  # the replicas that Serve has; raises Unavailable


@dataclass(frozen=True, slots=True)
class MissingWorker:
    """What was known of it; `epoch` and `register` None: only some order names it."""

    epoch: int | None = None
    register: Register | None = None
    report: WorkerReport | None = None
    reported_s: float = 0.0


class MissingWorkers:
    """`start` and `stop` are a pair. `on_gone` is called for whoever Serve no longer lists."""

    def __init__(self, listed: Listed, on_gone: Callable[[str], None]) -> None:
        self.all: dict[str, MissingWorker] = {}
        self._listed = listed
        self._on_gone = on_gone
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def lost(self, ident: str, worker: MissingWorker) -> None:
        self.all[ident] = worker
        self._lost.set()

    def is_back(self, ident: str, epoch: int) -> bool:
        """False: under that name came another process than the one that is missed."""
        missed = self.all.pop(ident, None)
        return missed is None or missed.epoch in (None, epoch)

    async def _watch(self) -> None:
        while True:
            await self._lost.wait()
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Unavailable:
                continue  # nobody is taken to be gone
            except Exception:
                log.exception("who is missing was not found out")
            if not self.all:
                self._lost.clear()

    async def look(self) -> None:
        """Ask Serve once. Raises Unavailable."""
        asked = set(self.all)
        listed = await self._listed()
        for ident in asked.intersection(self.all).difference(listed):
            del self.all[ident]
            self._on_gone(ident)
