"""One fault from start to end: load, the fault, what came of every stream, what is left behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.fault_app import App, Samples, change, held_blocks, histogram_ms, in_flight
from benchmarks.fault_client import Answer, Ask
from benchmarks.fault_load import Heard, Load, Reference, failed, stream_asks, varied
from benchmarks.fault_scenarios import Fault, Scene
from benchmarks.fault_verdict import Row, judge, wait_after_ms
from benchmarks.instrument import ahead_of_the_server

STREAMS = 24
PROMPT_TOKENS = 64
IDLE_S = 90.0  # what is still held by then is leaked: every lease and deadline of a hand-off is shorter
# Counters to report beside a row, by their change.
COUNTED = {
    "nixl_bytes": "kvrelay_handoff_bytes_total",
    "handoff_failures": "kvrelay_handoff_failures_total",
    "resumes": "kvrelay_resumes_total",
    "content_errors": "kvrelay_kv_content_errors_total",
}


def fault_asks(tokens: int, *, streams: int = STREAMS) -> list[Ask]:
    return stream_asks(streams, prompt_tokens=PROMPT_TOKENS, max_tokens=tokens)


async def run_fault(app: App, fault: Fault, reference: Reference, asks: Sequence[Ask]) -> dict[str, Any]:
    """The row of one fault; `asks` are varied first. Raises TimeoutError where the fault itself cannot be
    brought about."""
    if fault.prepare is not None:
        await asyncio.to_thread(fault.prepare, app)
    await asyncio.to_thread(app.wait_until, "all replicas run before the fault", app.at_strength)
    reference.learn(asks)
    asks = varied(asks, reference)
    before = await asyncio.to_thread(app.samples)
    # A name of its own: nothing of an earlier run is in any cache.
    load = Load(app, f"{fault.name}-{secrets.token_hex(3)}", asks, reconnect=fault.reconnect)
    scene = Scene(app, load)
    with ahead_of_the_server():
        await load.start(tokens=app.setup.begun_tokens)
        try:
            await fault.act(scene)
        finally:
            scene.thaw()
            heard = await load.finish()
    row = _row(heard, scene, reference)
    row |= scene.notes
    if fault.restore is not None:
        await asyncio.to_thread(fault.restore, app)
    row["at_strength"] = await asyncio.to_thread(_reached, app, "strength again", app.at_strength)
    left_s, after = await asyncio.to_thread(_settled, app)
    row["leaked_blocks"], row["left_in_flight"] = held_blocks(after), in_flight(after)
    row["settled_s"] = left_s
    row |= {key: round(change(before, after, name)) for key, name in COUNTED.items()}
    for outcome in ("moved", "failed"):
        moved = change(before, after, "kvrelay_migrations_total", outcome=outcome)
        row[f"migrations_{outcome}"] = round(moved)
    pause_ms = histogram_ms(before, after, "kvrelay_migration_gap_seconds", 0.99)
    if pause_ms is not None:
        row["migration_pause_ms_p99"] = pause_ms
    return row


def _row(heard: Heard, scene: Scene, reference: Reference) -> dict[str, Any]:
    streams = [exchange.answer() for exchange in heard.streams]
    late = [exchange.answer() for exchange in heard.late]
    reference.learn([answer.ask for answer in late])
    row = Row()
    row.add(judge(answer, reference.answer(answer.ask)) for answer in streams)
    row.add((judge(answer, reference.answer(answer.ask)) for answer in late), gaps=False)
    probes = [probe.answer() for probe in heard.probes]
    wrong = [answer for answer in probes if failed(answer)]
    row.other_errors = len(wrong)
    found = asdict(row)
    found["probes"] = len(probes)
    asks = [answer.ask for answer in streams]
    found["with_stop"] = sum(ask.stop is not None for ask in asks)
    found["with_logprobs"] = sum(ask.named_tokens for ask in asks)
    if late and scene.struck_s is not None:
        # Long prompts whose prefill and transfer begin anew: their wait has a target of its own.
        found["late_wait_ms"] = round(max(wait_after_ms(answer, scene.struck_s) for answer in late), 1)
    found["probe_ttft_ms_max"] = _ttft_ms_max(probes)
    found["client_late_ms"] = heard.client_late_ms
    if heard.reconnects:
        found["reconnects"] = heard.reconnects
    errors = [answer.error for answer in [*streams, *late, *wrong] if answer.error]
    if errors:
        found["errors"] = sorted(set(errors))[:5]
    return found


def _ttft_ms_max(answers: Sequence[Answer]) -> float:
    waits = [(answer.times_s[0] - answer.sent_s) * 1e3 for answer in answers if answer.times_s]
    return round(max(waits, default=0.0), 1)


def _reached(app: App, what: str, holds: Any) -> bool:
    try:
        app.wait_until(what, holds)
    except TimeoutError:
        return False
    return True


def _settled(app: App) -> tuple[float, Samples]:
    """Until nothing is held or in flight, or IDLE_S; (seconds, the last scrape)."""
    last: Samples = {}

    def idle() -> bool:
        nonlocal last
        last = app.samples()
        return held_blocks(last) == 0 and in_flight(last) == 0

    try:
        return round(app.wait_until("nothing is held", idle, IDLE_S), 1), last
    except TimeoutError:
        return IDLE_S, last
