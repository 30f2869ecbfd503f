"""What routing is worth: public traces through the real router code and simulated workers.

    python -m benchmarks.router_replay --trace conversation --workers 4 --speed 1.5 [--policy NAME] [--json]

Every policy sees the same requests, the same caches and exact predictions. `ttft_regret` has workers that
serve by deadline, `ttft_regret_fifo` and all others have FIFO workers. `--layout separate` adds as many
decode workers; by default each worker decodes what it prefilled. TTFT in seconds; `slo` is the share with
TTFT of 2 s or less; `hit` is the share of prompt blocks found in the cache.
"""

from __future__ import annotations

import heapq
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.replay_summary import print_table, summary
from benchmarks.replay_workers import (
    STEP_MS,
    TOKENS_PER_S,
    DecodeBatch,
    Job,
    PrefillQueue,
    Report,
)
from benchmarks.report import COUNT, POSITIVE, command
from benchmarks.traces import BLOCK_TOKENS, TRACE_NAMES, TraceRequest, load_trace, traces_dir
from kvrouter.deadline import Order
from kvrouter.events import CacheEvents
from kvrouter.index import PrefixIndex
from kvrouter.perf_model import WorkerModels
from kvrouter.policies.registry import POLICY_NAMES, make_policy
from kvrouter.policy_router import build_router
from kvrouter.router import RouterRequest, WorkerView
from planner.options import Number
from serving.errors import KVRelayError

FIFO_OURS = "ttft_regret_fifo"
REPLAYED = (*POLICY_NAMES[:1], FIFO_OURS, *POLICY_NAMES[1:])
MOST_OUTPUT_TOKENS = 2048  # what requests allow; the router does not know how long they get


@dataclass(frozen=True, slots=True)
class Setup:
    workers: int
    blocks: int  # of cache, a worker
    regret_weight: float = 1.0
    separate: bool = False  # prefill and decode on workers of their own
    fixed_decode: bool = True
    seed: int = 0
    frontends: int = 1  # that share the workers, each with a router of its own
    order: Order | None = None  # of all workers; None: as the policy wants it
    packed: bool = False  # prefill slices: see PrefillQueue
    prior_factor: float = 1.0  # of the true times, that routers begin with; 1: they know them


def first_models(factor: float) -> WorkerModels:
    base, per_sequence, per_token = STEP_MS
    return WorkerModels.from_priors(
        prefill=(0.0, factor * 1e3 / TOKENS_PER_S, 0.0),
        step=(factor * base, factor * per_sequence, factor * per_token),
        evidence=100 if factor == 1.0 else 0,
    )


