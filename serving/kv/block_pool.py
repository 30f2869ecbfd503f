"""Who holds which KV block, and which content can be found again. Pure bookkeeping, no memory, no threads.

A block is in one state, by precedence:

    used > leased > quarantined > cached > free

Holds are keyed by attempt and come in pairs; the ends are idempotent:

    hold / free                    a running attempt's table of blocks, which may `grow`
    lease / release                the table outlives its attempt until a reader has it
    quarantine / end_quarantine    a read into the blocks may still be in flight

Content is *found* by the chained hash and *accepted* only when stored tokens, namespace and the whole
chain before it are equal: two prompts whose hashes collide never see each other's KV.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from serving.engine.base import AttemptId, BlockHash, BlockId, BlockStates, StoredRun

_FREE, _CACHED, _QUARANTINED, _LEASED, _USED = range(5)


@dataclass(slots=True, eq=False)
class CachedBlock:
    """Content that can be found: these tokens, in this namespace, after that parent."""

    block: BlockId
    hash: BlockHash
    namespace: int
    parent: CachedBlock | None
    tokens: bytes  # u32 LE


def _same(one: CachedBlock | None, other: CachedBlock | None) -> bool:
    """Equal content along the whole chain. Identity decides nearly always in the first round."""
    while one is not other:
        if one is None or other is None or one.tokens != other.tokens or one.namespace != other.namespace:
            return False
        one, other = one.parent, other.parent
    return True


@dataclass(slots=True, eq=False)
class _Table:
    """Blocks of one attempt; `tail` ends the findable chain of its content, None at the start."""

    blocks: list[BlockId]
    namespace: int
    tail: CachedBlock | None
    committed: int  # leading blocks that went through `commit` or were found
    linked: bool = True  # False once a block could not be made findable: its followers cannot either


class BlockPool:
    """Pool of `n_blocks` equal blocks; not thread safe."""

    def __init__(self, n_blocks: int) -> None:
        self.total = n_blocks
        self._free: deque[BlockId] = deque(BlockId(b) for b in range(n_blocks))
        self._lru: OrderedDict[BlockId, None] = OrderedDict()  # cached and unheld, oldest first
        self._state: list[int] = [_FREE] * n_blocks
        self._count = [n_blocks, 0, 0, 0, 0]  # blocks by state
        self._uses = [0] * n_blocks
        self._leases = [0] * n_blocks
        self._parks = [0] * n_blocks
        self._content: list[CachedBlock | None] = [None] * n_blocks
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._tables: dict[AttemptId, _Table] = {}
        self._leased: dict[AttemptId, list[BlockId]] = {}
        self._parked: dict[AttemptId, list[BlockId]] = {}
        self._stored: dict[BlockHash, CachedBlock] = {}  # since the last `drain_events`
        self._removed: dict[BlockHash, None] = {}

    # ------------------------------------------------------------ looking

    @property
    def available(self) -> int:
        """Blocks that `hold` and `grow` can hand out: free, or cached and unheld."""
        return self._count[_FREE] + self._count[_CACHED]

    def states(self) -> BlockStates:
        count = self._count
        return BlockStates(
            self.total, count[_USED], count[_LEASED], count[_QUARANTINED], count[_CACHED], count[_FREE]
        )

    def is_leased(self, attempt: AttemptId) -> bool:
        return attempt in self._leased

    def find(self, namespace: int, hashes: list[BlockHash], data: bytes) -> list[CachedBlock]:
        """The longest run of leading blocks whose content is here. Changes nothing.

        `data`: token bytes (u32 LE) of at least the blocks that `hashes` name.
        """
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        get = self._by_hash.get
        start = 0
        for name in hashes:
            entry = get(name)
            if entry is None or entry.namespace != namespace:
                break
            end = start + len(entry.tokens)
            if entry.tokens != data[start:end] or not _same(entry.parent, parent):
                break
            found.append(entry)
            parent, start = entry, end
        return found

    def cost(self, found: list[CachedBlock], n_blocks: int) -> int:
        """How many of the available blocks a `hold` of `n_blocks` that starts with `found` takes."""
        state = self._state
        return n_blocks - len(found) + sum(1 for entry in found if state[entry.block] == _CACHED)

    def enough(self, short: int, givers: list[AttemptId], found: list[CachedBlock]) -> int:
        """How many of `givers`, who have tables, in order, must free them to make `short` (> 0) more blocks
        available that are not of `found`. 0 when all of them are too few. Changes nothing."""
        kept = {entry.block for entry in found}
        drops: dict[BlockId, int] = {}
        for n_given, attempt in enumerate(givers, start=1):
            for block in self._tables[attempt].blocks:
                drops[block] = n = drops.get(block, 0) + 1
                if n == self._uses[block] and not (
                    self._leases[block] or self._parks[block] or block in kept
                ):
                    short -= 1
            if short <= 0:
                return n_given
        return 0

    def chains(self) -> list[StoredRun]:
        """All content that can be found, parents before children: what a new listener must know."""
        children: dict[BlockHash | None, list[CachedBlock]] = {}
        for entry in self._by_hash.values():
            children.setdefault(entry.parent.hash if entry.parent else None, []).append(entry)
        runs: list[StoredRun] = []
        starts: list[tuple[CachedBlock | None, CachedBlock]] = [
            (None, entry) for entry in children.get(None, ())
        ]
        while starts:
            parent, entry = starts.pop()
            run = StoredRun(parent.hash if parent else None, [])
            runs.append(run)
            while True:
                run.hashes.append(entry.hash)
                after = [e for e in children.get(entry.hash, ()) if _same(e.parent, entry)]
                starts.extend((entry, e) for e in after[1:])
                if not after:
                    break
                entry = after[0]
        return runs

    # ------------------------------------------------------------ running attempts

    def hold(
        self, attempt: AttemptId, namespace: int, found: list[CachedBlock], n_blocks: int
    ) -> list[BlockId] | None:
        """Give `attempt` a table of `n_blocks` that starts with `found`; None when there are too few.

        `found` comes from `find` with nothing done to the pool in between. The list stays the pool's:
        callers read it and never change it. Raises ValueError when the attempt has a table.
        """
        if attempt in self._tables:
            raise ValueError(f"attempt {attempt} holds blocks already")
        if self.cost(found, n_blocks) > self.available:
            return None
        uses = self._uses
        blocks = [entry.block for entry in found]
        for block in blocks:
            uses[block] += 1
            if uses[block] == 1:
                self._settle(block)
        blocks.extend(self._take() for _ in range(n_blocks - len(found)))
        tail = found[-1] if found else None
        self._tables[attempt] = _Table(blocks, namespace, tail, committed=len(found))
        return blocks

    def grow(self, attempt: AttemptId) -> bool:
        """Append a block to the table of `attempt`; False when none is available."""
        if not self._count[_FREE] and not self._count[_CACHED]:
            return False
        self._tables[attempt].blocks.append(self._take())
        return True

    def commit(self, attempt: AttemptId, name: BlockHash, data: bytes) -> None:
        """The next block of the table is full and computed: `data` are its tokens, `name` its hash.

        It becomes findable unless equal content is (then that stays the one to find), the hash is taken
        by other content, or the block before it cannot be found any more.
        """
        table = self._tables[attempt]
        block = table.blocks[table.committed]
        table.committed += 1
        if not table.linked:
            return
        parent = table.tail
        if parent is not None and self._by_hash.get(parent.hash) is not parent:
            table.linked = False
            return
        entry = self._by_hash.get(name)
        if entry is None:
            entry = CachedBlock(block, name, table.namespace, parent, data)
            self._by_hash[name] = entry
            self._content[block] = entry
            self._stored[name] = entry
        elif entry.tokens != data or entry.namespace != table.namespace or not _same(entry.parent, parent):
            table.linked = False
            return
        table.tail = entry

    def free(self, attempt: AttemptId) -> None:
        """Drop the table of `attempt`; what is findable stays cached. Idempotent."""
        table = self._tables.pop(attempt, None)
        if table is not None:
            self._drop(self._uses, table.blocks)

    # ------------------------------------------------------------ leases and quarantine

    def lease(self, attempt: AttemptId) -> None:
        """The attempt ends, its blocks stay pinned until `release`. Raises KeyError without a table."""
        blocks = self._move(attempt, self._leases)
        self._leased.setdefault(attempt, []).extend(blocks)

    def release(self, attempt: AttemptId) -> None:
        """Idempotent."""
        self._drop(self._leases, self._leased.pop(attempt, []))

    def quarantine(self, attempt: AttemptId, first: int = 0) -> None:
        """The attempt ends; its blocks from index `first` on stay out of use until `end_quarantine`.

        Their content is not found any more: something may still write to them. Idempotent.
        """
        table = self._tables.get(attempt)
        if table is None:
            return
        for block in table.blocks[first:]:
            self._forget(block)
        blocks = self._move(attempt, self._parks, first)
        self._parked.setdefault(attempt, []).extend(blocks)

    def end_quarantine(self, attempt: AttemptId) -> None:
        """Idempotent."""
        self._drop(self._parks, self._parked.pop(attempt, []))

    # ------------------------------------------------------------ events

    def drain_events(self) -> tuple[list[StoredRun], list[BlockHash]]:
        """(stored, removed) since the last call; right when `removed` is applied before `stored`."""
        if not self._stored and not self._removed:
            return [], []
        runs: list[StoredRun] = []
        for entry in self._stored.values():
            parent = entry.parent.hash if entry.parent else None
            if runs and runs[-1].hashes[-1] == parent:
                runs[-1].hashes.append(entry.hash)
            else:
                runs.append(StoredRun(parent, [entry.hash]))
        removed = list(self._removed)
        self._stored = {}
        self._removed = {}
        return runs, removed

    # ------------------------------------------------------------ inside

    def _take(self) -> BlockId:
        """An available block, now used once; the least recently used content goes first."""
        count = self._count
        if self._free:
            block = self._free.popleft()
            count[_FREE] -= 1
        else:
            block, _ = self._lru.popitem(last=False)
            count[_CACHED] -= 1
            self._forget_content(block)
        self._state[block] = _USED
        count[_USED] += 1
        self._uses[block] = 1
        return block

    def _move(self, attempt: AttemptId, holds: list[int], first: int = 0) -> list[BlockId]:
        """End the table; its blocks from `first` on are held by `holds` instead."""
        blocks = self._tables.pop(attempt).blocks
        moved = blocks[first:]
        for block in moved:
            holds[block] += 1
        self._drop(self._uses, blocks)
        return moved

    def _drop(self, holds: list[int], blocks: list[BlockId]) -> None:
        """Last blocks first, so that the ends of chains are evicted before their beginnings."""
        for block in reversed(blocks):
            holds[block] -= 1
            if not holds[block]:
                self._settle(block)

    def _settle(self, block: BlockId) -> None:
        """Bring a block's state in line with its holds."""
        if self._uses[block]:
            new = _USED
        elif self._leases[block]:
            new = _LEASED
        elif self._parks[block]:
            new = _QUARANTINED
        elif self._content[block] is not None:
            new = _CACHED
        else:
            new = _FREE
        old = self._state[block]
        if new == old:
            return
        self._state[block] = new
        self._count[old] -= 1
        self._count[new] += 1
        if old == _CACHED:
            del self._lru[block]
        if new == _CACHED:
            self._lru[block] = None
        elif new == _FREE:
            self._free.append(block)

    def _forget(self, block: BlockId) -> None:
        if self._content[block] is not None:
            self._forget_content(block)

    def _forget_content(self, block: BlockId) -> None:
        entry = self._content[block]
        assert entry is not None
        self._content[block] = None
        del self._by_hash[entry.hash]
        # What was stored and removed between two drains never was; a listener applies removals first.
        if self._stored.pop(entry.hash, None) is None:
            self._removed[entry.hash] = None
