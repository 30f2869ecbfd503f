"""Two whole workers in one process: real links, real schedulers, simulated models, in-process transfer.

The simulated engine checks every transferred byte, so an answer means that the KV was right.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from serving.config import Deadlines, EngineConfig, SimProfile
from serving.engine.base import Mode, SamplingParams
from serving.engine.sim import build_sim_engine
from serving.kv.io import KvIo
from serving.kv.local import LocalTransfer, Switchboard
from serving.link import Identity, Link, dial
from serving.metrics import Registry
from serving.wire import (
    LAYOUT,
    AnyMessage,
    Cancel,
    Ended,
    Handoff,
    Pull,
    Step,
    Submit,
    pack_u32,
    unpack_u32,
    unpack_u64,
)
from serving.worker_host import WorkerHost
from tests.unit.handoff_fakes import until

BLOCK_TOKENS: Final = 8
CHUNK_TOKENS, NEW_TOKENS = 32, 5
KV_BYTES = 1 << 16
PROFILE = SimProfile(kv_bytes_per_token=64)


class Frontend:
    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = {}
        self.ended: dict[int, Ended] = {}

    def on_open(self, link: Link) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if not isinstance(message, Step):
            return
        if message.tokens is not None:
            columns = message.tokens
            rows = zip(
                unpack_u64(columns.attempts),
                unpack_u32(columns.positions),
                unpack_u32(columns.tokens),
                strict=True,
            )
            for attempt, position, token in rows:
                self.tokens.setdefault(attempt, {})[position] = token
        for ended in message.ended or []:
            self.ended[ended.attempt] = ended


class Worker:
    def __init__(self, board: Switchboard, role: str, key: bytes, model: str = "m") -> None:
        config = EngineConfig(
            kind="sim",
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            kv_bytes=KV_BYTES,
            profile=PROFILE,
        )
        self.engine = build_sim_engine(config, PROFILE, list(range(100, 200)), [0], model)
        self.transfer = LocalTransfer(role, board)
        self.io = KvIo(self.transfer)
        self.host = WorkerHost(
            me=Identity.fresh("worker", role),
            role=role,
            engine=self.engine,
            kv_io=self.io,
            key=key,
            deadlines=Deadlines(transfer_ms=3000, queue_ms=3000, prefill_ms=3000),
            registry=Registry({}),
        )
        self.address = ""

    def is_free(self) -> bool:
        states = self.engine.block_states()
        assert states.conserved
        return states.used == states.leased == states.quarantined == 0


class Rig:
    def __init__(self, model: str = "m") -> None:
        board, self.key = Switchboard(), os.urandom(32)
        self.prefill = Worker(board, "prefill", self.key)
        self.decode = Worker(board, "decode", self.key, model)
        self.frontend = Frontend()
        self.links: dict[Worker, Link] = {}

    async def start(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.address = await worker.host.start("127.0.0.1")
            me = Identity.fresh("frontend", "f")
            self.links[worker] = await dial(worker.address, me, self.key, self.frontend)

    async def stop(self) -> None:
        self.decode.transfer.faults.hang = False
        for worker in (self.decode, self.prefill):
            self.links[worker].close("done")
            await worker.host.stop()

    def submit(
        self,
        worker: Worker,
        attempt: int,
        mode: Mode,
        n_tokens: int,
        seed: int = 0,
        *,
        pull: Pull | None = None,
        n_prompt: int | None = None,
    ) -> None:
        me = self.prefill.host.me
        handoff = (
            Handoff(self.prefill.address, me.ident, me.epoch, attempt - 1) if mode is Mode.DECODE else None
        )
        prompt = array("I", [(seed * 7919 + i) % 5000 for i in range(n_tokens)])
        self.links[worker].send(
            Submit(
                attempt=attempt,
                mode=mode.value,
                tokens=pack_u32(prompt),
                n_prompt=n_prompt or n_tokens,
                params=SamplingParams(max_tokens=NEW_TOKENS, seed=1, ignore_eos=True),
                namespace=5,
                request_id="r",
                deadline_ms=30_000,
                handoff=handoff,
                pull=pull,
            )
        )

    def hand_off(self, attempt: int, n_tokens: int, seed: int = 0) -> None:
        """Prefill as `attempt`, decode as `attempt + 1`."""
        self.submit(self.decode, attempt + 1, Mode.DECODE, n_tokens, seed)
        self.submit(self.prefill, attempt, Mode.PREFILL, n_tokens, seed)

    def pull(self, n_tokens: int, within_ms: int = 3000) -> Pull:
        """From the prefill worker."""
        me = self.prefill.host.me
        return Pull(self.prefill.address, me.ident, me.epoch, n_tokens, within_ms)

    async def everything_is_free(self) -> None:
        await until(lambda: self.decode.is_free() and self.prefill.is_free())
        await until(lambda: self.decode.host.reader.idle and self.prefill.host.prefill.idle)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    await rig.stop()


@pytest.mark.parametrize(
    "n_tokens", [5, BLOCK_TOKENS, 3 * CHUNK_TOKENS + 1], ids=["short", "block", "chunks"]
)
async def test_large_prompt_over_chunk(rig: Rig, n_tokens: int) -> None:
    rig.hand_off(1, n_tokens)
    await until(lambda: 2 in rig.frontend.ended)
    assert rig.frontend.ended[2].error is None
    tokens = rig.frontend.tokens[1] | rig.frontend.tokens[2]
    assert sorted(tokens) == list(range(NEW_TOKENS))
    assert set(rig.frontend.tokens[1]) == {0}  # the first token comes from prefill alone
    counters = rig.decode.engine.counters
    assert counters.prompt_tokens_computed == 0  # decode_does_not_prefill
    assert counters.content_checks > 0
    assert counters.content_errors == 0
    assert rig.decode.transfer.counters.blocks == -(-n_tokens // BLOCK_TOKENS)
    await rig.everything_is_free()


async def test_second_turn_moves_only_what_is_new(rig: Rig) -> None:
    rig.hand_off(1, 64)
    await until(lambda: 2 in rig.frontend.ended)
    moved = rig.decode.transfer.counters.blocks
    rig.hand_off(3, 80)
    await until(lambda: 4 in rig.frontend.ended)
    assert rig.frontend.ended[4].error is None
    assert rig.decode.transfer.counters.blocks - moved == 2
    assert rig.decode.engine.counters.content_errors == 0
    await rig.everything_is_free()


async def test_many_at_once(rig: Rig) -> None:
    for number in range(20):
        rig.hand_off(1 + 2 * number, 40 + number, seed=number)
    await until(lambda: len([a for a in rig.frontend.ended if a % 2 == 0]) == 20, 20)
    assert [e.error for a, e in rig.frontend.ended.items() if a % 2 == 0] == [None] * 20
    assert rig.decode.engine.counters.content_errors == 0
    await rig.everything_is_free()


async def test_transfer_post_failure_told(rig: Rig) -> None:
    rig.hand_off(1, 8)
    await until(lambda: 2 in rig.frontend.ended)
    rig.decode.transfer.faults.failing_posts = 1
    rig.hand_off(3, 40, seed=3)
    await until(lambda: 4 in rig.frontend.ended)
    assert "not posted" in (rig.frontend.ended[4].error or "")
    assert rig.frontend.ended[4].retryable
    await rig.everything_is_free()


async def test_cancel_while_reading_keeps_the_blocks_in_quarantine(rig: Rig) -> None:
    rig.hand_off(1, 8)  # connects
    await until(lambda: 2 in rig.frontend.ended)
    rig.decode.transfer.faults.hang = True
    rig.hand_off(3, 36, seed=3)
    await until(lambda: rig.decode.transfer.busy)
    rig.links[rig.decode].send(Cancel(4))
    await until(lambda: rig.decode.engine.block_states().quarantined == 5)
    rig.decode.transfer.faults.hang = False
    await rig.everything_is_free()


async def test_another_layout_is_told_to_the_frontend() -> None:
    rig = Rig(model="another")
    await rig.start()
    rig.hand_off(1, 40)
    await until(lambda: 2 in rig.frontend.ended)
    ended = rig.frontend.ended[2]
    assert "layout" in (ended.error or "")
    assert (ended.reason, ended.retryable) == (LAYOUT, True)
    rig.links[rig.prefill].send(Cancel(1))  # as the frontend would
    await rig.everything_is_free()
    await rig.stop()