class Replay:
    """One policy over one trace. Events are (time, number, kind, payload), earliest first."""

    def __init__(self, policy: str, setup: Setup) -> None:
        order = setup.order or (Order.DEADLINE if policy == "ttft_regret" else Order.FIFO)
        self._setup = setup
        # FIFO is the same in one piece; but reports come with every chunk.
        self._chunked = order is Order.DEADLINE or setup.frontends > 1
        self._index = PrefixIndex()
        caches = CacheEvents(self._index)  # one for all: every frontend gets the same events
        self._routers = [
            build_router(
                "ttft_regret" if policy == FIFO_OURS else policy,
                regret_weight=setup.regret_weight,
                seed=setup.seed + i,
                frontends=setup.frontends,
                caches=caches,
                models=lambda: first_models(setup.prior_factor),
                order=order,
                local=False,  # decode workers of the separate layout only decode, whatever the policy
            )
            for i in range(setup.frontends)
        ]
        names = [f"w{i}" for i in range(setup.workers)]
        self._queues = {
            name: PrefillQueue(
                name,
                order,
                setup.blocks,
                self._on_begun,
                self._on_stored,
                chunked=self._chunked,
                packed=setup.packed,
            )
            for name in names
        }
        decoders = [f"d{i}" for i in range(setup.workers)] if setup.separate else names
        self._decodes = {name: DecodeBatch(fixed=setup.fixed_decode) for name in decoders}
        for router in self._routers:
            for name in decoders:
                router.add_worker(WorkerView(name, "decode", BLOCK_TOKENS, setup.blocks, 1024))
            for name in names if setup.separate else ():
                router.add_worker(WorkerView(name, "prefill", BLOCK_TOKENS, setup.blocks, 1024))
        self._events: list[tuple[float, int, str, Any]] = []
        self._number = 0
        self._attempts = 0
        self._planned: dict[str, float] = {}  # decode worker -> the end that is in the events
        self.jobs: list[Job] = []

    def run(self, requests: Sequence[TraceRequest], progress: Progress | None = None) -> None:
        task = progress.add_task("", total=len(requests)) if progress is not None else None
        waiting = iter(requests)
        request = next(waiting, None)
        events = self._events
        while request is not None or events:
            if request is not None and (not events or request.arrival_s <= events[0][0]):
                self._arrive(request)
                request = next(waiting, None)
                if progress is not None and task is not None and len(self.jobs) % 64 == 0:
                    progress.update(task, completed=len(self.jobs))
                continue
            now_s, _, kind, name = heapq.heappop(events)
            if kind == "prefill":
                self._on_slice(name, now_s)
            elif self._planned.get(name) == now_s:
                self._on_decoded(name, now_s)
        if progress is not None and task is not None:
            progress.remove_task(task)
        assert not any(router.in_flight for router in self._routers), "every booking was released"

    def _arrive(self, request: TraceRequest) -> None:
        now_s = request.arrival_s
        wanted = RouterRequest(
            tokens=array("I", bytes(4 * request.prompt_tokens)),  # only its length is looked at
            namespace=0,
            max_tokens=MOST_OUTPUT_TOKENS,
            hashes=request.hashes,
        )
        frontend = len(self.jobs) % len(self._routers)
        router = self._routers[frontend]
        choice = router.choose(wanted, now_s)
        computes = choice.prefill or choice.decode
        self._attempts += 2
        job = Job(self._attempts, request, choice.decode, frontend)
        self.jobs.append(job)
        router.book(job.attempt, computes, wanted, now_s)
        if choice.prefill is not None:
            router.book(job.attempt + 1, choice.decode, wanted, now_s)
        self._plan(self._queues[computes].submit(job, now_s), "prefill", computes)

    def _on_slice(self, name: str, now_s: float) -> None:
        done, again_s = self._queues[name].advance(now_s)
        self._plan(again_s, "prefill", name)
        if self._chunked:
            self._report(name, now_s)
            for job in self._queues[name].begun:
                self._on_begun(job, now_s)
        for job in done:
            self._on_computed(job, name, now_s)

    def _on_computed(self, done: Job, name: str, now_s: float) -> None:
        done.first_token_s = now_s
        router = self._routers[done.frontend]
        router.computed(done.attempt, now_s)
        if done.decode != name:
            router.release(done.attempt)
        if done.request.output_tokens <= 1:
            self._finish(done, now_s)
            return
        batch = self._decodes[done.decode]
        batch.add(done, now_s)
        self._plan_decode(done.decode)

    def _on_decoded(self, name: str, now_s: float) -> None:
        for job in self._decodes[name].pop_ended(now_s):
            self._finish(job, now_s)
        self._plan_decode(name)

    def _finish(self, job: Job, now_s: float) -> None:
        job.finished_s = now_s
        self._routers[job.frontend].release(job.attempt)
        self._routers[job.frontend].release(job.attempt + 1)

    def _plan(self, at_s: float | None, kind: str, name: str) -> None:
        if at_s is not None:
            self._number += 1
            heapq.heappush(self._events, (at_s, self._number, kind, name))

    def _plan_decode(self, name: str) -> None:
        end_s = self._decodes[name].next_end_s()
        self._planned.pop(name, None)
        if end_s is not None:
            self._planned[name] = end_s
            self._plan(end_s, "decode", name)

    # ------------------------------------------------------------ what workers say

    def _on_begun(self, job: Job, now_s: float) -> None:
        cached = (job.cached_blocks or 0) * BLOCK_TOKENS
        self._routers[job.frontend].begun(job.attempt, min(cached, job.request.prompt_tokens - 1), now_s)

    def _report(self, name: str, now_s: float) -> None:
        """One a chunk, to all frontends. KV is not scarce here, so its counts say nothing."""
        queue = self._queues[name]
        waiting, tokens = queue.load()
        running = 0 if self._setup.separate else len(self._decodes[name])
        blocks = self._setup.blocks
        report = Report(
            *(running, waiting, tokens, blocks, blocks, queue.slice_ms),
            queue=queue.queue(now_s),
            computed_tokens=int(queue.computed_tokens),
        )
        for router in self._routers:
            router.on_load(name, report, now_s)

    def _on_stored(self, name: str, chain: Sequence[int], first_new: int, evicted: list[int]) -> None:
        parent = chain[first_new - 1] if first_new else None
        self._index.store(name, parent, list(chain[first_new:]))
        if evicted:
            self._index.remove(name, evicted)


