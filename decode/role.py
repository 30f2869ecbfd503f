"""The reader's side of a hand-off: the KV of a whole prompt and its first token come, or the attempt fails.

A live hand-off brings what its owner (`decode.moves`) decodes meanwhile: KV and tokens up to its pause.
The work is `serving.kv.reader`'s; here is what a hand-off asks for and how it ends. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from decode.counters import HandoffCounters, MoveCounters, failure_kind
from serving.config import Deadlines
from serving.engine.base import AttemptId, Engine, Reserved, SelfMovingEngine
from serving.errors import KVRelayError, LayoutMismatch, TransferError
from serving.kv.read_job import Job
from serving.kv.reader import KvReader, NothingToRead
from serving.wire import Attach, Message, Ready, Submit

log = logging.getLogger(__name__)


class DecodeRole:
    """Takes over DECODE attempts; the Ending of their jobs.

    `on_failed(attempt, message, alike)` is called at most once an attempt and never after its job was
    cancelled; not `alike`: the KV is there in another layout, so these two can never hand over.
    `on_unneeded(attempt)` when the request had already finished on its first token, or ended at the owner
    of a live one; `on_arrived(attempt)` when the KV is here.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        reader: KvReader,
        deadlines: Deadlines,
        on_failed: Callable[[AttemptId, str, bool], None],
        on_unneeded: Callable[[AttemptId], None] = lambda attempt: None,
        on_arrived: Callable[[AttemptId], None] = lambda attempt: None,
    ) -> None:
        self.counters = HandoffCounters()
        self.moves = MoveCounters()  # live ones are counted here alone
        self._engine = engine
        self._reader = reader
        self._answer_s = (deadlines.queue_ms + deadlines.prefill_ms) / 1e3  # a prompt may have to wait
        self._live_answer_s = deadlines.transfer_ms / 1e3  # at most a step away
        self._on_failed = on_failed
        self._on_unneeded = on_unneeded
        self._on_arrived = on_arrived

    def accept(self, submit: Submit) -> None:
        """Take the KV over for a DECODE attempt that the engine is given. `submit.handoff` is set."""
        source = submit.handoff
        assert source is not None
        self._reader.take(
            Job(
                submit,
                ending=self,
                address=source.address,
                epoch=source.epoch,
                source=source.attempt,
                whole=True,
                answer_s=self._live_answer_s if source.live else self._answer_s,
            )
        )

    # -- Ending

    def ask(self, job: Job, reserved: Reserved | None) -> Message:
        if reserved is None:
            return Attach(job.source, 0)
        assert job.peer is not None
        if job.peer.link.wire_version < Ready.since:
            raise TransferError(f"{job.address} is too old for a live hand-off")
        room = len(reserved.blocks) * self._engine.block_tokens - job.n_tokens
        return Attach(job.source, reserved.n_cached, job.n_tokens, room)

    def arrived(self, job: Job) -> None:
        if job.state:
            cast(SelfMovingEngine, self._engine).take_over(job.attempt, job.token, job.state)
        else:
            self._engine.kv_arrived(job.attempt, job.token, job.drawn)
        self._on_arrived(job.attempt)
        if job.live:
            self.moves.count("moved")
            self.moves.bytes += job.n_read * self._engine.memory.block_bytes
            return
        now_s = asyncio.get_running_loop().time()
        size = self._engine.memory.block_bytes
        self.counters.taken(job.n_read, size, now_s - job.started_s, now_s - job.last_chunk_s)

    def failed(self, job: Job, error: BaseException | None, writing: bool) -> None:
        self._engine.cancel(job.attempt, quarantine=writing)
        unneeded = isinstance(error, NothingToRead)
        if job.live:
            self.moves.count("cancelled" if error is None else "unneeded" if unneeded else "failed")
        if error is None:
            self.counters.cancelled += not job.live
            return
        if unneeded:
            self._on_unneeded(job.attempt)
            return
        if not job.live:
            self.counters.failed(failure_kind(error))
        if not isinstance(error, KVRelayError):
            log.error("hand-off of attempt %d", job.attempt, exc_info=error)
        self._on_failed(job.attempt, str(error) or repr(error), not isinstance(error, LayoutMismatch))
