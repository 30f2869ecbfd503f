"""How fast each worker's cache is being overwritten, compared with its peers. Pure.

New blocks push out the least recently used ones. Where more was written lately, what is pushed out is
younger, and more likely to be asked for again. Writes count for as long as it takes all caches together to
be overwritten once, fading exponentially.
"""

from __future__ import annotations

import math

__all__ = ["CacheTurnover"]


class CacheTurnover:
    """Of the workers of one pool; sizes and writes in tokens."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._all_sizes = 0  # their sum
        self._written: dict[str, float] = {}  # as of `_as_of`
        self._as_of: dict[str, float] = {}
        self._total = 0.0  # faded, of all workers
        self._clock = 0.0  # tokens written since the start

    def add_worker(self, ident: str, cache_tokens: int) -> None:
        """Idempotent. A new worker starts as the average one, so that it is not flooded."""
        self._settle()
        if ident not in self._sizes and cache_tokens > 0:
            average = self._total / self._all_sizes if self._sizes else 0.0
            self._written[ident] = average * cache_tokens
            self._as_of[ident] = self._clock
            self._total += self._written[ident]
        if cache_tokens > 0:
            self._all_sizes += cache_tokens - self._sizes.get(ident, 0)
            self._sizes[ident] = cache_tokens

    def remove_worker(self, ident: str) -> None:
        """Idempotent."""
        self._settle()
        if ident in self._sizes:
            self._total -= self._written[ident]
            self._all_sizes -= self._sizes[ident]
            del self._sizes[ident], self._written[ident], self._as_of[ident]

    def write(self, ident: str, tokens: int) -> None:
        """Unknown workers are ignored."""
        if ident not in self._sizes:
            return
        self._total *= math.exp(-tokens / self._all_sizes)
        self._clock += tokens
        self._written[ident] = self._faded(ident) + tokens
        self._as_of[ident] = self._clock
        self._total += tokens

    def excess(self, ident: str) -> float:
        """By how many of its sizes the cache was overwritten more than the average; 0 when unknown."""
        if ident not in self._sizes:
            return 0.0
        return self._faded(ident) / self._sizes[ident] - self._total / self._all_sizes

    def _settle(self) -> None:
        """Before the sizes change, and with them how fast writes fade."""
        for ident in self._sizes:
            self._written[ident], self._as_of[ident] = self._faded(ident), self._clock

    def _faded(self, ident: str) -> float:
        passed = self._clock - self._as_of[ident]
        if passed == 0:
            return self._written[ident]
        return self._written[ident] * math.exp(-passed / self._all_sizes)
