"""KvIo: the kv-io thread, the only one that touches a Transfer, and its face towards asyncio.

The thread polls every 0.1-0.5 ms while reads are in flight, and up to 1 ms while somebody asked for
attention (an owner with readers: over tcp, and while a pair wires up, NIXL moves nothing unless both sides
poll). Otherwise it sleeps, but for a look around every quarter of a second.

A read ends for its caller by its deadline at the latest. If its bytes may still land after that, it is
*abandoned*: `in_flight(token)` goes on counting it, and `on_ended(token)` is called when the last one of
`token` has ended. All bookkeeping lives on the event loop, so the two never contradict each other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from serving.engine.base import BlockId, KVMemory
from serving.errors import PeerGone, TransferError, TransferTimeout
from serving.kv.prefault import Prefault
from serving.kv.transfer import PeerInfo, ReadId, ReadState, Transfer, TransferCounters

log = logging.getLogger(__name__)

FASTEST_POLL_S = 0.0001
SLOWEST_POLL_S = 0.0005  # with reads of ours in flight
SLOWEST_WATCH_S = 0.001  # with attention alone: 3 % of a core
POLL_BACKOFF = 1.05  # 18 ms from the fastest to the slowest: a tcp read of 20 MB is served at full speed
IDLE_LOOK_S = 0.25
OPEN_S = 120.0  # registering a big pool on a busy machine
CLOSE_S = 5.0


@dataclass(slots=True, eq=False)
class _Read:
    peer: str
    source: list[BlockId]
    target: list[BlockId]
    note: bytes
    token: Hashable
    done: asyncio.Future[None]
    waiting: Callable[[], None]  # called on the loop if the read did not end as it was posted
    abandoned: bool = False  # written by the loop, read by the thread before it posts


@dataclass(slots=True)
class _Touch:
    """Blocks that a read will write soon."""

    blocks: list[BlockId]


@dataclass(slots=True)
class _Call:
    """Something to do with the transfer on the thread; `done` gets what it returns."""

    verb: Callable[[Transfer], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _News:
    """What one turn of the thread has to tell the loop."""

    called: list[tuple[_Call, Any, Exception | None]] = field(default_factory=list)
    ended: list[tuple[_Read, TransferError | None]] = field(default_factory=list)
    lost: list[_Read] = field(default_factory=list)  # failed, and nobody will know when they end
    notes: list[bytes] = field(default_factory=list)
    waiting: list[_Read] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.called or self.ended or self.lost or self.notes or self.waiting)


class KvIo:
    """Create and use it on one event loop; `open` and `close` are a pair."""

    def __init__(self, transfer: Transfer) -> None:
        self.on_note: Callable[[bytes], None] = _ignore
        self.on_ended: Callable[[Any], None] = _ignore
        self.metadata = b""  # of our agent, once open
        self.memory: KVMemory | None = None
        self._transfer = transfer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._todo: deque[_Read | _Call | _Touch] = deque()
        self._stopping = False
        self._watchers: frozenset[Hashable] = frozenset()
        self._attend_until_s = 0.0
        self._in_flight: dict[Hashable, set[_Read]] = {}
        self._posted: dict[ReadId, _Read] = {}  # the thread's
        self._opened = False  # the thread's
        self._prefault: Prefault | None = None  # the thread's
        self._broken: str | None = None

    @property
    def agent(self) -> str:
        return self._transfer.agent

    @property
    def counters(self) -> TransferCounters:
        return self._transfer.counters

    async def open(self, memory: KVMemory) -> None:
        """Start the thread, create the agent and register `memory`; may take seconds."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kv-io", daemon=True)
        self._thread.start()
        self.memory = memory

        def start(transfer: Transfer) -> bytes:
            transfer.open(memory)
            self._prefault = Prefault(memory)
            self._opened = True
            return transfer.metadata()

        self.metadata = await self._call(start, OPEN_S)

    async def close(self) -> None:
        """End the thread; what still waits on a read gets a TransferError."""
        if self._thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        thread, self._thread = self._thread, None
        await asyncio.to_thread(thread.join, CLOSE_S)
        for read in [read for reads in self._in_flight.values() for read in reads]:
            _settle(read.done, None, TransferError("kv-io is closed"))

    async def add_peer(self, peer: PeerInfo, deadline_s: float) -> None:
        """Connect to `peer` and read a few bytes, so that the first real read need not wire up.

        Raises TransferTimeout or PeerGone. Connecting to an unreachable host blocks the thread, and so
        every other read, for as long as the kernel tries (facts: minutes): dial the peer's link first.
        """
        now = asyncio.get_running_loop().time
        until_s = now() + deadline_s
        was_kept = await self._call(lambda transfer: transfer.add_peer(peer), deadline_s)
        try:
            await self.read(peer.agent, [], [], b"", until_s - now(), token=None)
        except PeerGone:
            if not was_kept:
                raise
            # The connection broke while nobody read: once more, with a new one.
            await self._call(lambda transfer: transfer.add_peer(peer), until_s - now())
            await self.read(peer.agent, [], [], b"", until_s - now(), token=None)

    def remove_peer(self, agent: str) -> None:
        """No new reads of `agent`; those in flight fail for their callers now and end when they end."""
        for read in [read for reads in self._in_flight.values() for read in reads]:
            if read.peer == agent and not read.done.done():
                read.abandoned = True
                _settle(read.done, None, PeerGone(f"{agent}: dropped"))
        if self._loop is not None and self._thread is not None:
            self._put(_Call(lambda transfer: transfer.remove_peer(agent), self._loop.create_future()))

    async def read(
        self,
        peer: str,
        source: list[BlockId],
        target: list[BlockId],
        note: bytes,
        deadline_s: float,
        *,
        token: Hashable,
        waiting: Callable[[], None] | None = None,
    ) -> None:
        """Read `source` of `peer` into our `target`; returns when the bytes are here.

        `waiting` is called when they are not at once: over tcp the owner has to poll for them.

        Raises TransferTimeout, PeerGone or another TransferError. After any of them, or a cancel, ask
        `in_flight(token)` whether the targets may still be written.
        """
        if self._thread is None or self._broken is not None:
            raise TransferError(self._broken or "kv-io is not open")
        done = asyncio.get_running_loop().create_future()
        read = _Read(peer, source, target, note, token, done, waiting or _ignore_waiting)
        self._in_flight.setdefault(token, set()).add(read)
        self._put(read)
        try:
            async with asyncio.timeout(deadline_s):
                await read.done
        except TimeoutError:
            read.abandoned = True
            raise TransferTimeout(f"{peer}: {len(source)} blocks not read in {deadline_s:.1f} s") from None
        except asyncio.CancelledError:
            read.abandoned = True
            raise

    def expect(self, blocks: list[BlockId]) -> None:
        """Reads will write our `blocks` soon: have their memory ready. Costs the caller nothing."""
        self._put(_Touch(blocks))

    def in_flight(self, token: Hashable) -> int:
        """Reads of `token` that have not ended, abandoned ones included."""
        return len(self._in_flight.get(token, ()))

    @property
    def reads_in_flight(self) -> int:
        """Of all tokens; abandoned ones included."""
        return sum(map(len, self._in_flight.values()))

    def attend(self, who: Hashable) -> None:
        """Poll until `dismiss(who)`, fast for a start; again to say that something is about to happen."""
        if who not in self._watchers:
            self._watchers |= {who}
        self._nudge()

    def dismiss(self, who: Hashable) -> None:
        self._watchers -= {who}

    def attend_for(self, seconds: float) -> None:
        """Poll fast for a while: a peer is about to connect to us."""
        self._attend_until_s = max(self._attend_until_s, monotonic() + seconds)
        self._nudge()

    async def _call(self, verb: Callable[[Transfer], Any], deadline_s: float) -> Any:
        if self._thread is None or self._broken is not None:
            raise TransferError(self._broken or "kv-io is not open")
        call = _Call(verb, asyncio.get_running_loop().create_future())
        self._put(call)
        try:
            async with asyncio.timeout(deadline_s):
                return await call.done
        except TimeoutError:
            raise TransferTimeout(f"no answer from the kv-io thread in {deadline_s:.1f} s") from None

    def _put(self, item: _Read | _Call | _Touch) -> None:
        self._todo.append(item)
        self._nudge()

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    # -- on the event loop, called from the thread's news

    def _tell(self, news: _News) -> None:
        for call, value, error in news.called:
            _settle(call.done, value, error)
        for read, failure in news.ended:
            _settle(read.done, None, failure)
            reads = self._in_flight.get(read.token)
            if reads is None:
                continue
            reads.discard(read)
            if not reads:
                del self._in_flight[read.token]
                if read.token is not None:
                    self.on_ended(read.token)
        for read in news.lost:
            _settle(read.done, None, TransferError(self._broken or "kv-io failed"))
        for note in news.notes:
            self.on_note(note)
        for read in news.waiting:
            if not read.done.done():
                read.waiting()

    # -- on the thread

    def _run(self) -> None:
        transfer = self._transfer
        pause_s = FASTEST_POLL_S
        while not self._stopping:
            news = _News()
            known = len(self._posted)
            try:
                for _ in range(len(self._todo)):
                    self._take(transfer, self._todo.popleft(), news)
                posted = list(self._posted)[known:]
                if self._opened and self._broken is None:
                    self._poll(transfer, news)
                news.waiting += [self._posted[read] for read in posted if read in self._posted]
            except Exception as error:  # nothing the transfer promises; without it no read can end
                log.exception("kv-io cannot go on")
                self._broken = f"kv-io failed: {error!r}"
                news.lost += self._posted.values()
                self._posted.clear()
            if news:
                pause_s = FASTEST_POLL_S
                self._send(news)
            busy = bool(self._posted or self._watchers) or monotonic() < self._attend_until_s
            slowest_s = SLOWEST_POLL_S if self._posted else SLOWEST_WATCH_S
            nudged = True
            with self._wake:
                if not self._todo and not self._stopping:
                    nudged = self._wake.wait(pause_s if busy else IDLE_LOOK_S)
            pause_s = FASTEST_POLL_S if nudged else min(slowest_s, pause_s * POLL_BACKOFF)
        if self._opened:
            transfer.close()

    def _take(self, transfer: Transfer, item: _Read | _Call | _Touch, news: _News) -> None:
        if isinstance(item, _Touch):
            left = self._prefault.touch(item.blocks) if self._prefault else []
            if left:
                self._todo.append(_Touch(left))
            return
        if isinstance(item, _Call):
            try:
                news.called.append((item, item.verb(transfer), None))
            except Exception as error:
                news.called.append((item, None, error))
            return
        if item.abandoned or self._broken is not None:
            news.ended.append((item, TransferError(self._broken or "abandoned before it was posted")))
            return
        try:
            read = transfer.start_read(item.peer, item.source, item.target, item.note)
        except TransferError as error:
            news.ended.append((item, error))
        except Exception as error:
            news.ended.append((item, TransferError(f"{item.peer}: read not posted: {error}")))
        else:
            self._posted[read] = item

    def _poll(self, transfer: Transfer, news: _News) -> None:
        ended, news.notes = transfer.poll()
        for end in ended:
            read = self._posted.pop(end.read, None)
            if read is not None:
                failure = None if end.state is ReadState.DONE else PeerGone(f"{read.peer}: {end.error}")
                news.ended.append((read, failure))

    def _send(self, news: _News) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._tell, news)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.debug("kv-io: news after the event loop ended")


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
        future.exception()  # not an "exception was never retrieved" when its caller has gone


def _ignore(_: object) -> None:
    pass


def _ignore_waiting() -> None:
    pass
