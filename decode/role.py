"""The reader's side of a hand-off: the KV of a whole prompt and its first token come, or the attempt fails.

The work is `serving.kv.reader`'s; here is what a hand-off asks for and how it ends. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from decode.counters import HandoffCounters, failure_kind
from serving.config import Deadlines
from serving.engine.base import AttemptId, Engine, Reserved
from serving.errors import KVRelayError, LayoutMismatch
from serving.kv.reader import Job, KvReader, NothingToRead
from serving.wire import Attach, Message, Submit

log = logging.getLogger(__name__)


class DecodeRole:
    """Takes over DECODE attempts; the Ending of their jobs.

    `on_failed(attempt, message, retryable)` is called at most once an attempt and never after its job was
    cancelled; `on_unneeded(attempt)` when the request had already finished on its first token.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        reader: KvReader,
        deadlines: Deadlines,
        on_failed: Callable[[AttemptId, str, bool], None],
        on_unneeded: Callable[[AttemptId], None] = lambda attempt: None,
    ) -> None:
        self.counters = HandoffCounters()
        self._engine = engine
        self._reader = reader
        self._answer_s = deadlines.prefill_ms / 1e3
        self._on_failed = on_failed
        self._on_unneeded = on_unneeded

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
                answer_s=self._answer_s,
            )
        )

    # -- Ending

    def ask(self, job: Job, reserved: Reserved) -> Message:
        return Attach(job.source, reserved.n_cached)

    def arrived(self, job: Job) -> None:
        self._engine.kv_arrived(job.attempt, job.token)
        now_s = asyncio.get_running_loop().time()
        size = self._engine.memory.block_bytes
        self.counters.taken(job.n_read, size, now_s - job.started_s, now_s - job.last_chunk_s)

    def failed(self, job: Job, error: BaseException | None, writing: bool) -> None:
        self._engine.cancel(job.attempt, quarantine=writing)
        if error is None:
            self.counters.cancelled += 1
            return
        if isinstance(error, NothingToRead):
            self._on_unneeded(job.attempt)
            return
        self.counters.failed(failure_kind(error))
        if not isinstance(error, KVRelayError):
            log.error("hand-off of attempt %d", job.attempt, exc_info=error)
        self._on_failed(job.attempt, str(error) or repr(error), not isinstance(error, LayoutMismatch))
