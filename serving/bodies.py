"""Bodies of requests while they come in, and who has to leave when too much is held by them.

A body that comes with its head, or within SLOW_S, takes no place here. One that is still coming then is
*slow*: of these there may be `most_slow`, and all unfinished bodies together may hold so many bytes. Beyond
that the one that has been slow for longest ends, with 429; while none is slow, the one that asks for more.
So whoever sends slowly on purpose makes room for whoever comes next, and holds no place of a generation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain

from serving.eager import Message
from serving.errors import BodyTimeout, BodyTooLarge, KVRelayError, Overcrowded

SLOW_S = 1.0
CROWDED, KEY_CROWDED = "bodies", "key_bodies"  # reasons of a refusal

Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client left before its request was read."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one frontend. `_per_key`: of one tenant, where API keys are configured; None: no limit."""

    body_bytes: int = 16 << 20  # of one body
    body_s: float = 30.0  # to its end
    most_slow: int | None = None
    most_slow_per_key: int | None = None
    held_bytes: int | None = None
    held_bytes_per_key: int | None = None


class _Reading:
    """One body that is not here yet."""

    __slots__ = ("deadline", "held", "tenant", "timer", "why")

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant
        self.held = 0  # bytes
        self.why: KVRelayError | None = None  # it was ended
        self.deadline: asyncio.Timeout
        self.timer: asyncio.TimerHandle


class Bodies:
    """`on_refused` hears the reason (a label of metrics) of what ends for want of time or room."""

    def __init__(self, limits: BodyLimits, on_refused: Callable[[str], None] = lambda reason: None) -> None:
        self._limits = limits
        self._on_refused = on_refused
        self._slow: dict[_Reading, None] = {}  # in the order in which they became slow
        self._held = 0
        self._held_by_tenant: Counter[str] = Counter()

    async def read(self, receive: Receive, announced: bytes | None, tenant: str | None) -> bytes:
        """`announced`: the value of Content-Length. Raises BodyTooLarge as soon as that is known,
        BodyTimeout, Overcrowded, ClientGone."""
        limit = self._limits.body_bytes
        if announced is not None and announced.isdigit() and int(announced[:20]) > limit:
            raise self._too_large()
        parts: list[bytes] = []
        reading = _Reading(tenant)
        reading.timer = self._first_timer(reading)
        try:
            async with asyncio.timeout(None) as reading.deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part: bytes = message.get("body", b"")
                    if reading.held + len(part) > limit:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join([*parts, part]) if parts else part
                    parts.append(part)
                    self._hold(reading, len(part))
        except TimeoutError:
            if reading.why is None:  # the server's own
                raise
            raise reading.why from None
        finally:
            reading.timer.cancel()
            self._let_go(reading)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._limits.body_bytes} bytes")

    # ------------------------------------------------------------ time

    def _first_timer(self, reading: _Reading) -> asyncio.TimerHandle:
        loop, body_s = asyncio.get_running_loop(), self._limits.body_s
        if body_s <= SLOW_S:
            return loop.call_later(body_s, self._late, reading)
        return loop.call_later(SLOW_S, self._turns_slow, reading)

    def _turns_slow(self, reading: _Reading) -> None:
        if reading.why is not None:
            return
        limits, slow = self._limits, self._slow
        slow[reading] = None
        left_s = limits.body_s - SLOW_S
        reading.timer = asyncio.get_running_loop().call_later(left_s, self._late, reading)
        mine = [one for one in slow if one.tenant == reading.tenant]
        most = limits.most_slow_per_key
        if reading.tenant is not None and most is not None and len(mine) > most:
            self._crowd_out(mine[0], KEY_CROWDED)
        elif limits.most_slow is not None and len(slow) > limits.most_slow:
            self._crowd_out(next(iter(slow)), CROWDED)

    def _late(self, reading: _Reading) -> None:
        text = f"the body was not here within {self._limits.body_s:g} s"
        self._end(reading, "body_timeout", BodyTimeout(text))

    # ------------------------------------------------------------ room

    def _hold(self, reading: _Reading, n_bytes: int) -> None:
        """`reading` has so many more. Raises Overcrowded."""
        if reading.why is not None:
            raise reading.why
        reading.held += n_bytes
        self._held += n_bytes
        tenant, limits = reading.tenant, self._limits
        if tenant is not None:
            self._held_by_tenant[tenant] += n_bytes
            most = limits.held_bytes_per_key
            while most is not None and self._held_by_tenant[tenant] > most:
                mine = (one for one in self._slow if one.tenant == tenant)
                self._crowd_out(next(chain(mine, (reading,))), KEY_CROWDED)
        while limits.held_bytes is not None and self._held > limits.held_bytes:
            self._crowd_out(next(chain(self._slow, (reading,))), CROWDED)
        if reading.why is not None:
            raise reading.why

    def _crowd_out(self, reading: _Reading, reason: str) -> None:
        whose = "of this API key " if reason is KEY_CROWDED else ""
        text = f"this body comes slowly and other requests {whose}need its room; try again"
        self._end(reading, reason, Overcrowded(text))

    def _end(self, reading: _Reading, reason: str, why: KVRelayError) -> None:
        """Idempotent. Its bytes count no more; its reader hears of it in the loop's next turn."""
        if reading.why is not None:
            return
        reading.why = why
        self._on_refused(reason)
        reading.deadline.reschedule(asyncio.get_running_loop().time())
        self._let_go(reading)

    def _let_go(self, reading: _Reading) -> None:
        self._slow.pop(reading, None)
        if not reading.held:
            return
        self._held -= reading.held
        if reading.tenant is not None:
            self._held_by_tenant[reading.tenant] -= reading.held
            if not self._held_by_tenant[reading.tenant]:
                del self._held_by_tenant[reading.tenant]
        reading.held = 0
