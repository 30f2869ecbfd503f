"""What several frontends share, without Ray: who is there, everybody's metrics, live settings and orders.

Every frontend and worker keeps a link to Control. If Control is away they go on with what they last heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serving.admin import Admin
from serving.link import Identity, Link, LinkServer
from serving.live_settings import LivePlanner, LiveSettings, parse_settings, settings_values
from serving.metrics import Registry, fold, merge
from serving.missing_workers import Listed, MissingWorker, MissingWorkers
from serving.orders import OrderBook
from serving.wire import (
    AdminReply,
    AdminRequest,
    AnyMessage,
    Family,
    FrontendReport,
    Members,
    MetricsPull,
    MetricsPush,
    Register,
    ScrapeReply,
    ScrapeRequest,
    Settings,
    WorkerReport,
)

log = logging.getLogger("kvrelay.control")

PULL_S = 0.5  # how long a scrape waits for a party; then its last snapshot stands in
ABSENT_S = 60.0  # a party that lost its link may come back; then its counts are not those of a departed one


@dataclass(slots=True)
class _Party:
    label: str  # that names it on its samples
    register: Register | None = None
    families: list[Family] = field(default_factory=list)
    report: WorkerReport | None = None
    reported_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportedWorker:
    """A worker and what it said last, `age_s` ago."""

    labels: dict[str, str]  # model, variant, pool
    address: str | None
    report: WorkerReport | None
    age_s: float
    linked: bool = True


class _Counted(msgspec.Struct):
    """A party's counters and histograms."""

    ident: str
    epoch: int
    label: str
    families: list[Family]


class _Kept(msgspec.Struct):
    departed: list[Family]
    parties: list[_Counted]


@dataclass(slots=True)
class _Scrape:
    """One scrape in progress: who asked, and who has not answered yet."""

    asker: Link
    serial: int  # the asker's own number
    missing: set[Link]
    timer: asyncio.TimerHandle


async def _nobody() -> Collection[str]:
    return ()


