"""How many workers one variant should have by role, before the budget. Pure.

Up at once, by as many as are needed. Down to what the most demanding tick of the last minutes needed, with
a dead band, and not within a minute of growth. While the roles held are enough nothing changes; where
another split of as many workers is enough, workers flip, unless there was growth in those last minutes;
only else there are more. What is held is what the budget allowed: `decide` calls `remember` with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.observation import PoolSeen, VariantSeen
from planner.placement import current
from planner.predict import Forecast, forecast, record
from planner.settings import Settings, VariantSettings
from planner.sizing import Roles, Sizer
from planner.state import VariantState, Want

__all__ = ["Demand", "demand", "held_roles", "remember"]

SLIGHT = 1e-9  # less cost than that is none
FEWEST_SAMPLES = 8  # of the time models, before which they say nothing
PAUSE_S = 60.0  # after growth or a start, in which no pool shrinks
REGRET_S = 600.0  # growth so soon after a shrink takes it back
FORGIVE_S = 3600.0  # without a change, after which that is forgotten
MOST_PATIENCE = 8
MISSED_TICKS = 3.0  # after so many that were blind or left out, what was needed meanwhile is not known


@dataclass(frozen=True, slots=True)
class Demand:
    wanted: Roles  # for the demand alone
    roles: Roles  # with the rules against flapping
    reason: str
    forecast: Forecast | None = None  # None: blind
    reachable: str | None = None


def demand(
    seen: VariantSeen, state: VariantState, settings: Settings, own: VariantSettings, now_s: float
) -> tuple[Demand, VariantState]:
    lead_s = own.startup_s + settings.interval_s
    if seen.arrivals is not None and seen.window_s > 0:
        state = replace(
            state,
            forecast=record(
                state.forecast,
                seen.window_s,
                seen.arrivals,
                predictor=settings.predictor,
                lead_s=lead_s,
                now_s=now_s,
            ),
        )
    if seen.arrivals or seen.queued or seen.decoding or state.last_request_s is None:
        state = replace(state, last_request_s=now_s)
    held = held_roles(seen, state)
    blind = _blind(seen)
    if blind is not None or seen.times is None:
        return Demand(held, held, f"hold: {blind}"), state
    expected = forecast(
        state.forecast, settings.predictor, settings.error_quantile, lead_s=lead_s, now_s=now_s
    )
    sizer = Sizer(seen, seen.times, _one_pool(own) if own.together else own)
    if _idle(state, own, now_s):
        zero = own.prefill.min_replicas, own.decode.min_replicas
        return (
            Demand(zero, zero, f"no request for {own.idle_to_zero_s:g} s", expected),
            replace(state, wants=(), since_s=None),
        )
    if not state.wants or now_s - state.wants[-1].at_s > MISSED_TICKS * settings.interval_s:
        state, held = _begin_anew(seen, state, now_s)
    rate = expected.rate + _backlog_rate(seen, sizer, expected.level, own, settings)
    least = max(own.prefill.min_replicas, 1), max(own.decode.min_replicas, 1)
    band = rate * (1 + settings.dead_band)
    wanted = sizer.cheapest(rate, least)
    want = Want(now_s, sizer.cost(sizer.cheapest(band, least)))
    window_s = settings.down_window_s * state.patience
    state = replace(state, wants=(*(w for w in state.wants if w.at_s > now_s - window_s), want))
    most = max(w.cost for w in state.wants)
    costs = own.prefill.cost, own.decode.cost
    if own.together:
        # Decode workers compute the prompts too: they need what both roles would.
        wanted = 0, sum(wanted)
        roles = 0, max(held[1], wanted[1])
        if _may_shrink(state, settings, now_s):
            roles = _with_spare(wanted, most - sizer.cost(wanted), roles, costs)
    else:
        floor = max(held[0], least[0]), max(held[1], least[1])
        if floor != held or not sizer.meets(held, rate):
            roles = _more(sizer, held, floor, least, rate, own, _turns(state, settings, own, now_s))
        elif _may_shrink(state, settings, now_s) and most < sizer.cost(held):
            # Still enough for more than there is: checked with fewer, before they go.
            needed = sizer.cheapest(band, least, near=held)
            roles = _with_spare(needed, most - sizer.cost(needed), held, costs)
        else:
            roles = held
    roles = _bounded(roles, held, own)
    reason = _reason(roles, wanted, expected, rate, lead_s)
    return Demand(wanted, roles, reason, expected, sizer.unreachable), state


def held_roles(seen: VariantSeen, state: VariantState) -> Roles:
    """What was asked for last; at first, what there is."""
    now = current(seen.pools)
    return state.roles or (now.prefill + now.lent, now.decode - now.lent)


def remember(
    state: VariantState, held: Roles, roles: Roles, own: VariantSettings, now_s: float
) -> VariantState:
    """`held` became `roles`. Growth soon after a shrink says that the shrink was a mistake: be slower with
    the next one."""
    grown_s = [
        now_s if after > before else at_s
        for before, after, at_s in zip(held, roles, state.role_grown_s, strict=True)
    ]
    state = replace(state, roles=roles, role_grown_s=(grown_s[0], grown_s[1]))
    change = (roles[0] - held[0]) * own.prefill.cost + (roles[1] - held[1]) * own.decode.cost
    if change < -SLIGHT:
        asleep = state.since_s is None  # that is not a mistake when somebody comes
        return state if asleep else replace(state, shrunk_s=now_s)
    if change > SLIGHT:
        regret = now_s - state.shrunk_s < REGRET_S
        patience = min(state.patience * 2, MOST_PATIENCE) if regret else state.patience
        return replace(state, grown_s=now_s, patience=patience)
    if now_s - max(state.grown_s, state.shrunk_s) > FORGIVE_S:
        return replace(state, patience=1)
    return state


# ------------------------------------------------------------ what is known


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
    if own.together:
        pool, other = other, pool
    lead_s = own.startup_s if pool.starting == 0 else settings.interval_s
    left = seen.queued + (level - (pool.ready + other.lent) / sizer.service_s) * lead_s
    return max(left, 0.0) / settings.recover_s


def _idle(state: VariantState, own: VariantSettings, now_s: float) -> bool:
    since = state.last_request_s
    return own.idle_to_zero_s is not None and since is not None and now_s - since >= own.idle_to_zero_s


# ------------------------------------------------------------ steady


def _begin_anew(seen: VariantSeen, state: VariantState, now_s: float) -> tuple[VariantState, Roles]:
    """After a while in which nobody saw what was needed. Somebody may have changed the pools meanwhile:
    both what is there and what was asked for last is held."""
    asked, there = held_roles(seen, state), held_roles(seen, VariantState())
    held = max(asked[0], there[0]), max(asked[1], there[1])
    return replace(state, wants=(), since_s=now_s, roles=held), held


def _quiet_s(state: VariantState, now_s: float) -> float:
    """Since there was growth in all, or nobody saw whether there was."""
    return now_s - max(state.grown_s, state.since_s or now_s)


def _may_shrink(state: VariantState, settings: Settings, now_s: float) -> bool:
    """The window was seen whole, and nothing grew just now."""
    window_s = settings.down_window_s * state.patience - settings.interval_s
    whole = state.since_s is not None and now_s - state.since_s >= window_s
    return whole and _quiet_s(state, now_s) >= PAUSE_S


@dataclass(frozen=True, slots=True)
class _Turns:
    """Whether workers may flip now, and which roles may give some."""

    allowed: bool
    gives: tuple[bool, bool]


def _turns(state: VariantState, settings: Settings, own: VariantSettings, now_s: float) -> _Turns:
    """Not while a burst may last for which the roles grew; and no role gives what it got just before."""
    prefill, decode = (now_s - at_s >= PAUSE_S for at_s in state.role_grown_s)
    return _Turns(own.lends and _quiet_s(state, now_s) >= settings.down_window_s, (prefill, decode))


def _more(  # noqa: PLR0917 - all of one variant
    sizer: Sizer, held: Roles, floor: Roles, least: Roles, rate: float, own: VariantSettings, turns: _Turns
) -> Roles:
    """Enough for `rate`. Growth never shrinks a pool: so do pools come to swing against each other."""
    if turns.allowed:
        flipped = sizer.cheapest(rate, least, near=held)
        spare = sizer.cost(held) - sizer.cost(flipped)
        if spare >= -SLIGHT:
            roles = _with_spare(flipped, spare, held, (own.prefill.cost, own.decode.cost))
            stays = any(
                new < old and not may for new, old, may in zip(roles, held, turns.gives, strict=True)
            )
            return floor if stays else roles
    return sizer.cheapest(rate, floor)


def _with_spare(roles: Roles, spare: float, held: Roles, costs: tuple[float, float]) -> Roles:
    """`roles`, and beside them what may be kept of `held` at a cost of `spare`; both pools alike."""
    surplus = [max(before - needed, 0) for before, needed in zip(held, roles, strict=True)]
    all_of_it = sum(count * cost for count, cost in zip(surplus, costs, strict=True))
    part = min(max(spare / all_of_it, 0.0), 1.0) if all_of_it > 0 else 1.0
    kept = [math.floor(part * count + SLIGHT) for count in surplus]
    left = max(spare, 0.0) - sum(count * cost for count, cost in zip(kept, costs, strict=True))
    while fits := [i for i in (0, 1) if kept[i] < surplus[i] and 0 < costs[i] <= left + SLIGHT]:
        poorer = min(fits, key=lambda i: kept[i] / surplus[i])
        kept[poorer] += 1
        left -= costs[poorer]
    return roles[0] + kept[0], roles[1] + kept[1]


def _one_pool(own: VariantSettings) -> VariantSettings:
    """A worker for prompts costs what one for answers does: it is one."""
    return replace(own, prefill=replace(own.prefill, cost=own.decode.cost))


def _bounded(roles: Roles, held: Roles, own: VariantSettings) -> Roles:
    """Loans may take a role beyond the limit of its deployment, but not all together."""
    most = own.prefill.max_replicas, own.decode.max_replicas
    if not own.lends:
        return min(roles[0], most[0]), min(roles[1], most[1])
    if sum(roles) <= sum(most):
        return roles
    kept = min(held[0], roles[0]), min(held[1], roles[1])
    if sum(kept) > sum(most):
        kept = min(most[0], roles[0]), min(most[1], roles[1])
    return _with_spare(kept, sum(most) - sum(kept), roles, (1.0, 1.0))


def _reason(roles: Roles, wanted: Roles, expected: Forecast, rate: float, lead_s: float) -> str:
    why = f"{roles[0]}+{roles[1]} for {rate:.2f} requests/s"
    if rate > expected.rate * 1.001:
        why += f", {rate - expected.rate:.2f} of them a backlog"
    elif expected.rate > expected.level:
        why += f" in {lead_s:.0f} s, head-room {expected.headroom:.2f}"
    return why if roles == wanted else f"{why}, need {wanted[0]}+{wanted[1]}"
