"""The planner: `decide(observation, state, settings, now_s) -> (decision, state)`. Pure.

    1. record   arrivals into the forecast's past (planner.predict)
    2. demand   forecast at start-up lead time, and what a backlog adds
    3. need     workers by role for that demand (planner.sizing)
    4. steady   up at once, down slowly (planner.demand)
    5. budget   shared over all pools (planner.placement)
    6. place    replicas and loans; a start that never comes is taken back

Workers that start count as capacity: targets are numbers of workers, not steps. When something needed is
not known the variant holds, and the reason says what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.demand import Demand, demand, held_roles, remember
from planner.observation import Decision, Observation, PoolSeen, VariantDecision, VariantSeen
from planner.placement import Pool, current, lendable, occupied, place, rescue, share_budget
from planner.predict import forecast
from planner.settings import Settings, VariantSettings
from planner.sizing import Roles
from planner.state import PoolState, State, VariantState

__all__ = ["decide"]

UNCAPPED = 1 << 30


def decide(
    observation: Observation, state: State, settings: Settings, now_s: float
) -> tuple[Decision, State]:
    """A decision for every variant of `settings` that the observation has; the others keep their share."""
    seen = {name: observation.variants[name] for name in settings.variants if name in observation.variants}
    limits = {name: settings.variants[name] for name in seen}
    demands: dict[str, Demand] = {}
    states: dict[str, VariantState] = {}
    for name, variant in seen.items():
        before = state.variants.get(name, VariantState())
        demands[name], states[name] = demand(variant, before, settings, limits[name], now_s)
    budget = settings.budget - sum(
        pool.min_replicas * pool.cost
        for name, own in settings.variants.items()
        if name not in seen
        for pool in (own.prefill, own.decode)
    )
    held = {name: held_roles(variant, states[name]) for name, variant in seen.items()}
    firm: set[Pool] = {
        (name, role)
        for name, own in states.items()
        for role in (0, 1)
        if demands[name].forecast is None or now_s - own.role_grown_s[role] < settings.down_window_s
    }
    shared = share_budget({name: d.roles for name, d in demands.items()}, held, firm, limits, budget)
    free = budget - sum(occupied(seen[name].pools, limits[name]) for name in seen)
    decisions: dict[str, VariantDecision] = {}
    for name, variant in seen.items():
        if demands[name].forecast is not None:
            states[name] = remember(states[name], held[name], shared[name], limits[name], now_s)
        states[name] = _watch_starts(variant, states[name], settings, limits[name], now_s)
        decisions[name], free = _placed(
            variant, demands[name], shared[name], states[name], settings, limits[name], free, now_s
        )  # fmt: skip
    frontends, wants = _frontends(observation, state, settings, states, now_s)
    reason = "; ".join(f"{name}: {d.reason}" for name, d in decisions.items())
    return Decision(decisions, frontends, reason), State({**state.variants, **states}, wants)


def _placed(  # noqa: PLR0917 - all of one variant
    seen: VariantSeen,
    wish: Demand,
    roles: Roles,
    state: VariantState,
    settings: Settings,
    own: VariantSettings,
    free: float,
    now_s: float,
) -> tuple[VariantDecision, float]:
    """Within what is free now: what leaves still holds its place, so growth may take more than one tick."""
    now = current(seen.pools)
    least = {"prefill": own.prefill.min_replicas, "decode": own.decode.min_replicas}
    caps = {
        name: max(pool.cap, least[name]) if pool.cap is not None and pool.cap_until_s > now_s else UNCAPPED
        for name, pool in state.pools.items()
    }
    placed = place(roles, now, own, (caps["prefill"], caps["decode"]))
    loan = lendable(placed.lent, roles, seen.pools)
    if own.lends and own.startup_s > own.flip_s and (seen.arrivals or seen.queued):
        loan = rescue(loan, roles, seen.pools)
    reason = wish.reason
    if roles != wish.roles:
        reason += f"; budget {settings.budget:g} allows {roles[0]}+{roles[1]}"
    for name, cap in caps.items():
        if cap != UNCAPPED:
            reason += f"; {name} stays at {cap}: more were not placed"
    prefill, free = _affordable(placed.prefill, now.prefill, own.prefill.cost, free)
    decode, free = _affordable(placed.decode, now.decode, own.decode.cost, free)
    if (prefill, decode) != (placed.prefill, placed.decode):
        reason += "; waits for leaving workers' room"
    if wish.reachable:
        reason += f"; {wish.reachable}"
    decision = VariantDecision(
        prefill,
        decode,
        lent=min(max(loan, -prefill), decode),
        reason=reason,
        wanted=wish.wanted,
        forecast_rps=None if wish.forecast is None else wish.forecast.rate,
        reachable=wish.reachable,
    )
    return decision, free


def _affordable(target: int, now: int, cost: float, free: float) -> tuple[int, float]:
    """As many of the new ones as fit; what is left free."""
    if target <= now or cost <= 0:
        return target, free
    new = min(target - now, max(math.floor(free / cost + 1e-9), 0))
    return now + new, free - new * cost


def _watch_starts(
    seen: VariantSeen, state: VariantState, settings: Settings, own: VariantSettings, now_s: float
) -> VariantState:
    """Takes back starts that do not come. What finds no place in one deployment finds none in the other one
    either where both are made of the same: that stays as it is too."""
    pools = {}
    for name in ("prefill", "decode"):
        pools[name] = _watched(_pool(seen, name), state.pools.get(name, PoolState()), settings, own, now_s)
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        until_s = pools[name].cap_until_s
        if own.lends and until_s == now_s + settings.retry_s and pools[other].cap_until_s < until_s:
            there = _pool(seen, other)
            kept = there.ready + there.lent + there.starting
            pools[other] = replace(pools[other], cap=kept, cap_until_s=until_s)
    return replace(state, pools=pools)


def _pool(seen: VariantSeen, name: str) -> PoolSeen:
    return seen.pools.get(name, PoolSeen())


def _watched(
    pool: PoolSeen, state: PoolState, settings: Settings, own: VariantSettings, now_s: float
) -> PoolState:
    """When no start has come further for too long, those that have a place are all that is asked for; where
    all have one, those that are ready. A worker that loads is given twice what a start takes."""
    ready = pool.ready + pool.lent
    placed = ready if pool.unplaced is None else ready + pool.starting - pool.unplaced
    progress = ready, placed
    if pool.starting == 0:
        return replace(state, waiting_since_s=None, progress=progress)
    since = state.waiting_since_s
    if since is None or ready > state.progress[0] or placed > state.progress[1]:
        return replace(state, waiting_since_s=now_s, progress=progress)
    enough_s = settings.unplaced_s if pool.unplaced else max(settings.unplaced_s, 2 * own.startup_s)
    if now_s - since >= enough_s:
        cap = placed if pool.unplaced else ready
        return PoolState(None, progress, cap=cap, cap_until_s=now_s + settings.retry_s)
    return replace(state, progress=progress)


def _frontends(
    observation: Observation,
    state: State,
    settings: Settings,
    states: Mapping[str, VariantState],
    now_s: float,
) -> tuple[int | None, tuple[tuple[float, int], ...]]:
    """For the requests per second of all variants and for those in flight; as steady as the pools."""
    if observation.frontends is None or observation.inflight is None:
        return None, state.frontends
    rates = [
        forecast(
            s.forecast, settings.predictor, settings.error_quantile, lead_s=settings.interval_s, now_s=now_s
        ).rate
        for s in states.values()
    ]
    wanted = max(
        math.ceil(sum(rates) / settings.frontend_rps),
        math.ceil(observation.inflight / settings.frontend_inflight),
    )
    wanted = min(max(wanted, settings.min_frontends), settings.max_frontends)
    wants = (*(w for w in state.frontends if w[0] > now_s - settings.down_window_s), (now_s, wanted))
    whole = len(state.frontends) > 0 and wants[0][0] <= now_s - settings.down_window_s + (
        2 * settings.interval_s
    )
    held = min(observation.frontends, max(w for _, w in wants)) if whole else observation.frontends
    return min(max(wanted, held, settings.min_frontends), settings.max_frontends), wants
