"""Prompts that wait on one worker go to another one: that was added, or got free, or stays while this one
leaves. A prompt keeps its age in the order of the worker it comes to (`Submit.waited_ms`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice

from kvrouter.requeue import (
    LEAST_GAIN_MS,
    LEAST_WAIT_S,
    LOOKS_A_SECOND,
    MOST_REQUEUES,
    whose_turn,
)
from serving.engine.base import Mode
from serving.errors import NoWorker
from serving.frontend_metrics import FrontendMetrics
from serving.placement import Placer
from serving.run import Run, Stage

log = logging.getLogger("kvrelay.coordinator")

LOOKS_A_SWEEP = LOOKS_A_SECOND // 4


class Requeuer:
    """`live` are the coordinator's runs, oldest first; `able`: the engines tell when a prompt begins."""

    def __init__(
        self, live: Iterable[Run], placer: Placer, metrics: FrontendMetrics, *, able: bool
    ) -> None:
        self._live = live
        self._placer = placer
        self._metrics = metrics
        self._able = able

    def sweep(self, now: float) -> None:
        """Call it a few times a second. The oldest are looked at first."""
        if not self._able or not self._placer.router.is_uneven(LEAST_GAIN_MS, now):
            return
        waiting = [run for run in self._live if _waits(run, now)]
        for run in whose_turn(waiting, now, LOOKS_A_SWEEP):
            computes = next(a for a in run.attempts.values() if a.mode is not Mode.DECODE)
            try:
                sooner = self._placer.is_sooner_elsewhere(run, computes, now)
            except NoWorker:
                return
            if sooner:
                self._requeue(run, computes.worker, now)
                run.requeues += 1

    def leave(self, worker: str, runs: Iterable[Run], now: float) -> None:
        """`worker`, which was to decode `runs`, leaves: those whose prompts have not begun go elsewhere, a
        few with each call. It would have to stay until the last of them was computed."""
        if self._able and self._placer.router.can_spare(worker):
            for run in islice(filter(_not_begun, runs), LOOKS_A_SWEEP):
                self._requeue(run, worker, now)

    def _requeue(self, run: Run, worker: str, now: float) -> None:
        """Not on `worker`. The request's own deadline goes on; that of the queue begins anew: the new
        worker is not to blame for the old one's."""
        waited_s, tries = now - run.stage_s, run.tries
        self._placer.place_elsewhere(run, worker, now)
        run.waited_s += waited_s
        run.tries = tries
        self._metrics.requeued.inc()
        log.debug("%s waited on %s: placed anew", run.request.request_id, worker)


def _waits(run: Run, now: float) -> bool:
    """Long enough to look whether another worker would be sooner."""
    return now - run.stage_s >= LEAST_WAIT_S and run.requeues < MOST_REQUEUES and _not_begun(run)


def _not_begun(run: Run) -> bool:
    """It is placed and, as far as anyone said, no worker has begun with it."""
    return bool(
        run.stage is Stage.QUEUE
        and run.attempts
        and not run.early  # decode's word overtakes prefill's
        and run.final is None
        and not any(attempt.arrived for attempt in run.attempts.values())
    )
