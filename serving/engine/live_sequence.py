"""A sequence with what the scheduler knows of it, and how it gets and fills its blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from kvrouter.hashing import block_hashes, next_hash, token_bytes
from serving.engine.base import AttemptId, BlockHash, BlockId, Mode, Reserved
from serving.engine.sequence import Sequence
from serving.kv.block_pool import BlockPool, CachedBlock

_TOKEN_SIZE = 4  # bytes of a token in `token_bytes`


class Stage(Enum):
    """Where a sequence is. Leased blocks have no sequence: they are the pool's, by attempt."""

    WAITING = "waiting"  # new, preempted or gave blocks back; holds none
    RESERVED = "reserved"  # holds its blocks, KV from a peer is on its way
    READY = "ready"  # DECODE: the KV is here, waits for a place in the batch
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # a reader is about to go on with it elsewhere
    GONE = "gone"


@dataclass(slots=True, eq=False)
class LiveSequence(Sequence):
    attempt: AttemptId = field(init=False)  # of `work`, here for the hot loop
    n_prompt: int = field(init=False)  # the same
    number: int = 0  # of arrival
    arrived_s: float = 0.0
    due_s: float = 0.0  # the order of prompts, see PrefillOrder
    left: int = (
        0  # tokens to compute here, as far as is known: those cached since are only found at a start
    )
    stage: Stage = Stage.WAITING
    remote: bool = field(
        init=False
    )  # KV comes from a peer first: DECODE until preempted, a pull until done
    there: bool = field(init=False)  # not so before `kv_begun`, if a peer has still to compute it
    offer: Reserved | None = None  # the last one told
    reserve: int = 0  # tokens that its owner may draw until it is here, see Work.reserve_tokens
    pull_blocks: int = 0  # leading blocks that a peer may have, 0: no pull
    pulled: int = 0  # of them those that came from it, at the last start
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
        self.there = not self.remote or self.work.reserve_tokens > 0

    def __lt__(self, other: LiveSequence) -> bool:
        """Due before `other`; of those due at the same time, the one that came first."""
        return (self.due_s, self.number) < (other.due_s, other.number)


class BlockTables:
    """The blocks of live sequences: the pool's bookkeeping seen in tokens."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens

    @property
    def available(self) -> int:
        return self._pool.available

    def needed(self, seq: LiveSequence) -> int:
        """Blocks of all tokens, of those to come from elsewhere and, where it decodes here, of one more."""
        n_tokens = len(seq.tokens) + seq.reserve + (seq.work.mode is not Mode.PREFILL)
        return -(-n_tokens // self._block_tokens)

    def too_large(self, seq: LiveSequence) -> str | None:
        """Why the whole pool cannot hold `seq`, or None when it can."""
        needed, total = self.needed(seq), self._pool.total
        return None if needed <= total else f"needs {needed} KV blocks, the pool has {total}"

    def uncached(self, seq: LiveSequence) -> int:
        """Tokens that `seq`, which holds nothing, would compute if it started now."""
        return len(seq.tokens) - len(self._find(seq)) * self._block_tokens

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> list[BlockId]:
        """Lease the leading blocks of `tokens` that are cached under the name of `attempt`."""
        data = token_bytes(tokens)
        found = self._pool.find(namespace, block_hashes(data, self._block_tokens, namespace), data)
        if not found:
            return []
        blocks = self._pool.hold(attempt, namespace, found, len(found))
        assert blocks is not None  # it takes no block but those it found
        self._pool.lease(attempt)
        return blocks

    def start(self, seq: LiveSequence) -> bool:
        """Hold blocks for all of `seq`, cached ones first; False, nothing changed, if too few are left."""
        pool = self._pool
        if pool.available < seq.wants:
            return False
        found = self._find(seq)
        blocks = pool.hold(seq.attempt, seq.work.namespace, found, self.needed(seq))
        if blocks is None:
            seq.wants = pool.cost(found, self.needed(seq))
            return False
        seq.blocks = blocks
        seq.found, seq.pulled = len(found), 0
        seq.hashes = seq.known[: len(found)]
        seq.computed = len(found) * self._block_tokens
        return True

    def givers(self, seq: LiveSequence, others: list[LiveSequence]) -> int:
        """How many of `others`, in this order, must `give_back` so that `seq`, which could not start, can;
        0 if not even all of them help, or none is needed any more."""
        pool = self._pool
        if sum(len(other.blocks) for other in others) < seq.wants - pool.available:
            return 0
        found = self._find(seq)
        seq.wants = pool.cost(found, self.needed(seq))
        short = seq.wants - pool.available
        return pool.enough(short, [other.attempt for other in others], found) if short > 0 else 0

    def give_back(self, seq: LiveSequence) -> int:
        """Free the blocks of `seq`, of which nothing was announced, so that it can start over. What is full
        and computed stays cached; returns how many tokens are to compute if it is still there then."""
        left = len(seq.tokens) - len(seq.hashes) * self._block_tokens
        self._pool.free(seq.attempt)
        seq.blocks, seq.hashes, seq.computed, seq.wants = [], [], 0, 0
        return left

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

    def _find(self, seq: LiveSequence) -> list[CachedBlock]:
        """The leading blocks of `seq` that are cached and of use; names its blocks if need be."""
        size, namespace = self._block_tokens, seq.work.namespace
        data = token_bytes(seq.tokens)
        rest = data[len(seq.known) * size * _TOKEN_SIZE :]
        seq.known += block_hashes(rest, size, seq.known[-1] if seq.known else namespace)
        # What computes here computes its last token at least: the step has to draw from it.
        computes = not seq.remote or seq.pull_blocks > 0 or seq.reserve > 0
        usable = (len(seq.tokens) - computes) // size
        return self._pool.find(namespace, seq.known[:usable], data)
