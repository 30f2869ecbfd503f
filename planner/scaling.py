"""From replica counts to what the planner sees, and from its decision to orders. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from planner.observation import PoolSeen, VariantDecision

__all__ = ["Connector", "LentWorker", "PoolWorker", "ReplicaCounts", "flips", "pool_seen", "set_aside"]


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """One Serve deployment. `leaving`: the replicas that stop, by ident; `unplaced`: those of `starting`
    that the cluster has no place for yet, None: unknown; `replicas`: all there are, by ident."""

    target: int
    running: int
    starting: int
    stopping: int
    leaving: frozenset[str] = frozenset()
    unplaced: int | None = None
    replicas: frozenset[str] = frozenset()


class Connector(Protocol):
    """See planner.connector; all raise Unavailable."""

    async def counts(self) -> Mapping[str, ReplicaCounts]: ...

    async def scale(self, deployment: str, replicas: int) -> None: ...

    async def remove(self, deployment: str, replica: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker that Control knows. `role`: what it plays; `ordered`: what it was told to play, None: its
    pool's; `set_aside`: an operator told it to drain."""

    ident: str
    pool: str
    role: str
    draining: bool
    requests: int
    ordered: str | None = None
    set_aside: bool = False


@dataclass(frozen=True, slots=True)
class LentWorker:
    """An order: `worker` is to play `role`; None: its own pool's again."""

    worker: str
    role: str | None


def set_aside(pool: str, counts: ReplicaCounts, workers: list[PoolWorker]) -> int:
    """Replicas that Serve counts and the planner does not: an operator drains them, perhaps for a while."""
    return sum(w.pool == pool and w.set_aside and w.ident not in counts.leaving for w in workers)


def pool_seen(pool: str, counts: ReplicaCounts, workers: list[PoolWorker]) -> PoolSeen:
    """`workers`: all that Control knows, of both pools.

    One that was told to play the other role counts as lent at once; one that is set aside is leaving.
    """
    mine = [worker for worker in workers if worker.pool == pool]
    lent = [w for w in mine if not w.set_aside and (w.ordered is not None or w.role != w.pool)]
    leaving = [w for w in mine if w.draining and w not in lent]
    ready = len(mine) - len(lent) - len(leaving)
    # A replica that Serve stops drains too: it is in both lists, once.
    draining = max(len(leaving), counts.stopping)
    starting = max(counts.target - set_aside(pool, counts, workers) - len(lent) - ready, 0)
    unplaced = None if counts.unplaced is None else min(counts.unplaced, starting)
    return PoolSeen(ready=ready, lent=len(lent), starting=starting, draining=draining, unplaced=unplaced)


def flips(decision: VariantDecision, workers: list[PoolWorker]) -> list[LentWorker]:
    """The orders that bring about `decision.lent`: as few as can be, of workers with the least to move."""
    orders: list[LentWorker] = []
    for pool, other, wanted in (
        ("decode", "prefill", max(decision.lent, 0)),
        ("prefill", "decode", max(-decision.lent, 0)),
    ):
        mine = [worker for worker in workers if worker.pool == pool]
        lent = [worker for worker in mine if worker.ordered == other and not worker.set_aside]
        back = sorted(lent, key=lambda w: (w.requests, w.ident))[: max(len(lent) - wanted, 0)]
        orders += [LentWorker(worker.ident, None) for worker in back]
        free = [worker for worker in mine if worker.ordered is None and not worker.draining]
        more = sorted(free, key=lambda w: (w.requests, w.ident))[: max(wanted - len(lent), 0)]
        orders += [LentWorker(worker.ident, other) for worker in more]
    return orders
