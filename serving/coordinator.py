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
import os
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from kvrouter.hashing import namespace_seed
from kvrouter.router import Choice, Router, RouterRequest
from serving.config import Deadlines
from serving.engine.base import FinishReason, Mode, TokenLogprobs
from serving.errors import (
    DeadlineExceeded,
    EngineFailure,
    KVRelayError,
    NoWorker,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from serving.frontend_metrics import FrontendMetrics
from serving.generation import GenerationRequest, Sink
from serving.run import Attempt, Run, Stage, WorkerEntry
from serving.wire import Cancel, Handoff, Pull, Step, Submit, pack_u32, unpack_u32, unpack_u64

log = logging.getLogger("kvrelay.coordinator")

RECENT_CHOICES = 100  # kept for the debug route
MAX_PLACEMENTS = 4  # a request is placed at most this often, so that a bad node makes no storm


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
    ) -> None:
        self._model = model
        self._router = router
        self._workers = workers
        self._deadlines = deadlines
        self._max_inflight = max_inflight
        self._metrics = metrics
        self._clock = clock
        self._runs: dict[int, Run] = {}  # attempt -> run
        self._live: set[Run] = set()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_CHOICES)
        # Attempt ids are unique over all frontends and restarts: 31 random bits, 32 counted ones.
        self._next_attempt = (int.from_bytes(os.urandom(4), "little") >> 1) << 32
        self._stage_ms = {
            Stage.QUEUE: deadlines.queue_ms,
            Stage.PREFILL: deadlines.prefill_ms,
            Stage.FIRST_DECODE: deadlines.first_token_ms + deadlines.transfer_ms,
        }

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def attempts_in_flight(self) -> int:
        return len(self._runs)

    def uses(self, worker: str) -> bool:
        """Some run has an attempt on `worker`."""
        return any(a.worker == worker for run in self._live for a in run.attempts.values())

    # ------------------------------------------------------------ the request's verbs

    def start(self, request: GenerationRequest, sink: Sink) -> Run:
        if len(self._live) >= self._max_inflight:
            self._metrics.rejects.inc(labels=("inflight",))
            raise Overloaded(f"{self._max_inflight} requests are in flight; try again shortly")
        now = self._clock()
        run = Run(request, sink, now, self._cancel)
        limit_ms = self._deadlines.request_ms
        if request.timeout_ms is not None:
            limit_ms = min(limit_ms, request.timeout_ms)
        run.deadline_s = now + limit_ms / 1e3
        try:
            self._place(run, now)
        except NoWorker:
            self._metrics.rejects.inc(labels=("no_worker",))
            raise
        self._live.add(run)
        self._metrics.prompt_tokens.observe(len(request.prompt))
        return run

    def _cancel(self, run: Run, outcome: str) -> None:
        if not run.ended:
            self._end(run, outcome)

    # ------------------------------------------------------------ placing

    def _place(self, run: Run, now: float) -> None:
        """Choose workers and send the attempts. Raises NoWorker; then nothing was sent."""
        request = run.request
        tokens = request.prompt + run.sent if run.sent else request.prompt
        remaining = request.params.max_tokens - len(run.sent)
        wanted = RouterRequest(
            tokens=tokens,
            namespace=namespace_seed(self._model, salt=request.cache_salt or None),
            max_tokens=remaining,
            session=request.session,
            avoid=frozenset(run.failed_on),
        )
        began_s = perf_counter()
        choice = self._router.choose(wanted, now)
        self._metrics.decision.observe(perf_counter() - began_s)
        self._note(run, choice)
        run.placements += 1
        run.info.prefill_worker = choice.prefill or choice.decode
        run.info.decode_worker = choice.decode
        deadline_ms = max(1, int((run.deadline_s - now) * 1e3))
        packed = pack_u32(tokens)

        pull = self._pull(choice) if run.placements == 1 else None  # a resume takes no chances

        def submit(worker: WorkerEntry, mode: Mode, handoff: Handoff | None = None) -> int:
            self._next_attempt += 1
            attempt = self._next_attempt
            run.attempts[attempt] = Attempt(attempt, worker.ident, mode)
            self._runs[attempt] = run
            self._router.book(attempt, worker.ident, wanted, now)
            worker.send(
                Submit(
                    attempt=attempt,
                    mode=mode.value,
                    tokens=packed,
                    n_prompt=len(request.prompt),
                    params=request.params,
                    namespace=wanted.namespace,
                    request_id=request.request_id,
                    deadline_ms=deadline_ms,
                    handoff=handoff,
                    priority=request.priority,
                    pull=pull if handoff is None else None,
                )
            )
            return attempt

        decode = self._workers[choice.decode]
        if choice.prefill is None:
            submit(decode, Mode.LOCAL)
        else:
            prefill = self._workers[choice.prefill]
            if remaining == 1:  # prefill's token is the whole answer: nobody needs the KV
                submit(prefill, Mode.LOCAL)
            else:
                first = submit(prefill, Mode.PREFILL)
                source = Handoff(prefill.address, prefill.ident, prefill.epoch, first)
                submit(decode, Mode.DECODE, source)
        run.enter(Stage.QUEUE, now)
        log.debug(
            "placed %s: prefill %s, decode %s, %s",
            request.request_id, choice.prefill, choice.decode, choice.reasons,
        )  # fmt: skip

    def _pull(self, choice: Choice) -> Pull | None:
        """What the worker that computes may read first; the owner may be gone by now."""
        owner = None if choice.pull_from is None else self._workers.get(choice.pull_from)
        if owner is None:
            return None
        tokens = choice.cached_tokens + choice.pull_tokens
        return Pull(owner.address, owner.ident, owner.epoch, tokens, max(1, int(choice.pull_within_ms)))

    def _note(self, run: Run, choice: Choice) -> None:
        """Remember the choice for whoever asks why, and for the metrics of its outcome."""
        chosen = choice.reasons.get(choice.prefill or choice.decode, {})
        self._metrics.regret.observe(chosen.get("regret_ms", 0.0) / 1e3)
        run.predicted_ttft_s = None if choice.predicted_ttft_ms is None else choice.predicted_ttft_ms / 1e3
        self.recent.append(
            {
                "request": run.request.request_id,
                "prefill": choice.prefill,
                "decode": choice.decode,
                "cached_tokens": choice.cached_tokens,
                "pull_from": choice.pull_from,
                "pull_tokens": choice.pull_tokens,
                "predicted_ttft_ms": choice.predicted_ttft_ms,
                "predicted_itl_ms": choice.predicted_itl_ms,
                "terms": choice.reasons,
            }
        )

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
            if run is None:
                continue
            if ended.error is not None:
                self._on_failed(run, ended.attempt, ended.error, ended.retryable, now)
            else:
                self._runs.pop(ended.attempt, None)
                run.attempts.pop(ended.attempt, None)
                self._router.release(ended.attempt)
                run.final = FinishReason(ended.reason)
                if not run.early:
                    self._finish(run, now)

    def _on_begun(self, attempt: int, n_cached: int, now: float) -> None:
        run = self._runs.get(attempt)
        if run is None or run.attempts[attempt].mode is Mode.DECODE:
            return
        self._router.begun(attempt, n_cached, now)
        if run.stage is Stage.QUEUE:
            run.enter(Stage.PREFILL, now)
            self._metrics.queue.observe(now - run.started_s)
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
        for row, (attempt, position, token) in enumerate(
            zip(attempts, unpack_u32(columns.positions), tokens, strict=True)
        ):
            run = runs.get(attempt)
            if run is None:
                continue  # ended here, still on its way there
            expected = run.next_position
            if position == expected:
                if not run.pending:
                    touched.append(run)
                run.pending.append(token)
                if run.logprobs:
                    run.pending_logprobs.append(drawn[row])
                run.next_position = expected + 1
                if run.early:
                    self._take_early(run)
            elif position > expected:
                run.early[position] = (token, drawn.get(row))
            # A position below was already sent by an earlier attempt: dropped.
        for run in touched:
            self._emit(run, now)

    def _take_early(self, run: Run) -> None:
        """Append the tokens that waited for the one just appended."""
        while (waiting := run.early.pop(run.next_position, None)) is not None:
            token, logprobs = waiting
            run.pending.append(token)
            if run.logprobs and logprobs is not None:
                run.pending_logprobs.append(logprobs)
            run.next_position += 1

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
        if run.stage is Stage.QUEUE or run.stage is Stage.PREFILL:  # the first of this placement
            run.enter(Stage.FIRST_DECODE, now)
            self._prompt_computed(run, now)
        elif run.stage is not Stage.DECODE:
            run.enter(Stage.DECODE, now)
        run.last_s = now
        run.sent.extend(tokens)
        run.pending = []
        logprobs: list[TokenLogprobs] | None = None
        if run.logprobs:
            logprobs, run.pending_logprobs = run.pending_logprobs, []
        run.sink.on_tokens(tokens, logprobs)
        if run.final is not None and not run.early and not run.ended:
            self._finish(run, now)

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
        generated = len(run.sent)
        self._metrics.output_tokens.observe(generated)
        if generated > 1:
            self._metrics.tpot.observe((run.last_s - run.started_s) / generated)
        self._end(run, reason.value)
        run.sink.on_finish(reason)

    def _fail(self, run: Run, error: KVRelayError) -> None:
        self._end(run, "error")
        run.sink.on_error(error)

    def _end(self, run: Run, outcome: str) -> None:
        """Free everything the run holds, here and on the workers. After it no call reaches the sink but
        the terminal one of the caller."""
        run.ended = True
        self._live.discard(run)
        self._drop_attempts(run)
        self._metrics.requests.inc(labels=(outcome,))
        self._metrics.e2e.observe(self._clock() - run.started_s)

    def _drop_attempts(self, run: Run) -> None:
        for attempt in run.attempts.values():
            self._runs.pop(attempt.ident, None)
            self._router.release(attempt.ident)
            if run.final is not None and attempt.mode is Mode.PREFILL and attempt.computed:
                continue  # its reader confirmed the KV: nothing is left there
            worker = self._workers.get(attempt.worker)
            if worker is not None:
                worker.send(Cancel(attempt.ident))
        run.attempts.clear()

    # ------------------------------------------------------------ faults

    def on_worker_lost(self, ident: str) -> None:
        """The link to `ident` is gone; its runs go on elsewhere."""
        now = self._clock()
        for run in list(self._live):
            for attempt in list(run.attempts.values()):
                if attempt.worker != ident or run.ended:
                    continue
                if attempt.mode is Mode.PREFILL and run.sent:
                    # Its token is out; whether its KV is, the decode worker will say.
                    run.attempts.pop(attempt.ident)
                    self._runs.pop(attempt.ident, None)
                else:
                    self._on_failed(run, attempt.ident, f"the link to worker {ident} broke", True, now)

    def _on_failed(self, run: Run, attempt: int, message: str, retryable: bool, now: float) -> None:
        log.warning(
            "%s: attempt %x on %s failed: %s",
            run.request.request_id, attempt, run.attempts[attempt].worker, message,
        )  # fmt: skip
        self._metrics.attempt_failures.inc()
        if not retryable:
            self._fail(run, EngineFailure(message))
            return
        run.failed_on.add(run.attempts[attempt].worker)
        self._retry(run, WorkerLost(message), now)

    def _retry(self, run: Run, error: Unavailable, now: float) -> None:
        """Go on elsewhere from the prompt and the tokens sent, or end with `error`."""
        run.final = None
        self._drop_attempts(run)
        run.early.clear()
        if run.placements >= MAX_PLACEMENTS:
            self._fail(run, error)
            return
        try:
            self._place(run, now)
        except NoWorker:
            self._fail(run, error)
        else:
            self._metrics.resumes.inc()

    @staticmethod
    def _to_blame(run: Run) -> list[str]:
        """The workers whose turn it is in the run's stage."""
        decoding = run.stage is Stage.FIRST_DECODE
        return [
            a.worker
            for a in run.attempts.values()
            if a.mode is Mode.LOCAL or decoding == (a.mode is Mode.DECODE)
        ]

    def sweep(self) -> None:
        """Enforce the deadlines; call it every quarter of a second."""
        now = self._clock()
        for run in list(self._live):
            if run.ended:
                continue
            if now > run.deadline_s:
                self._metrics.deadlines.inc(labels=("request",))
                self._fail(run, DeadlineExceeded("the request's deadline passed"))
                continue
            limit_ms = self._stage_ms.get(run.stage)
            if limit_ms is None or (now - run.stage_s) * 1e3 <= limit_ms:
                continue
            self._metrics.deadlines.inc(labels=(run.stage.value,))
            run.failed_on.update(self._to_blame(run))
            self._retry(run, DeadlineExceeded(f"no progress in stage {run.stage.value}"), now)
