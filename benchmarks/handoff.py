"""What does it cost to hand a prompt's KV from one worker to another?

    python -m benchmarks.handoff --json [--engine torch] [--dtype float32] [--prompts 128 1024] [--rounds 3]

Two processes, each a whole worker (engine, scheduler, NIXL agent, links over loopback); this process plays
the frontend. One prompt at a time: prefill on one, decode on the other. By prompt length, medians:

    prefill_ms   start of the prompt's first step to the end of its last, on the prefill worker
    tail_ms      from there to the start of the first decode step on the other worker
    gbps         GB a second of the reads themselves, post to end
    descriptors  blocks read, one descriptor each

`exact`: the tokens after every first hand-off equal those of a local run without any cached block (to be
expected of float32). `--json` prints one object, else there is a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, cast

# OpenMP reads these when torch is loaded: threads that wait must not burn the core others need.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"

from benchmarks.report import COUNT, Progress, command
from serving.config import Deadlines, EngineConfig, SimProfile, Variant
from serving.engine.base import Engine, Mode, SamplingParams, StepOutput
from serving.link import Identity, Link, dial
from serving.wire import AnyMessage, Handoff, Step, Submit, pack_u32, unpack_u32, unpack_u64

NEW_TOKENS = 12
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000  # plain words: no special token among random prompts
KV_BYTES = 640 << 20
WARM_UP_TOKENS = 64
START_S = 120.0
REQUEST_S = 120.0
SIM = SimProfile(step_ms=2, prefill_ms_per_token=0.5, kv_bytes_per_token=23_040)


@dataclass(slots=True)
class Clock:
    """What one worker saw of the attempts, on CLOCK_MONOTONIC, which all processes share."""

    began_s: dict[int, float] = field(default_factory=dict)  # start of the attempt's first step
    complete_s: dict[int, float] = field(default_factory=dict)  # end of the step that ended its prompt
    decoding_s: dict[int, float] = field(
        default_factory=dict
    )  # start of the step that drew its second token
    bytes: int = 0  # read from the other worker, so far
    blocks: int = 0
    read_s: float = 0.0


class ClockedEngine:
    """An engine whose steps are written down before anybody else hears of them."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        def note(output: StepOutput) -> None:
            ended_s = time.monotonic()
            began_s, clock = ended_s - output.load.step_ms / 1e3, self._clock
            for started in output.started:
                clock.began_s[started.attempt] = began_s
            for chunk in output.chunks:
                if chunk.last:
                    clock.complete_s[chunk.attempt] = ended_s
            for attempt, position in zip(output.attempts, output.positions, strict=True):
                if position == 1:
                    clock.decoding_s[attempt] = began_s
            on_step(output)

        self._engine.start(note)


def worker_main(pipe: Connection, variant: Variant, role: str, key: bytes) -> None:
    asyncio.run(work(pipe, variant, role, key))


async def work(pipe: Connection, variant: Variant, role: str, key: bytes) -> None:
    """A worker until the pipe says so; every other word on the pipe is answered with the clock."""
    from serving.engine.factory import build_engine
    from serving.kv.io import KvIo
    from serving.kv.nixl import NixlTransfer
    from serving.metrics import Registry
    from serving.worker_host import WorkerHost

    me, clock, asked, loop = (
        Identity.fresh("worker", role),
        Clock(),
        asyncio.Event(),
        asyncio.get_running_loop(),
    )
    kv_io = KvIo(NixlTransfer(f"{role}-{me.epoch:x}"))
    engine = await asyncio.to_thread(build_engine, variant)
    host = WorkerHost(
        me=me,
        role=role,
        engine=cast(Engine, ClockedEngine(engine, clock)),
        kv_io=kv_io,
        key=key,
        deadlines=Deadlines(),
        registry=Registry({}),
    )
    address = await host.start("127.0.0.1")
    pipe.send((address, me.epoch))
    loop.add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if not pipe.poll(0):
            continue
        if pipe.recv() == "stop":
            break
        totals = kv_io.counters
        clock.bytes, clock.blocks, clock.read_s = totals.bytes, totals.blocks, totals.seconds
        pipe.send(clock)
    loop.remove_reader(pipe.fileno())
    await host.stop()


