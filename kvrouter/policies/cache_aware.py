"""SGLang's rule: longest match while request counts are even, else fewest in flight. Totals are in requests
or, while counts are even, in blocks not matched.

    uneven:  most - least > 64  and  most > 1.5 * least  -> least in flight
    else     match > half the prompt                     -> longest match
    else                                                 -> smallest tree

The tree size is what was sent to a worker so far, as in its approximate tree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms
from kvrouter.policies.policy import Policy

__all__ = ["CacheAware"]

ABSOLUTE, RELATIVE, MATCH = 64, 1.5, 0.5  # its defaults


class CacheAware(Policy):
    name: ClassVar[str] = "cache_aware"

    def __init__(self) -> None:
        self._sent_tokens: dict[str, int] = {}  # uncached tokens by worker: the growth of its tree
        self._uneven = False

    def keep(
        self, demand: Demand, candidates: Sequence[Candidate], generator: random.Random
    ) -> Sequence[Candidate]:
        counts = [c.in_flight for c in candidates]
        most, least = max(counts), min(counts)
        self._uneven = most - least > ABSOLUTE and most > RELATIVE * least
        if self._uneven:
            return candidates
        best = max(c.cached_tokens for c in candidates)
        if best > MATCH * demand.prompt_tokens:
            return [c for c in candidates if c.cached_tokens == best]
        smallest = min(self._sent_tokens.get(c.ident, 0) for c in candidates)
        return [c for c in candidates if self._sent_tokens.get(c.ident, 0) == smallest]

    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        if self._uneven:
            return {"in_flight": candidate.in_flight, "total": float(candidate.in_flight)}
        missing = demand.prompt_tokens - candidate.cached_tokens
        return {"missing_tokens": missing, "total": float(missing)}

    def chosen(self, candidate: Candidate) -> None:
        self._sent_tokens[candidate.ident] = (
            self._sent_tokens.get(candidate.ident, 0) + candidate.uncached_tokens
        )
