"""When does it pay to read a cached prefix from another worker instead of computing it?

    python -m benchmarks.pull --json [--engine sim] [--kv-bytes-per-token 23040] [--prompts 2000 8000]

Two processes, each a whole worker (engine, scheduler, NIXL agent, links over loopback); this process plays
the frontend. Each prompt is computed on the owner and then asked of the other worker, which pulls. Time to
the first token by prompt length, medians:

    compute_ms    on the owner, nothing cached
    pull_ms       on the other worker, the owner idle
    busy_ms       the same while the owner computes other prompts: it answers between two of its steps

`exact`: the first token is the same each time. `--json` prints one object, else there is a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from array import array
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from benchmarks.handoff import (
    FIRST_TOKEN_ID,
    LAST_TOKEN_ID,
    REQUEST_S,
    Frontend,
    Worker,
    engine_of,
    worker,
)
from benchmarks.report import COUNT, Progress, command
from planner.options import Number
from serving.config import EngineConfig, SimProfile, Variant
from serving.engine.base import Mode, SamplingParams
from serving.wire import Pull, Submit, pack_u32

POOL_TOKENS = 40_000  # a worker's KV memory
WARM_UP_TOKENS = 4000
TORCH_KV_BYTES = 1 << 30
TOKENS_PER_S = 20_480  # of the simulated engine
BUSY_PROMPTS, BUSY_TOKENS = 3, 2048


class Bench:
    def __init__(self, frontend: Frontend, owner: Worker, reader: Worker) -> None:
        import numpy as np

        self._frontend, self.owner, self.reader = frontend, owner, reader
        self._attempts = count(1)
        self._numbers = np.random.default_rng(1)

    def prompt(self, n_tokens: int) -> array[int]:
        return array("I", self._numbers.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, size=n_tokens).tolist())

    async def ask(self, to: Worker, prompt: array[int], *, pull: bool = False) -> tuple[float, int]:
        """(ms to the first token, that token)."""
        attempt = next(self._attempts)
        self._frontend.expect(attempt)
        began_s = time.perf_counter()
        to.link.send(
            Submit(
                attempt=attempt,
                mode=Mode.LOCAL.value,
                tokens=pack_u32(prompt),
                n_prompt=len(prompt),
                params=SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
                namespace=0,
                request_id=f"benchmark-{attempt}",
                deadline_ms=int(REQUEST_S * 1e3),
                pull=Pull(self.owner.address, "owner", self.owner.epoch, len(prompt), int(REQUEST_S * 1e3))
                if pull
                else None,
            )
        )
        tokens = await self._frontend.ended(attempt)
        return (time.perf_counter() - began_s) * 1e3, tokens[0]

    async def case(self, n_tokens: int, rounds: int, progress: Progress) -> tuple[dict[str, float], bool]:
        times: dict[str, list[float]] = {"compute_ms": [], "pull_ms": [], "busy_ms": []}
        exact = True
        for number in range(rounds):
            progress.say(f"{n_tokens} tokens, round {number + 1} of {rounds}")
            for busy in (False, True):
                prompt = self.prompt(n_tokens)
                compute_ms, right = await self.ask(self.owner, prompt)
                others = [
                    asyncio.create_task(self.ask(self.owner, self.prompt(BUSY_TOKENS)))
                    for _ in range(BUSY_PROMPTS if busy else 0)
                ]
                await asyncio.sleep(0.01)  # they compute
                pull_ms, token = await self.ask(self.reader, prompt, pull=True)
                exact = exact and token == right
                times["compute_ms"].append(compute_ms)
                times["busy_ms" if busy else "pull_ms"].append(pull_ms)
                await asyncio.gather(*others)
        medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
        return {"prompt_tokens": n_tokens, **medians}, exact


async def run(args: argparse.Namespace) -> dict[str, Any]:
    progress, frontend, key = Progress(quiet=args.json), Frontend(), os.urandom(32)
    sim = SimProfile(
        step_ms=2, prefill_ms_per_token=1e3 / TOKENS_PER_S, kv_bytes_per_token=args.kv_bytes_per_token
    )
    config = EngineConfig(
        kind=args.engine,
        kv_bytes=POOL_TOKENS * args.kv_bytes_per_token if args.engine == "sim" else TORCH_KV_BYTES,
        profile=sim if args.engine == "sim" else None,
    )
    variant = Variant(weights=args.weights, engine=config)
    progress.say("two workers start")
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(worker(variant, "prefill", key, frontend))
        reader = await stack.enter_async_context(worker(variant, "decode", key, frontend))
        bench = Bench(frontend, owner, reader)
        for _ in range(args.warm_ups):  # a pool's memory is slow when it is touched first
            prompt = bench.prompt(WARM_UP_TOKENS)
            await bench.ask(owner, prompt)
            await bench.ask(reader, prompt, pull=True)
        cases, exact = [], True
        for n_tokens in args.prompts:
            case, same = await bench.case(n_tokens, args.rounds, progress)
            cases.append(case)
            exact = exact and same
        read = reader.clock()
    gbps = round(read.bytes * 8 / read.read_s / 1e9, 2)
    return {
        "engine": engine_of(config),
        "kv_bytes_per_token": args.kv_bytes_per_token if args.engine == "sim" else None,
        "rounds": args.rounds,
        "cases": cases,
        "gbps": gbps,
        "exact": exact,
    }


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"pull against compute, {report['engine']['kind']}")
    for name in report["cases"][0]:
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_row(*(f"{value:,}" for value in case.values()))
    Console().print(table)
    Console().print(f"reads: {report['gbps']} Gbit/s; exact: {report['exact']}")


def main(argv: list[str] | None = None) -> int:
    parser = command("pull", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=["torch", "sim"], default="sim")
    parser.add_argument("--kv-bytes-per-token", type=COUNT, default=23_040, help="of the simulated model")
    parser.add_argument("--weights", default="smollm2-135m")
    parser.add_argument("--prompts", type=COUNT, nargs="+", default=[2000, 8000])
    parser.add_argument(
        "--warm-ups", type=Number(least=0, whole=True), default=POOL_TOKENS // WARM_UP_TOKENS + 1
    )
    parser.add_argument("--rounds", type=COUNT, default=3)
    args = parser.parse_args(argv)
    report = asyncio.run(run(args))
    print(json.dumps(report)) if args.json else print_table(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
