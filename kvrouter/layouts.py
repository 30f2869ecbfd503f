"""Workers of several KV layouts in one variant, as in a rollout that changes weights, dtype or block size.

A worker reads KV only of its own layout: the bytes of another one mean something else. So every layout is a
pair of pools of its own, and a request goes to one of them as a whole:

    decode   workers of any layout, as always: those that stay and are not to be avoided, if there are such
    prefill  those of the same layout that stay and are not to be avoided; without any, decode computes
    then     KV room, and then the least predicted time of the whole answer

A prefill worker that leaves is not used, though it be the last one of its layout: its decode workers can
compute, and a rollout would last as long as it is kept busy. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrouter.cost import Candidate, Demand, Terms, whole_ms
from kvrouter.load import WorkerLoad
from kvrouter.router import Choice

__all__ = ["Placing", "best_of", "by_layout", "held_by", "of_layout", "settled"]


@dataclass(slots=True)
class Placing:
    """What a choice among workers of one layout is made of."""

    demand: Demand
    decode: Candidate
    computes: Candidate  # the prompt: a prefill worker, or the one that decodes
    reasons: dict[str, Terms]
    move_ms: float = 0.0  # until its KV is where it decodes
    hashes: Sequence[int] | None = None  # of the prompt, in blocks of this layout

    @property
    def is_local(self) -> bool:
        return self.computes.ident == self.decode.ident

    @property
    def picked(self) -> list[Candidate]:
        """For the policy to remember."""
        return [self.decode] if self.is_local else [self.decode, self.computes]

    def choice(self) -> Choice:
        computes = self.computes
        return Choice(
            decode=self.decode.ident,
            prefill=None if self.is_local else computes.ident,
            cached_tokens=computes.cached_tokens,
            predicted_ttft_ms=computes.ttft_ms,
            predicted_itl_ms=self.decode.itl_ms,
            reasons=self.reasons,
            pull_from=computes.pull_from,
            pull_tokens=computes.pull_tokens,
            pull_within_ms=computes.compute_ms,
        )


def by_layout(loads: Iterable[WorkerLoad]) -> dict[str, list[WorkerLoad]]:
    groups: dict[str, list[WorkerLoad]] = {}
    for load in loads:
        groups.setdefault(load.view.layout, []).append(load)
    return groups


def of_layout(layout: str, loads: Iterable[WorkerLoad]) -> list[WorkerLoad]:
    return [load for load in loads if load.view.layout == layout]


def settled(loads: Iterable[WorkerLoad], avoid: frozenset[str]) -> list[WorkerLoad]:
    """The prefill workers that stay and are not to be avoided."""
    return [
        load
        for load in loads
        if load.view.role == "prefill" and not load.view.draining and load.view.ident not in avoid
    ]


def held_by(loads: Iterable[WorkerLoad], stored: Mapping[str, int]) -> Mapping[str, int]:
    """What of `stored`, blocks by worker, is on `loads`: nothing else can be read by them."""
    return {w.view.ident: stored[w.view.ident] for w in loads if w.view.ident in stored}


def best_of(placings: Sequence[Placing], generator: random.Random) -> Placing:
    """Equals are drawn from evenly."""
    scores = [_score(placing) for placing in placings]
    least = min(scores)
    equal = [placing for placing, score in zip(placings, scores, strict=True) if score == least]
    return equal[0] if len(equal) == 1 else generator.choice(equal)


def _score(placing: Placing) -> tuple[bool, float]:
    decode = placing.decode
    full = decode.room_blocks < decode.needs_blocks
    return full, whole_ms(placing.demand, decode, placing.computes, placing.move_ms)
