"""The reader's side of KV from a peer: a whole prompt's (decode.role) or a cached prefix (prefill.pull).

One job, in order (`KvReader._take_over`):

    1. connect   a link and an agent to the owner that the submit names
    2. reserve   the engine has room; the first `n_cached` blocks it already holds
    3. read      ask; for every chunk the owner announces, READ the blocks we lack, while it computes
                 (what has still to be computed there: ask before 2, claim the room with the first chunk;
                 see serving.engine.base)
    4. confirm   all is read: was the lease whole until now? NIXL does not fence, so only this makes it true
    5. go on     the job's ending tells the engine

An engine that moves KV by itself goes on after 3, by the state in the last chunk, which has no blocks: it
tells when the KV is there, and 4 is then a word to the owner that needs no answer.

Every step has a deadline. A failure or cancel in any of them ends in `_ended`: the owner is told, and the
job's ending what became of it. Blocks that a read may still write stay in quarantine
until it ended. No Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from serving.config import Deadlines
from serving.engine.base import AttemptId, BlockId, Engine, Moved, Reserved
from serving.errors import FrameRefused, LeaseRefused, PeerGone, TransferError, TransferTimeout
from serving.kv.io import KvIo
from serving.kv.lease import pack_note
from serving.kv.peer_link import Peer, PeerLinks
from serving.kv.read_job import TOKEN_BYTES, Job
from serving.wire import (
    AnyMessage,
    Chunk,
    Confirm,
    Confirmed,
    Detach,
    Ready,
    Refused,
    Renew,
    unpack_u32,
)

RENEWALS_PER_LEASE = 3
FASTEST_RENEWAL_S = 0.05  # however short a lease the owner claims to give


class NothingToRead(Exception):
    """The request ended on its first token, or while it was to move: nobody needs its KV."""


@dataclass(slots=True)
class Moves:
    """Reads since somebody took them: what the router learns the speed of the network from."""

    count: int = 0
    tokens: int = 0
    ms: float = 0.0


class KvReader:
    """Belongs to one event loop; `stop` ends it. An attempt has one job at most."""

    def __init__(self, *, engine: Engine, kv_io: KvIo, peers: PeerLinks, deadlines: Deadlines) -> None:
        self._engine = engine
        self._kv_io = kv_io
        self._peers = peers
        self._deadlines = deadlines
        self._jobs: dict[AttemptId, Job] = {}
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._asked: dict[tuple[Peer, int], Job] = {}  # by the owner's name for it
        self._quarantined: set[AttemptId] = set()
        self._moves = Moves()
        peers.deliver_to(self)
        kv_io.on_ended = self._reads_ended

    @property
    def idle(self) -> bool:
        """No job under way and no read that may still write."""
        return not self._jobs and not self._quarantined

    def take(self, job: Job) -> None:
        """Bring it over. The engine is given the attempt right after."""
        self._jobs[job.attempt] = job
        task = asyncio.get_running_loop().create_task(self._take_over(job))
        self._tasks[job.attempt] = task
        task.add_done_callback(lambda done: self._ended(job, done))

    def take_moves(self) -> Moves:
        """Since the last call."""
        moves, self._moves = self._moves, Moves()
        return moves

    def on_reserved(self, reserved: Reserved) -> None:
        job = self._jobs.get(reserved.attempt)
        if job is not None:
            job.offer(reserved)
            self._kv_io.expect(reserved.blocks[reserved.n_cached :])

    def on_engine_moved(self, moved: Moved) -> None:
        job = self._jobs.get(moved.attempt)
        if job is not None and not job.moved.done():
            job.moved.set_result(moved)

    def on_engine_finished(self, attempt: AttemptId) -> None:
        """The engine is done with it; here is at most something to stop."""
        job = self._jobs.get(attempt)
        if job is not None and not job.moved.done():  # else it has only its last word to say
            self._tasks[attempt].cancel()

    def on_engine_failed(self, attempt: AttemptId) -> None:
        """The engine gave it up, and its caller reports so. Its blocks are free once no read can write."""
        job = self._jobs.get(attempt)
        if job is None:
            self._engine.end_quarantine(attempt)
        else:
            job.engine_failed = True
            self._tasks[attempt].cancel()

    def cancel(self, attempt: AttemptId) -> bool:
        """Forget an attempt that waits for KV, here and in the engine; False for any other, which the
        engine can be told directly. Idempotent."""
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
        if isinstance(message, Chunk):
            _check(message)
        if isinstance(message, Chunk | Confirmed | Refused):
            job = self._asked.get((peer, message.attempt))
            if job is None:
                return
            if isinstance(message, Refused):
                job.fail(LeaseRefused(message.reason))
            else:
                job.inbox.put_nowait(message)

    def on_owner_lost(self, peer: Peer, reason: str) -> None:
        for job in self._jobs.values():
            if job.peer is peer:
                job.fail(PeerGone(f"{peer.address}: {reason}"))

    # -- one job

    async def _take_over(self, job: Job) -> None:
        try:
            async with asyncio.timeout_at(job.until_s):
                peer = await self._connected(job)
                if job.early:
                    self._ask(job, peer, None)
                    chunk = await self._chunk(job, peer)
                    await self._bring(job, peer, await self._room(job), chunk)
                else:
                    reserved = await self._room(job)
                    job.n_blocks = reserved.n_cached
                    if job.whole or reserved.n_cached < len(reserved.blocks):
                        peer = await self._connected(job)  # it may have been lost while we waited
                        self._ask(job, peer, reserved)
                        await self._bring(job, peer, reserved, await self._chunk(job, peer))
        except TimeoutError:
            raise TransferTimeout("the attempt's deadline passed before its KV was here") from None
        if not job.state:
            job.ending.arrived(job)

    def _ask(self, job: Job, peer: Peer, reserved: Reserved | None) -> None:
        job.peer, job.started_s = peer, asyncio.get_running_loop().time()
        self._asked[peer, job.source] = job
        peer.send(job.ending.ask(job, reserved))

    async def _room(self, job: Job) -> Reserved:
        """Its blocks, nobody else's from now on. Its frontend sees who lacks room, and for how long."""
        while True:
            if job.trouble is not None:
                raise job.trouble
            if job.early and not job.reserved.done():
                self._engine.kv_begun(job.attempt)
            reserved = await job.reserved
            if reserved is not None and reserved.claim():
                return reserved
            if job.reserved.done() and job.reserved.result() is reserved:  # it was taken back
                job.reserved = asyncio.get_running_loop().create_future()

    async def _bring(self, job: Job, peer: Peer, reserved: Reserved, chunk: Chunk) -> None:
        """All of it, from the first `chunk` on."""
        loop = asyncio.get_running_loop()
        job.n_blocks = reserved.n_cached
        async with asyncio.TaskGroup() as reads:
            while self._read_chunk(job, peer, reserved, chunk, reads):
                chunk = await self._chunk(job, peer)
        if job.state:
            await self._moved_by_engine(job, peer)
            return
        await self._confirmed(job, peer)
        if job.n_last:
            self._moves.count += 1
            self._moves.tokens += job.n_last * self._engine.block_tokens
            self._moves.ms += (loop.time() - job.last_chunk_s) * 1e3

    async def _connected(self, job: Job) -> Peer:
        deadline_s = min(self._deadlines.transfer_ms / 1e3, job.answer_s)
        return await self._peers.ensure(job.address, job.epoch, deadline_s)

    async def _chunk(self, job: Job, peer: Peer) -> Chunk:
        """The next one, under a lease that is kept alive from now on."""
        while True:
            chunk = await self._receive(job, job.answer_s, "the next chunk")
            if not isinstance(chunk, Chunk):
                continue
            if chunk.last and chunk.token is None:
                raise NothingToRead
            self._lease(job, peer, chunk)
            return chunk

    def _read_chunk(
        self, job: Job, peer: Peer, reserved: Reserved, chunk: Chunk, reads: asyncio.TaskGroup
    ) -> bool:
        """Start to read it; `reads` waits for the bytes. False if it is the last one."""
        have = job.n_blocks
        source = [BlockId(block) for block in unpack_u32(chunk.blocks)]
        end = chunk.first + len(source)
        if end > len(reserved.blocks) or (source and chunk.first > have):
            raise TransferError(f"chunk of blocks {chunk.first}..{end} does not follow block {have}")
        job.n_last = max(end - have, 0)
        if job.n_last:
            source, target = source[have - chunk.first :], reserved.blocks[have:end]
            note = pack_note(AttemptId(job.source), chunk.generation)
            read = partial(
                self._kv_io.read, peer.agent, source, target, note, self._deadlines.transfer_ms / 1e3,
                token=job.attempt, waiting=partial(peer.send, Renew(job.source, chunk.generation)),
            )  # fmt: skip
            reads.create_task(self._copied(job, peer, read) if job.live and not chunk.last else read())
            job.n_read += len(source)
            job.n_blocks = end
        if not chunk.last or chunk.token is None:
            return True
        n_blocks = len(reserved.blocks)
        if job.live:
            n_blocks = self._take_tokens(job, chunk, n_blocks)
        if job.whole and job.n_blocks != n_blocks:
            raise TransferError(f"the last chunk ends at block {job.n_blocks} of {n_blocks}")
        job.last_chunk_s = asyncio.get_running_loop().time()
        if chunk.state and not self._engine.capabilities.moves_kv:
            raise TransferError("the owner's engine moves KV by itself, this one does not")
        job.token, job.state = chunk.token, chunk.state
        return False

    async def _copied(self, job: Job, peer: Peer, read: Callable[[], Awaitable[None]]) -> None:
        """What the owner told while it went on is here: it may pause."""
        await read()
        assert job.generation is not None
        peer.send(Ready(job.source, job.generation))

    def _take_tokens(self, job: Job, chunk: Chunk, room: int) -> int:
        """What was drawn since the submit; returns how many blocks all but the last token fill."""
        job.drawn = unpack_u32(chunk.tokens)
        last = job.drawn[-1] if job.drawn else unpack_u32(job.submit.tokens[-TOKEN_BYTES:])[0]
        n_tokens = job.n_tokens + len(job.drawn)
        if chunk.token != last or n_tokens > room * self._engine.block_tokens:
            raise TransferError(f"{n_tokens} tokens up to {last}, not {chunk.token}, for {room} blocks")
        return -(-(n_tokens - 1) // self._engine.block_tokens)

    async def _moved_by_engine(self, job: Job, peer: Peer) -> None:
        """The engine has a deadline of its own, and may go on even when the link to the owner is lost."""
        job.ending.arrived(job)
        moved = await job.moved
        assert job.generation is not None
        peer.send(Confirm(job.source, job.generation))
        self._moves.count += 1
        self._moves.tokens += len(job.submit.tokens) // TOKEN_BYTES
        self._moves.ms += moved.seconds * 1e3

    async def _confirmed(self, job: Job, peer: Peer) -> None:
        assert job.generation is not None
        peer.send(Confirm(job.source, job.generation))
        answer_s = min(self._deadlines.transfer_ms / 1e3, job.answer_s)
        while True:
            answer = await self._receive(job, answer_s, "the owner's confirmation")
            if isinstance(answer, Confirmed) and answer.generation == job.generation:
                return

    async def _receive(self, job: Job, deadline_s: float, what: str) -> Chunk | Confirmed:
        """The owner's next word on this job; raises what it says went wrong."""
        try:
            async with asyncio.timeout(deadline_s):
                message = await job.inbox.get()
        except TimeoutError:
            raise TransferTimeout(f"{what} did not come within {deadline_s * 1e3:.0f} ms") from None
        if isinstance(message, TransferError):
            raise message
        return message

    def _lease(self, job: Job, peer: Peer, chunk: Chunk) -> None:
        """Keep the lease of `chunk` alive for as long as the job runs."""
        if job.generation is not None and job.generation != chunk.generation:
            raise LeaseRefused("the lease changed hands between two chunks")
        job.generation = chunk.generation
        if job.renewal is None:
            interval_s = chunk.lease_ms / 1e3 / RENEWALS_PER_LEASE
            self._renew_later(job, peer, max(interval_s, FASTEST_RENEWAL_S))

    def _renew_later(self, job: Job, peer: Peer, interval_s: float) -> None:
        def renew() -> None:
            assert job.generation is not None
            peer.send(Renew(job.source, job.generation))
            self._renew_later(job, peer, interval_s)

        job.renewal = asyncio.get_running_loop().call_later(interval_s, renew)

    # -- its end

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """The one place where a job ends, however it does; reads are cancelled or done by now."""
        attempt, peer = job.attempt, job.peer
        del self._jobs[attempt], self._tasks[attempt]
        if job.renewal is not None:
            job.renewal.cancel()
        if peer is not None and self._asked.get((peer, job.source)) is job:  # not of a live one's next try
            del self._asked[peer, job.source]
        writing = self._kv_io.in_flight(attempt) > 0
        if job.engine_failed and not writing:
            self._engine.end_quarantine(attempt)
        error = None if task.cancelled() else _root(task.exception())
        if error is None and not task.cancelled() and not job.cancelled:
            return
        if writing:
            self._quarantined.add(attempt)
        job.ending.failed(job, None if job.cancelled else error, writing)
        if peer is not None and not isinstance(error, NothingToRead):
            peer.send(Detach(job.source))
        if peer is not None and isinstance(error, PeerGone):
            self._peers.drop(peer, str(error))  # a failed agent must be added anew

    def _reads_ended(self, attempt: AttemptId) -> None:
        if attempt in self._quarantined:
            self._quarantined.discard(attempt)
            self._engine.end_quarantine(attempt)


def _check(chunk: Chunk) -> None:
    """Raises FrameRefused for what would only be found to be wrong on the engine's thread."""
    token = chunk.token or 0
    if len(chunk.blocks) % TOKEN_BYTES or len(chunk.tokens) % TOKEN_BYTES or token >= 1 << 32:
        raise FrameRefused("a malformed chunk")


def _root(error: BaseException | None) -> BaseException | None:
    """The first error within the group that a TaskGroup made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
