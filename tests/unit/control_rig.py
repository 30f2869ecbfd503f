"""Control and parties over real links, and what a scrape of one says."""

from __future__ import annotations

from typing import Any

from serving.control_client import ControlClient
from serving.control_host import ControlHost
from serving.link import Identity, Link
from serving.live_settings import LiveSettings
from serving.metrics import Registry
from serving.wire import Family, Register
from tests.unit.handoff_fakes import until

KEY = b"k" * 32
LONG_S = 20.0


class Party:
    """A process: some metrics and a ControlClient."""

    def __init__(self, kind: str, ident: str) -> None:
        self.me = Identity.fresh(kind, ident)
        self.registry = Registry({kind: ident})
        self.requests = self.registry.counter("requests", "Requests", ("outcome",))
        self.seconds = self.registry.histogram("seconds", "Seconds", buckets=(1.0,))
        self.registry.gauge("open", "Open", lambda: {(): 3.0})
        self.heard: list[LiveSettings] = []
        self.client = ControlClient(
            me=self.me,
            key=KEY,
            registry=self.registry,
            register=Register(kind, ident, {"pool": "x"}),
            on_settings=self.heard.append,
        )

    def work(self, times: int = 1) -> None:
        self.requests.inc(times, ("stop",))
        self.seconds.observe(0.5, times)

    async def scrape(self) -> Scraped:
        return Scraped(await self.client.scrape())


class Scraped:
    """One scrape. `series`: (name, labels) -> value, of everything that may only grow."""

    def __init__(self, families: list[Family]) -> None:
        self.gauges: dict[tuple[str, str], float] = {}
        self.series: dict[tuple[str, str], float] = {}
        for family in families:
            into = self.gauges if family.type == "gauge" else self.series
            for sample in family.samples:
                key = family.name + sample.suffix, ",".join(sorted(sample.labels.values()))
                assert key not in into, f"{key} is there twice"
                into[key] = sample.value

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.series.items() if found == name)

    @property
    def requests(self) -> float:
        assert self.total("kvrelay_requests_total") == self.total("kvrelay_seconds_count")
        return self.total("kvrelay_requests_total")

    def assert_not_below(self, earlier: Scraped, but: str | None = None) -> None:
        for key, value in earlier.series.items():
            assert key[0] == but or self.series.get(key, 0) >= value, key


class Rig:
    """Control, a frontend and two workers."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.address = "127.0.0.1:0"
        self.parties: list[Party] = []

    async def control_starts(self, settings: LiveSettings | None = None) -> None:
        """At the same address as before, if there was one."""
        me = Identity.fresh("control", "control")
        self.host = ControlHost(me=me, key=KEY, settings=settings, save=self.saved.append)
        self.address = await self.host.start("127.0.0.1", int(self.address.split(":")[1]))

    async def joins(self, kind: str, ident: str) -> Party:
        party = Party(kind, ident)
        self.parties.append(party)
        await party.client.connect(self.address)
        await self.registered(ident)
        return party

    async def registered(self, *idents: str) -> None:
        await until(lambda: set(idents) <= {member.ident for member in self.host.members}, LONG_S)

    async def gone(self, party: Party) -> None:
        await until(lambda: party.me.ident not in {m.ident for m in self.host.members}, LONG_S)

    async def stop(self) -> None:
        for party in self.parties:
            await party.client.stop()
        await self.host.stop()

    def link_of(self, party: Party) -> Link:
        """Control's end."""
        return next(link for link in self.host._parties if link.peer and link.peer.ident == party.me.ident)