@dataclass(slots=True)
class Worker:
    """The frontend's view of one."""

    address: str
    epoch: int
    pipe: Connection
    link: Link

    def clock(self) -> Clock:
        self.pipe.send("clock")
        assert self.pipe.poll(START_S)
        clock: Clock = self.pipe.recv()
        return clock


class Frontend:
    """Collects tokens by attempt; `token` and `ended` wait for them."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = {}  # attempt -> position -> token
        self._ended: dict[int, asyncio.Future[None]] = {}

    def expect(self, attempt: int) -> None:
        self.tokens[attempt] = {}
        self._ended[attempt] = asyncio.get_running_loop().create_future()

    async def ended(self, attempt: int) -> dict[int, int]:
        async with asyncio.timeout(REQUEST_S):
            await self._ended[attempt]
        return self.tokens[attempt]

    def on_open(self, link: Link) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None:
        for future in self._ended.values():
            if not future.done():
                future.set_exception(RuntimeError(f"a worker is gone: {reason}"))
                future.exception()

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if not isinstance(message, Step):
            return
        if message.tokens is not None:
            columns = message.tokens
            attempts, positions = unpack_u64(columns.attempts), unpack_u32(columns.positions)
            for attempt, position, token in zip(
                attempts, positions, unpack_u32(columns.tokens), strict=True
            ):
                self.tokens.setdefault(attempt, {})[position] = token
        for ended in message.ended or []:
            future = self._ended.get(ended.attempt)
            if future is not None and not future.done():
                if ended.error is None:
                    future.set_result(None)
                else:
                    future.set_exception(RuntimeError(ended.error))


@asynccontextmanager
async def worker(variant: Variant, role: str, key: bytes, frontend: Frontend) -> AsyncIterator[Worker]:
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=worker_main, args=(theirs, variant, role, key), daemon=True)
    process.start()
    try:
        if not await asyncio.to_thread(ours.poll, START_S):
            raise SystemExit(f"the {role} worker did not start in {START_S:.0f} s")
        address, epoch = ours.recv()
        link = await dial(
            address, Identity.fresh("frontend", "benchmark"), key, frontend, timeout_s=START_S
        )
        yield Worker(address, epoch, ours, link)
        ours.send("stop")
        await asyncio.to_thread(process.join, 10)
    finally:
        process.kill()
        process.join()


class Bench:
    def __init__(self, frontend: Frontend, prefill: Worker, decode: Worker) -> None:
        import numpy as np

        self._frontend, self._prefill, self._decode = frontend, prefill, decode
        self._attempts = count(1)
        self._numbers = np.random.default_rng(1)

    def prompt(self, n_tokens: int) -> list[int]:
        drawn = self._numbers.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, size=n_tokens)
        return [int(token) for token in drawn]

    async def hand_off(self, prompt: list[int]) -> tuple[int, int, list[int]]:
        """(attempt on prefill, attempt on decode, tokens of the answer)."""
        first, second = next(self._attempts), next(self._attempts)
        self._submit(self._prefill, first, Mode.PREFILL, prompt)
        handoff = Handoff(self._prefill.address, "prefill", self._prefill.epoch, first)
        self._submit(self._decode, second, Mode.DECODE, prompt, handoff=handoff)
        tokens = await self._frontend.ended(second) | self._frontend.tokens[first]
        return first, second, [tokens[position] for position in sorted(tokens)]

    async def local(self, prompt: list[int]) -> list[int]:
        """The answer of a run that finds nothing in the cache: its namespace is another."""
        attempt = next(self._attempts)
        self._submit(self._prefill, attempt, Mode.LOCAL, prompt, namespace=attempt)
        tokens = await self._frontend.ended(attempt)
        return [tokens[position] for position in sorted(tokens)]

    async def case(self, n_tokens: int, rounds: int, progress: Progress) -> tuple[dict[str, float], bool]:
        prefill_ms, tail_ms, exact = [], [], True
        before = self._decode.clock()
        for number in range(rounds):
            progress.say(f"{n_tokens} tokens, round {number + 1} of {rounds}")
            prompt = self.prompt(n_tokens)
            first, second, tokens = await self.hand_off(prompt)
            here, there = self._prefill.clock(), self._decode.clock()
            prefill_ms.append((here.complete_s[first] - here.began_s[first]) * 1e3)
            tail_ms.append((there.decoding_s[second] - here.complete_s[first]) * 1e3)
            if number == 0:
                exact = tokens == await self.local(prompt)
        after = self._decode.clock()
        moved, read_s = after.bytes - before.bytes, after.read_s - before.read_s
        return {
            "prompt_tokens": n_tokens,
            "bytes": moved // rounds,
            "descriptors": (after.blocks - before.blocks) // rounds,
            "gbps": round(moved / read_s / 1e9, 2),
            "prefill_ms": round(statistics.median(prefill_ms), 2),
            "tail_ms": round(statistics.median(tail_ms), 2),
        }, exact

    def _submit(
        self,
        to: Worker,
        attempt: int,
        mode: Mode,
        prompt: list[int],
        *,
        namespace: int = 0,
        handoff: Handoff | None = None,
    ) -> None:
        self._frontend.expect(attempt)
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
        tokens = pack_u32(array("I", prompt))
        to.link.send(
            Submit(
                attempt=attempt,
                mode=mode.value,
                tokens=tokens,
                n_prompt=len(prompt),
                params=params,
                namespace=namespace,
                request_id=f"benchmark-{attempt}",
                deadline_ms=int(REQUEST_S * 1e3),
                handoff=handoff,
            )
        )


async def run(args: argparse.Namespace) -> dict[str, Any]:
    progress, frontend, key = Progress(quiet=args.json), Frontend(), os.urandom(32)
    config = EngineConfig(
        kind=args.engine,
        dtype=args.dtype,
        kv_bytes=KV_BYTES,
        threads=args.threads,
        profile=SIM if args.engine == "sim" else None,
    )
    variant = Variant(weights=args.weights, engine=config)
    progress.say("two workers start")
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(worker(variant, "prefill", key, frontend))
        decode = await stack.enter_async_context(worker(variant, "decode", key, frontend))
        bench = Bench(frontend, prefill, decode)
        await bench.hand_off(bench.prompt(WARM_UP_TOKENS))
        cases, exact = [], True
        for n_tokens in args.prompts:
            case, same = await bench.case(n_tokens, args.rounds, progress)
            cases.append(case)
            exact = exact and same
    return {"engine": engine_of(config), "rounds": args.rounds, "cases": cases, "exact": exact}


def engine_of(config: EngineConfig) -> dict[str, Any]:
    return {"kind": config.kind, "dtype": config.dtype, "threads": config.threads}


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"hand-off, {report['engine']['kind']} {report['engine']['dtype']}")
    for name in report["cases"][0]:
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_row(*(f"{value:,}" for value in case.values()))
    Console().print(table)
    Console().print(f"exact: {report['exact']}")


def main(argv: list[str] | None = None) -> int:
    parser = command("handoff", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=["torch", "sim"], default="torch")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--weights", default="smollm2-135m")
    parser.add_argument("--threads", type=COUNT, default=1)
    parser.add_argument("--prompts", type=COUNT, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--rounds", type=COUNT, default=3)
    args = parser.parse_args(argv)
    report = asyncio.run(run(args))
    print(json.dumps(report)) if args.json else print_table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
