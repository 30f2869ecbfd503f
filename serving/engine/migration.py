"""Sequences on their way to another engine: what their readers were told, and where they stand.

    shared: it decodes on, its full blocks are told  ->  paused: all is told  ->  taken over, or goes on

Full blocks never change, so they can be read while the sequence decodes; only what is computed until the
pause is left for it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.engine.base import AttemptId, ChunkReady
from serving.engine.live_sequence import LiveSequence, Stage


@dataclass(slots=True)
class Share:
    """`sequence` decodes; its reader knows its first `n_tokens` and has room for `most_tokens`."""

    sequence: LiveSequence
    serial: int
    n_tokens: int
    most_tokens: int
    announced: int = 0  # leading blocks told in a chunk
    paused_in: Stage | None = None  # the stage it was taken from

    @property
    def is_full(self) -> bool:
        """The reader has no room for another token."""
        return len(self.sequence.tokens) >= self.most_tokens


class Shares:
    """At most one of an attempt. The chunks they return are for the next output."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._shares: dict[AttemptId, Share] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    @property
    def n_paused(self) -> int:
        """Sequences that were taken out of the batch and may come back."""
        return sum(share.paused_in is Stage.DECODE for share in self._shares.values())

    def full(self) -> list[AttemptId]:
        """Those whose reader has no room for another token."""
        return [attempt for attempt, share in self._shares.items() if share.is_full]

    def open(
        self, attempt: AttemptId, seq: LiveSequence | None, serial: int, n_tokens: int, most_tokens: int
    ) -> ChunkReady:
        """Share `seq` from now on: the blocks that do not change any more. One without a token if there is
        nothing that could be taken over."""
        if (
            seq is None
            or seq.stage not in (Stage.READY, Stage.DECODE)
            or attempt in self._shares
            or not n_tokens <= len(seq.tokens) <= most_tokens
        ):
            return _nothing(attempt, serial)
        share = self._shares[attempt] = Share(seq, serial, n_tokens, most_tokens)
        share.announced = seq.computed // self._block_tokens
        return ChunkReady(attempt, 0, seq.blocks[: share.announced], False, share=serial)

    def pausable(self, attempt: AttemptId) -> Share | None:
        """The share, if it is not paused yet."""
        share = self._shares.get(attempt)
        return share if share is not None and share.paused_in is None else None

    def paused(self, share: Share, stage: Stage) -> ChunkReady:
        """Its sequence was taken out of `stage`: all that was not told, the last block perhaps in part."""
        share.paused_in = stage
        seq, first = share.sequence, share.announced
        blocks = seq.blocks[first : -(-seq.computed // self._block_tokens)]
        drawn = seq.tokens[share.n_tokens :].tolist()
        token = seq.tokens[-1]
        return ChunkReady(seq.attempt, first, blocks, True, token, share=share.serial, tokens=drawn)

    def close(self, attempt: AttemptId) -> Share | None:
        """It is shared no more, whatever became of it. Idempotent."""
        return self._shares.pop(attempt, None)

    def lose(self, attempt: AttemptId) -> list[ChunkReady]:
        """Its blocks are taken from it: nothing is left to take over."""
        share = self.close(attempt)
        return [] if share is None else [_nothing(attempt, share.serial)]


def _nothing(attempt: AttemptId, serial: int) -> ChunkReady:
    return ChunkReady(attempt, 0, [], True, share=serial)
