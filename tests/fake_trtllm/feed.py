"""Ways out of the fake engine: responses of one request, and rows that are polled."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.fake_trtllm.requests import Response


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Feed:
    """Responses on their way to one RequestOutput; waited for on an event loop or in a thread."""

    def __init__(self) -> None:
        self._responses: deque[Response] = deque()
        self._lock = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def push(self, response: Response) -> None:
        with self._lock:
            self._responses.append(response)
            self._lock.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter[0].is_closed():
            waiter[0].call_soon_threadsafe(_wake, waiter[1])

    async def get(self) -> Response:
        while True:
            with self._lock:
                if self._responses:
                    return self._responses.popleft()
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = loop, future
            await future

    def wait(self, timeout: float | None) -> Response:
        with self._lock:
            if not self._lock.wait_for(lambda: bool(self._responses), timeout):
                raise TimeoutError
            return self._responses.popleft()


class Iteration:
    """What `get_stats_async` and `get_kv_cache_events_async` give: ends when nothing is queued."""

    def __init__(self, poll: Callable[[], list[dict[str, Any]]], timeout: float | None) -> None:
        self._poll = poll
        self._timeout = timeout or 0.0
        self._found: deque[dict[str, Any]] = deque()

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if not self._found:
            self._found.extend(self._poll())
        if not self._found and self._timeout:
            await asyncio.sleep(self._timeout)
            self._found.extend(self._poll())
        if not self._found:
            raise StopAsyncIteration
        return self._found.popleft()
