"""The application on TensorRT-LLM (the fake, both versions): equal answers, cancels, deaths, the router.

`App` checks at its end that nothing is in flight, booked or held anywhere, whatever the test did.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import pytest

from kvrouter.hashing import block_hashes, namespace_seed
from serving import control_client, control_host, kept_link
from serving.engine.base import Mode
from tests.unit.app_rig import BLOCK_TOKENS, LONG_S, Answer, prompt
from tests.unit.handoff_fakes import until
from tests.unit.test_application import resumes, run_mode, scrape, total
from tests.unit.trtllm_app import TrtllmApp, TrtllmWorker
from tests.unit.trtllm_rig import versions

N_TOKENS = 120


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a party that does not answer; retries come at once."""
    monkeypatch.setattr(control_host, "PULL_S", LONG_S)
    monkeypatch.setattr(control_client, "SCRAPE_S", LONG_S)
    monkeypatch.setattr(kept_link, "LAST_RETRY_S", kept_link.FIRST_RETRY_S)


@pytest.mark.parametrize(("version", "runtime"), [("1.2.1", "CPP"), ("main", "CPP"), ("main", "PYTHON")])
async def test_handed_over_equals_local(version: str, runtime: str) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": prompt(n, salt=n), "max_tokens": 30, "stream": stream, **how}
        for n, stream in ((1, False), (8, True), (64, False), (65, True), (500, False))
        for how in ({}, {"temperature": 1, "seed": n}, {"logprobs": 3})
    ]
    section = {"transceiver_runtime": runtime} if runtime == "PYTHON" else {}
    async with TrtllmApp(version=version, prefill=0) as local:
        right = [await local.complete(**fields) for fields in asked]
    async with TrtllmApp(version=version, trtllm=section) as app:
        answers = [await app.complete(**fields) for fields in asked]
        assert [a.said for a in answers] == [a.said for a in right]
        assert [logprobs(a) for a in answers] == [logprobs(a) for a in right]
        again = await asyncio.gather(*(app.complete(**fields) for fields in asked))
        assert [a.said for a in again] == [a.said for a in right]
        (prefill,), (decode,) = app.pool("prefill"), app.pool("decode")
        assert decode.counters.prompt_tokens_computed == 0
        assert prefill.counters.prompt_tokens_computed > 0
        kinds = {row["kind"] for row in list(app.machine("decode").seen)[1:]}  # after the first answer
        assert kinds == {"generation_only"}


def logprobs(answer: Answer) -> Any:
    """As the client got them, streamed or not."""
    parts = answer.reply.chunks if answer.reply.body.startswith(b"data:") else [answer.reply.json]
    found = [part["choices"][0].get("logprobs") for part in parts if part["choices"]]
    return [value for entry in found if entry for value in entry["token_logprobs"]]


@versions
async def test_the_first_token_does_not_wait_for_the_kv(version: str) -> None:
    patient = {"transfer_timeout_ms": 60_000}
    deadlines = {"transfer_ms": 60_000}
    async with TrtllmApp(version=version, step_ms=1, trtllm=patient, deadlines=deadlines) as app:
        app.machine("decode").knobs.transfer_s = 60.0
        asked = asyncio.create_task(app.complete(prompt(60), max_tokens=20, stream=True))
        run = await app.run_reaches(1)
        assert len(run.sent) == 1
        await until(lambda: app.machine("decode")._running, LONG_S)
        for n in range(3):  # whatever was said meanwhile has arrived
            await app.complete(prompt(8, n), max_tokens=1)
        (prefill,) = app.pool("prefill")
        assert prefill.host.leases == 1  # the owner is told when the KV is there, not before
        app.machine("decode")._running[0].arrives_s = 0.0
        assert (await asked).n_tokens == 20
        await until(lambda: prefill.host.leases == 0, LONG_S)


