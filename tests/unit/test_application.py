"""The whole application in one process: hand-overs, cancels, deaths of either side, health, metrics.

`App` checks at its end that nothing is in flight, booked or held anywhere, whatever the test did.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving import control_client, control_host, kept_link
from serving.engine.base import Mode, SamplingParams
from serving.kv.local import LocalTransfer
from serving.run import Run, Stage
from serving.wire import Handoff, Submit
from tests.unit.app_rig import LONG_S, Answer, App, SimWorker, prompt
from tests.unit.handoff_fakes import until

SLOW = {"step_ms": 2.0}
N_TOKENS = 150  # of an answer that something happens to


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a party that does not answer; retries come at once."""
    monkeypatch.setattr(control_host, "PULL_S", LONG_S)
    monkeypatch.setattr(control_client, "SCRAPE_S", LONG_S)
    monkeypatch.setattr(kept_link, "LAST_RETRY_S", kept_link.FIRST_RETRY_S)


async def scrape(app: App, frontend: int = 0) -> dict[tuple[str, str], float]:
    """(sample, its labels) -> value, as a scraper reads /metrics."""
    reply = await app.client(frontend).send("GET", "/metrics")
    assert reply.status == 200
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def total(scraped: dict[tuple[str, str], float], name: str, label: str = "") -> float:
    return sum(
        v for (found, labels), v in scraped.items() if found == f"kvrelay_{name}" and label in labels
    )


# ---------------------------------------------------------------- equal answers


@pytest.mark.parametrize("nixl", [False, True], ids=["memcpy", "nixl"])
async def test_handed_over_equals_local(nixl: bool) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": prompt(n, salt=n), "max_tokens": 30, "stream": stream, **how}
        for n, stream in ((1, False), (8, True), (64, False), (65, True), (500, False))
        for how in ({}, {"temperature": 1, "seed": n})
    ]
    async with App(prefill=0) as local:
        right = [(await local.complete(**fields)).said for fields in asked]
    async with App(nixl=nixl) as app:
        assert [(await app.complete(**fields)).said for fields in asked] == right
        assert [a.said for a in await asyncio.gather(*(app.complete(**f) for f in asked))] == right
        (prefill,), (decode,) = app.pool("prefill"), app.pool("decode")
        assert decode.counters.prompt_tokens_computed == 0
        assert decode.counters.content_checks > 0
        assert prefill.counters.prompt_tokens_computed > 0
    assert len(set(right)) == len(asked)


async def test_several_frontends_share_the_workers() -> None:
    async with App(prefill=2, decode=2, frontends=2) as app:
        first = [(await app.complete(prompt(40, salt), max_tokens=40)).said for salt in range(12)]
        both = await asyncio.gather(
            *(app.complete(prompt(40, salt), f, max_tokens=40) for salt in range(12) for f in (0, 1))
        )
        assert [answer.said for answer in both] == [said for said in first for _ in (0, 1)]
        # Which worker of a pool works is the router's choice; that both pools do is not.
        worked = {worker.role for worker in app.workers if worker.counters.steps > 0}
        assert worked == {"prefill", "decode"}


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("local", [False, True], ids=["handed_over", "as_predicted"])
async def test_cancelled_at_random_moments_frees_everything(local: bool) -> None:
    dice = random.Random(4)
    router = {"local_prefill": local}
    async with App(prefill=2, decode=2, frontends=2, profile={"step_ms": 1}, router=router) as app:
        clients = [app.client(n % 2) for n in range(100)]

        async def ask(number: int) -> bool:
            """Whether it got to its end."""
            client = clients[number]
            asyncio.get_running_loop().call_later(dice.uniform(0, 1), client.leave.set)
            ids = prompt(dice.choice((5, 40, 200)), salt=number % 10)
            fields = {"prompt": ids, "max_tokens": dice.choice((1, 20, 400)), "temperature": 1}
            return (await client.complete(**fields, stream=dice.random() < 0.8)).complete

        ended = await asyncio.gather(*(ask(number) for number in range(100)))
        assert 5 < sum(ended) < 95
        await app.is_idle()
        scraped = await scrape(app)
        assert total(scraped, "requests_total") == 100
        assert total(scraped, "in_flight") == total(scraped, "attempts") == total(scraped, "leases") == 0
        held = [
            total(scraped, "kv_blocks", f"state={state}") for state in ("used", "leased", "quarantined")
        ]
        assert held == [0, 0, 0]
        assert total(scraped, "kv_blocks") == sum(w.engine.memory.n_blocks for w in app.workers)


