"""How long a run may stay where it is, and whose fault it is when it stays longer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serving.config import Deadlines
from serving.engine.base import Mode
from serving.run import Run, Stage, WorkerEntry


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
        """What takes longer than it may: the stage, or "silence" of a stream that began."""
        if run.stage is Stage.DECODE:
            return self._silent(run, now_s)
        return run.stage.value if (now_s - run.stage_s) * 1e3 > self._stage_ms[run.stage] else None

    def move_is_late(self, run: Run, now_s: float) -> bool:
        """Once the source gave the run up it is no longer the move that is late, but the stream."""
        move = run.move
        if move is None or move.source not in run.attempts:
            return False
        return (now_s - move.since_s) * 1e3 > self._transfer_ms

    def _silent(self, run: Run, now_s: float) -> str | None:
        """Where requests wait, a stream without tokens may be one that gave way: that is a queue."""
        quiet_ms = (now_s - run.last_s) * 1e3
        if quiet_ms <= self._silence_ms:
            return None
        entries = [self._workers.get(attempt.worker) for attempt in run.decoding]
        runs = all(entry is not None and entry.waiting == 0 for entry in entries)
        return "silence" if runs or quiet_ms > self._queue_ms else None


def to_blame(run: Run) -> list[str]:
    """The workers whose turn it is in the run's stage; of a hand-off that hangs it may be either."""
    match run.stage:
        case Stage.QUEUE | Stage.PREFILL:
            return [a.worker for a in run.attempts.values() if a.mode is not Mode.DECODE]
        case Stage.TRANSFER:
            return [a.worker for a in run.attempts.values()]
        case _:
            move = run.move
            waits = None if move is None or move.source not in run.attempts else move.target
            return [attempt.worker for attempt in run.decoding if attempt.ident != waits]
