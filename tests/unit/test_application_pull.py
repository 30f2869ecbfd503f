"""The whole application with `router.pull`: a prefix is cached on one worker, another one computes.

`App` checks at its end that nothing is in flight, booked or held anywhere, and that no content was wrong.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from serving.kv.local import LocalTransfer
from tests.unit.app_rig import LONG_S, Answer, App, SimWorker, prompt
from tests.unit.handoff_fakes import until
from tests.unit.test_application import scrape, total

N_TOKENS = 600
# Blind to caches, so that the second request goes where the prefix is not.
ROUTER = {"policy": "round_robin", "local_prefill": False, "pull": True}
SLOW = {"prefill_ms_per_token": 0.5}  # 300 ms a prompt: reading it is faster by far


def pulling(**settings: object) -> App:
    return App(prefill=2, profile=SLOW, router=ROUTER, **settings)  # type: ignore[arg-type]


async def warm(app: App) -> Answer:
    """A prefix is cached on one prefill worker, the routers know it, and all links stand."""
    answer = await app.complete(prompt(N_TOKENS))
    for worker in app.pool("prefill"):
        await until(lambda w=worker: w.host.peers._peers, LONG_S)
    return answer


def computed(app: App) -> list[int]:
    return [worker.counters.prompt_tokens_computed for worker in app.pool("prefill")]


def pulled(app: App) -> int:
    return sum(worker.counters.prompt_tokens_pulled for worker in app.workers)


@pytest.mark.parametrize("nixl", [False, True], ids=["memcpy", "nixl"])
async def test_pulled_equals_local(nixl: bool) -> None:
    async with pulling(nixl=nixl) as app:
        right = await warm(app)
        answer = await app.complete(prompt(N_TOKENS))
        assert answer.said == right.said
        assert answer.cached == 592  # the last block has to draw the first token
        assert sorted(computed(app)) == [8, 600]
        assert pulled(app) == 592
        assert app.coordinator().recent[-1]["pull_tokens"] > 0
        again = [await app.complete(prompt(N_TOKENS)) for _ in range(2)]
        assert [a.said for a in again] == [right.said] * 2
        assert pulled(app) == 592  # both have it now
        scraped = await scrape(app)
        assert total(scraped, "prompt_tokens_pulled_total") == 592
        assert total(scraped, "pulls_total") == 1


async def test_router_learns_what_a_move_costs() -> None:
    async with pulling() as app:
        await warm(app)
        await app.complete(prompt(N_TOKENS))
        await asyncio.sleep(0.05)  # a report is due
        await app.complete(prompt(N_TOKENS))
        await app.complete(prompt(N_TOKENS))
        router = app.frontends[0].variants["tiny", "main"]._router

        def samples() -> int:
            return sum(
                router.load_of(worker.me.ident).models.move.linear.samples  # type: ignore[attr-defined]
                for worker in app.pool("prefill")
            )

        await until(lambda: samples() > 0, LONG_S)


async def test_off_by_default() -> None:
    router = {key: value for key, value in ROUTER.items() if key != "pull"}
    async with App(prefill=2, profile=SLOW, router=router) as app:
        first = await app.complete(prompt(200))
        assert (await app.complete(prompt(200))).said == first.said
        assert computed(app) == [200, 200]


def owner_and_reader(app: App) -> tuple[SimWorker, SimWorker]:
    workers = app.pool("prefill")
    return (
        max(workers, key=lambda w: w.counters.prompt_tokens_computed),
        min(workers, key=lambda w: w.counters.prompt_tokens_computed),
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["gone", "frozen"])
async def test_owner_dies_while_it_is_read(frozen: bool) -> None:
    """peer_death_mid_read: the request goes on elsewhere and its answer is the same."""
    async with pulling() as app:
        right = await warm(app)
        owner, reader = owner_and_reader(app)
        assert isinstance(reader.transfer, LocalTransfer)
        reader.transfer.faults.hang = True
        asked = asyncio.create_task(app.complete(prompt(N_TOKENS)))
        await until(lambda: reader.transfer.busy, LONG_S)
        await app.kill(owner, frozen)
        app.publish()
        await until(lambda: app.coordinator().attempts_in_flight == 0 or reader.states.quarantined, LONG_S)
        reader.transfer.faults.hang = False
        assert (await asked).said == right.said


async def test_cancelled_while_it_pulls() -> None:
    async with pulling() as app:
        await warm(app)
        _, reader = owner_and_reader(app)
        assert isinstance(reader.transfer, LocalTransfer)
        reader.transfer.faults.hang = True
        client = app.client()
        asked = asyncio.create_task(client.complete(prompt=prompt(N_TOKENS), max_tokens=12))
        await until(lambda: reader.transfer.busy, LONG_S)
        client.leave.set()
        await asked
        await until(lambda: reader.states.quarantined > 0, LONG_S)
        reader.transfer.faults.hang = False


async def test_cancelled_at_random_moments_frees_everything() -> None:
    dice = random.Random(5)
    async with pulling(frontends=2) as app:
        right = await warm(app)
        clients = [app.client(n % 2) for n in range(40)]

        async def ask(number: int) -> bool:
            asyncio.get_running_loop().call_later(dice.uniform(0, 1.5), clients[number].leave.set)
            ids = prompt(dice.choice((40, 200, N_TOKENS)), salt=number % 3)
            return (await clients[number].complete(prompt=ids, max_tokens=dice.choice((1, 20)))).complete

        ended = await asyncio.gather(*(ask(number) for number in range(40)))
        assert sum(ended) < 40
        await app.is_idle()
        assert (await app.complete(prompt(N_TOKENS))).said == right.said