class ControlHost:
    """`start` and `stop` are a pair. `save` and `save_orders` keep settings and orders beyond this process;
    `variants`: names by model, of the configuration; `listed`: the replicas that Serve has."""

    def __init__(
        self,
        *,
        me: Identity,
        key: bytes,
        settings: LiveSettings | None = None,
        save: Callable[[dict[str, Any]], None] = lambda values: None,
        save_orders: Callable[[dict[str, Any]], None] = lambda values: None,
        variants: Mapping[str, Sequence[str]] | None = None,
        listed: Listed = _nobody,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = LinkServer(me, key, self)
        self._parties: dict[Link, _Party] = {}
        self._absent: dict[tuple[str, int], tuple[_Party, asyncio.TimerHandle]] = {}
        self._departed: list[Family] = []
        self._scrapes: dict[int, _Scrape] = {}
        self._pulls = 0
        self._version = 1
        self._members_version = 0
        self._settings = settings or LiveSettings()
        self._save = save
        self._save_orders = save_orders
        self.orders = OrderBook(self._on_orders)
        self._missing = MissingWorkers(listed, on_gone=self.orders.forget)
        self.variants = variants or {}
        self.on_demand: Callable[[str, FrontendReport], None] = lambda frontend, report: None
        self.admin = Admin(self)
        registry = Registry({"control": me.ident})
        registry.gauge("parties", "Processes linked to Control, by kind", self._count_parties, ("kind",))
        self._scrape_count = registry.counter("scrapes", "Scrapes of the whole application")
        self._registry = registry

    async def start(self, host: str, port: int = 0) -> str:
        epochs = dict(self._absent)  # of those that may come back from before this Control
        for ident in self.orders.workers:
            epoch = next((epoch for name, epoch in epochs if name == ident), None)
            self._missing.lost(ident, MissingWorker(epoch))
        self._missing.start()
        return await self._server.start(host, port)

    async def stop(self) -> None:
        await self._server.stop()
        await self._missing.stop()
        for _, timer in self._absent.values():
            timer.cancel()

    # ------------------------------------------------------------ settings and members

    @property
    def settings(self) -> dict[str, Any]:
        return settings_values(self._settings)

    @property
    def members(self) -> list[Register]:
        return [party.register for party in self._parties.values() if party.register is not None]

    @property
    def workers(self) -> dict[str, ReportedWorker]:
        """The linked workers by ident."""
        now = self._loop.time()
        return {
            party.register.ident: ReportedWorker(
                party.register.labels, party.register.address, party.report, now - party.reported_s
            )
            for party in self._parties.values()
            if party.register is not None and party.register.kind == "worker"
        }

    @property
    def known_workers(self) -> dict[str, ReportedWorker]:
        """The linked workers and those that Serve lists all the same, by ident."""
        now = self._loop.time()
        missing = {
            ident: ReportedWorker(
                lost.register.labels,
                lost.register.address,
                lost.report,
                now - lost.reported_s,
                linked=False,
            )
            for ident, lost in self._missing.all.items()
            if lost.register is not None
        }
        return {**missing, **self.workers}

    def _on_orders(self, values: dict[str, Any]) -> None:
        self._save_orders(values)
        for link in self._parties:
            link.send(self.orders.message())

    @property
    def live(self) -> LiveSettings:
        return self._settings

    @property
    def registry(self) -> Registry:
        """Of Control itself."""
        return self._registry

    def change_settings(
        self, changes: dict[str, Any], check: Callable[[LivePlanner], None] = lambda planner: None
    ) -> dict[str, Any]:
        """Merge `changes`, keep and publish the result; raises ConfigError and then changes nothing.
        `check` raises it for what does not go with the configuration."""
        changed = parse_settings({**self.settings, **changes})
        check(changed.planner)
        self._save(settings_values(changed))
        self._settings = changed
        self._version += 1
        for link in self._parties:
            link.send(Settings(self._version, self.settings))
        return self.settings

    # ------------------------------------------------------------ links

    def on_open(self, link: Link) -> None:
        assert link.peer is not None
        for other in [o for o in self._parties if _key(o) == _key(link)]:
            self.on_lost(other, "it came back on another link")  # before we noticed that this one broke
            other.close("you came back on another link")
        party, timer = self._absent.pop(_key(link), (_Party(link.peer.kind), None))
        if timer is not None:
            timer.cancel()
        if not self._missing.is_back(*_key(link)):
            self.orders.forget(link.peer.ident)
        self._parties[link] = party
        link.send(Settings(self._version, self.settings))
        link.send(self.orders.message())

    def on_lost(self, link: Link, reason: str) -> None:
        party = self._parties.pop(link, None)
        if party is None:
            return
        if party.register is not None and party.register.kind == "worker":
            ident, epoch = _key(link)
            lost = MissingWorker(epoch, party.register, party.report, party.reported_s)
            self._missing.lost(ident, lost)
        party.register = party.report = None
        party.families = _monotone(party.families)
        self._absent[_key(link)] = party, self._loop.call_later(ABSENT_S, self._gone, _key(link))
        for serial in list(self._scrapes):
            self._answered(serial, link)
        log.info("%s left: %s", link.name, reason)
        self._publish_members()

    def _gone(self, key: tuple[str, int]) -> None:
        """It will not come back: what it counted stays in every sum, under one name for all such."""
        party, _ = self._absent.pop(key)
        self._departed = fold(self._departed, party.families, party.label, "departed")

    # ------------------------------------------------------------ across a restart of Control

    def counted(self) -> bytes:
        """What everybody counted so far, for the Control that comes after this one."""
        there = [(_key(link), party) for link, party in self._parties.items()]
        there += [(key, party) for key, (party, _) in self._absent.items()]
        parties = [_Counted(*key, party.label, _monotone(party.families)) for key, party in there]
        departed = fold(self._departed, self._registry.families(), "control", "departed")
        return msgspec.msgpack.encode(_Kept(departed, parties))

    def take_over(self, counted: bytes) -> None:
        """What `counted` gave: whoever does not come back is a departed one, so no sum ever falls."""
        try:
            kept = msgspec.msgpack.decode(counted, type=_Kept)
        except msgspec.MsgspecError:
            return  # of another version
        self._departed = kept.departed
        for party in kept.parties:
            key = (party.ident, party.epoch)
            timer = self._loop.call_later(ABSENT_S, self._gone, key)
            self._absent[key] = _Party(party.label, families=party.families), timer

    def on_message(self, link: Link, message: AnyMessage) -> None:
        party = self._parties.get(link)
        if party is None:
            return
        if isinstance(message, Register):
            party.register = message
            self._publish_members()
        elif isinstance(message, MetricsPush):
            party.families = message.families
            self._answered(message.serial, link)
        elif isinstance(message, WorkerReport):
            party.report, party.reported_s = message, self._loop.time()
        elif isinstance(message, FrontendReport):
            assert link.peer is not None
            self.on_demand(link.peer.ident, message)
        elif isinstance(message, ScrapeRequest):
            self._scrape(link, message.serial)
        elif isinstance(message, AdminRequest):
            status, body = self.admin.answer(message.verb, message.arguments, link.name)
            link.send(AdminReply(message.serial, status, body))
        else:
            link.close(f"{type(message).__name__} is not for control")

    def _publish_members(self) -> None:
        self._members_version += 1
        members = Members(self._members_version, self.members)
        for link in self._parties:
            link.send(members)

    # ------------------------------------------------------------ metrics

    def _scrape(self, asker: Link, serial: int) -> None:
        """Pull from every party, so that a scrape right after a request already counts it."""
        self._scrape_count.inc()
        self._pulls += 1
        pull = self._pulls
        timer = self._loop.call_later(PULL_S, self._finish_scrape, pull)
        self._scrapes[pull] = _Scrape(asker, serial, set(self._parties), timer)
        for link in self._parties:
            link.send(MetricsPull(pull))

    def _answered(self, pull: int, link: Link) -> None:
        scrape = self._scrapes.get(pull)
        if scrape is not None:
            scrape.missing.discard(link)
            if not scrape.missing:
                self._finish_scrape(pull)

    def _finish_scrape(self, pull: int) -> None:
        scrape = self._scrapes.pop(pull, None)
        if scrape is None:
            return
        scrape.timer.cancel()
        snapshots = [self._registry.families(), self._departed]
        snapshots += [party.families for party in self._parties.values()]
        snapshots += [party.families for party, _ in self._absent.values()]
        scrape.asker.send(ScrapeReply(scrape.serial, merge(snapshots)))

    def _count_parties(self) -> dict[tuple[str, ...], float]:
        counts: dict[tuple[str, ...], float] = {}
        for link in self._parties:
            kind = (link.peer.kind if link.peer is not None else "unknown",)
            counts[kind] = counts.get(kind, 0) + 1
        return counts


def _monotone(families: list[Family]) -> list[Family]:
    return [family for family in families if family.type != "gauge"]


def _key(link: Link) -> tuple[str, int]:
    """An incarnation of a party."""
    assert link.peer is not None
    return link.peer.ident, link.peer.epoch
