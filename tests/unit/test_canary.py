"""A worker that looks at itself: canaries answered, failed or late, and blocks that do not come back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from serving import canary as canary_module
from serving.engine.base import BlockStates, EngineDied, Failed, Load, StepOutput
from tests.unit.app_rig import LONG_S, App, SimWorker, prompt
from tests.unit.handoff_fakes import until

QUICK = {"canary_s": 0.05, "canary_timeout_s": 0.2}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "AGAIN_S", 0.02)
    monkeypatch.setattr(canary_module, "LOOK_S", 0.02)
    monkeypatch.setattr(canary_module, "LEAK_S", 0.1)


def value(worker: SimWorker, name: str) -> float:
    families = {f.name: f for f in worker.control._registry.families()}
    return max(s.value for s in families["kvrelay_" + name].samples)


async def health(app: App) -> dict[str, Any]:
    return dict((await app.client().send("GET", "/health")).json)


def hold_steps(worker: SimWorker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Future[None]:
    """The engine's next step takes until the future is done, as a GPU that hangs."""
    gate = threading.Event()
    runner: Any = worker.engine
    run = runner._runner.run

    def hang(plan: Any) -> Any:
        gate.wait(LONG_S)
        return run(plan)

    monkeypatch.setattr(runner._runner, "run", hang)
    released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(_: object) -> None:
        monkeypatch.setattr(runner._runner, "run", run)
        gate.set()

    released.add_done_callback(go_on)
    return released


