"""Hand-overs that never end and cancels, as users of TensorRT-LLM reported them, replayed on the fake.

Each test has the report's number. Without a prefix it is an issue or pull request of NVIDIA/TensorRT-LLM.
What is fixed there stays tested here: a deployment may run any version.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serving.engine.base import AttemptId, EngineDied
from serving.engine.trtllm import aborts, watchdog
from tests.unit.app_rig import LONG_S
from tests.unit.app_rig import prompt as plain_prompt
from tests.unit.handoff_fakes import until
from tests.unit.test_application import resumes, scrape, total
from tests.unit.trtllm_app import TrtllmApp
from tests.unit.trtllm_rig import pair, prompt, running, versions, work

QUICK = {"transfer_timeout_ms": 300.0, "transfer_ms_per_1k_tokens": 0.0}


# ---------------------------------------------------------------- hand-overs that never end


@versions
def test_17665_a_lost_completion_notice_is_a_deadline(version: str, tmp_path: Path) -> None:
    with pair(version, tmp_path, **QUICK) as (prefill, decode):
        decode.machine.knobs.lost_notices = 1
        decode.decode(2, prompt(20), prefill.prefill(1, prompt(20)))
        decode.until(lambda: decode.failure(2))
        failure = decode.failure(2)
        assert failure is not None
        assert "not here within 300 ms" in failure[0]
        assert failure[1]  # another decode worker may well get it
        assert decode.engine.counters.lost_transfers == 1
        assert decode.machine.aborts_in_transfer == 0
        # The engine goes on with others.
        decode.decode(4, prompt(20), prefill.prefill(3, prompt(20)))
        decode.until(lambda: decode.reason(4))


async def test_17665_the_request_goes_on_elsewhere() -> None:
    async with TrtllmApp(decode=2, trtllm=QUICK, step_ms=1) as app:
        right = await app.complete(plain_prompt(60), max_tokens=30)
        for number in range(2):
            app.machine("decode", number).knobs.lost_notices = 1
        asked = [app.complete(plain_prompt(60), max_tokens=30, stream=True) for _ in range(2)]
        assert [a.said for a in await asyncio.gather(*asked)] == [right.said] * 2
        scraped = await scrape(app)
        assert total(scraped, "engine_lost_transfers_total") == 2
        assert await resumes(app) >= 2
        for number in range(2):  # the two that never ended keep their blocks: let them go
            for request in list(app.machine("decode", number)._running):
                request.arrives_s = 0.0


@versions
def test_12542_a_block_evicted_before_its_send_is_the_same_deadline(version: str, tmp_path: Path) -> None:
    with pair(version, tmp_path, **QUICK) as (prefill, decode):
        chunk = prefill.prefill(1, prompt(20))
        prefill.machine.forget_cache()
        decode.machine.knobs.lost_notices = 1  # what is sent no more never arrives
        decode.decode(2, prompt(20), chunk)
        decode.until(lambda: decode.failure(2))
        again = prefill.prefill(3, prompt(20))  # a fresh prefill, under a new id
        assert again.state != chunk.state
        decode.decode(4, prompt(20), again)
        decode.until(lambda: decode.reason(4))


@versions
def test_14414_15363_no_wait_is_without_a_bound(version: str, tmp_path: Path) -> None:
    """Every step of an attempt has an end: even one whose engine stops in mid-transfer."""
    with pair(version, tmp_path, **QUICK) as (prefill, decode):
        chunk = prefill.prefill(1, prompt(20))
        decode.machine.knobs.hang = True
        decode.decode(2, prompt(20), chunk)
        decode.until(lambda: decode.failure(2))
        decode.machine.knobs.hang = False


@versions
def test_13868_15152_long_prompts_have_longer(version: str, tmp_path: Path) -> None:
    section = {"transfer_timeout_ms": 250.0, "transfer_ms_per_1k_tokens": 1000.0}
    with pair(version, tmp_path, **section) as (prefill, decode):
        assert decode.engine._llm.args.cache_transceiver_config.kv_transfer_timeout_ms == 250 + 1024
        decode.machine.knobs.lost_notices = 2
        decode.decode(2, prompt(20), prefill.prefill(1, prompt(20)))
        decode.decode(4, prompt(600), prefill.prefill(3, prompt(600)))
        decode.until(lambda: decode.failure(4))
        short, long = decode.failure(2), decode.failure(4)
        assert short is not None
        assert long is not None
        assert "within 270 ms" in short[0]
        assert "within 850 ms" in long[0]


# ---------------------------------------------------------------- cancels


@versions
def test_13056_13713_a_cancel_waits_until_the_transfer_is_over(version: str, tmp_path: Path) -> None:
    with pair(version, tmp_path) as (prefill, decode):
        decode.machine.knobs.transfer_s = 60.0
        decode.decode(2, prompt(20), prefill.prefill(1, prompt(20)), max_tokens=500)
        decode.until(lambda: decode.machine._running)
        decode.engine.cancel(AttemptId(2))
        decode.until(lambda: decode.engine.counters.deferred_aborts)
        assert decode.machine.aborts_in_transfer == 0
        decode.machine._running[0].arrives_s = 0.0
        decode.until(lambda: not decode.machine._running)  # aborted, long before 500 tokens
        assert decode.tokens(2) == {}
        assert decode.reason(2) is None
        assert decode.failure(2) is None
        assert not decode.machine.knobs.hang
        decode.until(lambda: not decode.engine._abandoned)


@versions
def test_13056_bursts_of_cancels_are_spread(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "INTERVAL_S", 0.002)
    times: list[float] = []
    with running(version, tmp_path, fake={"step_ms": 5, "blocks": 4096}) as heard:
        real = heard.machine.abort

        def abort(request: Any) -> None:
            times.append(heard.engine._loop.time())
            real(request)

        heard.machine.abort = abort  # type: ignore[method-assign]
        for number in range(1, 21):
            heard.engine.submit(work(number, prompt(200, number), max_tokens=500))
        heard.until(lambda: all(heard.tokens(n) for n in range(1, 21)))
        for number in range(1, 21):
            heard.engine.cancel(AttemptId(number))
        heard.until(lambda: not heard.machine._running)
        assert len(times) == 20
        assert min(b - a for a, b in pairwise(times)) >= 0.0015
        heard.until(lambda: heard.machine.held_blocks == 0)


@versions
def test_12313_a_cancel_that_leaks_kv_is_noticed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP health would go on saying 200 for ever."""
    monkeypatch.setattr(watchdog, "LEAK_S", 0.05)
    monkeypatch.setattr("serving.engine.trtllm.engine.LOOK_S", 0.05)
    with running(version, tmp_path, fake={"step_ms": 1, "blocks": 64}) as heard:
        heard.machine.knobs.leak_cancelled = True
        for number in range(1, 4):
            heard.engine.submit(work(number, prompt(200, number), max_tokens=500, namespace=number))
            heard.until(lambda number=number: len(heard.tokens(number)) > 20)  # type: ignore[misc]
            heard.engine.cancel(AttemptId(number))
            heard.until(lambda: not heard.machine._running)
        heard.machine.leaked = 62  # and so on, for a day
        heard.local(9, prompt(5), max_tokens=2)
        heard.until(lambda: heard.engine.died)
        assert "2 of 64 blocks are free with nothing in flight: they leaked" in str(heard.engine.died)
        with pytest.raises(EngineDied):
            heard.engine.submit(work(10, prompt(5)))


