"""The reader's side of a hand-off: bring a prompt's KV over and let the engine go on.

One attempt, in order (`DecodeRole._take_over`):

    1. connect   a link and an agent to the owner that the submit names
    2. reserve   the engine has room for the whole prompt; the first `n_cached` blocks it already holds
    3. read      attach; for every chunk the owner announces, READ the blocks we lack, while it computes
    4. confirm   all is read: was the lease whole until now? NIXL does not fence, so only this makes it true
    5. go on     `engine.kv_arrived` with the first token

Every step has a deadline, and a failure or cancel in any of them ends in `_ended`: the engine forgets the
attempt, its blocks under quarantine while a read may still write them; the owner is told. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from decode.counters import HandoffCounters, failure_kind
from serving.config import Deadlines
from serving.engine.base import AttemptId, BlockId, Engine, Reserved
from serving.errors import (
    KVRelayError,
    LayoutMismatch,
    LeaseRefused,
    PeerGone,
    TransferError,
    TransferTimeout,
)
from serving.kv.io import KvIo
from serving.kv.lease import pack_note
from serving.kv.peer_link import Peer, PeerLinks
from serving.wire import (
    AnyMessage,
    Attach,
    Chunk,
    Confirm,
    Confirmed,
    Detach,
    Handoff,
    Refused,
    Renew,
    Submit,
    unpack_u32,
)

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3


class _FinishedAlready(Exception):
    """The request ended on its first token: there is nothing to decode."""


@dataclass(slots=True, eq=False)
class _Job:
    attempt: AttemptId
    handoff: Handoff
    reserved: asyncio.Future[Reserved]
    until_s: float  # the attempt's own deadline
    inbox: asyncio.Queue[Chunk | Confirmed | TransferError] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    peer: Peer | None = None  # once attached
    generation: int | None = None
    renewal: asyncio.TimerHandle | None = None
    n_read: int = 0  # blocks
    started_s: float = 0.0
    last_chunk_s: float = 0.0


class DecodeRole:
    """Belongs to one event loop; `stop` ends it.

    `on_failed(attempt, message, retryable)` is called at most once an attempt and never after `cancel`;
    `on_unneeded(attempt)` when the request had already finished on its first token.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        kv_io: KvIo,
        peers: PeerLinks,
        deadlines: Deadlines,
        on_failed: Callable[[AttemptId, str, bool], None],
        on_unneeded: Callable[[AttemptId], None] = lambda attempt: None,
    ) -> None:
        self.counters = HandoffCounters()
        self._engine = engine
        self._kv_io = kv_io
        self._peers = peers
        self._deadlines = deadlines
        self._on_failed = on_failed
        self._on_unneeded = on_unneeded
        self._jobs: dict[AttemptId, _Job] = {}
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._attached: dict[tuple[Peer, int], _Job] = {}  # by the owner's attempt
        self._quarantined: set[AttemptId] = set()
        peers.deliver_to(self)
        kv_io.on_ended = self._reads_ended

    @property
    def idle(self) -> bool:
        """No hand-off under way and no read that may still write."""
        return not self._jobs and not self._quarantined

    def accept(self, submit: Submit) -> None:
        """Take the KV over for a DECODE attempt that the engine was given. `submit.handoff` is set."""
        assert submit.handoff is not None
        loop = asyncio.get_running_loop()
        attempt = AttemptId(submit.attempt)
        until_s = loop.time() + submit.deadline_ms / 1e3
        job = _Job(attempt, submit.handoff, loop.create_future(), until_s)
        self._jobs[attempt] = job
        task = self._tasks[attempt] = loop.create_task(self._take_over(job))
        task.add_done_callback(lambda done: self._ended(job, done))

    def on_reserved(self, reserved: Reserved) -> None:
        job = self._jobs.get(reserved.attempt)
        if job is not None and not job.reserved.done():
            job.reserved.set_result(reserved)
            self._kv_io.expect(reserved.blocks[reserved.n_cached :])

    def on_engine_failed(self, attempt: AttemptId) -> None:
        """The engine gave it up and its caller reports so; here is only something to stop."""
        task = self._tasks.get(attempt)
        if task is not None:
            task.cancel()

    def cancel(self, attempt: AttemptId) -> bool:
        """Forget an attempt that is being handed over, here and in the engine; False for any other,
        which the engine can be told directly. Idempotent."""
        job = self._jobs.get(attempt)
        if job is None:
            return False
        job.cancelled = True  # holds even when the task just came to its own end
        self._tasks[attempt].cancel()  # `_ended` does the rest, in the loop's next turns
        return True

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what owners say (PeerLinks)

    def on_owner_message(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Chunk | Confirmed | Refused):
            job = self._attached.get((peer, message.attempt))
            if job is None:
                return
            if isinstance(message, Refused):
                job.inbox.put_nowait(LeaseRefused(message.reason))
            else:
                job.inbox.put_nowait(message)

    def on_owner_lost(self, peer: Peer, reason: str) -> None:
        for job in self._jobs.values():
            if job.peer is peer:
                job.inbox.put_nowait(PeerGone(f"{peer.address}: {reason}"))

    # -- one hand-off

    async def _take_over(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(job.until_s):
                await self._connected(job)
                reserved = await self._reserved(job)
                peer = await self._connected(job)  # it may have been lost while we waited
                job.peer, job.started_s = peer, loop.time()
                self._attached[peer, job.handoff.attempt] = job
                peer.send(Attach(job.handoff.attempt, reserved.n_cached))
                async with asyncio.TaskGroup() as reads:
                    token = await self._read_chunks(job, peer, reserved, reads)
                await self._confirmed(job, peer)
        except TimeoutError:
            raise TransferTimeout("the attempt's deadline passed before its KV was here") from None
        self._engine.kv_arrived(job.attempt, token)
        now_s = loop.time()
        size = self._engine.memory.block_bytes
        self.counters.taken(job.n_read, size, now_s - job.started_s, now_s - job.last_chunk_s)

    async def _connected(self, job: _Job) -> Peer:
        deadline_s = self._deadlines.transfer_ms / 1e3
        return await self._peers.ensure(job.handoff.address, job.handoff.epoch, deadline_s)

    async def _reserved(self, job: _Job) -> Reserved:
        queue_ms = self._deadlines.queue_ms
        try:
            async with asyncio.timeout(queue_ms / 1e3):
                return await job.reserved
        except TimeoutError:
            raise TransferTimeout(f"no room for the prompt's KV within {queue_ms:.0f} ms") from None

    async def _read_chunks(
        self, job: _Job, peer: Peer, reserved: Reserved, reads: asyncio.TaskGroup
    ) -> int:
        """Start a read for every chunk; returns the first token. `reads` waits for the bytes."""
        have = reserved.n_cached
        transfer_s = self._deadlines.transfer_ms / 1e3
        while True:
            chunk = await self._receive(job, self._deadlines.prefill_ms, "the next chunk")
            if not isinstance(chunk, Chunk):
                continue
            if chunk.last and chunk.token is None:
                raise _FinishedAlready
            self._lease(job, peer, chunk)
            source = [BlockId(block) for block in unpack_u32(chunk.blocks)]
            end = chunk.first + len(source)
            if end > len(reserved.blocks) or (source and chunk.first > have):
                raise TransferError(f"chunk of blocks {chunk.first}..{end} does not follow block {have}")
            if end > have:
                source, target = source[have - chunk.first :], reserved.blocks[have:end]
                note = pack_note(AttemptId(job.handoff.attempt), chunk.generation)
                renew = partial(peer.send, Renew(job.handoff.attempt, chunk.generation))
                reads.create_task(
                    self._kv_io.read(
                        peer.agent, source, target, note, transfer_s, token=job.attempt, waiting=renew
                    )
                )
                job.n_read += len(source)
                have = end
            if chunk.last and chunk.token is not None:
                if have != len(reserved.blocks):
                    raise TransferError(f"the last chunk ends at block {have} of {len(reserved.blocks)}")
                job.last_chunk_s = asyncio.get_running_loop().time()
                return chunk.token

    async def _confirmed(self, job: _Job, peer: Peer) -> None:
        assert job.generation is not None
        peer.send(Confirm(job.handoff.attempt, job.generation))
        while True:
            answer = await self._receive(job, self._deadlines.transfer_ms, "the owner's confirmation")
            if isinstance(answer, Confirmed) and answer.generation == job.generation:
                return

    async def _receive(self, job: _Job, deadline_ms: float, what: str) -> Chunk | Confirmed:
        """The owner's next word on this attempt; raises what it says went wrong."""
        try:
            async with asyncio.timeout(deadline_ms / 1e3):
                message = await job.inbox.get()
        except TimeoutError:
            raise TransferTimeout(f"{what} did not come within {deadline_ms:.0f} ms") from None
        if isinstance(message, TransferError):
            raise message
        return message

    def _lease(self, job: _Job, peer: Peer, chunk: Chunk) -> None:
        """Keep the lease of `chunk` alive for as long as the job runs."""
        if job.generation is not None and job.generation != chunk.generation:
            raise LeaseRefused("the lease changed hands between two chunks")
        job.generation = chunk.generation
        if job.renewal is None:
            self._renew_later(job, peer, chunk.lease_ms / 1e3 / RENEWALS_PER_LEASE)

    def _renew_later(self, job: _Job, peer: Peer, interval_s: float) -> None:
        def renew() -> None:
            assert job.generation is not None
            peer.send(Renew(job.handoff.attempt, job.generation))
            self._renew_later(job, peer, interval_s)

        job.renewal = asyncio.get_running_loop().call_later(interval_s, renew)

    # -- its end

    def _ended(self, job: _Job, task: asyncio.Task[None]) -> None:
        """The one place where a hand-off ends, however it does; reads are cancelled or done by now."""
        attempt, peer = job.attempt, job.peer
        del self._jobs[attempt], self._tasks[attempt]
        if job.renewal is not None:
            job.renewal.cancel()
        if peer is not None:
            del self._attached[peer, job.handoff.attempt]
        error = None if task.cancelled() else _root(task.exception())
        if error is None and not task.cancelled() and not job.cancelled:
            return
        writing = self._kv_io.in_flight(attempt) > 0
        if writing:
            self._quarantined.add(attempt)
        self._engine.cancel(attempt, quarantine=writing)
        if isinstance(error, _FinishedAlready):
            if not job.cancelled:
                self._on_unneeded(attempt)
            return
        if peer is not None:
            peer.send(Detach(job.handoff.attempt))
        if isinstance(error, PeerGone) and peer is not None:
            self._peers.drop(peer, str(error))  # a failed agent must be added anew
        if error is None or job.cancelled:
            self.counters.cancelled += 1
            return
        self.counters.failed(failure_kind(error))
        if not isinstance(error, KVRelayError):
            log.error("hand-off of attempt %d", attempt, exc_info=error)
        self._on_failed(attempt, str(error) or repr(error), not isinstance(error, LayoutMismatch))

    def _reads_ended(self, attempt: AttemptId) -> None:
        if attempt in self._quarantined:
            self._quarantined.discard(attempt)
            self._engine.end_quarantine(attempt)


def _root(error: BaseException | None) -> BaseException | None:
    """The first error within the group that a TaskGroup made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
