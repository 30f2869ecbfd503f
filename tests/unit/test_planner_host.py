"""The planner at work: what it sees of frontends, workers and Serve, what it does, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from planner.observation import FittedTimes, PoolSeen, VariantDecision
from planner.scaling import LentWorker, PoolWorker, ReplicaCounts, flips, pool_seen
from serving.config import load_config
from serving.control_host import ControlHost
from serving.demand import Demand
from serving.errors import Unavailable
from serving.link import Identity
from serving.planner_host import PlannerHost
from serving.wire import ArrivalRow, FrontendReport

KEY = ("m", "main")
TIMES = FittedTimes((1.0, 0.05, 0.0), (10.0, 0.2, 1e-5), samples=100)


class FakeServe:
    """A controller that starts what it is told to at once, or never."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.targets = {"m-main-prefill": prefill, "m-main-decode": decode, "Frontend": 1}
        self.running = dict(self.targets)
        self.calls: list[tuple[str, int]] = []
        self.away = False

    async def counts(self) -> Mapping[str, ReplicaCounts]:
        if self.away:
            raise Unavailable("Serve's controller did not answer")
        return {
            name: ReplicaCounts(target, self.running[name], max(target - self.running[name], 0), 0)
            for name, target in self.targets.items()
        }

    async def scale(self, deployment: str, replicas: int) -> None:
        self.calls.append((deployment, replicas))
        self.targets[deployment] = self.running[deployment] = replicas

    async def remove(self, deployment: str, replica: str) -> None:
        self.calls.append((f"{deployment}#{replica}", -1))


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
        self.host.book._clock = lambda: self.now

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
        ({"targets": {"x": {}}}, 404, "no model 'x'"),
        ({"targets": {"m": {"itl_ms": -1}}}, 400, "itl_ms"),
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
    ],
    ids=["none", "least to move", "already", "back", "other way", "turn round", "not a draining one"],
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
    ],
    ids=["ready", "starting", "lent", "told to", "leaving once", "not linked yet"],
)
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
