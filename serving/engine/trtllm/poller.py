"""Asks the engine for events or statistics, on a thread and a loop of its own, and never fails with it.

A poll that raises is counted, told once and tried again later, less often each time; one that hangs is
given up after a while. Serving goes on in every case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvrelay.engine")

MOST_ITEMS = 256  # of one poll
HUNG_S = 10.0
SLOWEST_S = 1.0
END_OF_BATCH = (StopAsyncIteration, IndexError, asyncio.QueueEmpty, TimeoutError)


class Poller:
    """`start` and `stop` are a pair. `ask(timeout)` gives an async iterator that ends when nothing is
    queued; `take(items)` is called on the poller's thread, must not block, and gets no empty list."""

    def __init__(
        self,
        name: str,
        ask: Callable[[float], Any],
        take: Callable[[list[Any]], None],
        *,
        period_s: float,
        timeout_s: float = 0.0,
    ) -> None:
        self.errors = 0
        self._name = name
        self._ask = ask
        self._take = take
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"trtllm-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for a poll under way, but not for one that hangs."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _main(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            asyncio.run(self._poll())

    async def _poll(self) -> None:
        pause_s = self._period_s
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(HUNG_S):
                    items = await self._batch()
                if items:
                    self._take(items)
                pause_s = self._period_s
            except Exception as error:
                self.errors += 1
                if pause_s <= self._period_s:
                    log.warning("polling %s failed, serving goes on: %r", self._name, error)
                pause_s = min(max(pause_s, 0.01) * 2, SLOWEST_S)
            await asyncio.sleep(pause_s)

    async def _batch(self) -> list[Any]:
        items: list[Any] = []
        iterator = self._ask(self._timeout_s).__aiter__()
        while len(items) < MOST_ITEMS:
            try:
                items.append(await iterator.__anext__())
            except END_OF_BATCH:
                break
        return items
