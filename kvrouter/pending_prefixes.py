"""Prefixes that will be cached soon: those of the prompts this router has placed and that still compute.

Events tell of a block only once it is computed. Until then a burst of requests with one prefix would be
spread as if none had it; counting the prefix where it is being computed closes that window. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PendingPrefixes"]


class PendingPrefixes:
    """Chains of block hashes by attempt; each chain starts at its namespace's root."""

    def __init__(self) -> None:
        self._workers: dict[int, dict[str, int]] = {}  # hash -> worker -> attempts that will store it
        self._attempts: dict[int, tuple[str, Sequence[int]]] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, attempt: int, worker: str, hashes: Sequence[int]) -> None:
        self._attempts[attempt] = (worker, hashes)
        for block in hashes:
            workers = self._workers.setdefault(block, {})
            workers[worker] = workers.get(worker, 0) + 1

    def drop(self, attempt: int) -> None:
        """Idempotent."""
        worker, hashes = self._attempts.pop(attempt, ("", ()))
        for block in hashes:
            workers = self._workers[block]
            workers[worker] -= 1
            if workers[worker] == 0:
                del workers[worker]
                if not workers:
                    del self._workers[block]

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Blocks of the longest pending prefix by worker; those without any are left out."""
        found: dict[str, int] = {}
        for depth, block in enumerate(hashes, 1):
            workers = self._workers.get(block)
            if workers is None:
                break
            # A worker with this block has all before it: its attempts add whole chains.
            for worker in workers:
                found[worker] = depth
        return found