@versions
async def test_cancelled_at_random_moments_frees_everything(version: str) -> None:
    dice = random.Random(4)
    async with TrtllmApp(version=version, prefill=2, decode=2, frontends=2, step_ms=1) as app:
        for number in range(2):
            app.machine("decode", number).knobs.transfer_s = 0.02
        clients = [app.client(n % 2) for n in range(60)]

        async def ask(number: int) -> bool:
            """Whether it got to its end."""
            client = clients[number]
            asyncio.get_running_loop().call_later(dice.uniform(0, 0.8), client.leave.set)
            ids = prompt(dice.choice((5, 40, 200)), salt=number % 10)
            fields = {"prompt": ids, "max_tokens": dice.choice((1, 20, 400)), "temperature": 1}
            return (await client.complete(**fields, stream=dice.random() < 0.8)).complete

        ended = await asyncio.gather(*(ask(number) for number in range(60)))
        assert 3 < sum(ended) < 57
        await app.is_idle()
        assert sum(app.machine("decode", n).aborts_in_transfer for n in range(2)) == 0
        scraped = await scrape(app)
        assert total(scraped, "requests_total") == 60
        assert total(scraped, "in_flight") == total(scraped, "attempts") == total(scraped, "leases") == 0


@versions
@pytest.mark.parametrize("prefill", [1, 0], ids=["handed_over", "local"])
async def test_decode_dies_mid_stream_and_nothing_is_lost_or_repeated(version: str, prefill: int) -> None:
    async with TrtllmApp(
        version=version, prefill=prefill, decode=3, step_ms=2, trtllm={"transfer_timeout_ms": 500}
    ) as app:
        right = [await app.complete(prompt(60, n), max_tokens=N_TOKENS) for n in range(3)]
        asked = [
            asyncio.create_task(app.complete(prompt(60, n), max_tokens=N_TOKENS, stream=True))
            for n in range(3)
        ]
        for sent in (10, 70):  # twice, on two workers
            run = await app.run_reaches(sent)
            await app.kill(app.working_on(run, run_mode(run)))
        answers = await asyncio.gather(*asked)
        assert [a.said for a in answers] == [a.said for a in right]
        assert [a.usage["prompt_tokens"] for a in answers] == [a.usage["prompt_tokens"] for a in right]
        assert await resumes(app) >= 2


async def test_a_resume_is_a_fresh_prefill_under_a_new_id() -> None:
    async with TrtllmApp(decode=2, step_ms=2) as app:
        asked = asyncio.create_task(app.complete(prompt(60), max_tokens=N_TOKENS, stream=True))
        await app.kill(app.working_on(await app.run_reaches(10), Mode.DECODE))
        assert (await asked).n_tokens == N_TOKENS
        handed = [r for r in app.machine("prefill").seen if r["kind"] == "context_only"]
        ids = [row["disaggregated_params"].disagg_request_id for row in handed]
        assert len(ids) == len(set(ids)) == 2
        assert min(ids) >= 1 << 40
        assert len(handed[1]["inputs"]["prompt_token_ids"]) > 60  # the prompt and what was sent


async def test_a_sampled_stream_goes_on_after_a_death_with_every_token_once() -> None:
    """It is another draw from there on: the engine has no seeded resume, and says so."""
    async with TrtllmApp(decode=2, step_ms=2) as app:
        assert not app.model.capabilities.seeded_resume
        fields = {"temperature": 1, "seed": 11, "max_tokens": N_TOKENS}
        asked = asyncio.create_task(app.complete(prompt(60), stream=True, **fields))
        await app.kill(app.working_on(await app.run_reaches(30), Mode.DECODE))
        answer = await asked
        assert answer.n_tokens == N_TOKENS
        assert await resumes(app) == 1
        (last,) = [c for c in answer.reply.chunks if c["choices"] and c["choices"][0]["finish_reason"]]
        assert 30 <= last["choices"][0]["kvrelay_redrawn_from"] < N_TOKENS
        (marked,) = [c for chunk in answer.reply.chunks for c in chunk["choices"] if c["finish_reason"]]
        assert 30 <= marked["kvrelay_redrawn_from"] < N_TOKENS  # and the client is told


async def test_prefill_dies_and_decode_computes_prompts() -> None:
    async with TrtllmApp(step_ms=1) as app:
        right = await app.complete(prompt(60), max_tokens=40)
        await app.kill(app.pool("prefill")[0])
        pools = app.frontends[0].variants["tiny", "main"].pools
        await until(lambda: pools()["prefill"] == 0, LONG_S)
        assert (await app.complete(prompt(60), max_tokens=40)).said == right.said
        assert app.machine("decode").seen[-1]["kind"] == "context_and_generation"


