"""The owner's side: announce a prompt's chunks to its reader, lease their blocks, release them.

    accept -> chunks (buffered until the reader attaches, then streamed) -> last chunk -> Confirm
           -> Confirmed, blocks released            | the reader has them all
           -> Refused, blocks released              | lease run out, prefill failed or cancelled

A reader that wants a cached prefix asks with `Lend`: what the engine finds is one last chunk.

A reader may attach before, during or after prefill, once. While a prompt still computes its blocks are the
engine's own; `engine.release` is called only after its last chunk, and once. One event loop, no Ray.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from serving.config import Deadlines
from serving.engine.base import AttemptId, ChunkReady, Engine
from serving.kv.io import KvIo
from serving.kv.lease import LeaseTable, unpack_note
from serving.kv.peer_link import PeerLink
from serving.wire import (
    AnyMessage,
    Attach,
    Chunk,
    Confirm,
    Confirmed,
    Detach,
    Lend,
    PeerHello,
    PeerWelcome,
    Refused,
    Renew,
    Submit,
    loan_of,
    pack_u32,
    unpack_u32,
)

LEASES_PER_TRANSFER = 2  # a lease outlives the reader's own transfer deadline
UNKNOWN_S = 10.0  # how long a reader may be ahead of the prefill it waits for
WIRE_UP_S = 5.0  # how long we poll for a peer that said hello
TICK_S = 0.25
MOST_HANDOVERS = 1 << 16  # readers may wait for prompts that never come
TOKEN_BYTES = 4  # on the wire
REMEMBERED = 4096  # attempts that are over, for a clear answer to late readers


@dataclass(slots=True)
class PrefillCounters:
    """Monotone totals, but for `leases_held`."""

    leases_held: int = 0
    chunks_sent: int = 0
    confirmed: int = 0
    expired: int = 0  # leases that ran out, the reader there or never seen
    refused: int = 0
    detached: int = 0


@dataclass(slots=True)
class _Handover:
    """One attempt of ours that somebody may come to read."""

    attempt: AttemptId
    chunks: list[ChunkReady] = field(default_factory=list)
    reader: PeerLink | None = None
    first: int = 0  # the reader needs blocks from here on
    accepted: bool = False  # the engine has it; else a reader is ahead of its prefill
    loan: bool = False  # of a cached prefix: no prompt of ours
    complete: bool = False  # the last chunk is here
    unwanted: bool = False  # nobody will read it: release as soon as it is complete
    until_s: float | None = None  # when to give up waiting for the prefill or the reader

    @property
    def pinned(self) -> bool:
        """The engine keeps blocks for a reader, until `release`."""
        return self.complete and self.chunks[-1].token is not None


class PrefillRole:
    """Give it all that concerns hand-offs. `start` and `stop` are a pair, on one event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        kv_io: KvIo,
        deadlines: Deadlines,
        unknown_s: float = UNKNOWN_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counters = PrefillCounters()
        self._engine = engine
        self._kv_io = kv_io
        self._clock = clock
        self._lease_s = LEASES_PER_TRANSFER * deadlines.transfer_ms / 1e3
        self._unattached_s = (deadlines.queue_ms + deadlines.transfer_ms) / 1e3
        self._unknown_s = unknown_s
        self._leases = LeaseTable()
        self._handovers: dict[AttemptId, _Handover] = {}
        self._over: OrderedDict[AttemptId, str] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        kv_io.on_note = self._on_note

    def start(self) -> None:
        """Begin to end what waits too long."""
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self.start)

    async def stop(self) -> None:
        """Refuse whoever still reads; the engine is about to stop."""
        for attempt in list(self._handovers):
            self._refuse(attempt, "the worker stops")
        if self._timer is not None:
            self._timer.cancel()

    @property
    def idle(self) -> bool:
        """Nobody reads from us and nobody may come to.

        What ended on its first token stays for a while, to tell a late reader so; it holds nothing.
        """
        return all(handover.complete and not handover.pinned for handover in self._handovers.values())

    def has(self, attempt: AttemptId) -> bool:
        """A prefill of that name computes, or its KV waits for its reader."""
        handover = self._handovers.get(attempt)
        return handover is not None and handover.accepted

    def accept(self, submit: Submit) -> None:
        """A prefill goes to the engine: a reader that attaches from now on waits as long as that takes."""
        attempt = AttemptId(submit.attempt)
        handover = self._handover(attempt)
        handover.accepted = True
        handover.unwanted = attempt in self._over  # its reader came first and left again
        handover.until_s = None

    def on_chunk(self, chunk: ChunkReady) -> None:
        if chunk.attempt in self._over and chunk.attempt not in self._handovers:
            if chunk.last:  # cancelled while this output was on its way
                self._engine.release(chunk.attempt)
            return
        handover = self._handover(chunk.attempt)
        handover.accepted = True
        handover.chunks.append(chunk)
        handover.until_s = None
        handover.complete = chunk.last
        if handover.loan and not handover.pinned:
            self._refuse(chunk.attempt, "nothing of it is cached here")
        elif handover.unwanted:
            if chunk.last:
                self._forget(handover, self._over.get(chunk.attempt, "nobody wants it"))
        elif handover.reader is not None:
            self._send(handover, handover.reader, chunk)
        elif handover.pinned:
            self._leases.grant(chunk.attempt, self._clock(), self._unattached_s)
        elif chunk.last:
            handover.until_s = self._clock() + self._unattached_s

    def on_failed(self, attempt: AttemptId, message: str) -> None:
        """The engine failed it. Unknown attempts are ignored."""
        if attempt in self._handovers:
            self._refuse(attempt, f"prefill failed: {message}")

    def cancel(self, attempt: AttemptId) -> None:
        """The request is over, in whatever state; the caller cancels it in the engine. Idempotent."""
        if attempt in self._handovers:
            self._refuse(attempt, "prefill cancelled")

    def on_message(self, link: PeerLink, message: AnyMessage) -> bool:
        """False if the message is none of a reader's."""
        match message:
            case PeerHello():
                self._welcome(link)
            case Attach():
                self._attach(link, AttemptId(message.attempt), message.first)
            case Lend():
                self._lend(link, message)
            case Renew():
                # Its read is not done at once, so it is none that needs only the reader: poll for it.
                if message.attempt in self._handovers:
                    self._kv_io.attend(message.attempt)
                self._renew(AttemptId(message.attempt), message.generation)
            case Confirm():
                self._confirm(link, AttemptId(message.attempt), message.generation)
            case Detach():
                self._detach(link, AttemptId(message.attempt), "its reader detached")
            case _:
                return False
        return True

    def on_reader_lost(self, link: PeerLink) -> None:
        """A reader that lost its link fails its requests, so nobody will confirm them."""
        for handover in list(self._handovers.values()):
            if handover.reader is link:
                self._detach(link, handover.attempt, "its reader is gone")

    def tick(self) -> None:
        """End what has waited too long."""
        now_s = self._clock()
        for attempt in self._leases.expire(now_s):
            self.counters.expired += 1
            self._drop(attempt, "the lease ran out")
        for handover in list(self._handovers.values()):
            if handover.until_s is not None and handover.until_s <= now_s:
                self._refuse(handover.attempt, "no prefill of that name came")
        self.counters.leases_held = len(self._leases)

    def _send(self, handover: _Handover, reader: PeerLink, chunk: ChunkReady) -> None:
        """Tell the reader what it lacks of `chunk`, under a lease from now."""
        skip = min(max(0, handover.first - chunk.first), len(chunk.blocks))
        if skip == len(chunk.blocks) and not chunk.last:
            return
        attempt = handover.attempt
        if chunk.last and chunk.token is None:
            self._leases.release(attempt)  # that of earlier chunks
            reader.send(Chunk(attempt, chunk.first, b"", True, generation=0, lease_ms=0, token=None))
            self._forget(handover, "finished on its first token")
            return
        lease = self._leases.grant(attempt, self._clock(), self._lease_s)
        if lease is None:
            self._drop(attempt, "the lease ran out")
            return
        blocks = pack_u32([int(block) for block in chunk.blocks[skip:]])
        lease_ms = int(self._lease_s * 1e3)
        first = chunk.first + skip
        reader.send(
            Chunk(
                attempt,
                first,
                blocks,
                chunk.last,
                lease.generation,
                lease_ms,
                chunk.token,
                state=chunk.state,
            )
        )
        self.counters.chunks_sent += 1
        self.counters.leases_held = len(self._leases)

    # -- the reader's side

    def _welcome(self, link: PeerLink) -> None:
        """The reader compares layouts; then it connects, for which our agent must be polled."""
        memory = self._engine.memory
        self._kv_io.attend_for(WIRE_UP_S)
        link.send(
            PeerWelcome(
                metadata=self._kv_io.metadata,
                layout=self._engine.layout,
                agent=self._kv_io.agent,
                base_address=memory.address,
                block_bytes=memory.block_bytes,
                n_blocks=memory.n_blocks,
                device=memory.device,
                kind=memory.kind,
            )
        )

    def _attach(self, link: PeerLink, attempt: AttemptId, first: int) -> None:
        if attempt in self._over:
            self._answer_refused(link, attempt, self._over[attempt])
            return
        known = attempt in self._handovers
        if not known and len(self._handovers) >= MOST_HANDOVERS:
            self._answer_refused(link, attempt, "too many hand-offs")
            return
        handover = self._handover(attempt)
        if handover.reader is not None and handover.reader is not link:
            self._answer_refused(link, attempt, "another reader has it")
            return
        handover.reader, handover.first = link, first
        if not known:
            handover.until_s = self._clock() + self._unknown_s
        finished = handover.complete and not handover.pinned
        for chunk in handover.chunks[-1:] if finished else list(handover.chunks):
            if handover.reader is link:
                self._send(handover, link, chunk)

    def _lend(self, link: PeerLink, asked: Lend) -> None:
        attempt = AttemptId(asked.attempt)
        if attempt in self._over or attempt in self._handovers or loan_of(attempt) != attempt:
            self._answer_refused(link, attempt, "that name is taken")
            return
        if len(asked.tokens) > self._engine.context_tokens * TOKEN_BYTES:
            self._answer_refused(link, attempt, "more tokens than a prompt can have")
            return
        try:
            tokens = unpack_u32(asked.tokens)
        except ValueError as error:
            self._answer_refused(link, attempt, f"malformed tokens: {error}")
            return
        handover = self._handover(attempt)
        handover.reader, handover.first = link, asked.first
        handover.accepted = handover.loan = True
        self._engine.lend(attempt, asked.namespace, tokens)

    def _on_note(self, note: bytes) -> None:
        read = unpack_note(note)
        if read is not None:
            self._renew(*read)

    def _renew(self, attempt: AttemptId, generation: int) -> None:
        self._leases.renew(attempt, generation, self._clock(), self._lease_s)

    def _confirm(self, link: PeerLink, attempt: AttemptId, generation: int) -> None:
        self.tick()  # it may just have run out
        handover = self._handovers.get(attempt)
        if handover is not None and handover.reader is not link:
            self._answer_refused(link, attempt, "another reader has it")
            return
        complete = handover is None or handover.complete
        if not complete or not self._leases.confirm(attempt, generation, self._clock()):
            self._answer_refused(link, attempt, self._over.get(attempt, "that lease is not whole"))
            return
        link.send(Confirmed(attempt, generation))
        if handover is not None:
            self.counters.confirmed += 1
            self._forget(handover, "already handed over")

    def _detach(self, link: PeerLink, attempt: AttemptId, reason: str) -> None:
        handover = self._handovers.get(attempt)
        if handover is not None and handover.reader is link:
            self.counters.detached += 1
            handover.reader = None
            self._drop(attempt, reason)

    # -- ends

    def _drop(self, attempt: AttemptId, reason: str) -> None:
        """Nobody will read it (any more); the prefill itself may go on."""
        handover = self._handovers.get(attempt)
        if handover is None:
            return
        if handover.reader is not None:
            self._answer_refused(handover.reader, attempt, reason)
            handover.reader = None
        if handover.complete or not handover.accepted:
            self._forget(handover, reason)
            return
        handover.unwanted = True
        self._leases.release(attempt)
        self._kv_io.dismiss(attempt)
        self._remember(attempt, reason)

    def _refuse(self, attempt: AttemptId, reason: str) -> None:
        """It is over: the prefill failed, was cancelled or never came."""
        handover = self._handovers[attempt]
        if handover.reader is not None:
            self._answer_refused(handover.reader, attempt, reason)
        self._forget(handover, reason)

    def _forget(self, handover: _Handover, reason: str) -> None:
        """The one place where a hand-over ends."""
        attempt = handover.attempt
        del self._handovers[attempt]
        self._leases.release(attempt)
        self._kv_io.dismiss(attempt)
        if handover.pinned:
            self._engine.release(attempt)
        self._remember(attempt, reason)
        self.counters.leases_held = len(self._leases)

    def _answer_refused(self, link: PeerLink, attempt: AttemptId, reason: str) -> None:
        self.counters.refused += 1
        link.send(Refused(attempt, reason))

    def _remember(self, attempt: AttemptId, reason: str) -> None:
        self._over[attempt] = reason
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _handover(self, attempt: AttemptId) -> _Handover:
        handover = self._handovers.get(attempt)
        if handover is None:
            handover = self._handovers[attempt] = _Handover(attempt)
        return handover
