"""Which worker holds which prefix, in one tier: all chains of all workers as one tree of runs.

A run is a stretch of blocks without a fork inside. A worker holds a *leading part* of a run, so one number
per (run, worker) says it all, and a chain shared by a thousand workers is stored once:

    run 0   [s0 s1 s2 s3 a4 a5]      held: w1 -> 6, w2 -> 4, w3 -> 5
    run 1           \\ [b4 b5 b6]     held: w2 -> 7            (base 4: leaves run 0 after four blocks)

Depths count blocks from the start of the prompt. Three rules make a match a few look-ups:

- what a worker *shows* is prefix-closed: a block shows only while its parent does. Blocks that lost a block
  before them are *hidden*: remembered per worker, in no match, shown again when the gap is filled;
- so is the union over the workers, hence bisection finds how many leading blocks of a prompt are known;
- the workers of a run are workers of its parent run too.

The price is paid by removals from the middle of a chain, which hide what follows block by block. Engines
evict the ends of chains first, which costs nothing of the kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrouter.hidden_blocks import HiddenBlocks
from kvrouter.prefix_run import Holdings, Run

__all__ = ["Contradiction", "PrefixTree"]

_DEPTH_BITS = 24  # a place is run number << 24 | depth: one small object a block
_DEPTH = (1 << _DEPTH_BITS) - 1


class Contradiction(ValueError):
    """A chain that cannot be, given what is known: a hash at two places, or twice in one chain."""


class PrefixTree:
    """See the module docstring. Holds `max_entries` entries (see `entries`) at most; not thread safe."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._places: dict[int, int] = {}  # hash -> place
        self._runs: OrderedDict[int, Run] = OrderedDict()  # in the order in which eviction looks at them
        self._workers: dict[str, Holdings] = {}
        self._next_run = 0
        self.holders = 0  # pairs of run and worker
        self.hidden = 0  # hidden blocks of all workers
        self.evicted = 0  # blocks dropped for want of room, since the start

    # ------------------------------------------------------------ looking

    @property
    def blocks(self) -> int:
        """Distinct blocks shown."""
        return len(self._places)

    @property
    def runs(self) -> int:
        return len(self._runs)

    @property
    def entries(self) -> int:
        """What memory goes to: distinct blocks, pairs of run and worker, hidden blocks."""
        return len(self._places) + self.holders + self.hidden

    def n_held(self, worker: str) -> int:
        """Blocks that `worker` holds as far as is known here, shown and hidden."""
        mine = self._workers.get(worker)
        return mine.shown + len(mine.hidden) if mine else 0

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of `hashes` that each worker shows; workers that show none are left out."""
        depth = self._known(hashes)
        if not depth:
            return {}
        place = self._places[hashes[depth - 1]]
        if place & _DEPTH != depth:
            return self.match(hashes[: self._in_place(hashes)])
        run = self._runs[place >> _DEPTH_BITS]
        run.used = True
        held = run.held
        found = {w: d if d < depth else depth for w, d in held.items()} if run.end > depth else held.copy()
        while run.parent is not None:
            depth, run = run.base, run.parent
            held = run.held
            if len(held) > len(found):  # a superset, by the third rule
                for worker in held.keys() - found.keys():
                    end = held[worker]
                    found[worker] = end if end < depth else depth
        return found

    def _known(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of `hashes` some worker shows."""
        places = self._places
        if not hashes or hashes[0] not in places:
            return 0
        if hashes[-1] in places:
            return len(hashes)
        low, high = 1, len(hashes) - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if hashes[middle - 1] in places:
                low = middle
            else:
                high = middle - 1
        return low

    def _in_place(self, hashes: Sequence[int]) -> int:
        """As `_known`, one by one: for chains with a block that a faulty worker reported elsewhere."""
        get = self._places.get
        for depth, name in enumerate(hashes, 1):
            place = get(name)
            if place is None or place & _DEPTH != depth:
                return depth - 1
        return len(hashes)

    def _shown(self, worker: str, name: int) -> tuple[Run, int] | None:
        """Run and depth of a block, if `worker` shows it."""
        place = self._places.get(name)
        if place is None:
            return None
        run = self._runs[place >> _DEPTH_BITS]
        depth = place & _DEPTH
        return (run, depth) if run.held.get(worker, 0) >= depth else None

    # ------------------------------------------------------------ storing

    def store(self, worker: str, parent: int | None, hashes: list[int]) -> bool:
        """`worker` now holds the chain `hashes` after `parent` (None: they start a prompt). Idempotent.

        False: `worker` never said that it holds `parent`; the chain is hidden until it does.
        Raises Contradiction, with nothing of this chain stored but what other workers hold too.
        """
        mine = self._workers.get(worker)
        if mine is None:
            mine = self._workers[worker] = Holdings()
        if not hashes:
            return True
        if parent is not None and self._shown(worker, parent) is None:
            known = parent in mine.hidden
            self.hidden += mine.hidden.add_chain(parent, hashes)
            self._make_room()
            return known
        self._show(worker, mine, parent, hashes)
        if mine.hidden:
            self._reveal(worker, mine, hashes)
        if self.entries > self._max_entries:
            self._make_room()
        return True

    def _show(self, worker: str, mine: Holdings, parent: int | None, hashes: list[int]) -> None:
        """`store` for a parent that shows."""
        places = self._places
        after: Run | None = None
        depth = 0
        if parent is not None:
            place = places[parent]
            after, depth = self._runs[place >> _DEPTH_BITS], place & _DEPTH
        known = self._known(hashes)
        if known:
            first, last = places[hashes[0]], places[hashes[known - 1]]
            branch = self._runs[first >> _DEPTH_BITS]
            follows = branch is after or (branch.base == depth and branch.parent is after)
            depth += known
            if not follows or last & _DEPTH != depth:
                raise Contradiction(f"block {hashes[0]:016x} was reported after another block")
            after = self._runs[last >> _DEPTH_BITS]
            after.used = True
            self._reach(worker, mine, after, depth)
            if known == len(hashes):
                return
            hashes = hashes[known:]
        self._append(worker, mine, after, depth, hashes)

    def _reach(self, worker: str, mine: Holdings, run: Run, depth: int) -> None:
        """`worker` shows everything up to `depth` in `run`, and so in the runs before it."""
        below: Run | None = None
        above: Run | None = run
        while above is not None:
            run = above
            old = run.held.get(worker, run.base)
            if depth > old:
                run.held[worker] = depth
                mine.shown += depth - old
            new = old == run.base
            if new:
                mine.runs[run] = None
                self.holders += 1
            if below is not None:
                mine.link(run, below)
            if not new:
                return
            below, depth, above = run, run.base, run.parent

    def _append(
        self, worker: str, mine: Holdings, after: Run | None, depth: int, hashes: list[int]
    ) -> None:
        """New blocks of `worker` after `depth` in `after`: that run goes on, or a new one forks off."""
        places = self._places
        if not places.keys().isdisjoint(hashes):
            raise Contradiction(f"the chain from block {hashes[0]:016x} on runs into one known elsewhere")
        end = depth + len(hashes)
        if end > _DEPTH:
            raise Contradiction(f"a chain of {end} blocks")
        grows = after is not None and depth == after.end
        number = after.number if after is not None and grows else self._next_run
        start = (number << _DEPTH_BITS) + depth + 1
        size = len(places)
        places.update(zip(hashes, range(start, start + len(hashes)), strict=True))
        if len(places) != size + len(hashes):
            for name in hashes:
                places.pop(name, None)
            raise Contradiction(f"a block twice in the chain from block {hashes[0]:016x} on")
        if after is not None and grows:
            run = after
            run.used = True
        else:
            run = self._runs[number] = Run(number, after, depth)
            self._next_run += 1
            self.holders += 1
            mine.runs[run] = None
            if after is not None:
                after.branches += 1
                mine.link(after, run)
        run.hashes += hashes
        run.held[worker] = end
        mine.shown += len(hashes)

    def _reveal(self, worker: str, mine: Holdings, hashes: list[int]) -> None:
        """`hashes` show now: so does what was hidden behind them."""
        hidden = mine.hidden
        before = len(hidden)
        for name in hashes:
            hidden.discard(name)
        parents = list(hashes)
        try:
            while parents:
                parent = parents.pop()
                for child in hidden.take_children(parent):
                    self._show(worker, mine, parent, [child])
                    parents.append(child)
        finally:
            self.hidden -= before - len(hidden)

    # ------------------------------------------------------------ removing

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """`worker` no longer holds these blocks, if it did; what it holds behind them is hidden."""
        mine = self._workers.get(worker)
        if mine is None:
            return
        hidden = mine.hidden
        before = len(hidden)
        for name in hashes if hidden else ():
            hidden.discard(name)
        # From the ends: a branch has a higher number than its parent, and what goes anyway need not hide.
        places = sorted(set(filter(None, map(self._places.get, hashes))), reverse=True)
        shortened: dict[Run, None] = {}
        i, count = 0, len(places)
        while i < count:
            run, depth = self._runs[places[i] >> _DEPTH_BITS], places[i] & _DEPTH
            end = run.held.get(worker, 0)
            if depth == end and not mine.runs[run]:
                first, i = i, i + 1
                while i < count and places[i - 1] - places[i] == 1:
                    i += 1
                self._shorten(worker, mine, run, depth - (i - first), shortened)
                continue
            i += 1
            if depth <= end:
                self._hide(worker, mine, run, depth - 1, shortened)
                hidden.discard(run.hashes[depth - run.base - 1])
        self.hidden += len(hidden) - before
        for run in shortened:
            self._trim(run)

    def _shorten(
        self, worker: str, mine: Holdings, run: Run, depth: int, shortened: dict[Run, None]
    ) -> None:
        """`worker` shows `run` only up to `depth`; nothing it shows may hang behind that."""
        old = run.held[worker]
        mine.shown -= old - depth
        if old == run.end:
            shortened[run] = None
        if depth > run.base:
            run.held[worker] = depth
        else:
            del run.held[worker]
            self.holders -= 1
            mine.leave(run)

    def _hide(self, worker: str, mine: Holdings, run: Run, depth: int, shortened: dict[Run, None]) -> None:
        """Hide what `worker` shows in `run` behind `depth`, and all that hangs there."""
        stack = [(run, depth)]
        while stack:
            run, depth = stack.pop()
            stack.extend((branch, branch.base) for branch in mine.runs[run] or () if branch.base > depth)
            gone = run.hashes[depth - run.base : run.held[worker] - run.base]
            mine.hidden.add_chain(run.before(depth), gone)
            self._shorten(worker, mine, run, depth, shortened)

    def _trim(self, run: Run) -> None:
        """Forget the blocks of `run` that nobody shows any more."""
        size = max(run.held.values(), default=run.base) - run.base
        for name in run.hashes[size:]:
            del self._places[name]
        del run.hashes[size:]
        if not size:
            self._runs.pop(run.number)
            if run.parent is not None:
                run.parent.branches -= 1

    def clear(self, worker: str) -> None:
        """`worker` holds nothing: O(its runs, and its blocks that nobody else holds)."""
        mine = self._workers.pop(worker, None)
        if mine is None:
            return
        self.holders -= len(mine.runs)
        self.hidden -= len(mine.hidden)
        for run in mine.runs:
            if run.held.pop(worker) == run.end:
                self._trim(run)

    # ------------------------------------------------------------ bound

    def _make_room(self) -> None:
        """Evict until the bound holds: ends of the tree that no match and no event used for longest."""
        while self.entries > self._max_entries:
            run = self._unused()
            if run is None:  # there is nothing but hidden blocks
                hoarder = max(self._workers.values(), key=lambda mine: len(mine.hidden))
                self.evicted += len(hoarder.hidden)
                self.hidden -= len(hoarder.hidden)
                hoarder.hidden = HiddenBlocks()
                continue
            self.evicted += len(run.hashes)
            for worker, depth in run.held.items():
                mine = self._workers[worker]
                mine.shown -= depth - run.base
                mine.leave(run)
            self.holders -= len(run.held)
            run.held = {}
            self._trim(run)

    def _unused(self) -> Run | None:
        """A run without branches; second chance for what was used since the last look."""
        runs = self._runs
        while runs:
            number = next(iter(runs))
            run = runs[number]
            if not run.branches and not run.used:
                return run
            run.used = False
            runs.move_to_end(number)
        return None