async def test_a_frontend_that_is_cut_off_leaves_nothing_behind() -> None:
    """The workers hear no cancel, only that its links broke. The other frontend's streams go on; its own
    wait until it has found the workers again."""
    async with App(prefill=2, frontends=2, profile=SLOW) as app:
        fields = {"max_tokens": N_TOKENS, "stream": True}
        kept = [asyncio.create_task(app.complete(prompt(60, n), 0, **fields)) for n in range(3)]
        cut = [asyncio.create_task(app.complete(prompt(60, n), 1, **fields)) for n in range(3)]
        await asyncio.gather(app.run_reaches(5, 0), app.run_reaches(5, 1))
        for worker in app.workers:
            for link in list(worker.host._frontends):
                if link.peer is not None and link.peer.ident == "frontend-1":
                    link.close("cut")
        undisturbed = [answer.said for answer in await asyncio.gather(*kept)]
        assert [answer.n_tokens for answer in await asyncio.gather(*kept)] == [N_TOKENS] * 3
        assert [answer.said for answer in await asyncio.gather(*cut)] == undisturbed
        await until(app.is_ready, LONG_S)
        assert (await app.complete(prompt(60), 1)).n_tokens == 12


# ---------------------------------------------------------------- workers that die


async def undisturbed(app: App, n: int) -> list[Answer]:
    return [await app.complete(prompt(60, salt), max_tokens=N_TOKENS) for salt in range(n)]


def streams(app: App, n: int) -> list[asyncio.Task[Answer]]:
    return [
        asyncio.create_task(app.complete(prompt(60, salt), max_tokens=N_TOKENS, stream=True))
        for salt in range(n)
    ]


async def resumes(app: App) -> float:
    return total(await scrape(app), "resumes_total")


@pytest.mark.parametrize("prefill", [1, 0], ids=["handed_over", "local"])
async def test_decode_dies_mid_stream_and_nothing_is_lost_or_repeated(prefill: int) -> None:
    async with App(prefill=prefill, decode=3, profile=SLOW) as app:
        right = await undisturbed(app, 4)
        asked = streams(app, 4)
        for sent in (10, 80):  # twice, on two workers
            run = await app.run_reaches(sent)
            await app.kill(app.working_on(run, run_mode(run)))
        answers = await asyncio.gather(*asked)
        assert [a.said for a in answers] == [a.said for a in right]
        assert [a.usage["prompt_tokens"] for a in answers] == [a.usage["prompt_tokens"] for a in right]
        assert await resumes(app) >= 2


def run_mode(run: Run) -> Mode:
    """Of the attempt that makes the tokens now."""
    modes = {attempt.mode for attempt in run.attempts.values()}
    return Mode.DECODE if Mode.DECODE in modes else Mode.LOCAL


async def test_sampled_streams_resume_as_the_same_streams() -> None:
    async with App(decode=2, profile=SLOW) as app:
        fields = {"temperature": 1, "seed": 11, "max_tokens": N_TOKENS}
        right = await app.complete(prompt(60), **fields)
        asked = asyncio.create_task(app.complete(prompt(60), stream=True, **fields))
        await app.kill(app.working_on(await app.run_reaches(30), Mode.DECODE))
        assert (await asked).said == right.said


async def test_prefill_dies_mid_stream_and_nobody_notices() -> None:
    async with App(prefill=1, profile=SLOW) as app:
        right = await undisturbed(app, 3)
        asked = streams(app, 3)
        await until(
            lambda: sum(len(run.sent) >= 10 for run in app.coordinator()._live) == 3, LONG_S
        )  # all are decoding
        await app.kill(app.pool("prefill")[0])
        assert [a.said for a in await asyncio.gather(*asked)] == [a.said for a in right]
        assert await resumes(app) == 0
        # From here on decode computes prompts itself.
        assert [a.said for a in await undisturbed(app, 3)] == [a.said for a in right]


