"""Prompts that wait on one worker go to another one that was added, or got free."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvrouter.requeue import LEAST_GAIN_MS, LEAST_WAIT_S, LOOK_AGAIN_S, MOST_REQUEUES
from serving.engine.base import Mode
from serving.errors import NoWorker
from serving.frontend_metrics import FrontendMetrics
from serving.placement import Placer
from serving.run import Attempt, Run, Stage

log = logging.getLogger("kvrelay.coordinator")

LOOKS_A_SWEEP = 32  # at a fraction of a millisecond each


class Requeuer:
    """`live` are the coordinator's runs, the oldest first."""

    def __init__(self, live: Iterable[Run], placer: Placer, metrics: FrontendMetrics) -> None:
        self._live = live
        self._placer = placer
        self._metrics = metrics

    def sweep(self, now: float) -> None:
        """Call it a few times a second. The oldest go first, until it is no gain any more."""
        if not self._placer.router.is_uneven(LEAST_GAIN_MS, now):
            return
        looks = 0
        for run in self._live:
            waiting = _waiting(run, now)
            if waiting is None:
                continue
            run.look_after_s = now + LOOK_AGAIN_S
            try:
                if self._placer.is_sooner_elsewhere(run, waiting, now):
                    self._requeue(run, waiting, now)
            except NoWorker:
                return
            looks += 1
            if looks == LOOKS_A_SWEEP:
                return

    def _requeue(self, run: Run, waiting: Attempt, now: float) -> None:
        """As if it came now, but its deadline and its time in the queue go on."""
        since_s, tries = run.stage_s, run.tries
        try:
            self._placer.place_elsewhere(run, waiting, now)
        except NoWorker as error:
            run.waits_after = error
        run.stage_s, run.tries = since_s, tries
        run.requeues += 1
        self._metrics.requeued.inc()
        log.debug("%s waited on %s: placed anew", run.request.request_id, waiting.worker)


def _waiting(run: Run, now: float) -> Attempt | None:
    """The attempt that is to compute its prompt and has not begun, if it is time to look."""
    if (
        run.stage is not Stage.QUEUE
        or now < run.look_after_s
        or now - run.stage_s < LEAST_WAIT_S
        or run.requeues >= MOST_REQUEUES
        or run.waits_after is not None
    ):
        return None
    return next((a for a in run.attempts.values() if a.mode is not Mode.DECODE), None)
