"""From roles that are wanted to replicas and loans, within the budget. Pure.

`share_budget` gives out workers one by one, each to the pool that has least of what it wants: when there
is not enough, prefill and decode stay matched and variants suffer alike. `place` turns the roles of one
variant into replicas of its two deployments and a loan between them, at the least cost: a loan takes a
drain, a new replica a start-up.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from planner.observation import PoolSeen
from planner.settings import PoolLimits, VariantSettings

__all__ = ["Placed", "current", "lendable", "occupied", "place", "share_budget"]

AWAY_S = 1.0  # what a loan costs for being one: without need everybody is at home

Roles = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    prefill: int  # replicas
    decode: int
    lent: int  # decode replicas that play prefill; below 0 the other way round


def current(pools: Mapping[str, PoolSeen]) -> Placed:
    """As it is: what starts counts, what leaves does not."""
    prefill, decode = _pool(pools, "prefill"), _pool(pools, "decode")
    return Placed(_kept(prefill), _kept(decode), decode.lent - prefill.lent)


def _pool(pools: Mapping[str, PoolSeen], name: str) -> PoolSeen:
    """A pool that is not deployed has no workers."""
    return pools.get(name, PoolSeen())


def _kept(pool: PoolSeen) -> int:
    return pool.ready + pool.lent + pool.starting


def lendable(lent: int, roles: Roles, pools: Mapping[str, PoolSeen]) -> int:
    """`lent`, or as near to it as leaves the role that gives with all that it needs *ready*."""
    prefill, decode = _pool(pools, "prefill"), _pool(pools, "decode")
    now = decode.lent - prefill.lent
    spare = prefill.ready + decode.lent - roles[0], decode.ready + prefill.lent - roles[1]
    return min(max(lent, now - max(spare[0], 0)), now + max(spare[1], 0))


def occupied(pools: Mapping[str, PoolSeen], settings: VariantSettings) -> float:
    """What the workers cost that exist, the leaving ones too."""
    return sum(
        (_kept(_pool(pools, name)) + _pool(pools, name).draining) * limits.cost
        for name, limits in (("prefill", settings.prefill), ("decode", settings.decode))
    )


def share_budget(
    wanted: Mapping[str, Roles], settings: Mapping[str, VariantSettings], budget: float
) -> dict[str, Roles]:
    """Roles that fit, never below the minimum; `wanted` where the budget allows."""
    given: dict[str, list[int]] = {}
    limits: dict[str, tuple[PoolLimits, PoolLimits]] = {}
    left = budget
    for name, variant in settings.items():
        limits[name] = (variant.prefill, variant.decode)
        given[name] = [pool.min_replicas for pool in limits[name]]
        left -= sum(pool.min_replicas * pool.cost for pool in limits[name])
    queue: list[tuple[float, str, int]] = []
    for name in settings:
        for role in (0, 1):
            if given[name][role] < wanted[name][role]:
                queue.append((given[name][role] / wanted[name][role], name, role))
    heapq.heapify(queue)
    while queue:
        _, name, role = heapq.heappop(queue)
        cost = limits[name][role].cost
        if cost > left + 1e-9:
            continue
        left -= cost
        given[name][role] += 1
        if given[name][role] < wanted[name][role]:
            heapq.heappush(queue, (given[name][role] / wanted[name][role], name, role))
    return {name: (roles[0], roles[1]) for name, roles in given.items()}


def place(roles: Roles, now: Placed, settings: VariantSettings, caps: tuple[int, int]) -> Placed:
    """The cheapest way to play `roles`; as near as the limits of both deployments allow.

    `caps`: most replicas of each deployment, below its own maximum when starts did not come through.
    """
    prefill, decode = settings.prefill, settings.decode
    most = min(prefill.max_replicas, caps[0]), min(decode.max_replicas, caps[1])
    loans = range(-roles[1], roles[0] + 1) if settings.flips and prefill.cost == decode.cost else range(1)
    best: tuple[float, Placed] | None = None
    for lent in loans:
        replicas = (
            min(max(roles[0] - lent, prefill.min_replicas), most[0]),
            min(max(roles[1] + lent, decode.min_replicas), most[1]),
        )
        bounded = min(max(lent, -replicas[0]), replicas[1])
        played = replicas[0] + bounded, replicas[1] - bounded
        missing = max(roles[0] - played[0], 0) + max(roles[1] - played[1], 0)
        surplus = max(played[0] - roles[0], 0) + max(played[1] - roles[1], 0)
        starts = max(replicas[0] - now.prefill, 0) + max(replicas[1] - now.decode, 0)
        seconds = (
            1e6 * missing
            + 1e4 * surplus
            + starts * settings.startup_s
            + abs(bounded - now.lent) * settings.flip_s
            + abs(bounded) * AWAY_S
        )
        if best is None or seconds < best[0]:
            best = seconds, Placed(replicas[0], replicas[1], bounded)
    assert best is not None
    return best[1]
