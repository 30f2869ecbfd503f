"""A rollout from one KV layout to another, through the whole application: no request fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.app_rig import LONG_S, Answer, App, SimWorker, prompt
from tests.unit.handoff_fakes import until
from tests.unit.layouts_app import CHANGES, LayoutsApp, NewWorker

CLIENTS = 6
SLOW = {"step_ms": 1.0, "prefill_ms_per_token": 0.02}
change = pytest.mark.parametrize("change", CHANGES)


class Load:
    """Clients that ask one after the other until they are told to stop; every third does not stream."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._go_on = True
        self.answers: dict[int, list[Answer]] = {n: [] for n in range(CLIENTS)}
        self._clients = [asyncio.create_task(self._client(n)) for n in range(CLIENTS)]

    async def _client(self, n: int) -> None:
        while self._go_on:
            self.answers[n].append(
                await self._app.complete(prompt(100, n), max_tokens=30, stream=n % 3 > 0)
            )

    @property
    def count(self) -> int:
        return sum(len(answers) for answers in self.answers.values())

    async def more(self, n: int) -> None:
        """So many answers more; raises what a client met."""
        wanted = self.count + n
        await until(lambda: self.count >= wanted or any(task.done() for task in self._clients), LONG_S)
        for task in self._clients:
            if task.done():
                await task

    async def stop(self) -> None:
        self._go_on = False
        await asyncio.gather(*self._clients)


async def texts() -> dict[int, Any]:
    async with App() as app:
        return {n: (await app.complete(prompt(100, n), max_tokens=30)).said for n in range(CLIENTS)}


def mismatches(app: App) -> int:
    counters = [worker.host.decode.counters for worker in app.workers + app.dead]
    return sum(one.failures.get("layout_mismatch", 0) for one in counters)


@change
@pytest.mark.parametrize("order", ["prefill_first", "decode_first", "together"])
@pytest.mark.parametrize("local", [False, True], ids=["handed_over", "local_too"])
async def test_a_rollout_to_another_layout_fails_no_request(change: str, order: str, local: bool) -> None:
    expected = await texts()
    settings = {"router": {"local_prefill": local, "pull": True}}
    async with LayoutsApp(change, prefill=2, decode=2, frontends=1, profile=SLOW, **settings) as app:
        load = Load(app)
        await load.more(CLIENTS)
        if order == "together":
            await asyncio.gather(app.replace("prefill"), app.replace("decode"))
        else:
            pools = ("prefill", "decode") if order == "prefill_first" else ("decode", "prefill")
            for role in pools:
                await app.replace(role)
                await load.more(2 * CLIENTS)
        await load.more(2 * CLIENTS)
        await load.stop()
        assert {n: {answer.said for answer in load.answers[n]} for n in expected} == {
            n: {said} for n, said in expected.items()
        }
        assert all(isinstance(worker, NewWorker) for worker in app.workers)
        metrics = app.coordinator()._metrics
        assert metrics.attempt_failures.value() == 0
        assert metrics.resumes.value() == 0
        assert mismatches(app) == 0


@change
async def test_pairs_while_both_layouts_stay(change: str) -> None:
    """Workers of both, for good: each request stays within one, and both are used."""
    expected = await texts()
    async with LayoutsApp(change, prefill=1, decode=1, profile=SLOW) as app:
        await app.add("prefill")
        await app.add("decode")
        load = Load(app)
        await load.more(10 * CLIENTS)
        await load.stop()
        new = {worker.me.ident for worker in app.workers if isinstance(worker, NewWorker)}
        chosen = {(c["prefill"] in new, c["decode"] in new) for c in app.coordinator().recent}
        assert chosen == {(False, False), (True, True)}
        assert all({answer.said for answer in load.answers[n]} == {expected[n]} for n in expected)
        assert mismatches(app) == 0


@change
async def test_a_stream_of_the_old_layout_ends_where_it_is(change: str) -> None:
    """No worker could take over its KV; one of the same layout can, and does."""
    async with LayoutsApp(change, profile=SLOW) as app:
        (old,) = app.pool("decode")
        stream = await streaming(app)
        await app.add("decode")
        await app.retire(old)
        assert stream.done(), "the old worker stayed until then"
        answer = await stream
        assert answer.n_tokens == 400
        assert answer.reply.headers["x-kvrelay-decode"] == old.me.ident
        metrics = app.coordinator()._metrics
        assert metrics.migrations.value(("moved",)) == metrics.migrations.value(("failed",)) == 0
        assert metrics.resumes.value() == 0


@change
async def test_at_the_drains_limit_it_goes_on_from_its_tokens(change: str) -> None:
    async with App() as app:
        expected = (await app.complete(prompt(40), max_tokens=400, stream=True)).said
    async with LayoutsApp(change, profile={**SLOW, "step_ms": 4.0}) as app:
        (old,) = app.pool("decode")
        stream = await streaming(app)
        await app.add("decode")
        await app.retire(old, limit_s=0.2)
        assert not stream.done()
        assert (await stream).said == expected
        assert app.coordinator()._metrics.resumes.value() == 1


async def streaming(app: App) -> asyncio.Task[Answer]:
    task = asyncio.create_task(app.complete(prompt(40), max_tokens=400, stream=True))
    await app.run_reaches(8)
    return task


class Unlike(SimWorker):
    """A decode worker whose KV is not of the layout that its replica published."""

    def _make(self, app: App) -> None:
        super()._make(app)
        self.published = self.engine.layout
        if self.role == "decode":
            self.engine.layout = "another"

    @property
    def meta(self) -> dict[str, Any]:
        return {**super().meta, "layout": self.published}


class UnlikeApp(App):
    worker_type = Unlike

    def is_ready(self) -> bool:
        return self.frontends[0].variants["tiny", "main"].pools() == {"prefill": 1, "decode": 1}


async def test_workers_that_publish_a_wrong_layout_answer_all_the_same() -> None:
    """What is published is believed for placing; before a byte is read, the two compare for themselves."""
    expected = await texts()
    async with UnlikeApp() as app:
        answers = [await app.complete(prompt(100, n), max_tokens=30) for n in expected]
        assert [answer.said for answer in answers] == list(expected.values())
        assert mismatches(app) == len(expected)
        assert app.coordinator()._metrics.resumes.value() == len(expected)
