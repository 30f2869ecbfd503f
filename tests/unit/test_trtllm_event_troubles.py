"""Events that are missing, lost or half said, as users of TensorRT-LLM reported them, replayed on the fake.

Each test has the report's number, as in test_trtllm_transfer_troubles.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from serving.engine.trtllm import polled
from tests.unit.app_rig import prompt as plain_prompt
from tests.unit.trtllm_app import TrtllmApp
from tests.unit.trtllm_rig import NAMESPACE, prompt, running, versions


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
