"""Puts a run onto workers: asks the router, books, sends the submits, and takes them back."""

from __future__ import annotations

import logging
import os
from collections import deque
from time import perf_counter
from typing import Any

from kvrouter.hashing import namespace_seed
from kvrouter.requeue import is_sooner_elsewhere
from kvrouter.router import Choice, Router, RouterRequest
from serving.breaker import Breakers
from serving.engine.base import Mode
from serving.errors import NoWorker
from serving.frontend_metrics import FrontendMetrics
from serving.gate import Gate
from serving.run import Attempt, Move, Run, Stage, WorkerEntry
from serving.wire import Cancel, Handoff, Pull, Submit, pack_u32

log = logging.getLogger("kvrelay.coordinator")

RECENT_CHOICES = 100  # kept for the debug route
MIGRATION_WIRE = 2  # the first version that knows live hand-offs
# Tokens that the source of a move may draw meanwhile: 2.5 s at 20 ms, longer than a pre-copy should take.
RESERVE_TOKENS = 128


class Placer:
    """The attempts of one variant's runs; `runs` (attempt -> run) is shared with the coordinator."""

    def __init__(
        self,
        *,
        model: str,
        router: Router,
        workers: dict[str, WorkerEntry],
        runs: dict[int, Run],
        metrics: FrontendMetrics,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: what a request must pass before it is placed for the first time."""
        self._gate = gate
        self.router = router
        self.workers = workers
        self.breakers = Breakers()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_CHOICES)
        self._model = model
        self._runs = runs
        self._metrics = metrics
        # Attempt ids are unique over all frontends and restarts: 31 random bits, 32 counted ones.
        self._next_attempt = (int.from_bytes(os.urandom(4), "little") >> 1) << 32

    def place(self, run: Run, now: float, *, avoid: str | None = None) -> Choice:
        """Choose workers and send the attempts. Raises NoWorker, and what Gate.check does; then nothing was
        sent.

        `avoid`: one that is taken only when nobody else is left.
        """
        request = run.request
        wanted = self._wanted(run, now, avoid=avoid)
        began_s = perf_counter()
        choice = self.router.choose(wanted, now)
        self._metrics.decision.observe(perf_counter() - began_s)
        if self._gate is not None and run.placements == 0:
            choice = self._gate.check(
                request, wanted, choice, now, lambda short: self._again(wanted, short, now)
            )
            run.limit_s = wanted.limit_s
        self._note(run, choice)
        run.placements += 1
        run.tries += 1
        run.info.prefill_worker = choice.prefill or choice.decode
        run.info.decode_worker = choice.decode
        pull = self._pull(choice) if not run.info.resumes else None  # a resume takes no chances
        decode = self.workers[choice.decode]
        if choice.prefill is None:
            self._submit(run, decode, Mode.LOCAL, wanted, now, pull=pull)
        else:
            prefill = self.workers[choice.prefill]
            if wanted.max_tokens == 1:  # prefill's token is the whole answer: nobody needs the KV
                self._submit(run, prefill, Mode.LOCAL, wanted, now, pull=pull)
            else:
                first = self._submit(run, prefill, Mode.PREFILL, wanted, now, pull=pull)
                source = Handoff(prefill.address, prefill.ident, prefill.epoch, first.ident)
                self._submit(run, decode, Mode.DECODE, wanted, now, handoff=source)
        run.enter(Stage.QUEUE, now)
        log.debug(
            "placed %s: prefill %s, decode %s, %s",
            request.request_id, choice.prefill, choice.decode, choice.reasons,
        )  # fmt: skip
        return choice

    def is_sooner_elsewhere(self, run: Run, waiting: Attempt, now: float) -> bool:
        """Another worker is predicted to have computed its prompt well before `waiting` has, which has not
        begun. Raises NoWorker."""
        wanted = self._wanted(run, now, avoid=waiting.worker)
        return is_sooner_elsewhere(self.router, waiting.ident, wanted, now)

    def place_elsewhere(self, run: Run, worker: str, now: float) -> None:
        """Take its attempts back and place it anew, not on `worker`, which another one can replace."""
        for attempt in list(run.attempts.values()):
            self.take_back(run, attempt)
        self.place(run, now, avoid=worker)

    def move(self, run: Run, source: Attempt, now: float) -> None:
        """Start to move `run`, which decodes as `source`, to another decode worker with its KV.

        The source goes on until the target has taken over. Raises NoWorker; then nothing was sent.
        """
        owner = self.workers[source.worker]
        wanted = self._wanted(run, now)
        choice = self.router.choose_decode(wanted, source.worker, now)
        target = self.workers[choice.decode]
        if min(owner.wire_version, target.wire_version) < MIGRATION_WIRE:
            raise NoWorker("no worker that could take over knows live hand-offs")
        handoff = Handoff(owner.address, owner.ident, owner.epoch, source.ident, live=True)
        attempt = self._submit(run, target, Mode.DECODE, wanted, now, handoff=handoff)
        attempt.computed = True
        self.router.computed(attempt.ident, now)
        run.move = Move(source.ident, attempt.ident, now)

    def release(self, run: Run, attempt: int) -> Attempt | None:
        """`attempt` is over on its worker; idempotent."""
        self._runs.pop(attempt, None)
        self.router.release(attempt)
        return run.attempts.pop(attempt, None)

    def take_back(self, run: Run, attempt: Attempt) -> None:
        """Release `attempt` and tell its worker to forget it."""
        self.release(run, attempt.ident)
        worker = self.workers.get(attempt.worker)
        if worker is not None:
            worker.send(Cancel(attempt.ident))

    # ------------------------------------------------------------ inside

    def _again(self, wanted: RouterRequest, short: frozenset[str], now: float) -> Choice:
        """Another choice, where there is one: `short` lack what it needs."""
        wanted.avoid |= short
        return self.router.choose(wanted, now)

    def _wanted(self, run: Run, now: float, avoid: str | None = None) -> RouterRequest:
        request = run.request
        avoided = self.breakers.avoid(now) | run.failed_on
        return RouterRequest(
            tokens=request.prompt + run.sent if run.sent else request.prompt,
            namespace=namespace_seed(self._model, adapter=request.adapter, salt=request.cache_salt or None),
            max_tokens=request.params.max_tokens - len(run.sent),
            session=request.session,
            avoid=avoided if avoid is None else avoided | {avoid},
            limit_s=run.limit_s,
            waited_s=max(now - run.last_s, 0.0),
            handoff=run.handoff,
        )

    def _submit(
        self,
        run: Run,
        worker: WorkerEntry,
        mode: Mode,
        wanted: RouterRequest,
        now: float,
        *,
        handoff: Handoff | None = None,
        pull: Pull | None = None,
    ) -> Attempt:
        self._next_attempt += 1
        attempt = Attempt(self._next_attempt, worker.ident, mode)
        run.attempts[attempt.ident] = attempt
        self._runs[attempt.ident] = run
        self.router.book(attempt.ident, worker.ident, wanted, now)
        self.breakers.placed(worker.ident, now)
        request = run.request
        worker.send(
            Submit(
                attempt=attempt.ident,
                mode=mode.value,
                tokens=pack_u32(wanted.tokens),
                n_prompt=len(request.prompt),
                params=request.params,
                namespace=wanted.namespace,
                request_id=request.request_id,
                deadline_ms=max(1, int((run.deadline_s - now) * 1e3)),
                handoff=handoff,
                priority=request.priority,
                pull=pull,
                adapter=request.adapter or "",
                reserve_tokens=RESERVE_TOKENS if handoff is not None and handoff.live else 0,
                uncached_tokens=_uncached(wanted),
                waited_ms=int(wanted.waited_s * 1e3),
            )
        )
        return attempt

    def _pull(self, choice: Choice) -> Pull | None:
        """What the worker that computes may read first; the owner may be gone by now."""
        owner = None if choice.pull_from is None else self.workers.get(choice.pull_from)
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


def _uncached(wanted: RouterRequest) -> int | None:
    """Tokens that whoever computes the prompt has not cached, as the router believes."""
    choice = wanted.choice
    if choice is None:
        return None
    return max(len(wanted.tokens) - choice.cached_tokens - choice.pull_tokens, 1)
