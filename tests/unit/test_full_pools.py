"""More is asked of well workers than they can do at once: what waits is nobody's fault, and comes whole."""

from __future__ import annotations

import asyncio

from tests.scripted import Reply
from tests.unit.app_rig import App, prompt
from tests.unit.handoff_fakes import until

STEP_MS = 10.0


def failures(app: App) -> int:
    return len(app.coordinator()._breakers._breakers)


async def test_a_hand_off_waits_for_room_longer_than_a_transfer_may_take() -> None:
    """128 blocks of 8 tokens, nearly all of them held by a long answer."""
    async with App(
        kv_bytes=1 << 16,
        profile={"step_ms": STEP_MS},
        deadlines={"transfer_ms": 1000},
        router={"local_prefill": False},
        admission={"mode": "off"},
    ) as app:
        long = asyncio.create_task(app.complete(prompt(700, 1), max_tokens=300, ignore_eos=True))
        first = await app.run_reaches(3)
        short = asyncio.create_task(app.complete(prompt(400, 2), max_tokens=12, ignore_eos=True))
        await until(lambda: len(app.coordinator()._live) == 2)
        (second,) = [run for run in app.coordinator()._live if run is not first]
        assert [(await answer).n_tokens for answer in (short, long)] == [12, 300]
        assert [run.info.resumes for run in (first, second)] == [0, 0]
        assert failures(app) == 0


async def test_a_stream_waits_for_a_place_in_the_batch_longer_than_its_first_token_may_take() -> None:
    async with App(profile={"step_ms": STEP_MS}, deadlines={"first_token_ms": 700}, max_batch=2) as app:
        longs = [
            asyncio.create_task(app.complete(prompt(60, n), max_tokens=150, ignore_eos=True))
            for n in range(2)
        ]
        await until(lambda: sum(len(run.sent) > 3 for run in app.coordinator()._live) == 2)
        answer = await app.complete(prompt(60, 9), max_tokens=12, ignore_eos=True, stream=True)
        assert [answer.n_tokens, *[(await long).n_tokens for long in longs]] == [12, 150, 150]
        assert failures(app) == 0


async def test_readers_are_patient_while_prompts_wait_for_their_turn() -> None:
    """Eight prompts, one after the other: the last waits for longer than a prompt may take to compute."""
    async with App(
        profile={"prefill_ms_per_token": 0.5}, deadlines={"prefill_ms": 400}, admission={"mode": "off"}
    ) as app:
        answers = await asyncio.gather(
            *(app.complete(prompt(200, salt), max_tokens=2) for salt in range(8))
        )
        assert [answer.n_tokens for answer in answers] == [2] * 8
        assert failures(app) == 0


async def test_clients_in_a_great_hurry_cost_nobody_else_anything() -> None:
    """Their deadlines pass in every state there is. The retry budget is for workers that fail."""
    async with App(prefill=2, decode=2, profile={"step_ms": 2.0}, admission={"mode": "off"}) as app:

        async def hurried(n: int) -> Reply:
            body = {"model": "tiny", "prompt": prompt(64, n), "max_tokens": 200}
            headers = {"x-request-timeout-ms": str(1 + n % 7)}
            return await app.client().send("POST", "/v1/completions", body, headers)

        stream = asyncio.create_task(app.complete(prompt(60, 999), max_tokens=200, ignore_eos=True))
        replies = [
            reply for n in range(20) for reply in await asyncio.gather(*map(hurried, range(n, n + 5)))
        ]
        assert {reply.json["error"]["code"] for reply in replies} == {"deadline_exceeded"}
        assert (await stream).n_tokens == 200
        assert failures(app) == 0
        assert app.coordinator()._metrics.resumes.value() == 0


async def test_pools_that_hold_little_never_wait_for_each_other() -> None:
    """128 blocks a worker, prompts of up to 100: who has room on one side waits for it on the other."""
    async with App(
        prefill=2,
        decode=2,
        frontends=2,
        kv_bytes=1 << 16,
        profile={"prefill_ms_per_token": 0.05},
        admission={"mode": "off"},
    ) as app:
        asks = [(n, 100 + 41 * n % 700) for n in range(60)]
        answers = await asyncio.gather(
            *(app.complete(prompt(size, n), n % 2, max_tokens=4, ignore_eos=True) for n, size in asks)
        )
        assert [answer.n_tokens for answer in answers] == [4] * len(asks)
        assert failures(app) == 0
