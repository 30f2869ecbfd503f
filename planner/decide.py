"""The planner: `decide(observation, state, settings, now_s) -> (decision, state)`. Pure.

    1. record   arrivals into the forecast's past (planner.predict)
    2. demand   forecast at start-up lead time, and what a backlog adds
    3. need     workers by role for that demand (planner.sizing)
    4. steady   up at once; down to the most that was needed in the last minutes, with a dead band
    5. budget   shared over all pools (planner.placement)
    6. place    replicas and loans; a start that never comes is taken back

Pending workers count as capacity: targets are numbers of workers, not steps. When something needed is not
known the variant holds, and the reason says what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.observation import Decision, Observation, PoolSeen, VariantDecision, VariantSeen
from planner.placement import current, occupied, place, share_budget
from planner.predict import Forecast, forecast, record
from planner.settings import Settings, VariantSettings
from planner.sizing import Roles, Sizer
from planner.state import PoolState, State, VariantState, Want

__all__ = ["decide"]

FEWEST_SAMPLES = 8  # of the time models, before which they say nothing
PAUSE_S = 60.0  # after growth or a start, in which no pool shrinks


@dataclass(frozen=True, slots=True)
class _Demand:
    """What one variant wants before the budget."""

    wanted: tuple[int, int]  # for the demand
    roles: tuple[int, int]  # with the rules against flapping
    forecast: Forecast | None
    reason: str
    reachable: str | None = None
    hold: bool = False


def decide(
    observation: Observation, state: State, settings: Settings, now_s: float
) -> tuple[Decision, State]:
    """Every variant of `settings` gets a decision; those that the observation lacks hold their state."""
    demands: dict[str, _Demand] = {}
    states: dict[str, VariantState] = {}
    seen = {name: observation.variants[name] for name in settings.variants if name in observation.variants}
    for name, variant in seen.items():
        demands[name], states[name] = _demand(
            variant, state.variants.get(name, VariantState()), settings, settings.variants[name], now_s
        )
    limits = {name: settings.variants[name] for name in seen}
    elsewhere = sum(
        pool.min_replicas * pool.cost
        for name, variant in settings.variants.items()
        if name not in seen
        for pool in (variant.prefill, variant.decode)
    )
    shared = share_budget({n: d.roles for n, d in demands.items()}, limits, settings.budget - elsewhere)
    free = settings.budget - elsewhere - sum(occupied(seen[name].pools, limits[name]) for name in seen)
    decisions: dict[str, VariantDecision] = {}
    for name, demand in demands.items():
        decisions[name], states[name], free = _placed(
            seen[name],
            demand,
            shared[name],
            state=states[name],
            settings=settings,
            own=limits[name],
            free=free,
            now_s=now_s,
        )
    frontends, wants = _frontends(observation, state, settings, states, now_s)
    reason = "; ".join(f"{name}: {d.reason}" for name, d in decisions.items())
    return Decision(decisions, frontends, reason), State({**state.variants, **states}, wants)


# ------------------------------------------------------------ what is wanted


def _demand(
    seen: VariantSeen, state: VariantState, settings: Settings, own: VariantSettings, now_s: float
) -> tuple[_Demand, VariantState]:
    lead_s = own.startup_s + settings.interval_s
    if seen.arrivals is not None and seen.window_s > 0:
        state = replace(state, forecast=record(state.forecast, seen.window_s, seen.arrivals, lead_s, now_s))
    if seen.arrivals or seen.queued or seen.decoding or state.last_request_s is None:
        state = replace(state, last_request_s=now_s)
    blind = _blind(seen)
    now = current(seen.pools)
    held = state.roles or (now.prefill + now.lent, now.decode - now.lent)
    if blind is not None:
        return _Demand(held, held, None, f"hold: {blind}", hold=True), state
    assert seen.times is not None
    expected = forecast(state.forecast, settings.predictor, settings.error_quantile, lead_s, now_s)
    sizer = Sizer(seen, seen.times, own)
    rate = expected.rate + _backlog_rate(seen, sizer, expected.level, own, settings)
    least = _least(own, idle=_idle(state, own, now_s))
    wanted = _bounded(sizer.cheapest(rate, least), own)
    banded_rate = rate * (1 + settings.dead_band)
    cost = sizer.cost(_bounded(sizer.cheapest(banded_rate, least), own))
    wants = (*(w for w in state.wants if w.at_s > now_s - settings.down_window_s), Want(now_s, cost))
    state = replace(state, wants=wants, since_s=now_s if state.since_s is None else state.since_s)
    if together(own):
        roles = _steady_total(wanted[1], held[1], int(round(max(w.cost for w in wants) / own.decode.cost)))
    else:
        roles = _steady(
            sizer, held, least, (rate, banded_rate), state=state, settings=settings, own=own, now_s=now_s
        )
    roles = _bounded(roles, own)
    why = f"{rate:.2f} requests/s"
    if rate > expected.rate * 1.001:
        why += f", {rate - expected.rate:.2f} of them a backlog"
    elif expected.rate > expected.level:
        why += f" in {lead_s:.0f} s, head-room {expected.headroom:.2f}"
    if roles != wanted:
        why += f", need {wanted[0]}+{wanted[1]}"
    reason = f"{roles[0]}+{roles[1]} for {why}"
    grown = now_s if sum(roles) > sum(held) else state.grown_s
    demand = _Demand(wanted, roles, expected, reason, sizer.unreachable)
    return demand, replace(state, roles=roles, grown_s=grown)


def _blind(seen: VariantSeen) -> str | None:
    if seen.arrivals is None:
        return "no frontend reports arrivals"
    if seen.times is None:
        return "no profile, and too few requests yet to learn what they take"
    if seen.times.samples < FEWEST_SAMPLES:
        return f"the times are fitted to {seen.times.samples} samples; {FEWEST_SAMPLES} are needed"
    if not seen.recent and (seen.queued or seen.decoding):
        return "requests are in flight whose arrivals were not seen"
    return None


def _backlog_rate(
    seen: VariantSeen, sizer: Sizer, level: float, own: VariantSettings, settings: Settings
) -> float:
    """Requests per second beyond the arrivals, so that what will be queued at start-up's end is gone soon.

    The queue grows until then by what the workers that are ready cannot compute.
    """
    if not seen.queued or sizer.service_s <= 0:
        return 0.0
    pool, other = (seen.pools.get(name, PoolSeen()) for name in ("prefill", "decode"))
    if together(own):
        pool, other = other, pool
    ready = pool.ready + other.lent
    lead_s = own.startup_s if pool.starting == 0 else settings.interval_s
    per_s = ready / sizer.service_s
    left = seen.queued + (level - per_s) * lead_s
    return max(left, 0.0) / settings.recover_s


def _idle(state: VariantState, own: VariantSettings, now_s: float) -> bool:
    since = state.last_request_s
    return own.idle_to_zero_s is not None and since is not None and now_s - since >= own.idle_to_zero_s


def _least(own: VariantSettings, *, idle: bool) -> Roles:
    """The minimum, and one each while there may be requests."""
    some = 0 if idle else 1
    return max(own.prefill.min_replicas, some), max(own.decode.min_replicas, some)


def _bounded(roles: Roles, own: VariantSettings) -> Roles:
    """Loans may take a role beyond the limit of its deployment, but not all together."""
    if own.flips:
        total = own.prefill.max_replicas + own.decode.max_replicas
        prefill = min(roles[0], total - 1)
        return prefill, min(roles[1], total - prefill)
    return min(roles[0], own.prefill.max_replicas), min(roles[1], own.decode.max_replicas)


def _steady(
    sizer: Sizer,
    held: Roles,
    least: Roles,
    rates: tuple[float, float],
    *,
    state: VariantState,
    settings: Settings,
    own: VariantSettings,
    now_s: float,
) -> Roles:
    """Stay while it is enough; else flip if that is enough; else grow both as needed. Never shrink one pool
    to grow the other beyond what is there: that is how pools come to swing against each other.

    Down to the most that was needed in the window, dead band included, once all of it was seen.
    `rates`: the demand without and with the dead band.
    """
    rate, banded = rates
    assert state.since_s is not None
    floor = max(held[0], least[0]), max(held[1], least[1])
    if not sizer.meets(held, rate) or floor != held:
        if own.flips and now_s - max(state.grown_s, state.since_s) >= PAUSE_S:
            flipped = sizer.cheapest(rate, least, near=held)
            spare = int(sizer.cost(held) - sizer.cost(flipped))
            if spare >= 0:
                return _with_spare(flipped, spare, held)
        return sizer.cheapest(rate, floor)
    if now_s - state.since_s < settings.down_window_s - settings.interval_s:
        return held
    if now_s - state.grown_s < PAUSE_S:
        return held
    most = max(want.cost for want in state.wants)
    if most >= sizer.cost(held):
        return held
    fewer = sizer.cheapest(banded, least, near=held)
    return _with_spare(fewer, int(most - sizer.cost(fewer)), held)


def _with_spare(roles: Roles, spare: int, held: Roles) -> Roles:
    """What may be kept beyond what is needed stays where it is, both pools alike."""
    surplus = max(held[0] - roles[0], 0), max(held[1] - roles[1], 0)
    spare = min(max(spare, 0), sum(surplus))
    prefill = round(spare * surplus[0] / sum(surplus)) if spare else 0
    prefill = min(max(prefill, spare - surplus[1]), surplus[0])
    return roles[0] + prefill, roles[1] + spare - prefill


# ------------------------------------------------------------ what is done


def _placed(
    seen: VariantSeen,
    demand: _Demand,
    roles: Roles,
    *,
    state: VariantState,
    settings: Settings,
    own: VariantSettings,
    free: float,
    now_s: float,
) -> tuple[VariantDecision, VariantState, float]:
    """Within what is free now: what leaves still holds its place, so growth may take more than one tick."""
    now = current(seen.pools)
    pools = {
        name: _watch_starts(seen, name, state.pools.get(name, PoolState()), settings, now_s)
        for name in ("prefill", "decode")
    }
    state = replace(state, pools=pools)
    caps = [
        pool.cap if pool.cap is not None and pool.cap_until_s > now_s else 1 << 30
        for pool in pools.values()
    ]
    placed = place(roles, now, own, (caps[0], caps[1]))
    reason = demand.reason
    if roles != demand.roles:
        reason += f"; budget {settings.budget:g} allows {roles[0]}+{roles[1]}"
    for name, pool in pools.items():
        if pool.cap is not None and pool.cap_until_s > now_s:
            reason += (
                f"; {name} replicas were not placed within {settings.unplaced_s:g} s, not tried again yet"
            )
    prefill, free = _affordable(placed.prefill, now.prefill, own.prefill.cost, free)
    decode, free = _affordable(placed.decode, now.decode, own.decode.cost, free)
    if (prefill, decode) != (placed.prefill, placed.decode):
        reason += "; waits for leaving workers' room"
    lent = min(max(placed.lent, -prefill), decode)
    if demand.reachable:
        reason += f"; {demand.reachable}"
    rate = None if demand.forecast is None else demand.forecast.rate
    decision = VariantDecision(prefill, decode, lent, reason, demand.wanted, rate, demand.reachable)
    return decision, state, free


def _affordable(target: int, now: int, cost: float, free: float) -> tuple[int, float]:
    """As many of the new ones as fit; what is left free."""
    if target <= now or cost <= 0:
        return target, free
    new = min(target - now, max(math.floor(free / cost + 1e-9), 0))
    return now + new, free - new * cost


def _watch_starts(
    seen: VariantSeen, name: str, state: PoolState, settings: Settings, now_s: float
) -> PoolState:
    """After `unplaced_s` without a replica becoming ready, what is ready is all that is asked for."""
    pool = seen.pools.get(name, PoolSeen())
    ready = pool.ready + pool.lent
    if pool.starting == 0:
        return replace(state, waiting_since_s=None, ready=ready)
    since = state.waiting_since_s
    if since is None or ready > state.ready:
        return replace(state, waiting_since_s=now_s, ready=ready)
    if now_s - since >= settings.unplaced_s:
        return PoolState(None, ready, cap=ready, cap_until_s=now_s + settings.retry_s)
    return replace(state, ready=ready)


def _frontends(
    observation: Observation,
    state: State,
    settings: Settings,
    states: dict[str, VariantState],
    now_s: float,
) -> tuple[int | None, tuple[tuple[float, int], ...]]:
    """For the requests per second of all variants and for those in flight; as steady as the pools."""
    if observation.frontends is None or observation.inflight is None:
        return None, state.frontends
    rates = [
        forecast(s.forecast, settings.predictor, settings.error_quantile, settings.interval_s, now_s).rate
        for s in states.values()
    ]
    wanted = max(
        math.ceil(sum(rates) / settings.frontend_rps),
        math.ceil(observation.inflight / settings.frontend_inflight),
    )
    wanted = min(max(wanted, settings.min_frontends), settings.max_frontends)
    wants = (*(w for w in state.frontends if w[0] > now_s - settings.down_window_s), (now_s, wanted))
    held = min(observation.frontends, max(want for _, want in wants))
    return min(max(wanted, held, settings.min_frontends), settings.max_frontends), wants
