"""From roles that are wanted to replicas and loans, within the budget. Pure.

`share_budget` gives out workers one by one, each to the pool that has least of what it wants: when there
is not enough, prefill and decode stay matched and variants suffer alike; a split, once made, lasts for a
while. `place` turns the roles of one variant into replicas of its two deployments and a loan between them,
at the least cost: a loan takes a drain, a new replica a start-up.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.observation import PoolSeen
from planner.settings import PoolLimits, VariantSettings

__all__ = ["Placed", "Pool", "current", "lendable", "occupied", "place", "rescue", "share_budget"]

AWAY_S = 1.0  # what a loan costs for being one: without need everybody is at home

SWITCH_GAIN = 1.25  # how much more the poorest pool has to get for workers to change pools

Roles = tuple[int, int]
Pool = tuple[str, int]  # a variant's name; 0 is its prefill, 1 its decode


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


def rescue(lent: int, roles: Roles, pools: Mapping[str, PoolSeen]) -> int:
    """`lent`, or more: a role with nobody ready gets its share of those that are, until its own come.

    `lendable` keeps that loan until the role has all it needs. Decode workers compute prompts as well:
    the last one stays, and the last prefill worker goes.
    """
    prefill, decode = _pool(pools, "prefill"), _pool(pools, "decode")
    now = decode.lent - prefill.lent
    ready = prefill.ready + decode.lent, decode.ready + prefill.lent
    share = max(round(sum(ready) * roles[1] / max(sum(roles), 1)), 1)
    if ready[1] == 0 < roles[1] and ready[0] > 0 and lent >= now:
        return now - min(share, max(ready[0] - 1, 1))
    if ready[0] == 0 < roles[0] and ready[1] > 1 and lent <= now:
        return now + min(max(ready[1] - share, 1), ready[1] - 1)
    return lent


def share_budget(
    wanted: Mapping[str, Roles],
    held: Mapping[str, Roles],
    firm: Collection[Pool],
    settings: Mapping[str, VariantSettings],
    budget: float,
) -> dict[str, Roles]:
    """Roles that fit, never below the minimum; `wanted` where the budget allows.

    Everybody keeps what is held and still wanted, and what is free goes to the poorest. It is shared anew,
    so that some lose, only when the poorest gains much by it and no loser is in `firm`, or when a pool that
    wants workers would have none.
    """
    pools = {(name, role): pool for name, own in settings.items() for role, pool in enumerate(_limits(own))}
    wish = {(name, role): wanted[name][role] for name, role in pools}
    least = {at: pool.min_replicas for at, pool in pools.items()}
    costs = {at: pool.cost for at, pool in pools.items()}
    given = {at: max(min(held[at[0]][at[1]], wish[at]), least[at]) for at in pools}
    _trim(given, wish, least, costs, budget)
    _pour(given, wish, costs, budget)
    anew = dict(least)
    _pour(anew, wish, costs, budget)
    had, gets = _poorest(given, wish), _poorest(anew, wish)
    losers = {at for at in pools if anew[at] < given[at]}
    if gets > had * SWITCH_GAIN and (had == 0 or losers.isdisjoint(firm)):
        given = anew
    return {name: (given[name, 0], given[name, 1]) for name in settings}


def _limits(settings: VariantSettings) -> tuple[PoolLimits, PoolLimits]:
    return settings.prefill, settings.decode


def _pour(
    given: dict[Pool, int], wish: Mapping[Pool, int], costs: Mapping[Pool, float], budget: float
) -> None:
    """One worker after the other to the pool that has least of what it wants, while they fit; of pools that
    are as poor, to each variant's prefill first."""
    left = budget - sum(count * costs[at] for at, count in given.items())
    queue = [(given[at] / wish[at], at[1], at[0]) for at in given if given[at] < wish[at]]
    heapq.heapify(queue)
    while queue:
        _, role, name = heapq.heappop(queue)
        at = name, role
        if costs[at] > left + 1e-9:
            continue
        left -= costs[at]
        given[at] += 1
        if given[at] < wish[at]:
            heapq.heappush(queue, (given[at] / wish[at], role, name))


def _trim(
    given: dict[Pool, int],
    wish: Mapping[Pool, int],
    least: Mapping[Pool, int],
    costs: Mapping[Pool, float],
    budget: float,
) -> None:
    """One worker after the other from the pool that has most of what it wants, until the rest fits."""
    while sum(count * costs[at] for at, count in given.items()) > budget + 1e-9:
        rich = [at for at in given if given[at] > least[at] and costs[at] > 0]
        if not rich:
            return
        given[max(rich, key=lambda at: given[at] / max(wish[at], 1))] -= 1


def _poorest(given: Mapping[Pool, int], wish: Mapping[Pool, int]) -> float:
    """The least part of its wish that a pool has; 1 when all have everything."""
    return min((given[at] / wish[at] for at in given if wish[at] > 0), default=1.0)


def place(roles: Roles, now: Placed, settings: VariantSettings, caps: tuple[int, int]) -> Placed:
    """The cheapest way to play `roles`; as near as the limits of both deployments allow.

    `caps`: most replicas of each deployment, below its own maximum when starts did not come through.
    """
    prefill, decode = settings.prefill, settings.decode
    most = min(prefill.max_replicas, caps[0]), min(decode.max_replicas, caps[1])
    loans = range(-roles[1], roles[0] + 1) if settings.lends else range(1)
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
