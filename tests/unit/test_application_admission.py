"""Admission in the whole application: what a refused client gets, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvrouter.load import WorkerLoad
from kvrouter.policy_router import PolicyRouter
from kvrouter.router import WorkerView
from serving.admission import FEWEST_SAMPLES
from serving.gate import Gate
from serving.wire import Members, Register
from tests.scripted import Reply
from tests.unit.app_rig import App, prompt
from tests.unit.handoff_fakes import until

pytestmark = pytest.mark.asyncio

TOKENS = 200
SLOW = {"prefill_ms_per_token": 1.0}  # 0.2 s for each of these prompts
AT_ONCE = 40
LONG_S = 40.0


def slow_app(frontends: int, mode: str = "slo") -> App:
    return App(frontends=frontends, profile=SLOW, admission={"mode": mode})


def prefill_load(app: App, frontend: int) -> WorkerLoad:
    router = cast(PolicyRouter, app.coordinator(frontend)._router)
    (load,) = [load for load in router.loads() if load.view.role == "prefill"]
    return load


async def teach(app: App) -> None:
    """Every router has seen the prefill worker at work."""
    for frontend in range(len(app.frontends)):
        linear = prefill_load(app, frontend).models.prefill.linear
        salt = 1000 * (frontend + 1)
        while linear.evidence < FEWEST_SAMPLES:
            salt += 1
            await app.complete(prompt(TOKENS, salt), frontend, max_tokens=2)


@pytest.mark.parametrize("frontends", [1, 2])
async def test_too_much_at_once_is_refused_in_shape_and_leaves_nothing(frontends: int) -> None:
    async with slow_app(frontends) as app:
        await teach(app)

        async def ask(salt: int) -> Reply:
            return await app.client(salt % frontends).complete(
                prompt=prompt(TOKENS, salt), temperature=0, max_tokens=4, stream=salt % 4 < 2
            )

        replies = await asyncio.gather(*(ask(salt) for salt in range(AT_ONCE)))
        accepted = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status == 429]
        # 0.8 s of waiting at 0.2 s each, as each router believes.
        assert 2 <= len(accepted) <= 6 * frontends
        assert len(accepted) + len(refused) == AT_ONCE
        for reply in refused:
            error = reply.json["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
            assert "try again in" in error["message"]
            assert 1 <= int(reply.headers["retry-after"]) <= 10
        for frontend in range(frontends):
            metrics = app.coordinator(frontend)._metrics
            assert metrics.predicted_wait.count >= AT_ONCE // frontends
            assert metrics._queued() == {("short",): 0, ("medium",): 0, ("long",): 0}
        assert sum(app.coordinator(f)._metrics.rejects.value(("ttft",)) for f in range(frontends)) == len(
            refused
        )


@pytest.mark.parametrize("mode", ["off", "deadline"])
async def test_without_targets_nobody_is_refused(mode: str) -> None:
    async with slow_app(1, mode) as app:
        replies = await asyncio.gather(
            *(app.complete(prompt(TOKENS, salt), max_tokens=2) for salt in range(8))
        )
        assert len(replies) == 8


async def test_frontends_hear_at_once_what_others_send() -> None:
    async with slow_app(2) as app:
        await teach(app)
        prefill = prefill_load(app, 1)
        await until(lambda: prefill.queued_tokens == 0, LONG_S)
        asking = [
            asyncio.ensure_future(app.complete(prompt(TOKENS, salt), 0, max_tokens=2)) for salt in range(2)
        ]
        await until(lambda: prefill.queued_tokens > TOKENS, LONG_S)
        now_s = asyncio.get_running_loop().time()
        assert prefill.wait_ms(now_s + 60, now_s) > 0
        await asyncio.gather(*asking)
        await until(lambda: prefill.queued_tokens == 0, LONG_S)


async def test_routers_know_how_many_frontends_there_are() -> None:
    """By Control, whatever the configuration began with: the planner scales them."""
    async with App(frontends=2) as app:
        loads = [prefill_load(app, frontend) for frontend in range(2)]
        await until(lambda: [load.frontends for load in loads] == [2, 2], LONG_S)
        await app.frontends[1].control.stop()
        await until(lambda: loads[0].frontends == 1, LONG_S)
        worker = app.pool("prefill")[0]
        app.frontends[0]._routers[0].remove_worker(worker.me.ident)
        app.frontends[0]._on_members(Members(9, [Register("frontend", name, {}) for name in "abc"]))
        view = WorkerView("new", "prefill", 8, 10, 4)
        app.frontends[0]._routers[0].add_worker(view)
        assert app.frontends[0]._routers[0].load_of("new").frontends == 3
        app.frontends[0]._on_members(Members(10, []))
        assert app.frontends[0]._routers[0].load_of("new").frontends == 1, "it is there itself"
        app.frontends[0]._routers[0].remove_worker("new")


async def test_what_can_never_be_answered_is_a_400_without_retry_after() -> None:
    small = {**SLOW, "kv_bytes_per_token": 128}  # 64 blocks
    async with App(profile=small, kv_bytes=1 << 16, admission={"mode": "deadline"}) as app:
        await teach(app)
        for size, headers, code in (
            (600, {}, "context_length_exceeded"),
            (400, {"x-request-timeout-ms": "100"}, None),
        ):
            body = {"model": "tiny", "prompt": prompt(size, 7), "max_tokens": 2}
            reply = await app.client().send("POST", "/v1/completions", body, headers)
            assert (reply.status, reply.json["error"]["code"]) == (400, code), reply.body
            assert "retry-after" not in reply.headers
        assert app.coordinator(0)._breakers.avoid(0.0) == frozenset()


@pytest.mark.parametrize(
    ("planner", "told_s"),
    [
        pytest.param({}, [1, 1], id="nobody starts workers"),
        pytest.param({"mode": "act"}, [1, 1], id="a pool never at zero"),
        pytest.param({"mode": "off", "idle_to_zero_s": 600}, [1, 1], id="off"),
        pytest.param({"mode": "act", "idle_to_zero_s": 600}, [35, 25], id="from zero"),
    ],
)
async def test_a_pool_at_zero_tells_how_long_a_start_takes(
    monkeypatch: pytest.MonkeyPatch, planner: dict[str, object], told_s: list[int]
) -> None:
    monkeypatch.setattr("serving.coordinator.COME_BACK_S", -1.0)  # nobody waits for them
    now_s = [100.0]
    async with App(planner={"startup_s": 30, "interval_s": 5, **planner}) as app:
        generator = app.frontends[0]._generator
        generator._clock = lambda: now_s[0]

        async def told() -> int:
            body = {"model": "tiny", "prompt": prompt(20), "max_tokens": 2}
            reply = await app.client().send("POST", "/v1/completions", body)
            assert reply.status == 503
            return int(reply.headers["retry-after"])

        for worker in app.workers:
            await worker.host.stop()
        links = app.frontends[0].variants["tiny", "main"]
        await until(lambda: not links.can_answer, LONG_S)
        assert await told() == 1, "Serve lists them still: links come back soon"
        for member in list(links._workers.values()):
            links._depart(member)
        first = await told()
        now_s[0] += 10
        assert [first, await told()] == told_s
        now_s[0] += 100
        assert await told() == 1
        app.workers.clear()


async def test_live_targets_reach_the_gates_of_all_frontends() -> None:
    slo = {"ttft_ms": 800, "classes": {"chat": {"ttft_ms": 300}}}
    async with App(frontends=2, slo=slo, admission={"mode": "slo"}) as app:
        gates = [frontend._gates["tiny", "main"] for frontend in app.frontends]
        changed = {"itl_ms": 25, "classes": {"chat": {"ttft_ms": 100}, "gone": {"ttft_ms": 1}}}
        app.control.change_settings({"planner": {"targets": {"tiny": changed, "another": {"itl_ms": 1}}}})

        def targets(gate: Gate) -> tuple[float, float, dict[str, float]]:
            assert gate._admission is not None
            own = gate._admission._slo
            return own.ttft_ms, own.itl_ms, {name: one.ttft_ms for name, one in gate._classes.items()}

        await until(lambda: [targets(gate) for gate in gates] == [(800, 25, {"chat": 100})] * 2, LONG_S)
        app.control.change_settings({"planner": {}})
        await until(lambda: [targets(gate) for gate in gates] == [(800, 40, {"chat": 300})] * 2, LONG_S)