def fail_steps(worker: SimWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine: Any = worker.engine
    monkeypatch.setattr(engine._runner, "run", broken)


async def test_an_idle_worker_asks_itself_and_leaves_no_trace() -> None:
    async with App(health=QUICK) as app:
        worker = app.pool("decode")[0]
        before = worker.states
        caches = app.frontends[0].variants["tiny", "main"].coordinator._router.caches  # type: ignore[attr-defined]
        known = caches.index.stats.blocks
        await until(lambda: value(worker, "canary_seconds") >= 3, LONG_S)
        worker.host.check_alive()
        await until(lambda: worker.states == before, LONG_S)
        assert worker.states.cached == 0
        assert caches.index.stats.blocks == known
        assert worker.host._event_seq == 0
        assert value(worker, "canary_failures") == 0
        assert await health(app) == {"status": "ok", "degraded": [], "ill": {}}


async def test_a_busy_worker_needs_no_canary() -> None:
    async with App(health={**QUICK, "canary_s": 0.5}, profile={"step_ms": 20.0}) as app:
        worker = app.pool("decode")[0]
        asking = asyncio.ensure_future(app.complete(prompt(20), max_tokens=60))
        await app.run_reaches(3)
        before = value(worker, "canary_seconds")
        await app.run_reaches(55)
        assert value(worker, "canary_seconds") == before
        await asking


async def test_0_turns_canaries_off() -> None:
    async with App(health={"canary_s": 0}) as app:
        assert len(app.pool("decode")[0].host.canary._tasks) == 1  # the look at the blocks


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_worker_whose_canaries_fail_takes_nothing_more_and_asks_to_be_replaced(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App(decode=2, health=QUICK, deadlines={"silence_ms": 60_000}) as app:
        right = await app.complete(prompt(30))
        bad, good = app.pool("decode")
        if how == "hangs":
            release = hold_steps(bad, monkeypatch)
        else:
            fail_steps(bad, monkeypatch)
        await until(lambda: bad.host.canary.unfit, LONG_S)
        assert value(bad, "canary_failures") >= (3 if how == "hangs" else 1)
        assert value(bad, "worker_ill") == 1
        links = app.frontends[0].variants["tiny", "main"]
        await until(lambda: links.pools()["decode"] == 1, LONG_S)
        await until(lambda: bool(links.ills()), LONG_S)
        body = await health(app)
        assert body["status"] == "degraded"
        (reason,) = body["ill"].values()
        told = "canaries in a row failed: no answer within" if how == "hangs" else "illegal memory access"
        assert told in reason
        with pytest.raises(EngineDied, match=told):
            bad.host.check_alive()
        good.host.check_alive()
        for n in range(5):
            assert (await app.complete(prompt(30, n))).n_tokens == right.n_tokens
        if how == "hangs":  # it comes to itself before it was replaced
            release.set_result(None)
            await until(lambda: not bad.host.canary.unfit, LONG_S)
            bad.host.check_alive()
            await until(lambda: links.pools()["decode"] == 2, LONG_S)
            await until(lambda: not links.ills(), LONG_S)


async def test_it_is_replaced_only_once_its_requests_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with App(health={"canary_s": 0}) as app:
        worker = app.pool("decode")[0]
        canary = worker.host.canary
        canary._failures, canary._unfit_s = 3, asyncio.get_running_loop().time()
        monkeypatch.setattr(type(worker.host), "busy", property(lambda self: True))
        worker.host.check_alive()
        canary._unfit_s -= canary_module.UNFIT_DRAIN_S + 1
        with pytest.raises(EngineDied):
            worker.host.check_alive()
        canary._failures = 0
        monkeypatch.undo()


async def test_an_engine_that_died_is_told_at_once() -> None:
    async with App() as app:
        worker = app.pool("decode")[0]
        worker.engine.died = RuntimeError("gone")
        with pytest.raises(EngineDied, match="gone"):
            worker.host.check_alive()
        worker.engine.died = None


async def test_attempts_that_fail_without_a_step_call_for_a_canary_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with App(health={"canary_s": 3600, "canary_timeout_s": 5}) as app:
        worker = app.pool("decode")[0]
        fail_steps(worker, monkeypatch)
        canary = worker.host.canary
        canary.on_step(StepOutput(load_of(worker, free=5), failed=[Failed(1, "boom")]))  # type: ignore[arg-type]
        await until(lambda: canary.unfit, LONG_S)


# ---------------------------------------------------------------- blocks


def load_of(worker: SimWorker, *, free: int, running: int = 0, leased: int = 0) -> Load:
    total = worker.engine.memory.n_blocks
    blocks = BlockStates(total, total - free - leased, leased, 0, 0, free)
    return Load(1, running, 0, 0, 0, 0.0, False, blocks)


@pytest.mark.parametrize(
    ("load", "floor", "ill"),
    [
        ({"free": 200}, None, True),  # of 512
        ({"free": 300}, None, False),
        ({"free": 300}, 400, True),
        ({"free": 399}, 400, True),
        ({"free": 400}, 400, False),
        ({"free": 0, "running": 1}, None, False),
        ({"free": 0, "leased": 100}, None, False),
        ({"free": 0}, 0, False),
    ],
    ids=["half", "above-half", "floor", "just-below", "at-the-floor", "running", "leased", "off"],
)
async def test_blocks_that_do_not_come_back_make_a_worker_ill(
    load: dict[str, int], floor: int | None, ill: bool
) -> None:
    async with App(health={"canary_s": 0, "free_blocks_floor": floor}) as app:
        worker = app.pool("decode")[0]
        canary = worker.host.canary
        honest = canary._load
        canary._load = load_of(worker, **load)
        canary.look_at_blocks()
        assert canary.ill == "", "not at once"
        await asyncio.sleep(canary_module.LEAK_S * 1.5)
        canary.look_at_blocks()
        assert bool(canary.ill) is ill
        assert not canary.unfit
        worker.host.check_alive()
        if ill:
            assert f"{load['free']} of 512 blocks" in canary.ill
            assert value(worker, "worker_ill") == 1
            links = app.frontends[0].variants["tiny", "main"]
            await until(lambda: bool(links.ills()), LONG_S)
            assert (await health(app))["status"] == "degraded"
            await app.complete(prompt(30))  # it goes on
        canary._load = honest
        canary.look_at_blocks()
        assert canary.ill == ""
