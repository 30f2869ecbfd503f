"""The transfer of an engine that moves KV by itself: links and leases as ever, not a byte through here."""

from __future__ import annotations

from serving.engine.base import BlockId, KVMemory
from serving.errors import TransferError
from serving.kv.transfer import PeerInfo, ReadEnded, ReadId, ReadState, TransferCounters


class MovedElsewhere:
    """See `Transfer`. An empty read ends at once; any other is refused."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.counters = TransferCounters()
        self._ended: list[ReadEnded] = []
        self._last_id = 0

    def open(self, memory: KVMemory) -> None:
        pass

    def metadata(self) -> bytes:
        return b""

    def add_peer(self, peer: PeerInfo) -> bool:
        return False

    def remove_peer(self, agent: str) -> None:
        pass

    def start_read(
        self, peer: str, source: list[BlockId], target: list[BlockId], note: bytes = b""
    ) -> ReadId:
        if source:
            raise TransferError(f"{peer}: its engine moves KV by itself")
        self._last_id += 1
        self._ended.append(ReadEnded(ReadId(self._last_id), ReadState.DONE))
        return ReadId(self._last_id)

    def poll(self) -> tuple[list[ReadEnded], list[bytes]]:
        ended, self._ended = self._ended, []
        return ended, []

    @property
    def busy(self) -> bool:
        return bool(self._ended)

    def close(self) -> None:
        pass
