"""Troubles that users of TensorRT-LLM reported, replayed on the fake; each test has the report's number.

Without a prefix a number is an issue or pull request of NVIDIA/TensorRT-LLM. What is fixed there stays
tested here: a deployment may run any version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serving.config import Parallel, load_config
from serving.engine.base import AttemptId, EngineDied, Mode
from serving.engine.trtllm import aborts, polled, watchdog
from serving.engine.trtllm.placement import reserved
from serving.errors import ConfigError
from tests.fake_trtllm.contract import PROFILES
from tests.unit.app_rig import LONG_S
from tests.unit.app_rig import prompt as plain_prompt
from tests.unit.handoff_fakes import until
from tests.unit.test_application import resumes, scrape, total
from tests.unit.trtllm_app import TrtllmApp
from tests.unit.trtllm_rig import NAMESPACE, Heard, prompt, running, work

versions = pytest.mark.parametrize("version", PROFILES)
QUICK = {"transfer_timeout_ms": 300.0, "transfer_ms_per_1k_tokens": 0.0}


@contextmanager
def pair(version: str, directory: Path, **section: Any) -> Iterator[tuple[Heard, Heard]]:
    """A prefill and a decode engine."""
    with (
        running(version, directory / "p", "prefill", **section) as prefill,
        running(version, directory / "d", **section) as decode,
    ):
        yield prefill, decode


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


# ---------------------------------------------------------------- errors


@versions
def test_13119_a_requests_own_error_ends_that_request(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.machine.knobs.request_errors = 1
        heard.engine.submit(work(1, prompt(20), max_tokens=20))
        heard.engine.submit(work(2, prompt(21), max_tokens=20))
        heard.until(lambda: heard.failure(1) and heard.reason(2))
        assert heard.failure(1) == ("the request's own fault", False)
        assert len(heard.tokens(2)) == 20
        assert heard.engine.died is None


@versions
@pytest.mark.parametrize("how", ["raises", "fatal_flag", "refuses"])
def test_12909_a_crash_inside_is_the_engines_end(
    version: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accounting error kills its executor; iterators may hang, so the flag is looked at."""
    monkeypatch.setattr("serving.engine.trtllm.engine.LOOK_S", 0.05)
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.engine.submit(work(1, prompt(20), max_tokens=500))
        heard.engine.submit(work(2, prompt(21), Mode.DECODE))
        heard.until(lambda: heard.tokens(1))
        error = RuntimeError("Assertion failed: reused blocks")
        if how == "raises":
            (request,) = heard.machine._running
            from tests.fake_trtllm.machine import Response

            request.output._push(Response(error=error))
        elif how == "fatal_flag":
            heard.machine.die(error)
        else:
            heard.machine.stopped = True
            heard.engine.submit(work(3, prompt(22)))
        heard.until(lambda: heard.engine.died)
        heard.until(lambda: heard.failure(1) and heard.failure(2))
        assert [heard.failure(n)[1] for n in (1, 2)] == [True, True]  # type: ignore[index]
        with pytest.raises(EngineDied):
            heard.engine.submit(work(4, prompt(20)))
        heard.engine.stop()
        assert not heard.machine.shut_down_when_fatal  # its own shutdown may hang: nobody calls it


