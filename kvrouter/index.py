"""The router's index: which worker can serve how many leading blocks of a prompt, by storage tier.

Every tier is a tree of its own (kvrouter/prefix_tree.py): a match in a tier counts leading blocks held in
*that* tier. Namespaces need no separation here, they are in every hash (kvrouter/hashing.py).

The index has a bound. When it is reached, the ends of chains that were neither matched nor reported for
longest are forgotten: matches become shorter than the truth, never longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.prefix_tree import Contradiction, PrefixTree

__all__ = ["DEVICE", "MAX_ENTRIES", "Contradiction", "IndexStats", "PrefixIndex"]

DEVICE = "device"
MAX_ENTRIES = 4_000_000  # a tier; about 0.6 GB

# What an entry takes on CPython 3.11, from benchmarks/router_index.py.
_BLOCK_BYTES = 140
_HOLDER_BYTES = 200
_RUN_BYTES = 500
_HIDDEN_BYTES = 450


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Of all tiers together. `blocks` are distinct; one block on ten workers counts once."""

    workers: int
    blocks: int
    runs: int
    holders: int  # pairs of run and worker
    hidden: int  # blocks behind a missing one, by worker
    evicted: int  # blocks forgotten for want of room, since the start

    @property
    def memory_bytes(self) -> int:
        """Estimate."""
        return (
            self.blocks * _BLOCK_BYTES
            + self.runs * _RUN_BYTES
            + self.holders * _HOLDER_BYTES
            + self.hidden * _HIDDEN_BYTES
        )


class PrefixIndex:
    """Changes and matches of one frontend; pure, not thread safe. Unknown workers raise KeyError."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; at least 1 is needed")
        self._max_entries = max_entries
        self._workers: set[str] = set()
        self._tiers = {DEVICE: PrefixTree(max_entries)}

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str) -> None:
        """Idempotent: what is known of a worker stays."""
        self._workers.add(worker)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and all it holds, in O(what it holds). Idempotent."""
        self._workers.discard(worker)
        for tree in self._tiers.values():
            tree.clear(worker)

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(self._workers)

    # ------------------------------------------------------------ looking

    def match(self, hashes: Sequence[int], tier: str = DEVICE) -> dict[str, int]:
        """Leading blocks of the chain `hashes` by worker; workers with none are left out."""
        tree = self._tiers.get(tier)
        return {} if tree is None else tree.match(hashes)

    def n_held(self, worker: str, tier: str = DEVICE) -> int:
        """Blocks that `worker` reported and did not take back."""
        tree = self._tiers.get(tier)
        return 0 if tree is None else tree.n_held(worker)

    @property
    def stats(self) -> IndexStats:
        trees = self._tiers.values()
        return IndexStats(
            workers=len(self._workers),
            blocks=sum(tree.blocks for tree in trees),
            runs=sum(tree.runs for tree in trees),
            holders=sum(tree.holders for tree in trees),
            hidden=sum(tree.hidden for tree in trees),
            evicted=sum(tree.evicted for tree in trees),
        )

    # ------------------------------------------------------------ changes

    def store(self, worker: str, parent: int | None, hashes: list[int], tier: str = DEVICE) -> bool:
        """`worker` holds the chain `hashes` after `parent` (None: at the start of a prompt). Idempotent.

        False: it never reported `parent`, and the chain counts once it does. Raises Contradiction when the
        chain cannot be true together with what other workers reported.
        """
        if worker not in self._workers:
            raise KeyError(worker)
        tree = self._tiers.get(tier)
        if tree is None:
            tree = self._tiers[tier] = PrefixTree(self._max_entries)
        return tree.store(worker, parent, hashes)

    def remove(self, worker: str, hashes: Sequence[int], tier: str = DEVICE) -> None:
        """`worker` no longer holds these blocks; those behind them do not count until they are back."""
        if worker not in self._workers:
            raise KeyError(worker)
        if tier in self._tiers:
            self._tiers[tier].remove(worker, hashes)

    def clear(self, worker: str, tier: str | None = None) -> None:
        """`worker` holds nothing any more, in one tier or in all."""
        if worker not in self._workers:
            raise KeyError(worker)
        for name, tree in self._tiers.items():
            if tier is None or name == tier:
                tree.clear(worker)
