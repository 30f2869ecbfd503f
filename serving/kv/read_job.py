"""KV that one attempt needs from a peer, as the reader (serving.kv.reader) knows it while it brings it."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine.base import AttemptId, Moved, Reserved
from serving.errors import TransferError
from serving.kv.peer_link import Peer
from serving.wire import Chunk, Confirmed, Message, Submit

TOKEN_BYTES = 4  # on the wire
OVERDUE_S = 1.0  # its frontend ends a request on time; this is for one that does not


class Ending(Protocol):
    """What jobs of one kind do differently."""

    def ask(self, job: Job, reserved: Reserved | None) -> Message:
        """The first word to the owner, about `job.source`. `reserved`: None of an `early` one."""

    def arrived(self, job: Job) -> None:
        """The first `job.n_blocks` blocks hold their KV: tell the engine."""

    def failed(self, job: Job, error: BaseException | None, writing: bool) -> None:
        """Tell the engine. `error` None: cancelled. `writing`: a read may still write to its blocks, so
        they have to go under quarantine; that ends by itself."""


@dataclass(slots=True, eq=False)
class Job:
    """KV that `submit` needs from the owner at `address`, where it is known as `source`."""

    submit: Submit
    ending: Ending
    address: str
    epoch: int
    source: int
    whole: bool  # all blocks and the first token must come; else what there is
    answer_s: float  # the longest silence of the owner
    until_s: float = 0.0  # the attempt's own deadline
    reserved: asyncio.Future[Reserved | None] = field(init=False)  # the last offer; None: see `trouble`
    inbox: asyncio.Queue[Chunk | Confirmed | TransferError] = field(default_factory=asyncio.Queue)
    trouble: TransferError | None = None  # what the owner or its link said; also in the inbox
    cancelled: bool = False
    engine_failed: bool = False
    peer: Peer | None = None  # once asked
    generation: int | None = None
    renewal: asyncio.TimerHandle | None = None
    n_blocks: int = 0  # leading ones that are here, or on their way
    token: int = 0  # with the last chunk
    drawn: array[int] = field(default_factory=lambda: array("I"))  # the same, of a live attempt
    state: bytes = b""  # with the last chunk, of an engine that moves KV by itself
    moved: asyncio.Future[Moved] = field(init=False)  # by such an engine
    n_read: int = 0  # blocks
    n_last: int = 0  # of them in the last chunk
    started_s: float = 0.0
    last_chunk_s: float = 0.0

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reserved = loop.create_future()
        self.moved = loop.create_future()
        self.until_s = loop.time() + self.submit.deadline_ms / 1e3 + OVERDUE_S

    @property
    def attempt(self) -> AttemptId:
        return AttemptId(self.submit.attempt)

    @property
    def live(self) -> bool:
        """It decodes at the owner until that is told `Ready`."""
        return self.submit.handoff is not None and self.submit.handoff.live

    @property
    def early(self) -> bool:
        """The owner has still to compute it, or has just done so."""
        return self.whole and not self.live

    @property
    def n_tokens(self) -> int:
        """Of the submit."""
        return len(self.submit.tokens) // TOKEN_BYTES

    def offer(self, reserved: Reserved | None) -> None:
        """In place of an earlier one, which then is void."""
        if self.reserved.done():
            self.reserved = asyncio.get_running_loop().create_future()
        self.reserved.set_result(reserved)

    def fail(self, error: TransferError) -> None:
        """Whatever it waits for now will not come."""
        self.trouble = error
        self.inbox.put_nowait(error)
        if not self.reserved.done():
            self.reserved.set_result(None)