@versions
@pytest.mark.parametrize("how", ["cancelled", "timed_out"])
def test_an_end_that_nobody_asked_for_goes_elsewhere(version: str, how: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        setattr(heard.machine.knobs, how, 1)
        heard.engine.submit(work(1, prompt(20)))
        heard.until(lambda: heard.failure(1))
        failure = heard.failure(1)
        assert failure is not None
        assert failure[1]


@versions
def test_10810_an_abort_with_logprobs(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.engine.submit(work(1, prompt(20), max_tokens=500, logprobs=3))
        heard.until(lambda: len(heard.tokens(1)) > 5)
        heard.engine.cancel(AttemptId(1))
        heard.until(lambda: not heard.machine._running)
        assert len(heard.local(2, prompt(20), logprobs=3)) == 6


# ---------------------------------------------------------------- events


@versions
def test_14882_15522_an_engine_without_events_is_said_so(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(polled, "SILENT_PROMPTS", 3)
    caplog.set_level(logging.WARNING)
    with running(version, tmp_path) as heard:
        heard.machine.knobs.events_off = True
        for number in range(1, 6):
            heard.local(number, prompt(30, number))
        assert [r.message for r in caplog.records if "no KV event" in r.message] == [
            "3 prompts were computed and the engine told no KV event: "
            "the router goes by its own predictions for this worker"
        ]


async def test_14882_the_router_goes_by_its_predictions_without_events() -> None:
    # The fake computes in no time, so a policy that weighs time would not care what is cached.
    async with TrtllmApp(prefill=2, router={"local_prefill": False, "policy": "sticky"}) as app:
        caches = app.coordinator()._router.caches
        caches._silent_s = 0.0
        for number in range(2):
            app.machine("prefill", number).knobs.events_off = True

        async def placed(text: str) -> str:
            answer = await app.complete(text, max_tokens=4)
            return str(answer.reply.headers["x-kvrelay-prefill"])

        turn = 0
        while len(caches.silent) < 2:  # each is given a few prompts, and tells nothing
            turn += 1
            assert turn < 100
            await placed(plain_prompt(200, 100 + turn))
            app.frontends[0].variants["tiny", "main"].sweep()
        home = await placed(plain_prompt(200))
        for n in range(4):
            assert await placed(plain_prompt(200) + plain_prompt(30, n + 1)) == home


@versions
def test_3543_a_missing_parent_is_worked_out(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        heard.local(1, prompt(40))
        heard.until(heard.stored)
        before = {name for run in heard.engine.events.chains() for name in run.hashes}
        heard.machine.knobs.no_parents = True
        longer = prompt(40) + prompt(40, 5)
        heard.local(2, longer)
        heard.until(lambda: len(heard.engine.events._held) >= 9)
        from array import array

        from kvrouter.hashing import block_hashes

        whole = block_hashes(array("I", longer), 8, NAMESPACE)
        told = {name for run in heard.engine.events.chains() for name in run.hashes}
        assert before < told
        assert set(whole[:9]) <= told  # chained to what was there, not to nothing


@versions
def test_4666_a_poll_that_crashes_does_not_stop_generation(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        heard.machine.knobs.poll_errors = 3
        heard.until(lambda: heard.engine._polled._pollers[0].errors == 3)
        assert len(heard.local(1, prompt(30))) == 6
        heard.until(heard.stored)  # and it is polled again
        heard.until(lambda: heard.engine.counters.poll_errors == 3)
        assert heard.engine.died is None


@versions
def test_dynamo_711_a_full_event_buffer_is_a_gap(version: str, tmp_path: Path) -> None:
    """An overflow is silent: only the numbers tell. The buffer is large, and what was known is cleared."""
    with running(version, tmp_path) as heard:
        assert heard.engine._llm.args.kv_cache_config.event_buffer_max_size == 100_000
        heard.local(1, prompt(40))
        heard.until(heard.stored)
        known = {name for run in heard.engine.events.chains() for name in run.hashes}
        heard.machine.knobs.drop_events = 1
        heard.local(2, prompt(40, 1))
        heard.local(3, prompt(40, 2))
        heard.until(lambda: known <= set(heard.removed()))
        assert heard.engine.counters.event_gaps >= 1
        heard.until(lambda: heard.engine.events._held)  # what came after it is known


@versions
def test_restarted_events_clear_what_was_known(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        heard.local(1, prompt(40))
        heard.until(heard.stored)
        heard.machine.restart_events()
        heard.local(2, prompt(40, 1))
        heard.until(lambda: heard.engine.counters.event_gaps)


# ---------------------------------------------------------------- placement


def test_6507_unequal_layouts_need_a_comparison_first() -> None:
    """TP2 to TP1 gave wrong text on A100: a pair of layouts is allowed by name."""

    def args(pairs: list[str]) -> dict[str, Any]:
        engine = {"kind": "tensorrt_llm", "trtllm": {"topology_pairs": pairs}}
        variant = {
            "weights": "w",
            "engine": engine,
            "prefill": {"gpus": 2, "parallel": {"tensor": 2}},
            "decode": {"gpus": 1},
        }
        return {"models": [{"name": "m", "variants": [variant]}]}

    with pytest.raises(ConfigError, match="tp2pp1>tp1pp1"):
        load_config(args([]))
    with pytest.raises(ConfigError, match="allowed: prefill>decode"):
        load_config(args(["2 to 1"]))
    assert load_config(args(["tp2pp1>tp1pp1"]))


def test_10038_10235_gpus_are_given_by_ray_alone() -> None:
    """Nothing of ours sets CUDA_VISIBLE_DEVICES; a replica reserves what its engine uses."""
    source = Path(__file__).parents[2] / "serving" / "engine" / "trtllm"
    text = "".join(path.read_text() for path in source.glob("*.py"))
    assert "CUDA_VISIBLE_DEVICES" not in text
    config = load_config(
        {
            "models": [
                {
                    "name": "m",
                    "variants": [
                        {
                            "weights": "w",
                            "engine": {"kind": "tensorrt_llm"},
                            "parallel": {"tensor": 4},
                            "prefill": {"gpus": 4},
                            "decode": {"gpus": 4},
                        }
                    ],
                }
            ]
        }
    )
    pool = config.models[0].variants[0].decode
    assert reserved(pool, Parallel(4), "mpi")[0]["num_gpus"] == 4
    with pytest.raises(ConfigError, match=r"decode\.gpus = 1; allowed: 2"):
        load_config(
            {
                "models": [
                    {
                        "name": "m",
                        "variants": [
                            {
                                "weights": "w",
                                "engine": {"kind": "tensorrt_llm"},
                                "parallel": {"tensor": 2},
                                "prefill": {"gpus": 2},
                                "decode": {"gpus": 1},
                            }
                        ],
                    }
                ]
            }
        )


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
