"""A sequence with what the scheduler knows of it, and how it gets and fills its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvrouter.hashing import block_hashes, next_hash, token_bytes
from serving.engine.base import AttemptId, BlockHash, Mode
from serving.engine.sequence import Sequence
from serving.kv.block_pool import BlockPool

_TOKEN_SIZE = 4  # bytes of a token in `token_bytes`


class Stage(Enum):
    """Where a sequence is. Leased blocks have no sequence: they are the pool's, by attempt."""

    WAITING = "waiting"  # holds nothing: new, or preempted
    RESERVED = "reserved"  # DECODE: holds its blocks, their KV is on its way
    READY = "ready"  # DECODE: the KV is here, waits for a place in the batch
    PREFILL = "prefill"
    DECODE = "decode"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class LiveSequence(Sequence):
    attempt: AttemptId = field(init=False)  # of `work`, here for the hot loop
    n_prompt: int = field(init=False)  # the same
    stage: Stage = Stage.WAITING
    remote: bool = field(init=False)  # its prompt's KV comes from a peer: DECODE, until preempted
    begun: bool = False  # Started was told
    wanted: bool = True  # PREFILL: False after `release`, a lease would have no reader
    announced: int = 0  # PREFILL: leading blocks told in a ChunkReady
    found: int = 0  # leading blocks that were cached at the last start
    known: list[BlockHash] = field(default_factory=list)  # of full prompt blocks, computed or not
    wants: int = 0  # available blocks at which the next try to start can succeed

    def __post_init__(self) -> None:
        self.attempt = self.work.attempt
        self.n_prompt = self.work.n_prompt
        self.remote = self.work.mode is Mode.DECODE


class BlockTables:
    """The blocks of live sequences: the pool's bookkeeping seen in tokens."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens

    def needed(self, seq: LiveSequence) -> int:
        """Blocks of all tokens and, where it decodes here, of one more."""
        n_tokens = len(seq.tokens) + (seq.work.mode is not Mode.PREFILL)
        return -(-n_tokens // self._block_tokens)

    def too_large(self, seq: LiveSequence) -> str | None:
        """Why the whole pool cannot hold `seq`, or None when it can."""
        needed, total = self.needed(seq), self._pool.total
        return None if needed <= total else f"needs {needed} KV blocks, the pool has {total}"

    def start(self, seq: LiveSequence) -> bool:
        """Hold blocks for all of `seq`, cached ones first; False, holding nothing, if too few are left."""
        pool, size, namespace = self._pool, self._block_tokens, seq.work.namespace
        if pool.available < seq.wants:
            return False
        data = token_bytes(seq.tokens)
        rest = data[len(seq.known) * size * _TOKEN_SIZE :]
        seq.known += block_hashes(rest, size, seq.known[-1] if seq.known else namespace)
        # What computes here computes its last token at least: the step has to draw from it.
        usable = (len(seq.tokens) - (not seq.remote)) // size
        found = pool.find(namespace, seq.known[:usable], data)
        blocks = pool.hold(seq.attempt, namespace, found, self.needed(seq))
        if blocks is None:
            seq.wants = pool.cost(found, self.needed(seq))
            return False
        seq.blocks = blocks
        seq.found = len(found)
        seq.hashes = seq.known[: len(found)]
        seq.computed = len(found) * size
        return True

    def commit(self, seq: LiveSequence) -> None:
        """Make the blocks that are full and computed by now findable."""
        size, hashes, known = self._block_tokens, seq.hashes, seq.known
        while (end := (len(hashes) + 1) * size) <= seq.computed:
            data = token_bytes(seq.tokens[end - size : end])
            if len(hashes) < len(known):
                name = known[len(hashes)]
            else:
                name = next_hash(hashes[-1] if hashes else seq.work.namespace, data)
            hashes.append(name)
            self._pool.commit(seq.attempt, name, data)

    def empty(self, seq: LiveSequence) -> None:
        """Free the blocks of `seq` so that it can start over; their content stays cached."""
        self._pool.free(seq.attempt)
        seq.blocks, seq.hashes, seq.computed, seq.wants = [], [], 0, 0
        seq.remote = False
