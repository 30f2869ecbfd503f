"""Prompts that wait on one worker go to another one that was added, or got free."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice

from kvrouter.requeue import (
    LEAST_GAIN_MS,
    LEAST_WAIT_S,
    LOOK_AGAIN_S,
    LOOKS_A_SECOND,
    MOST_REQUEUES,
)
from serving.engine.base import Mode
from serving.errors import NoWorker
from serving.frontend_metrics import FrontendMetrics
from serving.placement import Placer
from serving.run import Attempt, Run, Stage

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
        waiting = [(run, a) for run in self._live if (a := _waiting(run, now)) is not None]
        again_s = now + max(LOOK_AGAIN_S, len(waiting) / LOOKS_A_SECOND)  # all of them have their turn
        due = ((run, attempt) for run, attempt in waiting if run.look_after_s <= now)
        for run, attempt in islice(due, LOOKS_A_SWEEP):
            run.look_after_s = again_s
            try:
                sooner = self._placer.is_sooner_elsewhere(run, attempt, now)
            except NoWorker:
                return
            if sooner:
                self._requeue(run, attempt, now)

    def _requeue(self, run: Run, waiting: Attempt, now: float) -> None:
        """As if it came now, but the request's own deadline goes on. That of the queue begins anew: the new
        worker is not to blame for the old one's."""
        waited_s, tries = now - run.stage_s, run.tries
        self._placer.place_elsewhere(run, waiting, now)
        run.waited_s += waited_s
        run.tries = tries
        run.requeues += 1
        self._metrics.requeued.inc()
        log.debug("%s waited on %s: placed anew", run.request.request_id, waiting.worker)


def _waiting(run: Run, now: float) -> Attempt | None:
    """The attempt that is to compute its prompt and has not begun, if it may go elsewhere."""
    if (
        run.stage is not Stage.QUEUE
        or now - run.stage_s < LEAST_WAIT_S
        or run.requeues >= MOST_REQUEUES
        or run.waits_after is not None
        or run.early  # decode's word overtakes prefill's: it has begun
        or run.final is not None
        or any(attempt.arrived for attempt in run.attempts.values())
    ):
        return None
    return next((a for a in run.attempts.values() if a.mode is not Mode.DECODE), None)
