"""How long a run may stay where it is, and whose fault it is when it stays longer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serving.config import Deadlines
from serving.engine.base import Mode
from serving.run import Attempt, Run, Stage, WorkerEntry

ROOM, SILENCE = "room", "silence"
# A link is dialled anew within a second. A new request waits so long where there were workers just now,
# instead of being refused.
COME_BACK_S = 10.0


class Lateness:
    """`workers`: the linked ones by ident, shared with the coordinator."""

    def __init__(self, deadlines: Deadlines, workers: Mapping[str, WorkerEntry]) -> None:
        self._workers = workers
        self._silence_ms = deadlines.silence_ms
        self._queue_ms = deadlines.queue_ms
        self._transfer_ms = deadlines.transfer_ms
        self._stage_ms = {
            Stage.QUEUE: deadlines.queue_ms,
            Stage.PREFILL: deadlines.prefill_ms,
            Stage.TRANSFER: deadlines.transfer_ms,
            Stage.FIRST_DECODE: deadlines.first_token_ms,
        }

    def late(self, run: Run, now_s: float) -> str | None:
        """What takes longer than it may: the stage, "silence" of a stream that began, or "room" where its
        decode worker is well and has none for it: a queue."""
        if run.stage in (Stage.QUEUE, Stage.PREFILL):
            since_s = run.stage_s
            if run.placements == 0:
                return run.stage.value if now_s - since_s > COME_BACK_S else None
        elif self._lacks_room(run):
            run.parked_s = now_s
            return ROOM if (now_s - run.last_s) * 1e3 > self._queue_ms else None
        elif run.stage is Stage.DECODE:
            return self._silent(run, now_s)
        else:
            since_s = max(run.stage_s, run.parked_s)
        return run.stage.value if (now_s - since_s) * 1e3 > self._stage_ms[run.stage] else None

    def move_is_late(self, run: Run, now_s: float) -> bool:
        """Once the source gave the run up it is no longer the move that is late, but the stream."""
        move = run.move
        if move is None or move.source not in run.attempts:
            return False
        return (now_s - move.since_s) * 1e3 > self._transfer_ms

    def _silent(self, run: Run, now_s: float) -> str | None:
        """Where a worker does not tell who lacks room, a stream without tokens may be one as long as
        anything waits there."""
        quiet_ms = (now_s - max(run.last_s, run.parked_s)) * 1e3
        if quiet_ms <= self._silence_ms:
            return None
        entries = [self._workers.get(attempt.worker) for attempt in _at_work(run)]
        runs = all(e is not None and (e.parked is not None or e.waiting == 0) for e in entries)
        return SILENCE if runs or quiet_ms > self._queue_ms else None

    def _lacks_room(self, run: Run) -> bool:
        entries = ((self._workers.get(attempt.worker), attempt.ident) for attempt in _at_work(run))
        return any(entry is not None and entry.parks(ident) for entry, ident in entries)


def _at_work(run: Run) -> list[Attempt]:
    """Whose tokens are next: not the target of a move that the source has not given up."""
    move = run.move
    waits = None if move is None or move.source not in run.attempts else move.target
    return [attempt for attempt in run.decoding if attempt.ident != waits]


def behind(run: Run, late: str) -> list[str]:
    """The workers whose turn it is, where so much of the run is late; of a hand-off that hangs it may be
    either."""
    if late in (ROOM, SILENCE) or run.stage is Stage.FIRST_DECODE:
        return [attempt.worker for attempt in _at_work(run)]
    if run.stage is Stage.TRANSFER:
        return [attempt.worker for attempt in run.attempts.values()]
    return [attempt.worker for attempt in run.attempts.values() if attempt.mode is not Mode.DECODE]


def is_fault(late: str) -> bool:
    """And not a queue: one that steps, and is asked for more than it can do, fails nobody."""
    return late not in (ROOM, Stage.QUEUE.value)
