"""Blocks a worker holds and cannot be found by, because a block before them is missing."""

from __future__ import annotations

from collections.abc import Iterable


class HiddenBlocks:
    """Of one worker: block -> parent, and back."""

    __slots__ = ("_children", "_parents")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._children: dict[int | None, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, name: int) -> bool:
        return name in self._parents

    def add_chain(self, parent: int | None, hashes: Iterable[int]) -> int:
        """Remember the chain `hashes` after `parent`; known blocks move. Returns how many are new."""
        before = len(self._parents)
        for name in hashes:
            self.discard(name)
            self._parents[name] = parent
            self._children.setdefault(parent, {})[name] = None
            parent = name
        return len(self._parents) - before

    def discard(self, name: int) -> None:
        """Forget one block; those behind it stay hidden."""
        if name not in self._parents:
            return
        parent = self._parents.pop(name)
        siblings = self._children[parent]
        del siblings[name]
        if not siblings:
            del self._children[parent]

    def take_children(self, parent: int) -> list[int]:
        """Forget the blocks right after `parent`, and return them."""
        children = list(self._children.pop(parent, ()))
        for name in children:
            del self._parents[name]
        return children
