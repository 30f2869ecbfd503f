"""Aborts one after the other: bursts of them, of long prompts, wedged engines (TensorRT-LLM #13056)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

log = logging.getLogger("kvrelay.engine")

INTERVAL_S = 0.005


class Aborts:
    """Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Any] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def abort(self, output: Any) -> None:
        """Soon; what is over by then is left alone."""
        self._waiting.append(output)
        if self._timer is None:
            self._next()

    def _next(self) -> None:
        self._timer = None
        while self._waiting:
            output = self._waiting.popleft()
            if getattr(output, "finished", False):
                continue
            try:
                output.abort()
            except Exception as error:
                log.warning("abort failed: %r", error)
            self._timer = self._loop.call_later(INTERVAL_S, self._next)
            return
