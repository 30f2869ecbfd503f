"""What a worker probably caches, by what was sent to it: the stand-in for its events. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PredictedCache"]


class PredictedCache:
    """Of one worker: the prompts placed on it within `ttl_s`, `blocks` blocks of them at most.

    Blocks are kept in two halves, new and old; when the new one is full it becomes the old one, and that is
    forgotten: least recently used within a factor of two, at one dictionary update a prompt. Prompts are
    added whole, so what is known stays prefix-closed, and a match is a bisection.
    """

    __slots__ = ("_half", "_new", "_old", "_ttl_s")

    def __init__(self, blocks: int, ttl_s: float) -> None:
        self._half = max(blocks // 2, 1)
        self._ttl_s = ttl_s
        self._new: dict[int, float] = {}  # hash -> placed at
        self._old: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, hashes: Sequence[int], now_s: float) -> None:
        """A prompt with these blocks was placed; of a longer one than fits, the beginning counts."""
        hashes = hashes[: self._half]
        if len(self._new) + len(hashes) > self._half:
            self._old, self._new = self._new, {}
        self._new.update(dict.fromkeys(hashes, now_s))

    def match(self, hashes: Sequence[int], now_s: float) -> int:
        """Leading blocks of `hashes` that were placed here."""
        oldest = now_s - self._ttl_s
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) >> 1
            name = hashes[middle - 1]
            placed_s = self._new.get(name)
            if placed_s is None:
                placed_s = self._old.get(name)
            if placed_s is not None and placed_s >= oldest:
                low = middle
            else:
                high = middle - 1
        return low
