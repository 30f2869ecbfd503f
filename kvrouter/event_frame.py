"""One frame of KV events, read from the wire and found to be sane."""

from __future__ import annotations

from dataclasses import dataclass

from serving.wire import Events, Stored, unpack_u64

__all__ = ["Chain", "Frame", "limit_bytes", "read_chains", "read_frame"]

LEAST_LIMIT_BLOCKS = 4096

Chain = tuple[int | None, list[int]]  # parent, hashes


@dataclass(slots=True)
class Frame:
    """`removed` comes before `chains`, `cleared` before both."""

    seq: int
    chains: list[Chain]
    removed: list[int]
    cleared: bool

    @property
    def blocks(self) -> int:
        return sum(len(hashes) for _, hashes in self.chains) + len(self.removed)


def limit_bytes(total_blocks: int) -> int:
    """Longer columns are absurd: several steps may share a frame, but not turnovers of the whole pool."""
    return 8 * max(4 * total_blocks, LEAST_LIMIT_BLOCKS)


def read_frame(events: object, most_bytes: int) -> Frame | None:
    """None when it is malformed."""
    if not isinstance(events, Events) or events.seq < 1:
        return None
    chains = read_chains(events.stored, most_bytes)
    removed = _read_column(events.removed, most_bytes)
    if chains is None or removed is None:
        return None
    return Frame(events.seq, chains, removed, events.cleared)


def read_chains(stored: list[Stored], most_bytes: int) -> list[Chain] | None:
    """None when one of them is malformed, or all together are too long."""
    chains: list[Chain] = []
    size = 0
    for run in stored:
        size += len(run.hashes)
        hashes = _read_column(run.hashes, most_bytes)
        if hashes is None or size > most_bytes:
            return None
        chains.append((run.parent, hashes))
    return chains


def _read_column(data: bytes, most_bytes: int) -> list[int] | None:
    if not data:
        return []
    if len(data) % 8 or len(data) > most_bytes:
        return None
    return unpack_u64(data).tolist()