async def test_prefill_dies_before_its_first_token() -> None:
    async with App(prefill=2, profile={"prefill_ms_per_token": 1}) as app:
        right = await app.complete(prompt(300), max_tokens=20)
        for number in range(2):  # the second time nobody but decode is left
            before = await resumes(app)
            asked = asyncio.create_task(
                app.complete(prompt(300, salt=0), cache_salt=str(number), max_tokens=20)
            )
            await until(lambda: any(r.stage is Stage.PREFILL for r in app.coordinator()._live), LONG_S)
            (run,) = app.coordinator()._live
            assert not run.sent
            await app.kill(app.working_on(run, Mode.PREFILL))
            assert (await asked).said == right.said
            assert await resumes(app) == before + 1


@pytest.mark.parametrize("frozen", [False, True], ids=["gone", "frozen"])
async def test_prefill_dies_while_decode_reads_from_it(frozen: bool) -> None:
    """The first token is out, its KV is not over: decode says so, and the request goes on from there.

    What a frozen owner may still send is kept away from blocks in use.
    """
    async with App(prefill=1, profile=SLOW) as app:
        right = await app.complete(prompt(300), max_tokens=N_TOKENS)
        (decode,) = app.pool("decode")
        assert isinstance(decode.transfer, LocalTransfer)
        decode.transfer.faults.hang = True
        asked = asyncio.create_task(
            app.complete(prompt(300), cache_salt="new", max_tokens=N_TOKENS, stream=True)
        )
        await app.run_reaches(1)
        await until(lambda: decode.transfer.busy, LONG_S)
        await app.kill(app.pool("prefill")[0], frozen)
        answer = await asked
        assert (decode.states.quarantined > 0) == frozen
        decode.transfer.faults.hang = False
        assert answer.said == right.said
        assert await resumes(app) == 1


async def test_every_worker_dies_and_the_stream_ends_with_an_error() -> None:
    async with App(profile=SLOW, deadlines={"queue_ms": 1500}) as app:
        asked = asyncio.create_task(
            app.client().complete(prompt=prompt(30), max_tokens=N_TOKENS, stream=True)
        )
        await app.run_reaches(10)
        for worker in list(app.workers):
            await app.kill(worker)
        reply = await asked
        assert reply.complete
        assert reply.events[-1]["error"]["code"] == "worker_lost"


async def test_a_hung_engine_is_left_and_taken_back() -> None:
    """It hangs in its first step after being idle: no beat of its own tells of that step."""
    async with App(prefill=0, decode=2, deadlines={"silence_ms": 1200}) as app:
        right = await app.complete(prompt(30), max_tokens=20)
        let_go = threading.Event()
        hung: list[SimWorker] = []

        def hang(worker: SimWorker) -> None:
            run = worker.engine._runner.run

            def hangs(plan: Any) -> Any:
                if not hung:
                    hung.append(worker)
                    let_go.wait(LONG_S)
                return run(plan)

            worker.engine._runner.run = hangs

        for worker in app.workers:
            hang(worker)
        assert (await app.complete(prompt(30), max_tokens=20, stream=True)).said == right.said
        assert len(hung) == 1
        assert app.frontends[0].variants["tiny", "main"].pools()["decode"] == 1
        steps = hung[0].counters.steps
        for _ in range(10):  # nothing goes to the one that hangs
            assert (await app.complete(prompt(30), max_tokens=20)).said == right.said
        assert hung[0].counters.steps == steps
        let_go.set()
        await until(app.is_ready, LONG_S)
        assert await resumes(app) == 1


async def test_a_worker_that_leaves_ends_its_streams_first() -> None:
    async with App(prefill=0, decode=2, profile=SLOW) as app:
        right = await undisturbed(app, 1)
        asked = streams(app, 1)
        leaving = app.working_on(await app.run_reaches(5), Mode.LOCAL)
        app.workers.remove(leaving)
        app.publish()
        app.dead.append(leaving)
        drawn = leaving.counters.tokens_generated
        for _ in range(4):
            await app.complete(prompt(20), max_tokens=2)
        assert [a.said for a in await asyncio.gather(*asked)] == [a.said for a in right]
        assert leaving.counters.tokens_generated - drawn <= N_TOKENS
        await until(lambda: not leaving.host._frontends, LONG_S)
        assert leaving.is_free
        assert await resumes(app) == 0


# ---------------------------------------------------------------- health and metrics


