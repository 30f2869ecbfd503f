"""The planner at work: what it sees of frontends, workers and Serve, what it does, and what it tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from planner.observation import FittedTimes, PoolSeen, VariantDecision, VariantSeen
from planner.observe import MOST_ROWS as MOST_SEEN
from planner.scaling import LentWorker, PoolWorker, ReplicaCounts, flips, pool_seen, set_aside
from serving.config import load_config
from serving.control_host import ControlHost, _Party
from serving.demand import MOST_ROWS, Demand
from serving.errors import Unavailable
from serving.link import Identity, Link
from serving.planner_host import PlannerHost, steady_time
from serving.wire import ArrivalRow, FrontendReport, Message, Register, WorkerReport
from tests.unit.handoff_fakes import until

KEY = ("m", "main")
TIMES = FittedTimes((1.0, 0.05, 0.0), (10.0, 0.2, 1e-5), samples=100)


class FakeServe:
    """A controller that starts what it is told to at once, or never."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.targets = {"m-main-prefill": prefill, "m-main-decode": decode, "Frontend": 1}
        self.running = dict(self.targets)
        self.calls: list[tuple[str, int]] = []
        self.away = False
        self.starts = True  # what is ordered runs at once
        self.removals = asyncio.Semaphore(100)  # how many may end

    async def counts(self) -> Mapping[str, ReplicaCounts]:
        if self.away:
            raise Unavailable("Serve's controller did not answer")
        return {
            name: ReplicaCounts(target, self.running[name], max(target - self.running[name], 0), 0)
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
    def __init__(self, mode: str = "act", **pool: Any) -> None:
        engine = {"kind": "sim", "profile": {"step_ms": 10}}
        pools = {"max_replicas": 8, "cpus": 1, **pool}
        variant = {"weights": "none", "engine": engine, "prefill": pools, "decode": pools}
        slo = {"ttft_ms": 1000, "itl_ms": 50}
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
        drained: bool = False,
        blocks: int = 100,
    ) -> None:
        """A worker links to Control and reports."""
        labels = {"model": "m", "variant": variant, "pool": pool}
        report = WorkerReport(pool, drained, False, 0, 0, 0, 0, 0, blocks, blocks, 10.0, 0, 0)
        party = _Party("worker", Register("worker", ident, labels), [], report, self.control._loop.time())
        self.control._parties[cast(Link, FakeLink(ident))] = party

    def leaves(self, ident: str) -> None:
        parties = self.control._parties
        del parties[next(link for link in parties if cast(Any, link).ident == ident)]

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


async def test_load_that_grows_is_answered_with_replicas_and_load_that_ends_gives_them_back() -> None:
    rig = Rig()
    await rig.ticks(4, rps=2)
    assert rig.serve.calls == []
    await rig.ticks(6, rps=12)
    grown = rig.serve.targets["m-main-prefill"]
    assert grown > 1
    assert sum(rig.serve.targets[f"m-main-{pool}"] for pool in ("prefill", "decode")) <= 8
    await rig.ticks(70, rps=2)
    assert rig.serve.targets["m-main-prefill"] < grown


async def test_advise_only_reports() -> None:
    rig = Rig(mode="advise")
    await rig.ticks(8, rps=12)
    assert rig.serve.calls == []
    told = rig.host.told()
    assert told["decision"]["variants"]["m/main"]["prefill"] > 1
    assert "requests/s" in told["reason"]
    assert len(told["history"]) == 8


async def test_off_does_not_look() -> None:
    rig = Rig(mode="off")
    rig.serve.away = True
    await rig.host.tick()
    assert rig.host.told()["trouble"] is None


async def test_a_redeploy_that_put_other_counts_back_is_mended() -> None:
    rig = Rig()
    await rig.ticks(8, rps=12)
    wanted = dict(rig.serve.targets)
    rig.serve.targets["m-main-prefill"] = rig.serve.running["m-main-prefill"] = 1
    await rig.ticks(1, rps=12)
    assert rig.serve.targets == wanted


