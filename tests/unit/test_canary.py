"""A worker that looks at itself: canaries answered, failed or late, and blocks that do not come back."""

from __future__ import annotations

import asyncio
import threading
from array import array
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from serving import canary as canary_module
from serving.engine.base import (
    TOKEN_TYPECODE,
    AttemptId,
    BlockStates,
    EngineDied,
    Failed,
    Load,
    Mode,
    SamplingParams,
    StepOutput,
    Work,
)
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


def hold_steps(worker: SimWorker, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> asyncio.Future[None]:
    """The engine's next step, `after` so many, takes until the future is done, as a GPU that hangs."""
    gate = threading.Event()
    steps = count()
    runner: Any = worker.engine
    run = runner._runner.run

    def hang(plan: Any) -> Any:
        if next(steps) >= after:
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


# ---------------------------------------------------------------- no room

SMALL = 1 << 16  # of KV: 128 blocks of 8 tokens


@pytest.mark.parametrize("then", ["goes on", "hangs"])
async def test_a_worker_whose_blocks_wait_for_others_kv_is_well(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill's second chunk takes long, for which decode holds all its blocks and computes nothing."""
    deadlines = {"silence_ms": 60_000}
    async with App(kv_bytes=SMALL, health=QUICK, deadlines=deadlines, admission={"mode": "off"}) as app:
        prefill, decode = app.pool("prefill")[0], app.pool("decode")[0]
        await prefill.host.canary.stop()  # it would be right to complain
        prefill_goes_on = hold_steps(prefill, monkeypatch, after=1)
        asking = [asyncio.ensure_future(app.complete(prompt(1018, n), max_tokens=4)) for n in range(3)]
        await until(lambda: decode.states.used == 128, LONG_S)
        before = value(decode, "canary_no_room")
        await until(lambda: value(decode, "canary_no_room") >= before + 4, LONG_S)
        assert value(decode, "canary_failures") == 0
        assert not decode.host.draining
        assert decode.host.canary.ill == ""
        decode.host.check_alive()
        if then == "hangs":  # a step that never ends is found all the same
            decode_goes_on = hold_steps(decode, monkeypatch)
            prefill_goes_on.set_result(None)
            await until(lambda: decode.host.canary.unfit, LONG_S)
            decode_goes_on.set_result(None)
        else:
            prefill_goes_on.set_result(None)
        for answer in await asyncio.gather(*asking):
            assert answer.n_tokens == 4
        await until(lambda: not decode.host.canary.unfit, LONG_S)
        assert (value(decode, "canary_failures") == 0) is (then == "goes on")


async def test_a_prefill_worker_whose_blocks_are_leased_is_well() -> None:
    async with App(kv_bytes=SMALL, health=QUICK) as app:
        worker = app.pool("prefill")[0]
        attempts = [AttemptId(1), AttemptId(2)]
        for attempt in attempts:  # their readers never come
            tokens = array(TOKEN_TYPECODE, prompt(512, attempt))
            params = SamplingParams(max_tokens=9, seed=0, ignore_eos=True)
            worker.engine.submit(Work(attempt, Mode.PREFILL, tokens, 512, params, 0))
        await until(lambda: worker.states.leased == 128, LONG_S)
        await until(lambda: value(worker, "canary_no_room") >= 4, LONG_S)
        assert value(worker, "canary_failures") == 0
        assert worker.host.canary.ill == ""
        for attempt in attempts:
            worker.host.prefill.cancel(attempt)
        before = value(worker, "canary_seconds")
        await until(lambda: value(worker, "canary_seconds") > before, LONG_S)


@pytest.mark.parametrize(
    ("free", "verdict"), [(0, None), (1, "no answer")], ids=["no-block", "some-blocks"]
)
async def test_an_engine_that_does_not_tell_what_began_is_judged_by_its_free_blocks(
    free: int, verdict: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App(health={"canary_s": 0, "canary_timeout_s": 0.1}) as app:
        worker = app.pool("decode")[0]
        canary, engine = worker.host.canary, worker.engine
        with monkeypatch.context() as patch:
            patch.setattr(engine, "submit", lambda work: None)
            patch.setattr(engine, "capabilities", replace(engine.capabilities, tells_begun=False))
            asking = asyncio.ensure_future(canary._ask())
            await asyncio.sleep(0)
            canary.on_step(StepOutput(load_of(worker, free=free)))
            said = await asking
        assert said == verdict or (verdict and said and verdict in said)


# ---------------------------------------------------------------- blocks


def load_of(worker: SimWorker, *, free: int, running: int = 0, leased: int = 0, cached: int = 0) -> Load:
    total = worker.engine.memory.n_blocks
    blocks = BlockStates(total, total - free - leased - cached, leased, 0, cached, free)
    return Load(1, running, 0, 0, 0, 0.0, False, blocks)


@pytest.mark.parametrize(
    ("load", "floor", "ill"),
    [
        ({"free": 200}, None, True),  # of 512
        ({"free": 511}, None, True),
        ({"free": 511, "cached": 1}, None, False),
        ({"free": 511, "leased": 1}, None, True),
        ({"free": 300}, 400, True),
        ({"free": 399}, 400, True),
        ({"free": 400}, 400, False),
        ({"free": 0, "running": 1}, None, False),
        ({"free": 0, "leased": 100, "busy": True}, None, False),
        ({"free": 0}, 0, False),
    ],
    ids=[
        "many",
        "one",
        "none",
        "a-lease-of-nobody",
        "floor",
        "just-below",
        "at-the-floor",
        "running",
        "leased",
        "off",
    ],
)
async def test_blocks_that_do_not_come_back_make_a_worker_ill(
    load: dict[str, int], floor: int | None, ill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App(health={"canary_s": 0, "free_blocks_floor": floor}) as app:
        worker = app.pool("decode")[0]
        canary = worker.host.canary
        if load.pop("busy", False):
            monkeypatch.setattr(type(worker.host), "busy", property(lambda self: True))
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
        monkeypatch.undo()
        canary._load = honest
        canary.look_at_blocks()
        assert canary.ill == ""
