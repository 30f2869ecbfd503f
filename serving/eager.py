"""Sends ASGI body chunks from plain callbacks, without waking a task a chunk.

An ASGI `send` is a coroutine that as a rule finishes without suspending: the server writes to its
transport and returns. So `write` runs it on the spot. When it does suspend (the transport is paused because
the client reads slowly), a task takes over the suspended coroutine, and bytes wait in a bounded buffer
until it is done.

The price: during the eager part `asyncio.current_task()` is not a task of this request. A `send` that sets
timers on its task (asyncio.timeout, anyio scopes) before it suspends would not work; those of uvicorn and
Ray Serve set none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

BUFFER_LIMIT_BYTES = 4 << 20
DRAIN_TIMEOUT_S = 30.0  # how long a finished stream waits for a client that does not read


class EagerSender:
    """Writes one streamed response body.

    Attributes:
        wrote: set by every write; a keep-alive timer clears it to see quiet spells.
        closed: settled once nothing more will be sent: the end went out, or the client is gone.
        failed: the client went away or read too slowly to get everything.
    """

    __slots__ = (
        "_buffer",
        "_buffered",
        "_drain",
        "_ended",
        "_limit",
        "_on_overflow",
        "_send",
        "closed",
        "failed",
        "wrote",
    )

    def __init__(
        self, send: Send, on_overflow: Callable[[], None], *, limit_bytes: int = BUFFER_LIMIT_BYTES
    ) -> None:
        """`on_overflow` is called once, by `write`, when more than `limit_bytes` wait for a slow client."""
        self._send = send
        self._on_overflow = on_overflow
        self._limit = limit_bytes
        self._buffer: list[Message] = []
        self._buffered = 0  # bytes
        self._drain: asyncio.Task[None] | None = None
        self._ended = False
        self.wrote = False
        self.failed = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The response's head; before the first write."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        self.wrote = True
        if self._drain is None:
            self._put({"type": "http.response.body", "body": data, "more_body": True})
            return
        if self._ended:
            return
        self._buffer.append({"type": "http.response.body", "body": data, "more_body": True})
        before, self._buffered = self._buffered, self._buffered + len(data)
        if before <= self._limit < self._buffered:
            self._on_overflow()

    def end(self, data: bytes = b"") -> None:
        """The last bytes; idempotent. `closed` settles when they are out, at most DRAIN_TIMEOUT_S later."""
        if self._ended:
            return
        self._ended = True
        last: Message = {"type": "http.response.body", "body": data, "more_body": False}
        if self._drain is None:
            self._put(last)
        else:
            self._buffer.append(last)
        if self._drain is None:
            self._close()
        else:
            asyncio.get_running_loop().call_later(DRAIN_TIMEOUT_S, self.abandon)

    def abandon(self) -> None:
        """The client is gone: drop what waits. Idempotent."""
        if self.closed.done():
            return
        self.failed = True
        self._ended = True
        self._buffer.clear()
        if self._drain is not None:
            self._drain.cancel()
        self._close()

    def _put(self, message: Message) -> None:
        if self._drain is not None:
            self._buffer.append(message)
            return
        if self.closed.done():
            return
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        except Exception:  # the server's way to say that the connection is gone
            self.abandon()
            return
        self._drain = asyncio.get_running_loop().create_task(self._catch_up(_Rest(sending, waits_for)))

    async def _catch_up(self, suspended: _Rest) -> None:
        """Finish the suspended send, then send what was written meanwhile, in few large pieces."""
        try:
            await suspended
            while self._buffer:
                for message in self._take_joined():
                    await self._send(message)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._drain = None
            self.abandon()
            return
        self._drain = None
        if self._ended:
            self._close()

    def _take_joined(self) -> list[Message]:
        """All that waits, with the body's pieces joined; the buffer is empty afterwards."""
        waiting, self._buffer, self._buffered = self._buffer, [], 0
        joined = [m for m in waiting if m["type"] == "http.response.start"]
        bodies = [m for m in waiting if m["type"] == "http.response.body"]
        if bodies:
            data = b"".join([m["body"] for m in bodies])
            joined.append(
                {"type": "http.response.body", "body": data, "more_body": bodies[-1]["more_body"]}
            )
        return joined

    def _close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class _Rest:
    """The rest of a started awaitable, for a task to await.

    `waits_for` is what it yielded when it first suspended; the task must see that yield as its own.
    """

    __slots__ = ("_sending", "_waits_for")

    def __init__(self, sending: Generator[Any, None, None], waits_for: Any) -> None:
        self._sending = sending
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield self._waits_for
        except BaseException as error:
            # The task throws when it is cancelled while waiting: pass it on to where the send waits.
            self._waits_for = self._sending.throw(error)
            yield self._waits_for
        yield from self._sending
