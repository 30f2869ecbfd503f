"""The two halves of the tree of prefixes: a run of blocks, and what one worker holds of the runs."""

from __future__ import annotations

from kvrouter.hidden_blocks import HiddenBlocks

__all__ = ["Holdings", "Run"]


class Run:
    """A stretch of blocks without a fork inside; see kvrouter.prefix_tree."""

    __slots__ = ("base", "branches", "hashes", "held", "number", "parent", "used")

    def __init__(self, number: int, parent: Run | None, base: int) -> None:
        self.number = number
        self.parent = parent
        self.base = base  # depth of the block before the first one
        self.hashes: list[int] = []
        self.held: dict[str, int] = {}  # worker -> depth of the last block it shows, > base
        self.branches = 0  # runs whose parent this is
        self.used = False  # since it was new, or since eviction last looked

    @property
    def end(self) -> int:
        """Depth of the last block: the deepest that any worker shows."""
        return self.base + len(self.hashes)

    def before(self, depth: int) -> int | None:
        """The hash at `depth`, which is in this run or the last one before it; None before the first."""
        if depth > self.base:
            return self.hashes[depth - self.base - 1]
        parent = self.parent
        return None if parent is None else parent.hashes[depth - parent.base - 1]


class Holdings:
    """What one worker holds: parts of runs, and blocks that do not show."""

    __slots__ = ("hidden", "runs", "shown")

    def __init__(self) -> None:
        self.runs: dict[Run, set[Run] | None] = {}  # held run -> held runs whose parent it is
        self.hidden = HiddenBlocks()
        self.shown = 0  # blocks

    def link(self, run: Run, branch: Run) -> None:
        """Both are held, and `branch` hangs on `run`."""
        branches = self.runs[run]
        if branches is None:
            self.runs[run] = {branch}
        else:
            branches.add(branch)

    def leave(self, run: Run) -> None:
        """`run` is held no longer."""
        del self.runs[run]
        parent = run.parent
        branches = self.runs.get(parent) if parent is not None else None
        if branches is not None and parent is not None:
            branches.discard(run)
            if not branches:
                self.runs[parent] = None  # an empty set takes 216 bytes
