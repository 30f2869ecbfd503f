"""What a placement policy is: two pure rules, one for who computes a prompt, one for who decodes it.

A new policy is one file of this shape and a line in registry.py. It sees candidates only through their
predictions (kvrouter.cost.Candidate), so the same file works live, in tests and in the replay.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvrouter.cost import Candidate, Demand, Terms

__all__ = ["Policy"]


class Policy(ABC):
    """Least total wins. `keep` narrows before scoring and may not return an empty list."""

    name: ClassVar[str]
    sees_pending: ClassVar[bool] = True  # counts prefixes as cached that are still being computed
    weighs_local: ClassVar[bool] = False  # compares prefill on the decode worker; others never do that

    def keep(
        self, demand: Demand, candidates: Sequence[Candidate], generator: random.Random
    ) -> Sequence[Candidate]:
        """The candidates worth scoring; by default all."""
        return candidates

    @abstractmethod
    def score(self, demand: Demand, candidate: Candidate) -> Terms:
        """Terms of computing the prompt on `candidate`; `total` is compared."""

    def score_decode(self, demand: Demand, candidate: Candidate) -> Terms:
        """Terms of decoding on `candidate`, which has KV room; by default fewest requests in flight."""
        return {"total": float(candidate.in_flight)}

    def chosen(self, candidate: Candidate) -> None:  # noqa: B027 (most rules have no memory)
        """`candidate` was picked; for rules with a memory."""
