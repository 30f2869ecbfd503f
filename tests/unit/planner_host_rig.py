"""The planner's host over a fake Serve, with frontends and workers that are said to be there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from planner.observation import FittedTimes, VariantSeen
from planner.scaling import ReplicaCounts
from serving.config import load_config
from serving.control_host import ControlHost, _Party
from serving.errors import Unavailable
from serving.link import Identity, Link
from serving.missing_workers import MissingWorker
from serving.planner_host import PlannerHost
from serving.wire import ArrivalRow, FrontendReport, Message, Register, WorkerReport

KEY = ("m", "main")
TIMES = FittedTimes((1.0, 0.05, 0.0), (10.0, 0.2, 1e-5), samples=100)


class FakeServe:
    """A controller that starts what it is told to at once, or never."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.targets = {"m-main-prefill": prefill, "m-main-decode": decode, "Frontend": 1}
        self.running = dict(self.targets)
        self.calls: list[tuple[str, int]] = []
        self.listed: frozenset[str] = frozenset()  # those without a link that are there all the same
        self.away = False
        self.starts = True  # what is ordered runs at once
        self.removals = asyncio.Semaphore(100)  # how many may end

    async def counts(self) -> Mapping[str, ReplicaCounts]:
        if self.away:
            raise Unavailable("Serve's controller did not answer")
        return {
            name: ReplicaCounts(
                target,
                self.running[name],
                max(target - self.running[name], 0),
                stopping=0,
                replicas=self.listed,
            )
            for name, target in self.targets.items()
        }

    async def scale(self, deployment: str, replicas: int) -> None:
        self.calls.append((deployment, replicas))
        self.targets[deployment] = replicas
        if self.starts or replicas < self.running[deployment]:
            self.running[deployment] = replicas

    async def remove(self, deployment: str, replica: str) -> None:
        self.calls.append((f"{deployment}#{replica}", -1))
        await self.removals.acquire()
        self.calls.append((f"{deployment}#{replica}", 0))


@dataclass(frozen=True)
class FakeLink:
    ident: str

    def send(self, message: Message) -> None:
        """Nobody listens."""


class Rig:
    def __init__(
        self,
        mode: str = "act",
        slo: dict[str, Any] | None = None,
        classes: dict[str, Any] | None = None,
        **pool: Any,
    ) -> None:
        engine = {"kind": "sim", "profile": {"step_ms": 10}}
        pools = {"max_replicas": 8, "cpus": 1, **pool}
        variant = {"weights": "none", "engine": engine, "prefill": pools, "decode": pools}
        slo = slo or {"ttft_ms": 1000, "itl_ms": 50, "classes": classes or {}}
        self.config = load_config(
            {
                "models": [{"name": "m", "variants": [variant], "slo": slo}],
                "planner": {
                    "mode": mode,
                    "interval_s": 5,
                    "budget": {"cpus": 8},
                    "startup_s": 5,
                    "down_window_s": 30,
                },
            }
        )
        self.now = 1_000_000.0
        self.serve = FakeServe()
        self.control = ControlHost(
            me=Identity.fresh("control", "c"), key=b"k" * 32, variants={"m": ["main"]}
        )
        self.host = PlannerHost(
            control=self.control,
            config=self.config,
            connector=self.serve,
            times={KEY: TIMES},
            clock=lambda: self.now,
        )

    def joins(
        self,
        ident: str,
        pool: str = "decode",
        *,
        variant: str = "main",
        role: str | None = None,
        drained: bool = False,
        blocks: int = 100,
    ) -> None:
        """A worker links to Control and reports; `role`: what it plays, if not its pool's."""
        labels = {"model": "m", "variant": variant, "pool": pool}
        report = WorkerReport(role or pool, drained, False, 0, 0, 0, 0, 0, blocks, blocks, 10.0, 0, 0)
        party = _Party("worker", Register("worker", ident, labels), [], report, self.control._loop.time())
        self.control._parties[cast(Link, FakeLink(ident))] = party

    def leaves(self, ident: str) -> None:
        parties = self.control._parties
        del parties[next(link for link in parties if cast(Any, link).ident == ident)]

    def falls_silent(self, ident: str) -> None:
        """Its link ends, and Serve lists it all the same."""
        self.serve.listed = frozenset({ident})
        link = next(link for link in self.control._parties if cast(Any, link).ident == ident)
        party = self.control._parties.pop(link)
        lost = MissingWorker(1, party.register, party.report, party.reported_s)
        self.control._missing.lost(ident, lost)

    async def holds(self, n: int) -> None:
        """`n` intervals in which nothing is known."""
        for _ in range(n):
            self.now += 5
            await self.host.tick()

    def reports(self, *ages_s: float, decoding: int = 0) -> None:
        rows = [ArrivalRow(age * 1e3, 4000, 4000) for age in ages_s]
        self.host.book.reported("f", FrontendReport("m", "main", rows, [], 0, 0.0, decoding))

    def seen(self) -> VariantSeen:
        assert self.host._observation is not None
        return self.host._observation.variants["m/main"]

    async def ticks(self, n: int, rps: float, prompt: int = 4000) -> None:
        """`n` intervals under a steady load."""
        for _ in range(n):
            for _ in range(10):  # frontends report twice a second
                self.now += 0.5
                rows = [ArrivalRow(0.0, prompt, prompt) for _ in range(int(rps / 2))]
                self.host.book.reported(
                    "f", FrontendReport("m", "main", rows, [(prompt, 200)] * len(rows), 0, 0.0, 10)
                )
            await self.host.tick()
