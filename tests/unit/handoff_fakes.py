"""Two ends of a hand-off in one process: fake engines, in-process transfer, links without sockets."""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from decode.role import DecodeRole
from prefill.pull import PullRole
from prefill.role import PrefillRole
from serving.config import Deadlines
from serving.engine.base import AttemptId, BlockId, ChunkReady, Engine, KVMemory, Reserved, SamplingParams
from serving.errors import LinkError
from serving.kv.io import KvIo
from serving.kv.local import LocalTransfer, Switchboard
from serving.kv.peer_link import PeerLink, PeerLinkHandler, PeerLinks
from serving.kv.reader import KvReader
from serving.link import Identity
from serving.wire import (
    WIRE_VERSION,
    AnyMessage,
    Handoff,
    Hello,
    Message,
    Pull,
    Submit,
    decode,
    encode,
    pack_u32,
)

BLOCK_BYTES, N_BLOCKS = 32, 64
TOKEN = 42
A = AttemptId(1)
OWNER = "owner:1"
DEADLINES = Deadlines(transfer_ms=5000, prefill_ms=5000, queue_ms=5000)


async def until(condition: Callable[[], object], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


class FakeEngine:
    """Records what it is told. Its memory's block `b` is filled with `fill + b`."""

    layout = "layout-1"
    block_tokens = 1
    context_tokens = 4096

    def __init__(self, fill: int) -> None:
        size = BLOCK_BYTES * N_BLOCKS
        content = b"".join(bytes([fill + block]) * BLOCK_BYTES for block in range(N_BLOCKS))
        buffer = ctypes.create_string_buffer(content, size)
        self.memory = KVMemory(ctypes.addressof(buffer), BLOCK_BYTES, N_BLOCKS, owner=buffer)
        self.cancelled: dict[AttemptId, bool] = {}  # attempt -> with quarantine
        self.unquarantined: list[AttemptId] = []
        self.arrived: list[tuple[AttemptId, int]] = []
        self.released: list[AttemptId] = []
        self.begun: list[AttemptId] = []
        self.prefixes: list[tuple[AttemptId, int]] = []  # of pulls that are over
        self.lent: list[tuple[AttemptId, int, list[int]]] = []  # attempt, namespace, tokens

    def cancel(self, attempt: AttemptId, *, quarantine: bool = False) -> None:
        self.cancelled[attempt] = quarantine

    def end_quarantine(self, attempt: AttemptId) -> None:
        self.unquarantined.append(attempt)

    def kv_arrived(self, attempt: AttemptId, token: int, drawn: Sequence[int] = ()) -> None:
        self.arrived.append((attempt, token))

    def kv_begun(self, attempt: AttemptId) -> None:
        self.begun.append(attempt)

    def prefix_arrived(self, attempt: AttemptId, n_blocks: int) -> None:
        self.prefixes.append((attempt, n_blocks))

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> None:
        self.lent.append((attempt, namespace, list(tokens)))

    def release(self, attempt: AttemptId) -> None:
        self.released.append(attempt)

    def block(self, block: int) -> int:
        """The byte that fills `block`."""
        content = ctypes.string_at(self.memory.address + block * BLOCK_BYTES, BLOCK_BYTES)
        assert len(set(content)) == 1
        return content[0]


class MemoryLink:
    """One end of a link within a process. Frames are encoded; a lost one is told to both ends."""

    def __init__(self, handler: Any, peer: Hello) -> None:
        self.peer: Hello | None = peer
        self.closed = False
        self.wire_version = WIRE_VERSION
        self.sent: list[Message] = []
        self.hold: Callable[[Message], bool] = lambda message: False  # messages that get stuck
        self._handler = handler
        self._far: MemoryLink | None = None

    @staticmethod
    def pair(near: Any, near_hello: Hello, far: Any, far_hello: Hello) -> MemoryLink:
        ours, theirs = MemoryLink(near, far_hello), MemoryLink(far, near_hello)
        ours._far, theirs._far = theirs, ours
        return ours

    @property
    def far(self) -> MemoryLink:
        assert self._far is not None
        return self._far

    def send(self, message: Message) -> None:
        if self.closed:
            return
        self.sent.append(message)
        if not self.hold(message):
            asyncio.get_running_loop().call_soon(self.far.deliver, decode(encode(message)))

    def deliver(self, message: AnyMessage) -> None:
        if not self.closed:
            self._handler.on_message(self, message)

    def close(self, reason: str) -> None:
        for end in (self, self.far):
            if not end.closed:
                end.closed = True
                asyncio.get_running_loop().call_soon(end._handler.on_lost, end, reason)


def hello(epoch: int) -> Hello:
    return Hello(1, 1, "0", "worker", f"worker-{epoch}", epoch, b"")


@dataclass
class Owner:
    """A prefill worker. `links` are its ends of the readers' links."""

    board: Switchboard
    deadlines: Deadlines
    epoch: int = 1
    now_s: float = 0.0
    unknown_s: float = 10.0
    links: list[MemoryLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(fill=100)
        self.io = KvIo(LocalTransfer(f"agent-{self.epoch}", self.board))
        self.role = PrefillRole(
            engine=cast(Engine, self.engine),
            kv_io=self.io,
            deadlines=self.deadlines,
            unknown_s=self.unknown_s,
            clock=lambda: self.now_s,
        )

    def on_message(self, link: PeerLink, message: AnyMessage) -> None:
        assert self.role.on_message(link, message)

    def on_lost(self, link: PeerLink, reason: str) -> None:
        self.role.on_reader_lost(link)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.role.tick()

    def accept(self, attempt: int) -> None:
        self.role.accept(submit(attempt))

    def chunk(
        self, first: int, blocks: list[int], *, last: bool = False, token: int | None = TOKEN
    ) -> None:
        """The engine finished a chunk of attempt 1."""
        ids = [BlockId(block) for block in blocks]
        self.role.on_chunk(ChunkReady(AttemptId(1), first, ids, last, token if last else None))


@dataclass
class Reader:
    """A decode worker that dials `owners` by address."""

    board: Switchboard
    deadlines: Deadlines
    owners: dict[str, Owner]
    failed: list[tuple[AttemptId, str, bool]] = field(default_factory=list)
    unneeded: list[AttemptId] = field(default_factory=list)
    links: list[MemoryLink] = field(default_factory=list)
    hold: Callable[[Message], bool] = lambda message: False
    dial_s: float = 0.0

    def __post_init__(self) -> None:
        self.engine = FakeEngine(fill=0)
        self.transfer = LocalTransfer("agent-reader", self.board)
        self.io = KvIo(self.transfer)
        self.me = Identity("worker", "reader", 99)
        self.peers = PeerLinks(me=self.me, dial=self.dial, kv_io=self.io, layout=self.engine.layout)
        self.kv = KvReader(
            engine=cast(Engine, self.engine), kv_io=self.io, peers=self.peers, deadlines=self.deadlines
        )
        self.role = DecodeRole(
            engine=cast(Engine, self.engine),
            reader=self.kv,
            deadlines=self.deadlines,
            on_failed=lambda *failure: self.failed.append(failure),
            on_unneeded=self.unneeded.append,
        )
        self.pulls = PullRole(
            engine=cast(Engine, self.engine),
            reader=self.kv,
            on_failed=lambda *failure: self.failed.append(failure),
        )

    async def dial(self, address: str, handler: PeerLinkHandler) -> PeerLink:
        await asyncio.sleep(self.dial_s)
        owner = self.owners.get(address)
        if owner is None:
            raise LinkError(f"{address}: refused")
        link = MemoryLink.pair(handler, hello(self.me.epoch), owner, hello(owner.epoch))

        def held(message: Message) -> bool:
            return self.hold(message)  # as it is then

        link.hold = held
        self.links.append(link)
        owner.links.append(link.far)
        return link

    def accept(self, attempt: int = 1, epoch: int = 1) -> None:
        self.role.accept(submit(attempt, Handoff(OWNER, "owner", epoch, 1)))

    def pull(self, within_ms: int = 5000, *, address: str = OWNER, epoch: int = 1) -> None:
        """Attempt 1 is to compute the tokens 1, 2, 3; the owner may have them all."""
        asked = submit(1)
        asked.pull = Pull(address, "owner", epoch, 3, within_ms)
        self.pulls.accept(asked)

    def reserve(self, blocks: list[int], n_cached: int = 0, attempt: int = 1) -> Reserved:
        offer = Reserved(AttemptId(attempt), [BlockId(block) for block in blocks], n_cached)
        self.kv.on_reserved(offer)
        return offer

    def attached(self) -> bool:
        return any(type(m).__name__ == "Attach" for link in self.links for m in link.sent)


class Pair:
    def __init__(self, deadlines: Deadlines = DEADLINES) -> None:
        self.board = Switchboard()
        self.owners = {OWNER: Owner(self.board, DEADLINES)}
        self.reader = Reader(self.board, deadlines, self.owners)

    @property
    def owner(self) -> Owner:
        return self.owners[OWNER]

    async def open(self) -> None:
        await self.owner.io.open(self.owner.engine.memory)
        await self.reader.io.open(self.reader.engine.memory)

    async def close(self) -> None:
        self.reader.transfer.faults.hang = False
        await self.reader.kv.stop()
        await self.reader.peers.stop()
        for owner in self.owners.values():
            await owner.role.stop()
            await owner.io.close()
        await self.reader.io.close()

    async def arrives(self) -> None:
        await until(lambda: self.reader.engine.arrived)
        await until(lambda: self.owner.role.idle)

    async def fails(self) -> tuple[str, bool]:
        """Message and retryability of the failure of attempt 1."""
        await until(lambda: self.reader.failed)
        [(attempt, message, retryable)] = self.reader.failed
        assert attempt == A
        assert A in self.reader.engine.cancelled
        assert self.reader.engine.arrived == []
        return message, retryable

    async def reads_hang(self) -> None:
        """Up to the state in which a read is in flight for attempt 1, the prefill complete."""
        await self.is_attached()
        self.reader.transfer.faults.hang = True
        self.owner.chunk(0, [1, 2], last=True)
        await until(lambda: self.reader.transfer.busy)

    async def is_attached(self) -> None:
        self.owner.accept(1)
        self.reader.accept()
        self.reader.reserve([11, 12])
        await until(self.reader.attached)


def submit(attempt: int, handoff: Handoff | None = None) -> Submit:
    return Submit(
        attempt=attempt,
        mode="decode" if handoff else "prefill",
        tokens=pack_u32(array("I", [1, 2, 3])),
        n_prompt=3,
        params=SamplingParams(max_tokens=4, seed=0),
        namespace=0,
        request_id="r",
        deadline_ms=60_000,
        handoff=handoff,
    )
