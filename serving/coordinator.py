"""One request over its workers: places attempts, orders their tokens, ends it exactly once.

A request is a `Run`. Its attempts live on workers; a token is known by (attempt, position), where position
0 follows the client's prompt whichever attempt made it. Tokens leave in order of position: one that was
already sent is dropped, one that came too early waits (decode's second token can overtake prefill's
first). When an attempt fails, the run goes on elsewhere from the prompt and the tokens already sent.

Everything here happens on one event loop, without tasks: frames come in through `on_step`, and
`sweep` is called every quarter of a second to enforce the deadlines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from kvrouter.router import Router
from serving.config import Deadlines
from serving.demand import Demand
from serving.engine.base import Capabilities, FinishReason, Mode, TokenLogprobs
from serving.errors import (
    DeadlineExceeded,
    EngineFailure,
    KVRelayError,
    NoWorker,
    Overloaded,
    Stopping,
    Unavailable,
    WorkerLost,
)
from serving.frontend_metrics import FrontendMetrics
from serving.gate import Gate, Refused
from serving.generation import GenerationRequest, Sink
from serving.lateness import COME_BACK_S, Lateness, behind, is_fault
from serving.moving import MOVED, Mover
from serving.placement import Placer
from serving.requeue import Requeuer
from serving.retry_budget import RetryBudget
from serving.run import Run, Stage, WorkerEntry
from serving.wire import LAYOUT, STEP, Ended, FrontendReport, Step, unpack_u32, unpack_u64

log = logging.getLogger("kvrelay.coordinator")

MAX_TRIES = 4  # placements of a request without a token decoded between them
MOST_FAILED_STEPS = 2  # engines that raised over a request: then it is the request


class Coordinator:
    """The runs of one variant on one frontend; implements `serving.generation.Generator`."""

    def __init__(
        self,
        *,
        model: str,
        router: Router,
        workers: dict[str, WorkerEntry],
        deadlines: Deadlines,
        max_inflight: int,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        capabilities: Capabilities,
        gate: Gate | None = None,
    ) -> None:
        """`capabilities`: of the engines behind it."""
        self._gate = gate
        self._seeded_resume = capabilities.seeded_resume
        self._request_ms = deadlines.request_ms
        self._lateness = Lateness(deadlines, workers)
        self._max_inflight = max_inflight
        self._metrics = metrics
        self._clock = clock
        self._runs: dict[int, Run] = {}  # attempt -> run
        self._live: dict[Run, None] = {}  # oldest first
        self._placer = Placer(
            model=model, router=router, workers=workers, runs=self._runs, metrics=metrics, gate=gate
        )
        self._router = router
        self._breakers = self._placer.breakers
        self._budget = RetryBudget(max_inflight)
        self._requeuer = Requeuer(self._live, self._placer, metrics, able=capabilities.tells_begun)
        self._mover = Mover(self._live, self._placer, self._requeuer, metrics, able=capabilities.migrate_kv)
        self._demand = Demand()
        self._had_workers_s = -inf  # when one was lost

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def attempts_in_flight(self) -> int:
        return len(self._runs)

    @property
    def recent(self) -> deque[dict[str, Any]]:
        """The last choices, newest last."""
        return self._placer.recent

    def report(self, model: str, variant: str) -> FrontendReport:
        """What came since the last call, and what is; for the planner."""
        return self._demand.report(model, variant, self._live, self._router.models(), self._clock())

    def turned_away(self) -> None:
        """A request that may have been for this variant was refused unread."""
        self._demand.turned_away(self._clock())

    def uses(self, worker: str) -> bool:
        """Some run has an attempt on `worker`."""
        return any(a.worker == worker for run in self._live for a in run.attempts.values())

    def forget_worker(self, ident: str) -> None:
        """It is gone for good: one of that name would be another process."""
        self._breakers.forget(ident)

    # ------------------------------------------------------------ the request's verbs

    def start(self, request: GenerationRequest, sink: Sink) -> Run:
        now, n_prompt = self._clock(), len(request.prompt)
        if len(self._live) >= self._max_inflight:
            self._demand.arrived(n_prompt, n_prompt, request.slo_class, now)
            self._metrics.rejects.inc(labels=("inflight",))
            raise Overloaded(f"{self._max_inflight} requests are in flight; try again shortly")
        run = Run(request, sink, now, self._cancel)
        run.deadline_s = now + min(self._request_ms, request.timeout_ms or inf) / 1e3
        uncached = n_prompt
        try:
            uncached = max(n_prompt - self._placer.place(run, now).cached_tokens, 1)
        except NoWorker as error:
            if now - self._had_workers_s > COME_BACK_S:
                self._demand.arrived(n_prompt, n_prompt, request.slo_class, now)
                self._metrics.rejects.inc(labels=("no_worker",))
                raise
            run.waits_after = error
        except Refused as refused:
            self._demand.arrived(n_prompt, refused.uncached_tokens, request.slo_class, now)
            raise
        self._demand.arrived(n_prompt, uncached, request.slo_class, now)
        self._live[run] = None
        self._budget.earn()
        self._metrics.prompt_tokens.observe(n_prompt)
        return run

    def _cancel(self, run: Run, outcome: str) -> None:
        if run.ended:
            return
        if outcome == FinishReason.STOP.value:  # its client side found a stop string: a complete answer
            for attempt in run.decoding:
                self._breakers.succeeded(attempt.worker)
            self._count_answer(run)
        self._end(run, outcome)

    def stop(self) -> None:
        """End everything; for when nobody will call `sweep` any more."""
        for run in list(self._live):
            if not run.ended:
                self._fail(run, Stopping("this frontend stops; try again shortly"))

    # ------------------------------------------------------------ frames from workers

    def on_step(self, step: Step) -> None:
        """Apply one worker frame: begun, then tokens, then ended."""
        now = self._clock()
        for begun in step.begun or ():
            self._on_begun(begun.attempt, begun.n_cached, now)
        if step.tokens is not None:
            self._on_tokens(step, now)
        for ended in step.ended or ():
            run = self._runs.get(ended.attempt)
            if run is not None:
                self._on_ended(run, ended, now)

    def _on_ended(self, run: Run, ended: Ended, now: float) -> None:
        if ended.error is not None:
            run.failed_steps += ended.reason == STEP
            run.handoff = run.handoff and ended.reason != LAYOUT
            retryable = ended.retryable and run.failed_steps < MOST_FAILED_STEPS
            self._on_failed(run, ended.attempt, ended.error, retryable, now)
            return
        attempt = self._placer.release(run, ended.attempt)
        if attempt is not None:
            self._breakers.succeeded(attempt.worker)
        if ended.reason == MOVED:
            if not self._mover.moved(run):
                self._retry(run, WorkerLost("the worker that took over is gone"), now)
            return
        run.final = FinishReason(ended.reason)
        if not run.early:
            self._finish(run, now)

    def _on_begun(self, attempt: int, n_cached: int, now: float) -> None:
        run = self._runs.get(attempt)
        if run is None:
            return
        if run.attempts[attempt].mode is Mode.DECODE:
            run.attempts[attempt].arrived = True
            if run.move is None:
                self._handed_over(run)
            if run.stage is Stage.TRANSFER:
                run.enter(Stage.FIRST_DECODE, now)
            return
        self._router.begun(attempt, n_cached, now)
        if run.stage is Stage.QUEUE:
            self._metrics.queue.observe(now - run.stage_s + run.waited_s)
            run.enter(Stage.PREFILL, now)
        if not run.sent:
            # A resume finds its own tokens again; what the client's prompt hit is the first answer.
            run.info.cached_tokens = min(n_cached, len(run.request.prompt))
            self._metrics.hit_tokens.inc(run.info.cached_tokens)

    def _on_tokens(self, step: Step, now: float) -> None:
        columns = step.tokens
        assert columns is not None
        runs = self._runs
        drawn: dict[int, TokenLogprobs] = {}
        tokens = unpack_u32(columns.tokens)
        attempts = unpack_u64(columns.attempts)
        if step.logprobs:
            for entry in step.logprobs:
                drawn[entry.row] = TokenLogprobs(tokens[entry.row], entry.logprob, list(entry.top))
        touched: list[Run] = []
        broken: list[tuple[Run, int]] = []
        for row, (attempt, position, token) in enumerate(
            zip(attempts, unpack_u32(columns.positions), tokens, strict=True)
        ):
            run = runs.get(attempt)
            if run is None:
                continue  # ended here, still on its way there
            expected = run.next_position
            if run.logprobs and row not in drawn:
                broken.append((run, attempt))
            elif position >= run.request.params.max_tokens:
                continue  # nobody asked for it
            elif position == expected:
                if not run.pending:
                    touched.append(run)
                    if run.move is not None and run.move.target == attempt:
                        self._mover.taken_over(run, now)
                run.pending.append(token)
                if run.logprobs:
                    run.pending_logprobs.append(drawn[row])
                run.next_position = expected + 1
                if run.early:
                    run.take_early()
            elif position > expected:
                run.early[position] = (token, drawn.get(row))
            # A position below was already sent by an earlier attempt: dropped.
        for run in touched:
            self._emit(run, now)
        for run, attempt in broken:
            if attempt in run.attempts:
                self._on_failed(run, attempt, "tokens without the log-probabilities asked for", True, now)

    def _emit(self, run: Run, now: float) -> None:
        tokens = run.pending
        count = len(tokens)
        metrics = self._metrics
        if not run.sent:
            ttft_s = now - run.started_s
            metrics.ttft.observe(ttft_s)
            if run.predicted_ttft_s is not None and run.placements == 1:
                metrics.predicted_ttft.observe(run.predicted_ttft_s)
                metrics.ttft_error.observe(abs(ttft_s - run.predicted_ttft_s))
        else:
            metrics.itl.observe((now - run.last_s) / count, count)
        first = run.stage is Stage.QUEUE or run.stage is Stage.PREFILL  # of this placement
        if first:
            coming = any(a.mode is Mode.DECODE and not a.arrived for a in run.attempts.values())
            run.enter(Stage.TRANSFER if coming else Stage.FIRST_DECODE, now)
            self._prompt_computed(run, now)
        if run.stage is not Stage.DECODE and (count > 1 or not first):
            run.enter(Stage.DECODE, now)
            run.tries = 0
        run.last_s = now
        run.sent.extend(tokens)
        run.pending = []
        logprobs: list[TokenLogprobs] | None = None
        if run.logprobs:
            logprobs, run.pending_logprobs = run.pending_logprobs, []
        run.sink.on_tokens(tokens, logprobs)
        if run.final is not None and not run.early and not run.ended:
            self._finish(run, now)

    def _handed_over(self, run: Run) -> None:
        """Its KV is at the decode worker: only that makes prefill's work a success."""
        for attempt in run.attempts.values():
            if attempt.mode is Mode.PREFILL:
                self._breakers.succeeded(attempt.worker)

    def _prompt_computed(self, run: Run, now: float) -> None:
        """What was booked for the prompt on the prefill (or local) worker is done."""
        for attempt in run.attempts.values():
            attempt.computed = True
            self._router.computed(attempt.ident, now)
            if attempt.mode is Mode.PREFILL:
                self._router.release(attempt.ident)
            else:
                self._router.progress(attempt.ident, 1)

    # ------------------------------------------------------------ ends

    def _finish(self, run: Run, now: float) -> None:
        reason = run.final
        assert reason is not None
        self._count_answer(run)
        self._end(run, reason.value)
        run.sink.on_finish(reason)

    def _count_answer(self, run: Run) -> None:
        generated = len(run.sent)
        self._metrics.output_tokens.observe(generated)
        self._demand.finished(len(run.request.prompt), generated)
        if self._gate is not None:
            self._gate.ended(generated)
        if generated > 1:
            self._metrics.tpot.observe((run.last_s - run.started_s) / generated)

    def _fail(self, run: Run, error: KVRelayError) -> None:
        self._end(run, "error")
        run.sink.on_error(error)

    def _end(self, run: Run, outcome: str) -> None:
        """Free everything the run holds, here and on the workers. After it no call reaches the sink but
        the terminal one of the caller."""
        run.ended = True
        self._live.pop(run, None)
        self._drop_attempts(run)
        self._metrics.requests.inc(labels=(outcome,))
        self._metrics.e2e.observe(self._clock() - run.started_s)

    def _drop_attempts(self, run: Run) -> None:
        run.move = None
        for attempt in list(run.attempts.values()):
            if run.final is not None and attempt.mode is Mode.PREFILL and attempt.computed:
                self._placer.release(run, attempt.ident)  # its reader confirmed: nothing is left there
            else:
                self._placer.take_back(run, attempt)

    def move_from(self, worker: str) -> int:
        """See Mover."""
        return self._mover.move_from(worker, self._clock())

    # ------------------------------------------------------------ faults

    def on_worker_lost(self, ident: str) -> None:
        """The link to `ident` is gone; its runs go on elsewhere."""
        now = self._had_workers_s = self._clock()
        for run in list(self._live):
            for attempt in list(run.attempts.values()):
                if attempt.worker == ident and attempt.ident in run.attempts:  # else a retry took it back
                    self._on_failed(run, attempt.ident, f"the link to worker {ident} broke", True, now)

    def _on_failed(self, run: Run, attempt: int, message: str, retryable: bool, now: float) -> None:
        failed = run.attempts[attempt]
        if failed.handed_over or (failed.mode is Mode.PREFILL and failed.computed):
            self._placer.release(run, attempt)  # its work is done; whether the KV arrived, its reader says
            return
        if now >= run.deadline_s:  # nobody is to blame, and nothing is to be tried again
            self._overdue(run)
            return
        log.warning(
            "%s: attempt %x on %s failed: %s", run.request.request_id, attempt, failed.worker, message
        )
        self._metrics.attempt_failures.inc()
        move = run.move
        if move is not None and move.target == attempt and move.source in run.attempts:
            self._placer.release(run, attempt)
            self._mover.stop(run, message, now)
            return
        workers = {failed.worker}
        if failed.mode is Mode.DECODE and not failed.arrived:  # its KV did not come: it may be either side
            workers.update(a.worker for a in run.attempts.values())
        self._count_failures(workers, now)
        if not retryable:
            self._fail(run, EngineFailure(message))
            return
        run.failed_on |= workers
        self._retry(run, WorkerLost(message), now)

    def _retry(self, run: Run, error: Unavailable, now: float) -> None:
        """Go on elsewhere from the prompt and the tokens sent, or end with `error`."""
        run.final = None
        self._drop_attempts(run)
        run.early.clear()
        if len(run.sent) == run.request.params.max_tokens:  # only the worker's word for it was missing
            run.final = FinishReason.LENGTH
            self._finish(run, now)
            return
        run.info.resumes += 1
        run.limit_s = inf  # no prediction was wrong: a worker failed
        if run.sent and not self._seeded_resume and not run.request.params.is_greedy:
            run.info.redrawn_from = run.info.redrawn_from or len(run.sent)
        if run.tries >= MAX_TRIES or not self._budget.spend(now):
            self._metrics.retries_refused.inc(labels=("limit" if run.tries >= MAX_TRIES else "budget",))
            self._fail(run, error)
            return
        run.enter(Stage.QUEUE, now)
        run.waited_s = 0.0
        self._go_on(run, error, now)

    def _go_on(self, run: Run, error: Unavailable, now: float) -> None:
        """Place it, or wait: what was accepted is not given up because no worker is there just now."""
        try:
            self._placer.place(run, now)
        except NoWorker:
            run.waits_after = error
        except KVRelayError as refused:  # it is placed for the first time, and not admitted
            self._fail(run, refused)
        else:
            run.waits_after = None
            self._metrics.resumes.inc(run.placements > 1)

    def _overdue(self, run: Run) -> None:
        self._metrics.deadlines.inc(labels=("request",))
        self._fail(run, DeadlineExceeded("the request's deadline passed"))

    def _count_failures(self, workers: Iterable[str], now: float) -> None:
        for worker in filter(lambda worker: self._breakers.failed(worker, now), workers):
            self._metrics.breaker_openings.inc()
            log.warning("worker %s fails requests in a row: avoided for a while", worker)

    def sweep(self) -> None:
        """Enforce the deadlines; call it every quarter of a second."""
        now = self._clock()
        for run in list(self._live):
            if run.ended:
                continue
            if now > run.deadline_s:
                self._overdue(run)
                continue
            if run.waits_after is not None:
                if self._lateness.late(run, now) is None:
                    self._go_on(run, run.waits_after, now)
                else:
                    self._metrics.deadlines.inc(labels=(Stage.QUEUE.value,))
                    self._fail(run, run.waits_after)
                continue
            if self._lateness.move_is_late(run, now):
                self._mover.stop(run, "it took too long", now)
            late = self._lateness.late(run, now)
            if late is None:
                continue
            self._metrics.deadlines.inc(labels=(late,))
            workers = behind(run, late)
            run.failed_on.update(workers)
            if is_fault(late):
                self._count_failures(workers, now)
            self._retry(run, DeadlineExceeded(f"no progress in stage {late}"), now)
        self._requeuer.sweep(now)