async def test_a_controller_that_is_away_is_asked_less_often_and_the_reason_is_told() -> None:
    rig = Rig()
    rig.serve.away = True
    waits = []
    for _ in range(8):
        await rig.host.tick()
        waits.append(rig.host._back_off_s)
    assert waits == sorted(waits)
    assert waits[-1] == 60
    assert rig.host.told()["trouble"] == "Serve's controller did not answer"
    rig.serve.away = False
    await rig.ticks(1, rps=2)
    assert rig.host.told()["trouble"] is None
    assert rig.host._back_off_s == 0


async def test_without_reports_it_holds_and_says_why() -> None:
    rig = Rig()
    rig.now += 5
    await rig.host.tick()
    assert rig.serve.calls == []
    assert "no frontend reports" in rig.host.told()["reason"]


async def test_mode_targets_and_budget_change_live() -> None:
    rig = Rig(mode="off")
    status, told = rig.control.admin.answer(
        "change_planner", {"mode": "advise", "budget": 4, "targets": {"m": {"itl_ms": 30}}}
    )
    assert status == 200
    assert (told["mode"], told["budget"]) == ("advise", 4)
    assert told["targets"]["m/main"]["itl_ms"] == 30
    assert told["targets"]["m/main"]["ttft_ms"] == 1000
    status, told = rig.control.admin.answer("change_planner", {"mode": "act"})
    assert (status, told["budget"]) == (200, 4)  # what is not named stays


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"mode": "wild"}, 400, "mode"),
        ({"budget": 1}, 400, "budget = 1; allowed: at least 2"),
        ({"targets": {"x": {}}}, 404, "no model 'x'; there are: m"),
        ({"targets": 3}, 400, "give them by model"),
        ({"targets": {"m": 3}}, 400, "give them by model"),
        ({"targets": {"m": {"itl_ms": -1}}}, 400, "planner.targets.m.itl_ms = -1"),
        ({"speed": 1}, 400, "speed"),
    ],
)
async def test_a_wrong_change_is_one_line_and_changes_nothing(
    change: dict[str, Any], status: int, says: str
) -> None:
    rig = Rig(mode="off")
    before = rig.control.settings
    answered, body = rig.control.admin.answer("change_planner", change)
    assert (answered, says in body["error"]["message"]) == (status, True), body
    assert rig.control.settings == before


def worker(ident: str, pool: str = "decode", requests: int = 0, **more: Any) -> PoolWorker:
    fields = {"role": pool, "draining": False, **more}
    return PoolWorker(ident=ident, pool=pool, requests=requests, **fields)


def aside(ident: str, **more: Any) -> PoolWorker:
    return worker(ident, draining=True, set_aside=True, **more)


@pytest.mark.parametrize(
    ("lent", "workers", "orders"),
    [
        (0, [worker("a"), worker("b")], []),
        (1, [worker("a", requests=5), worker("b", requests=2)], [LentWorker("b", "prefill")]),
        (1, [worker("a", ordered="prefill"), worker("b")], []),
        (0, [worker("a", ordered="prefill"), worker("b")], [LentWorker("a", None)]),
        (-1, [worker("p", "prefill"), worker("a")], [LentWorker("p", "decode")]),
        (1, [worker("p", "prefill", ordered="decode"), worker("a")],
         [LentWorker("a", "prefill"), LentWorker("p", None)]),
        (1, [worker("a", draining=True), worker("b", requests=9)], [LentWorker("b", "prefill")]),
        (1, [aside("a", ordered="prefill"), worker("b")], [LentWorker("b", "prefill")]),
    ],
    ids=["none", "least to move", "already", "back", "other way", "turn round", "not a draining one",
         "one that is set aside is no help"],
)  # fmt: skip
def test_flips(lent: int, workers: list[PoolWorker], orders: list[LentWorker]) -> None:
    assert flips(VariantDecision(1, 2, lent, ""), workers) == orders


