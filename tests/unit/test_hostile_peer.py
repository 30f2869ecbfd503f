"""Peers that have the link key and send what no honest one does: they end their link, and nothing else."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest

from serving.engine.base import SamplingParams
from serving.errors import FrameRefused
from serving.kv.reader import _check
from serving.link import Identity, Link, dial
from serving.step_check import check_step
from serving.wire import (
    AnyMessage,
    Begun,
    Cancel,
    Chunk,
    Ended,
    Family,
    Handoff,
    Lend,
    LoadReport,
    Logprobs,
    MetricsPush,
    Peers,
    Pull,
    Register,
    Sample,
    SnapshotRequest,
    Step,
    Submit,
    Tokens,
    loan_of,
    pack_u32,
    pack_u64,
)
from tests.unit.app_rig import CONTEXT_TOKENS, LONG_S, App, SimWorker, prompt
from tests.unit.coordinator_rig import Bench
from tests.unit.handoff_fakes import until

GOOD = Submit(
    attempt=77,
    mode="local",
    tokens=pack_u32([2, 3, 4]),
    n_prompt=3,
    params=SamplingParams(max_tokens=4, seed=1),
    namespace=1,
    request_id="r",
    deadline_ms=10_000,
)


class Peer:
    def __init__(self) -> None:
        self.messages: list[AnyMessage] = []
        self.lost = ""

    def on_open(self, link: Link) -> None: ...

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost = reason

    @property
    def ended(self) -> list[Ended]:
        return [e for m in self.messages if isinstance(m, Step) for e in m.ended or ()]


async def intrude(app: App, to: SimWorker | str, kind: str) -> tuple[Link, Peer]:
    peer = Peer()
    address = to if isinstance(to, str) else to.address
    link = await dial(address, Identity.fresh(kind, "intruder"), app.key, peer, timeout_s=LONG_S)
    return link, peer


def changed(**changes: Any) -> Submit:
    return msgspec.structs.replace(GOOD, **changes)


def params(**changes: Any) -> Submit:
    return changed(params=msgspec.structs.replace(GOOD.params, **changes))


SUBMITS = {
    "mode": changed(mode="root"),
    "odd-bytes": changed(tokens=b"\1\2\3"),
    "no-token": changed(tokens=b"", n_prompt=0),
    "n_prompt": changed(n_prompt=4),
    "context": changed(tokens=pack_u32([2] * CONTEXT_TOKENS), n_prompt=3),
    "loan": changed(attempt=loan_of(5)),
    "decode-alone": changed(mode="decode"),
    "priority": changed(priority=-(1 << 62)),
    "max_tokens": params(max_tokens=0),
    "min_tokens": params(min_tokens=-1),
    "seed": params(seed=-1),
    "nan": params(temperature=math.nan),
    "cold": params(temperature=-1.0),
    "top_p": params(top_p=0.0),
    "top_k": params(top_k=0),
    "min_p": params(min_p=2.0),
    "penalty": params(presence_penalty=math.inf),
    "repetition": params(repetition_penalty=0.0),
    "bias-id": params(logit_bias={-1: 1.0}),
    "bias-nan": params(logit_bias={1: math.nan}),
    "biases": params(logit_bias=dict.fromkeys(range(5000), 1.0)),
    "stop-id": params(stop_token_ids=(-1,)),
    "stop-ids": params(stop_token_ids=tuple(range(5000))),
    "logprobs": params(logprobs=10**6),
}


async def test_a_malformed_submit_is_answered_and_hurts_nobody() -> None:
    async with App() as app:
        right = await app.complete(prompt(30))
        worker = app.pool("decode")[0]
        link, peer = await intrude(app, worker, "frontend")
        for attempt, (name, submit) in enumerate(SUBMITS.items(), start=1):
            if submit.attempt == GOOD.attempt:
                submit.attempt = attempt
            link.send(submit)
            await until(lambda: len(peer.ended) == attempt, LONG_S)  # noqa: B023  (it is awaited here)
            assert peer.ended[-1].error, name
        assert peer.lost == ""
        assert (await app.complete(prompt(30))).said == right.said
        link.close("done")


@pytest.mark.parametrize(
    "submit",
    [
        changed(attempt=-1),
        changed(namespace=-1),
        changed(deadline_ms=-1),
        changed(pull=Pull("127.0.0.1:1", "x", 1, -8, 10)),
        changed(handoff=Handoff("127.0.0.1:1", "x", 1, -1), mode="decode"),
        Peers([None] * 5000),  # type: ignore[list-item]
    ],
    ids=["attempt", "namespace", "deadline", "pull", "handoff", "peers"],
)
async def test_what_cannot_be_read_ends_the_link(submit: AnyMessage) -> None:
    async with App() as app:
        link, peer = await intrude(app, app.pool("decode")[0], "frontend")
        link.send(submit)
        await until(lambda: peer.lost != "", LONG_S)
        await app.complete(prompt(30))


async def test_a_flood_of_all_kinds_leaves_the_worker_well() -> None:
    async with App() as app:
        right = await app.complete(prompt(30))
        worker = app.pool("prefill")[0]
        link, peer = await intrude(app, worker, "frontend")
        reader, answers = await intrude(app, worker, "worker")
        for n in range(300):
            link.send(SnapshotRequest())
            link.send(Cancel(n))
            reader.send(Lend(n, 1, b"\0" * 8, 0))  # not the name of a loan
            reader.send(Lend(loan_of(n), 1, b"\0" * 4 * (CONTEXT_TOKENS + 1), 0))
            reader.send(Lend(loan_of(1000 + n), 1, b"\0" * 7, 0))
        await until(lambda: sum(type(m).__name__ == "Refused" for m in answers.messages) == 900, LONG_S)
        await until(lambda: any(type(m).__name__ == "Snapshot" for m in peer.messages), LONG_S)
        assert (await app.complete(prompt(30))).said == right.said
        link.close("done")
        reader.close("done")


async def test_a_second_submit_of_a_name_in_use_is_ignored() -> None:
    async with App() as app:
        worker = app.pool("prefill")[0]
        link, peer = await intrude(app, worker, "frontend")
        waiting = changed(mode="prefill", tokens=pack_u32(prompt(30)), n_prompt=30)
        link.send(waiting)
        await until(lambda: worker.states.leased > 0, LONG_S)
        link.send(waiting)
        link.send(changed(attempt=78))
        await until(lambda: 78 in [e.attempt for e in peer.ended], LONG_S)
        assert worker.states.leased > 0
        assert 77 not in [e.attempt for e in peer.ended]
        link.send(Cancel(77))
        await until(lambda: worker.states.leased == 0, LONG_S)
        link.close("done")


# ---------------------------------------------------------------- worker -> frontend

ONE = Tokens(pack_u64([5]), pack_u32([0]), pack_u32([9]))
LOAD = LoadReport(1, 0, 0, 0, 1, 1, 1.0)
STEPS = {
    "short-positions": Step(tokens=Tokens(ONE.attempts, b"", ONE.tokens)),
    "short-attempts": Step(tokens=Tokens(pack_u32([5]), ONE.positions, ONE.tokens)),
    "odd-tokens": Step(tokens=Tokens(b"", b"", b"\1\2\3")),
    "row": Step(tokens=ONE, logprobs=[Logprobs(1, 0.0, [])]),
    "row-of-none": Step(logprobs=[Logprobs(0, 0.0, [])]),
    "reason": Step(ended=[Ended(5, "bored")]),
    "role": Step(load=msgspec.structs.replace(LOAD, role="root")),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_at_odds_with_itself_is_refused(step: Step) -> None:
    with pytest.raises(FrameRefused):
        check_step(step)


def test_an_honest_step_passes() -> None:
    check_step(Step())
    check_step(
        Step(
            tokens=ONE,
            logprobs=[Logprobs(0, 0.0, [])],
            begun=[Begun(5, 0)],
            ended=[Ended(5, "stop"), Ended(6, "", "failed")],
            load=LOAD,
        )
    )


async def test_a_worker_that_sends_nonsense_loses_its_link_and_no_request() -> None:
    async with App(decode=2, profile={"step_ms": 3.0}) as app:
        right = await app.complete(prompt(30), max_tokens=200)
        asking = asyncio.ensure_future(app.complete(prompt(30), max_tokens=200))
        run = await app.run_reaches(3)
        worker = next(
            w for w in app.pool("decode") if any(a.worker == w.me.ident for a in run.attempts.values())
        )
        for step in STEPS.values():
            for link in list(worker.host._frontends):
                link.send(step)
            await until(lambda: len(worker.host._frontends) == 0, LONG_S)
            await until(lambda: len(worker.host._frontends) == 1, LONG_S)
        assert (await asking).said == right.said
        await until(app.is_ready, LONG_S)


def test_tokens_without_the_logprobs_asked_for_are_had_elsewhere() -> None:
    bench = Bench(prefill=0, decode=2)
    _, sink = bench.start(logprobs=0)
    first = next(ident for ident in ("d0", "d1") if bench.submits(ident))
    other = "d1" if first == "d0" else "d0"
    bench.tokens(bench.submits(first)[0].attempt, 0, 10, 11)
    assert sink.tokens == []
    assert bench.cancels(first)
    (again,) = bench.submits(other)
    for row, token in enumerate((10, 11, 12, 13)):
        columns = Tokens(pack_u64([again.attempt]), pack_u32([row]), pack_u32([token]))
        bench.coordinator.on_step(Step(tokens=columns, logprobs=[Logprobs(0, -0.5, [])]))
    assert sink.tokens == [10, 11, 12, 13]
    assert len(sink.logprobs) == 4


def test_tokens_beyond_what_was_asked_for_reach_nobody() -> None:
    bench = Bench(prefill=0)
    run, sink = bench.start(max_tokens=2)
    attempt = bench.submits("d0")[0].attempt
    bench.tokens(attempt, (1 << 32) - 5, 1, 2, 3)
    bench.tokens(attempt, 0, 10, 11, 12, 13, ended="length")
    assert sink.tokens == [10, 11]
    assert run.early == {}
    bench.check_idle()


# ---------------------------------------------------------------- party -> control


async def test_a_party_whose_metrics_are_nonsense_hides_nobody_elses() -> None:
    async with App() as app:
        link, _ = await intrude(app, app.control_address, "worker")
        nonsense = [
            Family("kvrelay_x", "no-such-type", "", []),
            Family("not a name", "gauge", "", [Sample("", {"a b": "\n"}, math.nan)]),
            Family("", "counter", "", [Sample("_total", {}, math.inf)]),
        ]
        link.send(Register("worker", "intruder", {}, None))
        link.send(MetricsPush(0, nonsense))
        await until(lambda: any(m.ident == "intruder" for m in app.control.members), LONG_S)
        reply = await app.client().send("GET", "/metrics")
        assert reply.status == 200
        assert b"kvrelay_requests_total" in reply.body
        link.close("done")


# ---------------------------------------------------------------- owner -> reader


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, 0, b"\1\2\3", False, 1, 1000),
        Chunk(1, 0, b"", True, 1, 1000, token=1 << 32),
        Chunk(1, 0, b"", True, 1, 1000, token=1, tokens=b"\1"),
    ],
    ids=["blocks", "token", "tokens"],
)
def test_a_malformed_chunk_is_refused(chunk: Chunk) -> None:
    with pytest.raises(FrameRefused):
        _check(chunk)
