"""Streams that move while they run, through the whole application: nobody notices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.app_rig import App, SimWorker, prompt
from tests.unit.handoff_fakes import until

LONG_S = 40.0
SLOW = {"step_ms": 4.0}


async def streams(app: App, n: int, **fields: Any) -> list[asyncio.Task[Any]]:
    """Running, each with some tokens out."""
    asked = {"stream": True, "max_tokens": 300, **fields}
    tasks = [asyncio.create_task(app.complete(prompt(40, salt), **asked)) for salt in range(n)]
    await until(lambda: sum(len(run.sent) >= 4 for run in app.coordinator()._live) == n, LONG_S)
    return tasks


def loaded(app: App) -> SimWorker:
    return max(app.pool("decode"), key=lambda worker: worker.host.attempts)


async def undisturbed(n: int, **fields: Any) -> list[Any]:
    async with App() as app:
        asked = {"stream": True, "max_tokens": 300, **fields}
        return [(await app.complete(prompt(40, salt), **asked)).said for salt in range(n)]


@pytest.mark.parametrize("nixl", [False, True], ids=["memcpy", "nixl"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
async def test_a_drained_worker_hands_its_streams_on(nixl: bool, fields: dict[str, Any]) -> None:
    expected = await undisturbed(6, **fields)
    async with App(decode=2, nixl=nixl, profile=SLOW) as app:
        tasks = await streams(app, 6, **fields)
        worker = loaded(app)
        before = worker.host.attempts
        assert before > 0
        worker.host.drain()
        await until(lambda: worker.host.attempts == 0, LONG_S)
        assert sum(not task.done() for task in tasks) > 0, "nothing was left to move"
        answers = [await task for task in tasks]
        assert [answer.said for answer in answers] == expected
        metrics = app.coordinator()._metrics
        assert metrics.migrations.value(("moved",)) >= 1
        assert metrics.resumes.value() == 0
        gap = metrics.migration_gap
        assert gap.count == metrics.migrations.value(("moved",))


async def test_nothing_new_comes_to_a_drained_worker_until_it_is_taken_back() -> None:
    async with App(decode=2) as app:
        worker, other = app.pool("decode")
        worker.host.drain()
        await until(lambda: app.frontends[0].variants["tiny", "main"].pools()["decode"] == 1, LONG_S)
        for salt in range(4):
            answer = await app.complete(prompt(20, salt))
            assert answer.reply.headers["x-kvrelay-decode"] == other.me.ident
        worker.host.undrain()
        await until(lambda: app.frontends[0].variants["tiny", "main"].pools()["decode"] == 2, LONG_S)


async def test_a_worker_drains_until_no_reason_is_left() -> None:
    """A canary that is well again does not take back what an operator ordered, nor the other way round."""
    async with App(decode=2) as app:
        host = app.pool("decode")[0].host
        links = app.frontends[0].variants["tiny", "main"]
        host.drain("ordered")
        host.drain("unfit")
        await until(lambda: links.pools()["decode"] == 1, LONG_S)
        host.undrain("unfit")
        host.undrain("unfit")
        assert host.draining
        host.undrain("ordered")
        await until(lambda: links.pools()["decode"] == 2, LONG_S)


async def test_the_last_worker_still_answers_while_it_drains() -> None:
    async with App(decode=1) as app:
        app.pool("decode")[0].host.drain()
        await until(lambda: app.frontends[0].variants["tiny", "main"].pools()["decode"] == 0, LONG_S)
        assert (await app.complete(prompt(20))).n_tokens == 12
        assert app.frontends[0].health()[0] == 200


async def test_an_operator_drains_a_worker_and_is_told_when_it_is_safe_to_remove() -> None:
    async with App(decode=2, profile=SLOW) as app:
        tasks = await streams(app, 4)
        worker = loaded(app)
        ask = app.frontends[0].control.ask
        status, told = await ask("drain", {"worker": worker.me.ident})
        assert (status, told["ordered_to_drain"]) == (200, True)

        async def state() -> dict[str, Any]:
            _, body = await ask("workers", {})
            return next(w for w in body["workers"] if w["worker"] == worker.me.ident)

        async with asyncio.timeout(LONG_S):
            while not (await state())["safe_to_remove"]:
                await asyncio.sleep(0.05)
        assert worker.host.attempts == 0
        for task in tasks:
            await task
        status, told = await ask("undrain", {"worker": worker.me.ident})
        assert (status, told["ordered_to_drain"]) == (200, False)
        async with asyncio.timeout(LONG_S):
            while (await state())["draining"]:
                await asyncio.sleep(0.05)


async def test_a_lent_worker_plays_the_other_role_and_comes_back() -> None:
    async with App(prefill=1, decode=2) as app:
        worker = app.pool("decode")[0]
        links = app.frontends[0].variants["tiny", "main"]
        app.control.orders.lend(worker.me.ident, "prefill")
        await until(lambda: links.pools() == {"prefill": 2, "decode": 1}, LONG_S)
        answers = [await app.complete(prompt(64, salt)) for salt in range(12)]
        chosen = {answer.reply.headers["x-kvrelay-prefill"] for answer in answers}
        assert worker.me.ident in chosen
        app.control.orders.call_back(worker.me.ident)
        await until(lambda: links.pools() == {"prefill": 1, "decode": 2}, LONG_S)


async def test_frontend_drain() -> None:
    """A frontend that stops says so, refuses what is new, and ends what runs."""
    expected = await undisturbed(3)
    async with App(frontends=2, profile=SLOW) as app:
        tasks = await streams(app, 3)
        stopping = asyncio.create_task(app.frontends[0].drain(LONG_S))
        await until(lambda: app.frontends[0].health()[0] == 503, LONG_S)
        assert app.frontends[0].health()[1]["status"] == "stopping"
        refused = await app.client().complete(prompt="late")
        assert refused.status == 503
        assert "retry-after" in refused.headers
        assert (await app.complete(prompt(20), 1)).n_tokens == 12  # the other one answers
        assert [(await task).said for task in tasks] == expected
        await asyncio.wait_for(stopping, LONG_S)