async def test_health_says_what_can_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.coordinator.COME_BACK_S", -1.0)  # nobody waits for the dead
    async with App() as app:
        right = await app.complete(prompt(30))

        async def health() -> tuple[int, dict[str, Any]]:
            reply = await app.client().send("GET", "/health")
            assert ("retry-after" in reply.headers) == (reply.status == 503)
            return reply.status, reply.json

        assert await health() == (200, {"status": "ok", "degraded": [], "ill": {}})
        await app.kill(app.pool("prefill")[0])
        pools = app.frontends[0].variants["tiny", "main"].pools
        await until(lambda: pools()["prefill"] == 0, LONG_S)
        missing = {"status": "degraded", "degraded": ["tiny/main/prefill"], "ill": {}}
        assert await health() == (200, missing)
        assert (await app.complete(prompt(30))).said == right.said
        await app.kill(app.pool("decode")[0])
        await until(lambda: pools()["decode"] == 0, LONG_S)
        status, body = await health()
        assert (status, body["status"]) == (503, "unavailable")
        for stream in (False, True):
            refused = await app.client().complete(prompt=prompt(30), stream=stream)
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json["error"]["code"] == "no_worker"
        for role in ("prefill", "decode"):
            worker = SimWorker(app, role, 7)
            worker.address = await worker.host.start("127.0.0.1")
            await worker.control.connect(app.control_address)
            app.workers.append(worker)
        app.publish()
        await until(app.is_ready, LONG_S)
        assert await health() == (200, {"status": "ok", "degraded": [], "ill": {}})
        assert (await app.complete(prompt(30))).said == right.said


async def test_metrics_are_complete_and_grow_whichever_frontend_is_asked() -> None:
    async with App(prefill=2, decode=2, frontends=2) as app:
        before: dict[tuple[str, str], float] = {}
        gauges = (
            "kvrelay_in_flight",
            "kvrelay_kv_blocks",
            "kvrelay_attempts",
            "kvrelay_leases",
            "kvrelay_queue",
        )
        for n in range(1, 13):
            await app.complete(prompt(40, salt=n % 5), n % 2, max_tokens=3)
            scraped = await scrape(app, (n // 2) % 2)
            assert total(scraped, "requests_total") == total(scraped, "ttft_seconds_count") == n
            assert total(scraped, "output_tokens_sum") == 3 * n
            assert total(scraped, "tokens_generated_total", "pool=prefill") == n
            assert total(scraped, "tokens_generated_total", "pool=decode") == 2 * n
            for key, value in before.items():
                assert key[0] in gauges or scraped[key] >= value, key
            before = scraped
        assert total(before, "prefix_hit_tokens_total") > 0
        assert total(before, "handoff_bytes_total") > 0
        assert total(before, "parties") == 6
        # A worker dies: what it counted stays in every sum.
        dying = next(w for w in app.pool("decode") if w.counters.tokens_generated)
        await app.kill(dying)
        await until(lambda: len(app.control.members) == 5, LONG_S)
        for frontend in (0, 1):
            after = await scrape(app, frontend)
            assert total(after, "tokens_generated_total") == total(before, "tokens_generated_total")
            assert total(after, "kv_blocks") == 3 * dying.engine.memory.n_blocks
            assert total(after, "parties") == 5


async def test_what_a_worker_does_not_know_it_refuses() -> None:
    """A submit no honest frontend sends ends its attempt and hurts nobody else."""
    async with App() as app:
        right = await app.complete(prompt(30))
        entry = app.frontends[0].variants["tiny", "main"]._entries["decode-0"]
        params = SamplingParams(max_tokens=4, seed=1)
        nowhere = Handoff("127.0.0.1:9", "nobody", 1, 1)
        entry.send(Submit(1, "decode", b"\1\0\0\0", 2, params, 0, "r", 1000))  # n_prompt beyond its tokens
        entry.send(Submit(2, "dance", b"\1\0\0\0", 1, params, 0, "r", 1000))
        entry.send(Submit(3, "decode", b"\1\0\0\0", 1, params, 0, "r", 1000, nowhere))
        assert (await app.complete(prompt(30))).said == right.said


async def test_the_access_log_names_the_variant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvrelay.access")
    async with App() as app:
        await app.complete(prompt(30))
    (record,) = [r.__dict__["fields"] for r in caplog.records if r.name == "kvrelay.access"]
    assert (record["model"], record["variant"]) == ("tiny", "main")
