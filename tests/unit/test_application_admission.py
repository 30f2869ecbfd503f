"""Admission in the whole application: what a refused client gets, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvrouter.load import WorkerLoad
from kvrouter.policy_router import PolicyRouter
from serving.admission import FEWEST_SAMPLES
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
            asyncio.ensure_future(app.complete(prompt(TOKENS, salt), 0, max_tokens=2)) for salt in range(3)
        ]
        await until(lambda: prefill.queued_tokens >= 2 * TOKENS, LONG_S)
        now_s = asyncio.get_running_loop().time()
        assert prefill.wait_ms(now_s + 60, now_s) > 0
        await asyncio.gather(*asking)
        await until(lambda: prefill.queued_tokens == 0, LONG_S)
