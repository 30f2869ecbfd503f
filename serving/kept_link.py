"""A link that is dialled again whenever it is lost, until somebody no longer wants it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from serving.errors import LinkError
from serving.link import Identity, Link, LinkHandler, dial
from serving.log_limit import LogLimit
from serving.wire import AnyMessage, Beat, Message

log = logging.getLogger("kvrelay.link")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
LASTING_S = 1.0  # a link that lived this long starts the waits anew; a peer that always hangs up does not


class KeptLink:
    """Owns one dialling task. The handler hears `on_open` and `on_lost` for every link in turn.

    `start` and `stop` are a pair; the handler hears its last `on_lost` before `stop` returns.
    """

    def __init__(
        self,
        address: str,
        me: Identity,
        key: bytes,
        handler: LinkHandler,
        *,
        beat: Callable[[], Beat] = Beat,
    ) -> None:
        self.address = address
        self._me = me
        self._key = key
        self._handler = handler
        self._beat = beat
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def link(self) -> Link | None:
        return self._link

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._link is not None:
            self._link.close("no longer wanted")
            await self._lost.wait()

    def send(self, message: Message) -> None:
        """Dropped while there is no link: the owner hears `on_lost` and knows."""
        if self._link is not None:
            self._link.send(message)

    # -- LinkHandler

    def on_open(self, link: Link) -> None:
        self._link = link
        self._handler.on_open(link)

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self._handler.on_message(link, message)

    def on_lost(self, link: Link, reason: str) -> None:
        self._link = None
        self._lost.set()
        self._handler.on_lost(link, reason)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        refusals = LogLimit()
        wait_s = FIRST_RETRY_S
        while True:
            self._lost.clear()
            try:
                await dial(self.address, self._me, self._key, self, beat=self._beat, refusals=refusals)
            except LinkError as error:
                if (more := refusals.pass_on()) is not None:
                    log.info("no link yet to %s%s", error.message, more)
            else:
                opened_s = loop.time()
                await self._lost.wait()
                if loop.time() - opened_s >= LASTING_S:
                    wait_s = FIRST_RETRY_S
            await asyncio.sleep(wait_s)
            wait_s = min(LAST_RETRY_S, wait_s * 2)
