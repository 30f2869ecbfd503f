"""Long answers while frontends come and go: HAProxy starts anew with each, old streams stay with the old.

`long_stream` lasts 150 s and `long_answer` is sent whole after 30 s. Soon after both began a frontend is
added, later one is taken away. HAProxy's own default cuts what is older than 120 s at its next start.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from benchmarks.fault_app import STEP_MS, App
from benchmarks.fault_client import Ask, Exchange, send
from benchmarks.fault_load import Reference, random_prompt
from benchmarks.fault_verdict import Verdict, judge

STREAM_S = 150.0
ANSWER_S = 30.0
PROMPT_TOKENS = 64
BEGUN_S = 3.0
SLACK_S = 60.0  # more than undisturbed, on a busy machine


async def long_answers(app: App, reference: Reference, *, stream_s: float = STREAM_S) -> dict[str, Any]:
    """{"long_stream": row, "long_answer": row}."""
    numbers = random.Random(5)
    stream = Ask(random_prompt(numbers, PROMPT_TOKENS), round(stream_s * 1e3 / STEP_MS))
    answer = Ask(random_prompt(numbers, PROMPT_TOKENS), round(ANSWER_S * 1e3 / STEP_MS), stream=False)
    reference.learn([stream, answer])
    sent = [await send(app.host, app.port, ask, app.model) for ask in (stream, answer)]
    await asyncio.sleep(BEGUN_S)
    frontends = app.wanted["Frontend"]
    for wanted in (frontends + 1, frontends):
        await asyncio.to_thread(app.scale, "Frontend", wanted)
        await asyncio.to_thread(
            app.wait_until, f"{wanted} frontends run", partial(_frontends_are, app, wanted)
        )
    rows = [await _row(exchange, reference, stream_s) for exchange in sent]
    await asyncio.to_thread(app.wait_until, "the frontend that was taken away has gone", app.at_strength)
    return {"long_stream": rows[0], "long_answer": rows[1]}


def _frontends_are(app: App, wanted: int) -> bool:
    return len(app.replicas("Frontend")) == wanted


async def _row(exchange: Exchange, reference: Reference, stream_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(stream_s + SLACK_S):
            await exchange.ended.wait()
    except TimeoutError:
        exchange.error = "hung"
        exchange.hang_up()
        await exchange.ended.wait()
    answer = exchange.answer()
    verdict: Verdict = judge(answer, reference.answer(answer.ask))
    return {
        "whole": verdict.completed and not verdict.wrong_usage,
        "seconds": round(answer.ended_s - answer.sent_s, 1),
        "lost": verdict.lost,
        "repeated": verdict.repeated,
        "max_gap_ms": round(verdict.gap_ms, 1) if answer.ask.stream else None,
        **({"error": answer.error} if answer.error else {}),
    }
