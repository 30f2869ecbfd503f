"""Moving KV blocks between two workers' pools: the protocol. Real: nixl.py; in one process: local.py.

A transfer only ever *reads* a peer's memory into its own. It knows agents and block ids, nothing of
requests. All calls run on one thread (the kv-io thread, serving/kv/io.py): agents are not thread safe,
and connecting or posting can block for seconds.

In words of `serving.kv.nixl`: `start_read` posts, `poll` makes progress and tells which reads ended.
A read whose deadline passed is *abandoned*, not gone: its destination may still be written, so its blocks
stay quarantined until `poll` reports it ended. Removing the peer is no fence either (measured, NIXL 1.5.1
over tcp: all bytes of a read landed after release and removal, when the frozen peer woke up).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from serving.engine.base import BlockId, KVMemory

ReadId = NewType("ReadId", int)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What is needed to read a peer's pool; `agent` is unique per incarnation of the peer."""

    agent: str
    metadata: bytes
    base_address: int
    block_bytes: int
    n_blocks: int
    device: int = 0
    kind: str = "DRAM"  # NIXL's memory type: DRAM or VRAM


class ReadState(str, Enum):
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReadEnded:
    read: ReadId
    state: ReadState
    error: str | None = None


@dataclass(slots=True)
class TransferCounters:
    """Monotone totals of one agent's reads."""

    bytes: int = 0
    blocks: int = 0
    descriptors: int = 0
    reads: int = 0
    failures: int = 0
    seconds: float = 0.0  # summed over reads, post to end


class Transfer(Protocol):
    agent: str
    counters: TransferCounters

    def open(self, memory: KVMemory) -> None:
        """Create the agent and register `memory`, once. May take seconds."""

    def metadata(self) -> bytes: ...

    def add_peer(self, peer: PeerInfo) -> bool:
        """Idempotent; True if it was still connected.

        Raises TransferError; may block for as long as a connect takes.
        """

    def remove_peer(self, agent: str) -> None:
        """Take no new reads of the peer, and forget it in a while or once those in flight have ended.

        Their ends are told by `poll`. Unknown names are ignored.
        """

    def start_read(
        self, peer: str, source: list[BlockId], target: list[BlockId], note: bytes = b""
    ) -> ReadId:
        """Post a read of `source` (peer's ids) into `target` (ours); `note` reaches the peer when the
        data was read. An empty read only connects: it ends when the peer answered.

        Raises PeerGone, TransferError, or ValueError for ids outside either pool.
        """

    def poll(self) -> tuple[list[ReadEnded], list[bytes]]:
        """Make progress once: (reads that ended, notes that peers sent us)."""

    @property
    def busy(self) -> bool:
        """Some read of ours has not ended."""

    def close(self) -> None:
        """End the agent. The memory stays registered and allocated until the process ends."""
