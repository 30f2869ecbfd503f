"""Moves of streams from one decode worker to another, as the frontend sees them.

move_from    a submit to the target, which reads the KV from the source; the source goes on meanwhile
moved        the source gave the run up: its reader has everything
taken_over   the first token of the target is here
stop         the target failed before that: the run goes on where it was
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from serving.errors import NoWorker
from serving.frontend_metrics import FrontendMetrics
from serving.placement import Placer
from serving.requeue import Requeuer
from serving.run import Attempt, Run, Stage

log = logging.getLogger("kvrelay.coordinator")

MOVES_AT_ONCE = 4  # off one worker: more would only share its network and lengthen each other's pause
MOVE_AGAIN_S = 1.0  # after a move that failed
MOVED = "moved"  # reason of an Ended whose run goes on at the reader of its KV


class Mover:
    """`live` are the coordinator's runs; `able`: the engines can hand over what they decode. Those that
    only wait for their prompt are `requeuer`'s to move."""

    def __init__(
        self,
        live: Iterable[Run],
        placer: Placer,
        requeuer: Requeuer,
        metrics: FrontendMetrics,
        *,
        able: bool,
    ) -> None:
        self._able = able
        self._live = live
        self._placer = placer
        self._requeuer = requeuer
        self._metrics = metrics

    def move_from(self, worker: str, now: float) -> int:
        """Move the runs that decode on `worker` elsewhere, a few at a time; call it until it returns 0.

        Returns how many attempts are there. Those that cannot be moved go on where they are.
        """
        there = moving = 0
        running: list[tuple[Run, Attempt]] = []
        waiting: list[Run] = []
        for run in self._live:
            for attempt in run.attempts.values():
                if attempt.worker != worker:
                    continue
                there += 1
                if run.move is not None:
                    moving += run.move.source == attempt.ident
                elif attempt not in run.decoding or len(run.sent) == run.request.params.max_tokens:
                    continue  # it is the other side's, or only its end is still to be told
                elif run.stage is Stage.DECODE:
                    running.append((run, attempt))
                else:
                    waiting.append(run)
        self._requeuer.leave(worker, waiting, now)
        for run, attempt in running if self._able else ():
            if moving >= MOVES_AT_ONCE:
                break
            if now < run.move_after_s:
                continue
            try:
                self._placer.move(run, attempt, now)
                moving += 1
            except NoWorker:
                run.move_after_s = now + MOVE_AGAIN_S
        return there

    def moved(self, run: Run) -> bool:
        """False: nobody has the run, the target failed or was taken back while the source confirmed."""
        self._metrics.migrations.inc(labels=("moved",))
        return bool(run.decoding)

    def taken_over(self, run: Run, now: float) -> None:
        move = run.move
        assert move is not None
        self._metrics.migration_gap.observe(now - run.last_s)
        run.move = None
        run.info.decode_worker = run.attempts[move.target].worker
        source = run.attempts.get(move.source)
        if source is not None:
            source.handed_over = True

    def stop(self, run: Run, why: str, now: float) -> None:
        move = run.move
        assert move is not None
        log.info("%s: not moved: %s", run.request.request_id, why)
        self._metrics.migrations.inc(labels=("failed",))
        run.move = None
        run.move_after_s = now + MOVE_AGAIN_S
        target = run.attempts.get(move.target)
        if target is not None:
            self._placer.take_back(run, target)