@versions
async def test_what_is_cached_is_found_and_counted(version: str) -> None:
    """router: the engine's events become the index, the next turn goes where its prefix is."""
    async with TrtllmApp(version=version, prefill=3) as app:
        first = await app.complete(prompt(200), max_tokens=4)
        assert first.cached == 0
        home = first.reply.headers["x-kvrelay-prefill"]
        await until(lambda: _matched(app, prompt(200)).get(home, 0) >= 24, LONG_S)
        for n in range(6):
            again = await app.complete(prompt(200) + prompt(30, 50 + n), max_tokens=4)
            assert again.reply.headers["x-kvrelay-prefill"] == home
            assert again.cached == (192 if n == 0 else 200)  # the last token of a prompt is not kept
        other = await app.complete(prompt(200), max_tokens=4, cache_salt="another")
        assert other.cached == 0  # as the engine itself keeps salts apart


def _matched(app: TrtllmApp, ids: list[int]) -> dict[str, int]:
    """Leading blocks of `ids` that each worker holds, by the router's index."""
    hashes = block_hashes(array("I", ids), BLOCK_TOKENS, namespace_seed("tiny"))
    router: Any = app.coordinator()._router
    found: dict[str, int] = dict(router.caches.index.match(hashes))
    return found


async def test_the_metrics_of_an_engine_that_is_polled() -> None:
    async with TrtllmApp() as app:
        for n in range(4):
            await app.complete(prompt(100, n), max_tokens=8)
        await until(lambda: all(engine._polled.reading for engine in app.engines), LONG_S)
        scraped = await scrape(app)
        assert total(scraped, "tokens_generated_total") == 32
        assert total(scraped, "kv_blocks") == 1024
        assert total(scraped, "engine_steps_total") > 0
        assert total(scraped, "engine_event_gaps_total") == 0
        assert total(scraped, "engine_lost_transfers_total") == 0


async def test_a_drain_waits_because_nothing_can_be_moved() -> None:
    """What is asked to move goes on where it is, and its answer is the same."""
    async with TrtllmApp(decode=2, step_ms=2) as app:
        right = await app.complete(prompt(60), max_tokens=N_TOKENS)
        asked = asyncio.create_task(app.complete(prompt(60), max_tokens=N_TOKENS, stream=True))
        leaving = app.working_on(await app.run_reaches(10), Mode.DECODE)
        while app.coordinator().move_from(leaving.me.ident):
            await asyncio.sleep(0.02)  # as whoever drains asks again and again
        assert (await asked).said == right.said
        assert await resumes(app) == 0


async def test_an_engine_that_dies_is_left_and_said_so() -> None:
    async with TrtllmApp(prefill=0, decode=2, step_ms=2) as app:
        right = await app.complete(prompt(60), max_tokens=N_TOKENS)
        asked = asyncio.create_task(app.complete(prompt(60), max_tokens=N_TOKENS, stream=True))
        worker = app.working_on(await app.run_reaches(10), Mode.LOCAL)
        assert isinstance(worker, TrtllmWorker)
        worker.machine.die(RuntimeError("CUDA error"))
        answer: Answer = await asked
        assert answer.said == right.said
        await until(lambda: worker.engine.died is not None, LONG_S)
        with pytest.raises(Exception, match="CUDA error"):
            worker.host.check_alive()
        worker.machine.leaked = 0
        app.workers.remove(worker)
        app.dead.append(worker)


async def test_an_adapter_is_a_model_of_its_own_and_shares_no_cache() -> None:
    async with TrtllmApp(trtllm={"lora": {"sql": "/adapters/sql", "law": "/adapters/law"}}) as app:
        listed = (await app.client().send("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["tiny", "tiny:sql", "tiny:law"]
        long = prompt(8 * BLOCK_TOKENS)
        for model, cached in (
            ("tiny", 0),
            ("tiny:sql", 0),
            ("tiny:law", 0),
            ("tiny:sql", 7 * BLOCK_TOKENS),
        ):
            answer = await app.complete(long, model=model)
            assert answer.cached >= cached
            assert bool(answer.cached) == bool(cached)
            loras = {
                row["lora_request"].lora_name if row["lora_request"] is not None else None
                for pool in ("prefill", "decode")
                for row in [list(app.machine(pool).seen)[-1]]
            }
            assert loras == {model.partition(":")[2] or None}
        reply = await app.client().complete(prompt="x", model="tiny:poetry")
        assert reply.status == 404
