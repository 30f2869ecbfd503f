"""A party's side of Control: registers, reports, answers metric pulls, hears settings and orders, asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from serving.errors import ConfigError, LinkError, Unavailable
from serving.kept_link import KeptLink
from serving.link import Identity, Link
from serving.live_settings import LiveSettings, parse_settings
from serving.metrics import Registry, merge
from serving.wire import (
    AdminReply,
    AdminRequest,
    AnyMessage,
    Family,
    Members,
    Message,
    MetricsPull,
    MetricsPush,
    Orders,
    Register,
    ScrapeReply,
    ScrapeRequest,
    Settings,
)

SCRAPE_S = 1.0
ASK_S = 5.0
REPORT_S = 0.5


class ControlClient:
    """Follows Control from address to address; `connect` may be called at any time, `stop` ends it."""

    def __init__(
        self,
        *,
        me: Identity,
        key: bytes,
        registry: Registry,
        register: Register,
        on_settings: Callable[[LiveSettings], None] = lambda settings: None,
        on_orders: Callable[[Orders], None] = lambda orders: None,
        on_members: Callable[[Members], None] = lambda members: None,
        report: Callable[[], Iterable[Message]] = lambda: (),
    ) -> None:
        """`report` makes what is sent every `REPORT_S` while Control is there."""
        self._me = me
        self._key = key
        self._registry = registry
        self._register = register
        self._on_settings = on_settings
        self._on_orders = on_orders
        self._on_members = on_members
        self._report = report
        self._reporting: asyncio.TimerHandle | None = None
        self._kept: KeptLink | None = None
        self._serial = 0
        self._scrapes: dict[int, asyncio.Future[list[Family]]] = {}
        self._asked: dict[int, asyncio.Future[tuple[int, dict[str, Any]]]] = {}
        self._last: list[Family] = []

    async def connect(self, address: str) -> None:
        if self._kept is not None and self._kept.address == address:
            return
        # Exchanged before anything is awaited: of two calls at once neither may leave a link behind.
        old, self._kept = self._kept, KeptLink(address, self._me, self._key, self)
        self._kept.start()
        if old is not None:
            await old.stop()

    async def stop(self) -> None:
        """What was counted since the last pull goes along."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.send(MetricsPush(0, self._registry.families()))
            await kept.stop()

    @property
    def connected(self) -> bool:
        return self._kept is not None and self._kept.link is not None

    async def scrape(self) -> list[Family]:
        """The metrics of the whole application; without Control, its last ones and ours."""
        if self._kept is not None and self._kept.link is not None:
            self._serial += 1
            serial = self._serial
            waiting: asyncio.Future[list[Family]] = asyncio.get_running_loop().create_future()
            self._scrapes[serial] = waiting
            self._kept.send(ScrapeRequest(serial))
            try:
                async with asyncio.timeout(SCRAPE_S):
                    self._last = await waiting
                    return self._last
            except (TimeoutError, LinkError):
                pass  # answered below from what we have
            finally:
                self._scrapes.pop(serial, None)
        kind, ident = self._me.kind, self._me.ident
        others = [
            Family(f.name, f.type, f.help, [s for s in f.samples if s.labels.get(kind) != ident])
            for f in self._last
        ]
        return merge([others, self._registry.families()])

    async def ask(self, verb: str, arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """An operator's request (serving.admin): HTTP status and body. Raises Unavailable."""
        link = None if self._kept is None else self._kept.link
        if link is None or link.wire_version < AdminRequest.since:
            raise Unavailable("Control is away; try again shortly")
        self._serial += 1
        answer: asyncio.Future[tuple[int, dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._asked[self._serial] = answer
        link.send(AdminRequest(self._serial, verb, arguments))
        try:
            async with asyncio.timeout(ASK_S):
                return await answer
        except (TimeoutError, LinkError):
            raise Unavailable("Control did not answer; try again shortly") from None
        finally:
            self._asked = {serial: a for serial, a in self._asked.items() if a is not answer}

    def send(self, message: Message) -> None:
        """Dropped while Control is away."""
        if self._kept is not None:
            self._kept.send(message)

    def _report_now(self) -> None:
        self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report_now)
        for message in self._report():
            self.send(message)

    # -- LinkHandler

    def on_open(self, link: Link) -> None:
        link.send(self._register)
        self._report_now()

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, MetricsPull):
            link.send(MetricsPush(message.serial, self._registry.families()))
        elif isinstance(message, ScrapeReply):
            waiting = self._scrapes.get(message.serial)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.families)
        elif isinstance(message, AdminReply):
            answer = self._asked.get(message.serial)
            if answer is not None and not answer.done():
                answer.set_result((message.status, message.body))
        elif isinstance(message, Orders):
            self._on_orders(message)
        elif isinstance(message, Members):
            self._on_members(message)
        elif isinstance(message, Settings):
            with contextlib.suppress(ConfigError):  # a newer Control's settings: ours stay as they are
                self._on_settings(parse_settings(message.values))

    def on_lost(self, link: Link, reason: str) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        waiting: list[asyncio.Future[Any]] = [*self._scrapes.values(), *self._asked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(LinkError(f"control is away: {reason}"))
