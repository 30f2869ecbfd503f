"""Transfer within one process, for tests: a memcpy between pools, with faults to order.

A `Switchboard` joins the transfers of one test. Bytes move in the reader's `poll`, so a read is in flight
between `start_read` and then, as with NIXL over tcp.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from serving.engine.base import BlockId, KVMemory
from serving.errors import PeerGone, TransferError
from serving.kv.transfer import PeerInfo, ReadEnded, ReadId, ReadState, TransferCounters


@dataclass(slots=True)
class Faults:
    """What goes wrong with the reads that one transfer posts."""

    failing_posts: int = 0  # so many of the next posts raise
    hang: bool = False  # reads stay in flight until this is False again
    delay_s: float = 0.0  # from post to end


@dataclass(slots=True)
class Switchboard:
    transfers: dict[str, LocalTransfer] = field(default_factory=dict)


@dataclass(slots=True)
class _Read:
    peer: str
    source: list[BlockId]
    target: list[BlockId]
    note: bytes
    posted_s: float


class LocalTransfer:
    """See `Transfer`."""

    def __init__(self, agent: str, switchboard: Switchboard) -> None:
        self.agent = agent
        self.counters = TransferCounters()
        self.faults = Faults()
        self._switchboard = switchboard
        self._memory: KVMemory | None = None
        self._peers: dict[str, PeerInfo] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._notes: deque[bytes] = deque()
        self._last_id = 0

    def open(self, memory: KVMemory) -> None:
        self._memory = memory
        self._switchboard.transfers[self.agent] = self

    def metadata(self) -> bytes:
        return self.agent.encode()

    def add_peer(self, peer: PeerInfo) -> bool:
        if peer.metadata != peer.agent.encode():
            raise TransferError(f"metadata is not of agent {peer.agent!r}")
        if peer.agent not in self._switchboard.transfers:
            raise PeerGone(f"{peer.agent}: no such agent")
        known = peer.agent in self._peers
        self._peers[peer.agent] = peer
        return known

    def remove_peer(self, agent: str) -> None:
        self._peers.pop(agent, None)

    def start_read(
        self, peer: str, source: list[BlockId], target: list[BlockId], note: bytes = b""
    ) -> ReadId:
        info = self._peers.get(peer)
        if info is None or peer not in self._switchboard.transfers:
            raise PeerGone(f"{peer}: not connected")
        assert self._memory is not None
        if len(source) != len(target):
            raise ValueError(f"{len(source)} blocks cannot be read into {len(target)}")
        for blocks, n_blocks in ((source, info.n_blocks), (target, self._memory.n_blocks)):
            if any(not 0 <= block < n_blocks for block in blocks):
                raise ValueError(f"block ids outside a pool of {n_blocks}: {blocks}")
        if source and self.faults.failing_posts > 0:
            self.faults.failing_posts -= 1
            self.counters.failures += 1
            raise TransferError(f"{peer}: read not posted, as ordered")
        self._last_id += 1
        read = ReadId(self._last_id)
        self._reads[read] = _Read(peer, list(source), list(target), note, monotonic())
        return read

    def poll(self) -> tuple[list[ReadEnded], list[bytes]]:
        ended = []
        for read_id, read in list(self._reads.items()):
            there = self._switchboard.transfers.get(read.peer)
            if there is None:
                self.counters.failures += 1
                ended.append(ReadEnded(read_id, ReadState.FAILED, f"{read.peer} is gone"))
            elif self.faults.hang or monotonic() - read.posted_s < self.faults.delay_s:
                continue
            else:
                self._copy(read, there)
                ended.append(ReadEnded(read_id, ReadState.DONE))
            del self._reads[read_id]
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return ended, notes

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def close(self) -> None:
        """As a peer sees it, this agent is gone: its reads of us fail."""
        self._switchboard.transfers.pop(self.agent, None)

    def _copy(self, read: _Read, there: LocalTransfer) -> None:
        here, far = self._memory, there._memory
        assert here is not None
        assert far is not None
        size = here.block_bytes
        for source, target in zip(read.source, read.target, strict=True):
            ctypes.memmove(here.address + target * size, far.address + source * size, size)
        if read.note:
            there._notes.append(read.note)
        totals = self.counters
        totals.reads += 1
        totals.blocks += len(read.source)
        totals.descriptors += len(read.source)
        totals.bytes += len(read.source) * size
        totals.seconds += monotonic() - read.posted_s
