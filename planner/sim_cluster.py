"""The simulator: the live router and the planner over workers on a virtual clock.

One event after the other: a request arrives and is placed by `kvrouter`, a worker is done with something,
a worker becomes ready, KV has moved, a worker fails, the planner's tick. A policy sees the Observation
that frontends would report and answers with targets (planner.observation.Decision).

Deployments and roles are as in production: a worker belongs to the prefill or the decode deployment, and
may be lent to the other role; it first drains, as one that leaves. It costs from the order to the end.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kvrouter.events import CacheEvents
from kvrouter.index import PrefixIndex
from kvrouter.policy_router import PolicyRouter, build_router
from kvrouter.requeue import (
    LEAST_GAIN_MS,
    LEAST_WAIT_S,
    LOOKS_A_SECOND,
    MOST_REQUEUES,
    is_sooner_elsewhere,
    whose_turn,
)
from kvrouter.router import WorkerView
from planner.observation import Arrival, FittedTimes, Observation, VariantDecision
from planner.observe import Observer
from planner.sim_setup import (
    ROLES,
    SAMPLES,
    VARIANT,
    Admit,
    Policy,
    Replica,
    Sample,
    SimSetup,
    asks,
    changes,
    cost_of_leaving,
    places,
    pools_seen,
    sample,
    turns,
)
from planner.sim_worker import Job, SimWorker
from planner.workload import BLOCK_TOKENS, TraceRequest
from serving.errors import NoWorker

__all__ = ["Cluster"]


class Cluster:
    """`run` once; then read `jobs`, `samples`, `gpu_s` and `scale_events`."""

    def __init__(
        self, setup: SimSetup, policy: Policy, admission: Callable[[PolicyRouter], Admit] | None = None
    ) -> None:
        self.setup = setup
        self.policy = policy
        self.jobs: list[Job] = []
        self.samples: list[Sample] = []
        self.scale_events = 0
        self.failures = 0
        self.workers: dict[str, Replica] = {}
        self.end_s = 0.0
        self._index = PrefixIndex()
        self._router = build_router(
            setup.router,
            seed=setup.seed,
            caches=CacheEvents(self._index),
            models=setup.models,
            order=setup.order,
            local=setup.local_prefill,
        )
        self._admit = None if admission is None else admission(self._router)
        self._random = random.Random(setup.seed)
        self._events: list[tuple[float, int, str, Any]] = []
        self._number = 0
        self._planned: dict[str, float] = {}  # worker -> its event that counts
        self._live: dict[int, Job] = {}  # by attempt, those on a worker
        self._held: deque[Job] = deque()  # nobody can take them now
        self._attempts = 0
        self._last: VariantDecision | None = None
        self.observer = Observer(FittedTimes(setup.times.prefill, setup.times.step, 0.0, 0.0, SAMPLES))
        for role, count in zip(ROLES, setup.initial, strict=True):
            for _ in range(count):
                self._become_ready(self._order(role, 0.0), 0.0)

    def run(
        self, requests: Sequence[TraceRequest], progress: Callable[[float], None] | None = None
    ) -> None:
        """Until the last one is answered."""
        waiting = iter(requests)
        request = next(waiting, None)
        events = self._events
        end_s = requests[-1].arrival_s if requests else 0.0
        self.observer.reported(0.0)
        self._tick(0.0)
        self._push(1.0, "requeue", None)
        while request is not None or (events and (self._live or self._held)):
            if request is not None and (not events or request.arrival_s <= events[0][0]):
                self._arrive(request)
                request = next(waiting, None)
                if progress is not None and len(self.jobs) % 256 == 0:
                    progress(len(self.jobs) / len(requests))
                continue
            now_s, _, kind, what = heapq.heappop(events)
            if kind == "worker":
                if self._planned.get(what) == now_s:
                    self._on_worker(self.workers[what], now_s)
            elif kind == "tick":
                self._tick(now_s)
            elif kind == "moved":
                self._on_moved(what[0], what[1], now_s)
            elif kind == "ready":
                if self.workers[what].state == "starting":
                    self._become_ready(self.workers[what], now_s)
            elif kind == "fail":
                self._fail(self.workers[what], now_s)
            elif kind == "requeue":
                self._requeue(now_s)
        self.end_s = max([end_s, *(job.finished_s or 0.0 for job in self.jobs)])

    @property
    def gpu_s(self) -> float:
        return sum(
            (self.end_s if w.gone_s is None else w.gone_s) - w.ordered_s for w in self.workers.values()
        )

    # ------------------------------------------------------------ requests

    def _arrive(self, request: TraceRequest) -> None:
        job = Job(request, request.prompt_tokens, max(request.output_tokens, 1))
        self.jobs.append(job)
        self._place(job, request.arrival_s, first=True)

    def _place(self, job: Job, now_s: float, *, first: bool = False, avoid: str | None = None) -> None:
        wanted = asks(job, avoid, now_s)
        try:
            choice = self._router.choose(wanted, now_s)
        except NoWorker:
            if first:
                self.observer.arrived(Arrival(now_s, job.context_tokens, job.context_tokens))
            self._held.append(job)
            return
        if first:
            uncached = job.context_tokens - choice.cached_tokens
            self.observer.arrived(Arrival(now_s, job.context_tokens, uncached))
            if self._admit is not None and not self._admit.admit(job, choice, now_s):
                job.rejected = True
                return
            choice = wanted.choice = job.chosen or choice
            wanted.limit_s = job.limit_s
        self._attempts += 2
        job.attempt, job.stage = self._attempts, "prefill"
        job.prefill, job.decode = choice.prefill or choice.decode, choice.decode
        self._live[job.attempt] = job
        self._router.book(job.attempt, job.prefill, wanted, now_s)
        if choice.prefill is not None:
            self._router.book(job.attempt + 1, job.decode, wanted, now_s)
        worker = self.workers[job.prefill]
        worker.engine.submit(job, now_s)
        self._after(worker, now_s)

    def _requeue(self, now_s: float) -> None:
        """As `serving.requeue` and `serving.moving` do, at one time of each second."""
        self._push(now_s + 1.0, "requeue", None)
        for worker in list(self.workers.values()):
            if worker.state == "draining" or worker.becomes is not None:
                self._move_streams(worker, now_s)
        if not self._router.is_uneven(LEAST_GAIN_MS, now_s):
            return
        waiting = [
            job
            for worker in self.workers.values()
            if worker.state != "gone"
            for job in worker.engine.waiting()
            if now_s - job.request.arrival_s >= LEAST_WAIT_S and job.requeued < MOST_REQUEUES
        ]
        waiting.sort(key=lambda job: job.request.arrival_s)
        for job in whose_turn(waiting, now_s, LOOKS_A_SECOND):
            if job.cached_tokens is not None:  # it began just now: the one before it went elsewhere
                continue
            wanted = asks(job, job.prefill, now_s)
            try:
                sooner = is_sooner_elsewhere(self._router, job.attempt, wanted, now_s)
            except NoWorker:
                return
            if sooner:
                job.requeued += 1
                self._place_elsewhere(job, job.prefill, now_s)

    def _place_elsewhere(self, job: Job, avoid: str, now_s: float) -> None:
        """Its prompt has not begun."""
        old = self.workers[job.prefill]
        old.engine.withdraw(job, now_s)
        self._release(job)
        self._place(job, now_s, avoid=avoid)
        self._after(old, now_s)

    def _after(self, worker: Replica, now_s: float) -> None:
        """Something changed on the worker: say what began, plan its next event, let it go if it may."""
        for job in worker.engine.begun:
            self._router.begun(job.attempt, job.cached_tokens or 0, now_s)
        worker.engine.begun.clear()
        at_s = worker.engine.next_event_s()
        if at_s is None:
            self._planned.pop(worker.ident, None)
            if worker.state == "draining" or worker.becomes is not None:
                self._drained(worker, now_s)
        elif self._planned.get(worker.ident) != at_s:
            self._planned[worker.ident] = at_s
            self._push(at_s, "worker", worker.ident)

    def _on_worker(self, worker: Replica, now_s: float) -> None:
        computed, ended = worker.engine.advance(now_s)
        for job in computed:
            self._router.computed(job.attempt, now_s)
            job.waits_since_s = now_s
            if job.first_token_s is None:
                job.first_token_s = now_s
                job.first_own_ms = job.own_ms
            if job.left_tokens <= 1:
                self._finish(job, now_s)
            elif job.decode == worker.ident:
                job.stage = "decode"
                worker.engine.hand_over(job, now_s)
            else:
                job.stage = "moving"
                self._push(now_s + self.setup.times.move_ms / 1e3, "moved", (job, job.attempt))
        for job in ended:
            self._finish(job, now_s)
        self._after(worker, now_s)

    def _on_moved(self, job: Job, attempt: int, now_s: float) -> None:
        if attempt not in self._live:
            return  # a worker failed meanwhile: it goes on elsewhere, or will
        worker = self.workers[job.decode]
        if worker.state == "gone":
            self._release(job)
            self._resume(job, None, now_s)
            return
        job.stage = "decode"
        self._router.release(job.attempt)
        worker.engine.hand_over(job, now_s)
        self._after(worker, now_s)
        self._let_go(job.prefill, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        job.finished_s = now_s
        self._release(job)
        self.observer.finished(job.request.prompt_tokens, job.request.output_tokens)
        if self._admit is not None:
            self._admit.ended(job.request.output_tokens)

    def _let_go(self, ident: str, now_s: float) -> None:
        worker = self.workers[ident]
        if worker.engine.idle and (worker.state == "draining" or worker.becomes is not None):
            self._drained(worker, now_s)

    # ------------------------------------------------------------ workers

    def _order(self, deployment: str, now_s: float) -> Replica:
        ident = f"{deployment[0]}{len(self.workers)}"
        engine = SimWorker(ident, self.setup.times, self.setup.order, self._on_stored)
        worker = Replica(ident, deployment, deployment, now_s, engine)
        self.workers[ident] = worker
        return worker

    def _place_pending(self, now_s: float) -> None:
        """As many as the cluster has room for start."""
        placed = sum(1 for w in self.workers.values() if w.state in ("starting", "ready", "draining"))
        for worker in self.workers.values():
            if worker.state == "pending":
                if self.setup.capacity is not None and placed >= self.setup.capacity:
                    return
                placed += 1
                worker.state = "starting"
                spread = 1 + self.setup.startup_spread * self._random.uniform(-1, 1)
                self._push(now_s + self.setup.startup_s * spread, "ready", worker.ident)

    def _become_ready(self, worker: Replica, now_s: float) -> None:
        worker.state = "ready"
        self._show(worker, draining=False)
        if self.setup.mean_time_to_failure_s is not None:
            lives_s = self._random.expovariate(1 / self.setup.mean_time_to_failure_s)
            self._push(now_s + lives_s, "fail", worker.ident)
        self._place_held(now_s)

    def _show(self, worker: Replica, *, draining: bool) -> None:
        times = self.setup.times
        blocks = times.cache_blocks if worker.role == "prefill" else times.kv_tokens // BLOCK_TOKENS
        self._router.add_worker(
            WorkerView(worker.ident, worker.role, BLOCK_TOKENS, blocks, times.max_batch, draining)
        )

    def _place_held(self, now_s: float) -> None:
        for _ in range(len(self._held)):
            self._place(self._held.popleft(), now_s)

    def _drained(self, worker: Replica, now_s: float) -> None:
        if self._router.load_of(worker.ident).bookings:
            return  # a prompt that is to be decoded here computes elsewhere
        if worker.state == "draining":
            worker.state, worker.gone_s = "gone", now_s
            self._router.remove_worker(worker.ident)
            self._planned.pop(worker.ident, None)
            self._place_pending(now_s)
        elif worker.becomes is not None:
            worker.role, worker.becomes = worker.becomes, None
            self._show(worker, draining=False)
            self._place_held(now_s)

    def _fail(self, worker: Replica, now_s: float) -> None:
        """Its requests go on elsewhere, from prompt and what they have; a new replica takes its place."""
        if worker.state not in ("ready", "draining"):
            return
        self.failures += 1
        lost = [job for job in self._live.values() if worker.ident in places(job)]
        if worker.state == "ready":
            self._order(worker.deployment, now_s)
        worker.state, worker.gone_s, worker.becomes = "gone", now_s, None
        self._planned.pop(worker.ident, None)
        for job in lost:
            self._release(job)
        self._router.remove_worker(worker.ident)
        self._place_pending(now_s)
        for job in lost:
            self._resume(job, worker.engine.emitted(job) if job.stage == "decode" else None, now_s)
        worker.engine.lose()

    def _resume(self, job: Job, emitted: int | None, now_s: float) -> None:
        """`emitted` None: no more than the first token, if that."""
        if emitted is None:
            emitted = 0 if job.first_token_s is None else 1
        else:
            job.waits_since_s = now_s
        job.context_tokens += emitted
        job.left_tokens = max(job.left_tokens - emitted, 1)
        job.cached_tokens, job.limit_s = None, inf  # no prediction was wrong: a worker failed
        job.resumed += 1
        self._place(job, now_s)

    def _release(self, job: Job) -> None:
        self._router.release(job.attempt)
        self._router.release(job.attempt + 1)
        self._live.pop(job.attempt, None)

    # ------------------------------------------------------------ planner

    def _tick(self, now_s: float) -> None:
        observation = self._observe(now_s)
        decision = self.policy.decide(observation, now_s).variants[VARIANT]
        self._apply(decision, now_s)
        self.samples.append(sample(now_s, list(self.workers.values()), decision))
        self._push(now_s + self.policy.interval_s, "tick", None)

    def _observe(self, now_s: float) -> Observation:
        oldest = [s for w in self.workers.values() if (s := w.engine.oldest_s()) is not None]
        oldest += [job.request.arrival_s for job in self._held]
        seen = self.observer.observe(
            now_s,
            pools_seen(self.workers.values()),
            queue_age_s=now_s - min(oldest) if oldest else 0.0,
            queued=sum(w.engine.queued for w in self.workers.values()) + len(self._held),
            decoding=sum(w.engine.batch for w in self.workers.values()),
            going=[row for w in self.workers.values() for row in w.engine.going()],
            kv_tokens=self.setup.times.kv_tokens,
            max_batch=self.setup.times.max_batch,
        )
        return Observation({VARIANT: seen}, frontends=1, inflight=self._router.in_flight // 2)

    def _apply(self, decision: VariantDecision, now_s: float) -> None:
        self.scale_events += changes(self._last, decision)
        self._last = decision
        for name, target in (("prefill", decision.prefill), ("decode", decision.decode)):
            own = [
                w
                for w in self.workers.values()
                if w.deployment == name and w.state in ("pending", "starting", "ready")
            ]
            for _ in range(target - len(own)):
                self._order(name, now_s)
            for worker in sorted(own, key=cost_of_leaving)[: max(len(own) - target, 0)]:
                self._leave(worker, now_s)
        for worker, role in turns(self.workers.values(), decision.lent):
            self._turn(worker, role, now_s)
        self._place_pending(now_s)

    def _leave(self, worker: Replica, now_s: float) -> None:
        if worker.state in ("pending", "starting"):
            worker.state, worker.gone_s = "gone", now_s
            return
        worker.state, worker.becomes = "draining", None
        self._empty(worker, now_s)

    def _turn(self, worker: Replica, role: str, now_s: float) -> None:
        if worker.role == role:  # it was on its way: it stays after all
            worker.becomes = None
            self._show(worker, draining=False)
            return
        worker.becomes = role
        self._empty(worker, now_s)

    def _empty(self, worker: Replica, now_s: float) -> None:
        """It leaves its role when the last of its jobs is done or moved, as `serving.moving` does it."""
        self._show(worker, draining=True)
        if self._router.can_spare(worker.ident):
            for job in [job for job in self._live.values() if job.decode == worker.ident]:
                if job.stage == "prefill" and job.cached_tokens is None:
                    self._place_elsewhere(job, worker.ident, now_s)
        self._move_streams(worker, now_s)
        self._let_go(worker.ident, now_s)

    def _move_streams(self, worker: Replica, now_s: float) -> None:
        """What decodes there goes on at other workers, after one pause. Nobody there: it stays."""
        for job in worker.engine.streams():
            wanted = asks(job, None, now_s)
            try:
                target = self._router.choose_decode(wanted, worker.ident, now_s).decode
            except NoWorker:
                break
            worker.engine.take_away(job, now_s)
            self._release(job)
            self._attempts += 2
            job.attempt, job.stage, job.moved = self._attempts, "moving", job.moved + 1
            job.prefill, job.decode = worker.ident, target
            self._live[job.attempt] = job
            self._router.book(job.attempt, worker.ident, wanted, now_s)  # until its KV is read
            self._router.book(job.attempt + 1, target, wanted, now_s)
            self._push(now_s + self.setup.times.move_ms / 1e3, "moved", (job, job.attempt))
        self._after(worker, now_s)

    # ------------------------------------------------------------

    def _push(self, at_s: float, kind: str, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, kind, what))

    def _on_stored(self, name: str, chain: Sequence[int], first_new: int, evicted: list[int]) -> None:
        parent = chain[first_new - 1] if first_new else None
        self._index.store(name, parent, list(chain[first_new:]))
        if evicted:
            self._index.remove(name, evicted)
