"""Pull: read a cached prefix from another worker before computing the rest of a prompt.

    submit -> connect, reserve -> Lend -> Chunk -> READ -> Confirm -> `engine.prefix_arrived`

Best effort. Whatever goes wrong, a refusal or an owner that is slow to answer included, the engine is told
that nothing came and computes. The one exception is a failure that leaves a read in flight: it may still
write to the blocks, so they go under quarantine and the attempt fails; the frontend goes on elsewhere.
The work is `serving.kv.reader`'s; the owner's side is `prefill.role`'s. No Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from decode.counters import failure_kind
from serving.engine.base import AttemptId, Engine, Reserved
from serving.kv.read_job import Job
from serving.kv.reader import KvReader
from serving.wire import Lend, Message, Submit, loan_of

log = logging.getLogger(__name__)

TOKEN_BYTES = 4


@dataclass(slots=True)
class PullCounters:
    """Monotone totals."""

    pulls: int = 0  # that brought blocks
    blocks: int = 0
    cancelled: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by kind


class PullRole:
    """Pulls for LOCAL and PREFILL attempts; the Ending of their jobs.

    `on_failed(attempt, message, True)` is called when a read was left in flight, and only then.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        reader: KvReader,
        on_failed: Callable[[AttemptId, str, bool], None],
    ) -> None:
        self.counters = PullCounters()
        self._engine = engine
        self._reader = reader
        self._on_failed = on_failed

    def accept(self, submit: Submit) -> None:
        """Pull for an attempt that the engine is given with `pull_tokens`. `submit.pull` is set."""
        source = submit.pull
        assert source is not None
        self._reader.take(
            Job(
                submit,
                ending=self,
                address=source.address,
                epoch=source.epoch,
                source=loan_of(submit.attempt),
                whole=False,
                answer_s=source.within_ms / 1e3,
            )
        )

    # -- Ending

    def ask(self, job: Job, reserved: Reserved | None) -> Message:
        assert reserved is not None  # a pull is no early job
        n_bytes = len(reserved.blocks) * self._engine.block_tokens * TOKEN_BYTES
        return Lend(job.source, job.submit.namespace, job.submit.tokens[:n_bytes], reserved.n_cached)

    def arrived(self, job: Job) -> None:
        self._engine.prefix_arrived(job.attempt, job.n_blocks)
        if job.n_read:
            self.counters.pulls += 1
            self.counters.blocks += job.n_read

    def failed(self, job: Job, error: BaseException | None, writing: bool) -> None:
        if error is None:
            self.counters.cancelled += 1
            self._engine.cancel(job.attempt, quarantine=writing)
            return
        kind = failure_kind(error)
        self.counters.failures[kind] = self.counters.failures.get(kind, 0) + 1
        log.info("pull of attempt %x from %s: %s", job.attempt, job.address, error)
        if not writing:
            self._engine.prefix_arrived(job.attempt, 0)
            return
        self._engine.cancel(job.attempt, quarantine=True)
        self._on_failed(job.attempt, f"pull of a prefix: {error}", True)
