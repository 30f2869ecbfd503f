"""Whole workers between which running requests move: real links, real schedulers, a scripted frontend.

A worker's engine takes a step only while it has `credits` (None: any number), so a test says at which
token a request stands when something happens to it. Verbs take effect without.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from serving.config import Deadlines, EngineConfig, SimProfile
from serving.engine.base import Mode, SamplingParams
from serving.engine.core import EngineCore
from serving.engine.sequence import StepPlan
from serving.engine.sim import build_sim_engine
from serving.engine.torch.build import build_torch_engine
from serving.kv.io import KvIo
from serving.kv.local import LocalTransfer, Switchboard
from serving.kv.nixl import NixlTransfer
from serving.link import Identity, Link, dial
from serving.metrics import Registry
from serving.wire import (
    AnyMessage,
    Cancel,
    Draining,
    Ended,
    Handoff,
    Message,
    Step,
    Submit,
    pack_u32,
    unpack_u32,
    unpack_u64,
)
from serving.worker_host import WorkerHost
from tests.unit.handoff_fakes import until

BLOCK_TOKENS: Final = 8
DEADLINES = Deadlines(transfer_ms=3000, queue_ms=3000, prefill_ms=3000)
NAMESPACE = 5

Row = tuple[int, int, tuple[float, tuple[tuple[int, float], ...]] | None]  # position, token, logprobs


class Frontend:
    """What one frontend heard, in order. A token told twice or a hole fails its `stream`."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}
        self.ended: dict[int, list[Ended]] = {}
        self.draining: list[bool] = []

    def on_open(self, link: Link) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Draining):
            self.draining.append(message.on)
        if not isinstance(message, Step):
            return
        if message.tokens is not None:
            columns = message.tokens
            drawn = {
                entry.row: (round(entry.logprob, 4), tuple((t, round(p, 4)) for t, p in entry.top))
                for entry in message.logprobs or []
            }
            rows = zip(
                unpack_u64(columns.attempts),
                unpack_u32(columns.positions),
                unpack_u32(columns.tokens),
                strict=True,
            )
            for row, (attempt, position, token) in enumerate(rows):
                assert attempt not in self.ended, "a token after the end"
                self.rows.setdefault(attempt, []).append((position, token, drawn.get(row)))
        for ended in message.ended or []:
            self.ended.setdefault(ended.attempt, []).append(ended)

    def count(self, attempt: int) -> int:
        return len(self.rows.get(attempt, []))

    def stream(self, *attempts: int) -> list[Row]:
        """Those of `attempts` together, which must be one answer from position 0 on, each token once."""
        rows = [row for attempt in attempts for row in self.rows.get(attempt, [])]
        assert [position for position, _, _ in rows] == list(range(len(rows)))
        return rows

    def tokens(self, *attempts: int) -> list[int]:
        return [token for _, token, _ in self.stream(*attempts)]

    def outcome(self, attempt: int) -> str:
        """The one end of `attempt`: its reason, or `error`."""
        (ended,) = self.ended[attempt]
        return "error" if ended.error is not None else ended.reason


class Worker:
    def __init__(self, rig: Rig, name: str, wire_version: int) -> None:
        self.engine = rig.build()
        self.credits: int | None = None
        self.transfer = (
            NixlTransfer(f"{name}-{os.urandom(4).hex()}") if rig.nixl else LocalTransfer(name, rig.board)
        )
        me = Identity.fresh("worker", name)
        self.host = WorkerHost(
            me=Identity(me.kind, me.ident, me.epoch, wire_version),
            role="decode",
            engine=self.engine,
            kv_io=KvIo(self.transfer),
            key=rig.key,
            deadlines=rig.deadlines,
            registry=Registry({}),
        )
        self.address = ""
        self._schedule = self.engine._scheduler.schedule
        self.engine._scheduler.schedule = self._with_credit  # type: ignore[method-assign]

    def _with_credit(self, decode: bool = True) -> StepPlan:
        plan = self._schedule(decode)  # blocks are given out all the same
        if self.credits == 0:
            return StepPlan()
        if self.credits is not None and plan.n_tokens:
            self.credits -= 1
        return plan

    def grant(self, steps: int | None) -> None:
        """From now on so many steps."""
        self.credits = steps
        self.engine._post(lambda: None)

    @property
    def local(self) -> LocalTransfer:
        assert isinstance(self.transfer, LocalTransfer)
        return self.transfer

    @property
    def out(self) -> dict[str, int]:
        """How moves away from here ended."""
        return self.host.moves.counters.outcomes

    @property
    def came(self) -> dict[str, int]:
        """How moves to here ended."""
        return self.host.decode.moves.outcomes

    def cut_peers(self) -> None:
        """Break the links on which this worker reads."""
        for peer in list(self.host.peers._peers.values()):
            peer.link.close("cut")

    @property
    def is_free(self) -> bool:
        states = self.engine.block_states()
        assert states.conserved
        held = states.used + states.leased + states.quarantined
        return (
            not held and not self.host.busy and self.host.moves.idle and not self.engine._scheduler.n_live
        )


