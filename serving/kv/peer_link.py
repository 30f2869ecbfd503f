"""The reader's links to owners of KV: dial once per owner incarnation, compare layouts, connect agents.

    dial -> PeerHello -> PeerWelcome -> layouts equal? -> NIXL peer added and warmed -> ready

The layout is compared before a descriptor exists: NIXL itself compares lengths only. A link that is lost
takes its NIXL peer along; a new epoch at an address replaces what was there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from serving.errors import KVRelayError, LayoutMismatch, PeerGone, TransferTimeout
from serving.kv.io import KvIo
from serving.kv.transfer import PeerInfo
from serving.link import Identity
from serving.wire import AnyMessage, Hello, Message, PeerAddress, PeerHello, PeerWelcome

log = logging.getLogger(__name__)

MOST_BLOCKS = 1 << 22  # of one owner: each costs 24 bytes of descriptors
CONNECT_S = 10.0  # for everything from the dial to a warm agent


class PeerLink(Protocol):
    """What this package needs of a `serving.link.Link`."""

    peer: Hello | None

    @property
    def closed(self) -> bool: ...

    @property
    def wire_version(self) -> int: ...

    def send(self, message: Message) -> None: ...

    def close(self, reason: str) -> None: ...


class PeerLinkHandler(Protocol):
    """What a dialled link calls back; see `serving.link.LinkHandler`."""

    def on_open(self, link: PeerLink) -> None: ...

    def on_message(self, link: PeerLink, message: AnyMessage) -> None: ...

    def on_lost(self, link: PeerLink, reason: str) -> None: ...


Dial = Callable[[str, PeerLinkHandler], Awaitable[PeerLink]]  # address, handler; times out by itself


@dataclass(slots=True, eq=False)
class Peer:
    """An owner that we can read from."""

    address: str
    epoch: int
    link: PeerLink
    agent: str

    def send(self, message: Message) -> None:
        self.link.send(message)


class Reader(Protocol):
    """Whom PeerLinks tells what owners say (the decode role)."""

    def on_owner_message(self, peer: Peer, message: AnyMessage) -> None: ...

    def on_owner_lost(self, peer: Peer, reason: str) -> None: ...


class PeerLinks:
    """Give `dial` bound to this worker's identity and key. Belongs to one event loop."""

    def __init__(self, *, me: Identity, dial: Dial, kv_io: KvIo, layout: str) -> None:
        self._me = me
        self._dial = dial
        self._kv_io = kv_io
        self._layout = layout
        self._reader: Reader | None = None
        self._opening: dict[tuple[str, int], asyncio.Task[Peer]] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._by_link: dict[PeerLink, Peer] = {}
        self._welcomes: dict[PeerLink, asyncio.Future[PeerWelcome]] = {}
        self._warming: set[asyncio.Task[None]] = set()

    def deliver_to(self, reader: Reader) -> None:
        self._reader = reader

    async def ensure(self, address: str, epoch: int, deadline_s: float) -> Peer:
        """The peer, connected first if need be; one dial at a time, shared by all who wait.

        Raises LayoutMismatch, PeerGone, TransferTimeout or what `dial` raises (KVRelayError).
        """
        key = (address, epoch)
        peer = self._peers.get(key)
        if peer is not None and peer.link.closed:  # its `on_lost` is on the way
            self._forget(peer, "link closed")
            peer = None
        if peer is not None:
            return peer
        task = self._opening.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(address, epoch))
            self._opening[key] = task
            task.add_done_callback(lambda done: self._connected(key, done))
        try:
            async with asyncio.timeout(deadline_s):
                peer = await asyncio.shield(task)
        except TimeoutError:
            raise TransferTimeout(f"{address}: not connected in {deadline_s:.1f} s") from None
        if peer.link.closed:  # since the task ended: nobody would hear of it any more
            raise PeerGone(f"{address}: link lost while connecting")
        return peer

    def warm(self, peers: list[PeerAddress]) -> None:
        """Connect to owners ahead of the first hand-off; failures show when one is needed."""
        for peer in peers:
            if peer.layout == self._layout and peer.epoch != self._me.epoch:
                task = asyncio.get_running_loop().create_task(self._warm(peer))
                self._warming.add(task)
                task.add_done_callback(self._warming.discard)

    def drop(self, peer: Peer, reason: str) -> None:
        """Its agent failed: close the link; the next `ensure` starts afresh."""
        peer.link.close(reason)
        self._forget(peer, reason)

    async def stop(self) -> None:
        tasks = [*self._warming, *self._opening.values()]
        for task in tasks:
            task.cancel()
        for peer in list(self._peers.values()):
            self.drop(peer, "the worker stops")
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- PeerLinkHandler

    def on_open(self, link: PeerLink) -> None:
        pass

    def on_message(self, link: PeerLink, message: AnyMessage) -> None:
        if isinstance(message, PeerWelcome):
            welcome = self._welcomes.get(link)
            if welcome is not None and not welcome.done():
                welcome.set_result(message)
            return
        peer = self._by_link.get(link)
        if peer is not None and self._reader is not None:
            self._reader.on_owner_message(peer, message)

    def on_lost(self, link: PeerLink, reason: str) -> None:
        welcome = self._welcomes.get(link)
        if welcome is not None and not welcome.done():
            welcome.set_exception(PeerGone(f"link lost before the peer's welcome: {reason}"))
        peer = self._by_link.get(link)
        if peer is not None:
            self._forget(peer, reason)

    # -- connecting

    async def _connect(self, address: str, epoch: int) -> Peer:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + CONNECT_S
        link = await self._dial(address, self)
        try:
            async with asyncio.timeout_at(until_s):
                welcome = await self._welcome(link, address, epoch)
            info = PeerInfo(
                agent=welcome.agent,
                metadata=welcome.metadata,
                base_address=welcome.base_address,
                block_bytes=welcome.block_bytes,
                n_blocks=welcome.n_blocks,
                device=welcome.device,
                kind=welcome.kind,
            )
            try:
                await self._kv_io.add_peer(info, until_s - loop.time())
            except BaseException:
                self._kv_io.remove_peer(info.agent)
                raise
            if link.closed:
                self._kv_io.remove_peer(info.agent)
                raise PeerGone(f"{address}: link lost while connecting")
        except TimeoutError:
            link.close("no welcome in time")
            raise TransferTimeout(f"{address}: no welcome in {CONNECT_S:.0f} s") from None
        except BaseException as error:
            link.close(f"not connected: {error}")
            raise
        peer = Peer(address, epoch, link, welcome.agent)
        for other in [other for other in self._peers.values() if other.address == address]:
            self.drop(other, f"epoch {epoch:x} replaced it")
        self._peers[address, epoch] = self._by_link[link] = peer
        return peer

    async def _welcome(self, link: PeerLink, address: str, epoch: int) -> PeerWelcome:
        """The owner's answer to our hello, once it is known to be the right one with our layout."""
        if link.peer is None or link.peer.epoch != epoch:
            there = f"{link.peer.epoch:x}" if link.peer else "no epoch"
            raise PeerGone(f"{address}: expected epoch {epoch:x}, found {there}: it was restarted")
        welcome: asyncio.Future[PeerWelcome] = asyncio.get_running_loop().create_future()
        self._welcomes[link] = welcome
        try:
            link.send(PeerHello(self._kv_io.metadata, self._layout))
            answer = await welcome
        except PeerGone as error:
            raise PeerGone(f"{address}: {error.message}") from None
        finally:
            del self._welcomes[link]
        if answer.n_blocks > MOST_BLOCKS or answer.kind not in ("DRAM", "VRAM"):
            raise PeerGone(f"{address}: a welcome that no worker of ours sends")
        ours = self._kv_io.memory
        if answer.layout != self._layout or ours is None or answer.block_bytes != ours.block_bytes:
            raise LayoutMismatch(
                f"{address}: its KV layout is {answer.layout}, ours {self._layout}: "
                "both pools of a variant must run the same model, dtype and block size"
            )
        return answer

    async def _warm(self, peer: PeerAddress) -> None:
        try:
            await self.ensure(peer.address, peer.epoch, CONNECT_S)
        except KVRelayError as error:
            log.info("not connected ahead of need: %s", error)

    def _connected(self, key: tuple[str, int], task: asyncio.Task[Peer]) -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may have waited

    def _forget(self, peer: Peer, reason: str) -> None:
        if self._by_link.pop(peer.link, None) is None:
            return
        del self._peers[peer.address, peer.epoch]
        self._kv_io.remove_peer(peer.agent)
        if self._reader is not None:
            self._reader.on_owner_lost(peer, reason)