@versions
def test_11795_12640_12208_stuck_generations_get_the_worker_replaced(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.engine.trtllm.engine.LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "MOST_ABANDONED", 3)
    with pair(version, tmp_path, **QUICK) as (prefill, decode):
        decode.machine.knobs.lost_notices = 3
        for number in range(3):
            decode.decode(100 + number, prompt(20), prefill.prefill(number + 1, prompt(20)))
            decode.engine.cancel(AttemptId(100 + number))
        decode.until(lambda: decode.engine.died)
        assert "3 transfers never ended" in str(decode.engine.died)


@versions
def test_12208_a_step_that_never_comes_gets_the_worker_replaced(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.engine.trtllm.engine.LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "STUCK_S", 0.2)
    with running(version, tmp_path) as heard:
        heard.local(1, prompt(20))
        heard.machine.knobs.hang = True
        heard.engine.submit(work(2, prompt(20)))
        heard.until(lambda: heard.failure(2))
        failure = heard.failure(2)
        assert failure is not None
        assert failure[1]  # on another worker
        assert "no iteration for" in str(heard.engine.died)


# ---------------------------------------------------------------- placement


async def test_dynamo_5827_cancels_are_on_and_hurt_nobody() -> None:
    """Another server switched aborts off for this engine; here they wait for the right moment instead."""
    async with TrtllmApp(step_ms=1) as app:
        app.machine("decode").knobs.transfer_s = 0.05
        clients = [app.client() for _ in range(10)]
        asked = [
            asyncio.create_task(
                client.complete(prompt=plain_prompt(100, n), max_tokens=400, stream=True, temperature=0)
            )
            for n, client in enumerate(clients)
        ]
        await app.run_reaches(1)
        for client in clients:
            client.leave.set()
        await asyncio.gather(*asked)
        await app.is_idle()
        assert app.machine("decode").aborts_in_transfer == 0
        assert (await app.complete(plain_prompt(60))).n_tokens == 12
        await until(lambda: app.machine("decode").held_blocks == 0, LONG_S)