def replay(
    requests: Sequence[TraceRequest], policy: str, setup: Setup, progress: Progress | None = None
) -> dict[str, float]:
    run = Replay(policy, setup)
    run.run(requests, progress)
    return summary(run.jobs)


def replay_all(
    requests: Sequence[TraceRequest], policies: Sequence[str], setup: Setup, *, quiet: bool
) -> dict[str, dict[str, float]]:
    """One policy after the other, with a bar on a terminal."""
    results: dict[str, dict[str, float]] = {}
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        overall = progress.add_task("policies", total=len(policies))
        for policy in policies:
            progress.update(overall, description=policy)
            results[policy] = replay(requests, policy, setup, progress)
            progress.advance(overall)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = command("router_replay", __doc__)
    parser.add_argument("--trace", choices=TRACE_NAMES, default="conversation")
    parser.add_argument("--traces", metavar="DIR", help="where the traces are")
    parser.add_argument("--workers", type=COUNT, default=4)
    parser.add_argument(
        "--blocks",
        type=COUNT,
        help="cache of a worker, in blocks of 512 tokens; by default 3000 for up to 4 workers, else 2000",
    )
    parser.add_argument("--speed", type=POSITIVE, default=1.5, help="times the trace's rate")
    parser.add_argument("--policy", default="all", choices=("all", *REPLAYED))
    parser.add_argument("--regret-weight", type=Number(least=0, most=100), default=1.0)
    parser.add_argument("--layout", choices=("together", "separate"), default="together")
    parser.add_argument(
        "--decode", choices=("fixed", "step"), default="fixed", help="30 ms a token, or by load"
    )
    parser.add_argument("--requests", type=COUNT, help="only the first so many")
    parser.add_argument("--seed", type=Number(whole=True), default=0)
    parser.add_argument(
        "--frontends", type=COUNT, default=1, help="that share the workers; reports tell of others"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    setup = Setup(
        args.workers,
        args.blocks or (3000 if args.workers <= 4 else 2000),
        args.regret_weight,
        args.layout == "separate",
        args.decode == "fixed",
        args.seed,
        args.frontends,
    )
    policies = REPLAYED if args.policy == "all" else (args.policy,)
    try:
        make_policy(
            policies[0].removesuffix("_fifo"), regret_weight=args.regret_weight
        )  # says what is wrong
        requests = load_trace(args.trace, traces_dir(args.traces), args.speed, args.requests)
        results = replay_all(requests, policies, setup, quiet=args.json)
    except (FileNotFoundError, KVRelayError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"policies": results}))
    else:
        print_table(
            f"{args.trace} x{args.speed:g}, {setup.workers} workers, {setup.blocks} blocks", results
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