class Rig:
    """`async with Rig(...)`; leaving it checks that nothing is held anywhere."""

    def __init__(
        self,
        n_workers: int = 2,
        *,
        directory: Path | None = None,  # of a torch model; None: the simulated one
        nixl: bool = False,
        deadlines: Deadlines = DEADLINES,
        wire_versions: Iterable[int] = (),
        kv_bytes: int = 1 << 16,  # sim: 128 blocks
        max_batch: int = 64,
        **profile: Any,
    ) -> None:
        self.board, self.key = Switchboard(), os.urandom(32)
        self.nixl, self.deadlines = nixl, deadlines
        sim = SimProfile(context_tokens=1024, **profile)
        config = EngineConfig(
            kind="sim" if directory is None else "torch",
            dtype="float32",
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=64,
            kv_bytes=kv_bytes,
            max_batch=max_batch,
            profile=sim if directory is None else None,
        )

        def build() -> EngineCore:
            if directory is None:
                return build_sim_engine(config, sim, list(range(100, 200)), [0], "m")
            engine = build_torch_engine(config, directory)
            assert isinstance(engine, EngineCore)
            return engine

        self.build = build
        self.params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        versions = [*wire_versions, *[2] * n_workers]
        self.workers = [Worker(self, f"worker-{n}", versions[n]) for n in range(n_workers)]
        self.frontend = Frontend()
        self._references = 1 << 40  # the last attempt of one
        self.links: dict[Worker, Link] = {}
        self.prompts: dict[int, array[int]] = {}
        self.n_prompt: dict[int, int] = {}

    async def __aenter__(self) -> Rig:
        for worker in self.workers:
            worker.address = await worker.host.start("127.0.0.1")
            me = Identity.fresh("frontend", "f")
            self.links[worker] = await dial(worker.address, me, self.key, self.frontend)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self.is_free()
                assert [w.engine.counters.content_errors for w in self.workers] == [0] * len(self.workers)
        finally:
            for worker in self.workers:
                if isinstance(worker.transfer, LocalTransfer):
                    worker.transfer.faults.hang = False
                self.links[worker].close("done")
                await worker.host.stop()

    async def is_free(self) -> None:
        for worker in self.workers:
            worker.grant(None)
            await until(partial(getattr, worker, "is_free"))

    # ------------------------------------------------------------ asking

    def start(
        self,
        worker: Worker,
        attempt: int,
        prompt: array[int],
        params: SamplingParams | None = None,
        mode: Mode = Mode.LOCAL,
    ) -> None:
        self.prompts[attempt] = prompt
        self.n_prompt[attempt] = len(prompt)
        self._submit(worker, attempt, prompt, mode, params=params)

    def _submit(
        self,
        worker: Worker,
        attempt: int,
        tokens: array[int],
        mode: Mode,
        *,
        params: SamplingParams | None = None,
        handoff: Handoff | None = None,
        reserve_tokens: int = 0,
    ) -> None:
        self.links[worker].send(
            Submit(
                attempt=attempt,
                mode=mode.value,
                tokens=pack_u32(tokens),
                n_prompt=self.n_prompt[attempt],
                params=params or self.params,
                namespace=NAMESPACE,
                request_id="r",
                deadline_ms=30_000,
                handoff=handoff,
                reserve_tokens=reserve_tokens,
            )
        )

    async def stands_at(
        self,
        worker: Worker,
        attempt: int,
        prompt: array[int],
        n_generated: int,
        params: SamplingParams | None = None,
    ) -> None:
        """`attempt` runs on `worker`, drew so many tokens, and draws no more until it is granted."""
        worker.grant(0)
        self.start(worker, attempt, prompt, params)
        await until(lambda: self._scheduled(worker, attempt))
        worker.grant(-(-len(prompt) // 64) + n_generated - 1)
        await until(lambda: self.frontend.count(attempt) == n_generated)

    @staticmethod
    def _scheduled(worker: Worker, attempt: int) -> bool:
        return attempt in worker.engine._scheduler._live

    def move(
        self,
        source: Worker,
        attempt: int,
        target: Worker,
        new: int,
        *,
        known: int | None = None,  # generated tokens that the frontend has; None: all it heard
        reserve_tokens: int = 32,
        params: SamplingParams | None = None,
        epoch: int | None = None,
        live: bool = True,
    ) -> None:
        """As the frontend asks for it."""
        heard = self.frontend.rows.get(attempt, [])[:known]
        self.ask_to_move(
            (source, attempt),
            (target, new),
            self.prompts[attempt],
            heard,
            reserve_tokens=reserve_tokens,
            params=params,
            epoch=epoch,
            live=live,
        )

    def ask_to_move(
        self,
        old: tuple[Worker, int],  # with its attempt
        to: tuple[Worker, int],
        prompt: array[int],
        heard: list[Row],  # over all attempts
        *,
        reserve_tokens: int = 32,
        params: SamplingParams | None = None,
        epoch: int | None = None,
        live: bool = True,
    ) -> None:
        (source, attempt), (target, new) = old, to
        tokens = prompt + array("I", [token for _, token, _ in heard])
        self.prompts[new], self.n_prompt[new] = tokens, self.n_prompt.get(attempt, len(prompt))
        me = source.host.me
        handoff = Handoff(source.address, me.ident, epoch or me.epoch, attempt, live=live)
        self._submit(
            target, new, tokens, Mode.DECODE, params=params, handoff=handoff, reserve_tokens=reserve_tokens
        )

    def cancel(self, worker: Worker, attempt: int) -> None:
        self.links[worker].send(Cancel(attempt))

    async def connect(self, source: Worker, target: Worker) -> None:
        """The target has read from the source before: what is in flight from now on are blocks."""
        self.n_prompt[50] = self.n_prompt[51] = 9
        handoff = Handoff(source.address, source.host.me.ident, source.host.me.epoch, 50)
        self._submit(source, 50, prompt(9, salt=50), Mode.PREFILL)
        self._submit(target, 51, prompt(9, salt=50), Mode.DECODE, handoff=handoff)
        await self.ends(51)

    async def ends(self, *attempts: int) -> None:
        await until(lambda: all(attempt in self.frontend.ended for attempt in attempts))

    async def drew(self, attempt: int, n_tokens: int) -> None:
        await until(lambda: self.frontend.count(attempt) == n_tokens)

    async def reference(self, prompt: array[int], params: SamplingParams | None = None) -> list[Row]:
        """The answer of a worker where nothing moves."""
        self._references += 1
        attempt = self._references
        self.workers[-1].grant(None)
        self.start(self.workers[-1], attempt, prompt, params)
        await self.ends(attempt)
        rows = self.frontend.stream(attempt)
        del self.frontend.rows[attempt], self.frontend.ended[attempt]
        return rows


def prompt(n_tokens: int, salt: int = 0) -> array[int]:
    return array("I", [3 + (salt * 7919 + i * 31) % 300 for i in range(n_tokens)])


def held(link: Any, kinds: tuple[type, ...], stuck: list[Message] | None = None) -> Callable[[], None]:
    """Messages of `kinds` get stuck in `link` from now on; call what is returned to let them go."""
    messages: list[Message] = [] if stuck is None else stuck
    send = link.send

    def hold(message: Message) -> None:
        if isinstance(message, kinds):
            messages.append(message)
        else:
            send(message)

    link.send = hold

    def let_go() -> None:
        link.send = send
        for message in messages:
            send(message)

    return let_go
