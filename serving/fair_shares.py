"""Who got how much of something lately, and who has had more than a fair share of it. Pure.

Amounts fade with `MEMORY_S`, so that neither an old debt nor an old credit counts for long. Fair is
max-min: those that ask for less than an even share get all they ask for, the others even parts of the
rest. Nobody has to know what anybody will ask for: whoever is above the mean of all that ask gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import exp
from typing import Generic, TypeVar

__all__ = ["MEMORY_S", "FairShares"]

MEMORY_S = 20.0  # after which an amount counts 1/e
ASKS_S = 2 * MEMORY_S  # whoever has not asked for so long takes no part
MOST_KEYS = 4096  # the one that has not asked for longest is forgotten first
LARGEST = 40.0  # exponent at which the scale starts anew

K = TypeVar("K", bound=Hashable)


class FairShares(Generic[K]):
    """`ask` whenever a key wants something, `spend` when it got it. `now_s` never goes back."""

    def __init__(self) -> None:
        self._spent: OrderedDict[K, float] = OrderedDict()  # by the time of the last ask; scaled
        self._asked_s: dict[K, float] = {}
        self._total = 0.0
        # Instead of fading what was spent, later amounts weigh more: exp((now - since) / MEMORY_S).
        self._since_s: float | None = None

    def __len__(self) -> int:
        return len(self._spent)

    def ask(self, key: K, now_s: float) -> None:
        self._asked_s[key] = now_s
        self._spent.setdefault(key, 0.0)
        self._spent.move_to_end(key)
        while self._spent:
            oldest = next(iter(self._spent))
            if now_s - self._asked_s[oldest] <= ASKS_S and len(self._spent) <= MOST_KEYS:
                return
            self._total -= self._spent.pop(oldest)
            del self._asked_s[oldest]

    def spend(self, key: K, amount: float, now_s: float) -> None:
        """`key` has asked before."""
        if self._since_s is None:
            self._since_s = now_s
        exponent = (now_s - self._since_s) / MEMORY_S
        if exponent > LARGEST:
            faded = exp(-exponent)
            for other in self._spent:
                self._spent[other] *= faded
            self._total = sum(self._spent.values())
            self._since_s, exponent = now_s, 0.0
        amount *= exp(exponent)
        self._spent[key] += amount
        self._total += amount

    def is_over(self, key: K) -> bool:
        """It got more than the mean of all that ask."""
        return self._spent.get(key, 0.0) * len(self._spent) > self._total * (1 + 1e-9)

    def share(self, key: K) -> float:
        """Of all that was spent lately, 0..1."""
        return self._spent.get(key, 0.0) / self._total if self._total > 0 else 0.0