@pytest.mark.parametrize(
    ("counts", "workers", "seen"),
    [
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b")], PoolSeen(2, 0, 0, 0)),
        (ReplicaCounts(3, 2, 1, 0), [worker("a"), worker("b")], PoolSeen(2, 0, 1, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b", role="prefill")], PoolSeen(1, 1, 0, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b", ordered="prefill")], PoolSeen(1, 1, 0, 0)),
        (ReplicaCounts(1, 1, 0, 1), [worker("a"), worker("b", draining=True)], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("p", "prefill")], PoolSeen(1, 0, 1, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), aside("b")], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(3, 2, 1, 0), [worker("a"), aside("b")], PoolSeen(1, 0, 1, 1)),
        (ReplicaCounts(1, 1, 0, 1, frozenset({"b"})), [worker("a"), aside("b")], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), aside("b", ordered="prefill")], PoolSeen(1, 0, 0, 1)),
    ],
    ids=[
        "ready", "starting", "lent", "told to", "leaving once", "not linked yet",
        "set aside", "set aside, starting", "set aside, then stopped", "lent, then set aside",
    ],
)  # fmt: skip
def test_pool_seen(counts: ReplicaCounts, workers: list[PoolWorker], seen: PoolSeen) -> None:
    assert pool_seen("decode", counts, workers) == seen


def test_demand_is_told_once_and_by_age() -> None:
    demand = Demand()
    demand.arrived(100, 60, None, 10.0)
    demand.arrived(200, 200, "batch", 10.5)
    demand.finished(100, 7)
    report = demand.report("m", "main", [], [], 11.0)
    assert [(row.age_ms, row.prompt_tokens, row.uncached_tokens) for row in report.arrivals] == [
        (1000.0, 100, 60),
        (500.0, 200, 200),
    ]
    assert report.outputs == [(100, 7)]
    again = demand.report("m", "main", [], [], 12.0)
    assert (again.arrivals, again.outputs, again.fitted) == ([], [], None)


def test_the_newest_demand_is_kept_while_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Demand()
    for n in range(MOST_ROWS + 5):
        demand.arrived(n, n, None, float(n))
        demand.finished(n, 1)
    report = demand.report("m", "main", [], [], float(MOST_ROWS + 5))
    assert len(report.arrivals) == len(report.outputs) == MOST_ROWS
    assert (report.arrivals[0].prompt_tokens, report.arrivals[-1].age_ms) == (5, 1000.0)


async def test_what_came_while_control_was_away_is_no_burst() -> None:
    rig = Rig(mode="advise")
    rig.reports()
    rig.now += 5
    rig.reports(0.1, 0.4)
    await rig.host.tick()
    assert (rig.seen().arrivals, rig.seen().window_s) == (2, 5)
    for _ in range(6):  # half a minute without a word
        rig.now += 5
        await rig.host.tick()
        assert rig.seen().arrivals is None
        assert "no frontend reports" in rig.host.told()["reason"]
    rig.reports(*(0.5 + n for n in range(30)))
    rig.now += 1
    rig.reports(0.2)
    await rig.host.tick()
    assert rig.seen().arrivals == 4  # of the last few seconds


async def test_in_mode_off_nothing_piles_up_and_the_first_window_is_a_whole_one() -> None:
    rig = Rig(mode="off")
    for _ in range(100):
        rig.now += 5
        rig.reports(*[0.1] * 100)
        await rig.host.tick()
    assert len(rig.host.book._observers[KEY]._recent) <= 2 * MOST_SEEN
    rig.control.admin.answer("change_planner", {"mode": "advise"})
    rig.now += 5
    rig.reports(0.1, 0.2)
    await rig.host.tick()
    assert (rig.seen().arrivals, rig.seen().window_s) == (2, 5)


async def test_kv_room_is_that_of_the_variants_own_workers() -> None:
    rig = Rig(mode="advise")
    for ident, variant, blocks in (("a", "main", 100), ("b", "main", 80), ("x", "tiny", 3)):
        rig.joins(ident, variant=variant, blocks=blocks)
    await rig.host.tick()
    assert rig.seen().kv_tokens == 80 * rig.host._engine(KEY).block_tokens


async def test_a_start_that_was_taken_back_is_not_measured_by_the_next_one() -> None:
    """Else one that never came makes the planner believe that starts take hours."""
    rig = Rig()
    rig.joins("p1", "prefill")
    rig.joins("d1")
    rig.serve.starts = False
    await rig.ticks(8, rps=12)
    ordered = rig.serve.targets["m-main-prefill"]
    assert ordered > 1
    rig.serve.targets.update({"m-main-prefill": 1, "m-main-decode": 1})  # an operator
    rig.control.admin.answer("change_planner", {"mode": "advise"})
    rig.now += 3600
    await rig.ticks(1, rps=12)
    rig.control.admin.answer("change_planner", {"mode": "act"})
    await rig.ticks(1, rps=12)
    assert rig.serve.targets["m-main-prefill"] > 1
    rig.joins("p2", "prefill")
    await rig.ticks(1, rps=12)
    assert rig.host.told()["startup_s"] == {"m/main": 5.0}


async def test_without_any_linked_worker_no_pool_falls_below_its_minimum() -> None:
    """All starts seem to fail when workers cannot reach Control."""
    rig = Rig(min_replicas=2, replicas=2)
    rig.serve.targets = {"m-main-prefill": 2, "m-main-decode": 2, "Frontend": 1}
    rig.serve.running = dict(rig.serve.targets)
    for _ in range(130):
        await rig.holds(1)
        for pool in ("prefill", "decode"):
            assert rig.serve.targets[f"m-main-{pool}"] >= 2


async def test_a_worker_that_an_operator_drains_is_no_start_that_never_comes() -> None:
    """It would be taken back, and Serve would stop one of the others."""
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool)
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 2
    rig.control.orders.drain("d2")
    await rig.holds(130)
    assert rig.seen().pools["decode"] == PoolSeen(ready=1, draining=1)
    assert rig.serve.targets["m-main-decode"] == 2
    rig.control.orders.undrain("d2")
    await rig.holds(1)
    assert rig.seen().pools["decode"] == PoolSeen(ready=2)
    assert rig.serve.calls == []


async def test_the_last_worker_is_not_removed_even_when_the_planner_is_off() -> None:
    rig = Rig(mode="off")
    rig.joins("d1", drained=True)
    rig.joins("p1", "prefill")
    status, body = rig.control.admin.answer("remove", {"worker": "d1"})
    assert (status, "is the last of m-main-decode" in body["error"]["message"]) == (400, True)


async def test_removals_go_one_by_one_and_leave_one() -> None:
    rig = Rig(mode="off")
    for ident in ("d1", "d2", "d3"):
        rig.joins(ident, drained=True)
    rig.serve.removals = asyncio.Semaphore(0)
    for ident in ("d1", "d2", "d2"):
        assert rig.control.admin.answer("remove", {"worker": ident})[0] == 200
    assert rig.control.admin.answer("remove", {"worker": "d3"})[0] == 400
    for _ in range(2):
        await until(lambda: len(rig.serve.calls) % 2 == 1, 20)
        rig.serve.removals.release()
    await until(lambda: not rig.host._removals, 20)
    assert [call for call in rig.serve.calls if call[1] == -1] == [
        ("m-main-decode#d1", -1),
        ("m-main-decode#d2", -1),
    ]
    assert [value for _, value in rig.serve.calls] == [-1, 0, -1, 0]


async def test_a_pool_that_loses_a_worker_on_purpose_is_left_alone_meanwhile() -> None:
    rig = Rig()
    for ident, pool in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        rig.joins(ident, pool, drained=ident == "d2")
    rig.control.orders.drain("d2")
    rig.serve.targets["m-main-decode"] = rig.serve.running["m-main-decode"] = 2
    rig.serve.removals = asyncio.Semaphore(0)
    assert rig.control.admin.answer("remove", {"worker": "d2"})[0] == 200
    await until(lambda: len(rig.serve.calls) == 1, 20)
    rig.leaves("d2")  # Serve has not noticed yet
    await rig.holds(130)
    assert rig.serve.targets["m-main-decode"] == 2
    rig.serve.removals.release()
    await until(lambda: not rig.host._removals, 20)


def test_the_clock_shows_the_time_of_day_and_never_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_time()
    assert abs(clock() - time.time()) < 1.0
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert 0.0 <= clock() - before < 1.0


def test_set_aside() -> None:
    workers = [worker("a"), aside("b"), aside("c"), aside("p", pool="prefill")]
    assert set_aside("decode", ReplicaCounts(3, 3, 0, 0), workers) == 2
    assert set_aside("decode", ReplicaCounts(2, 2, 0, 1, frozenset({"c"})), workers) == 1
