"""How many workers one variant should have by role, before the budget. Pure.

Up at once, by as many as are needed. Down to what the most demanding tick of the last minutes needed, with
a dead band, and not within a minute of growth. While the roles held are enough nothing changes; where
another split of as many workers is enough, workers flip; only else there are more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.observation import PoolSeen, VariantSeen
from planner.placement import current
from planner.predict import Forecast, forecast, record
from planner.settings import Settings, VariantSettings
from planner.sizing import Roles, Sizer
from planner.state import VariantState, Want

__all__ = ["Demand", "demand"]

FEWEST_SAMPLES = 8  # of the time models, before which they say nothing
PAUSE_S = 60.0  # after growth or a start, in which no pool shrinks
REGRET_S = 600.0  # growth so soon after a shrink takes it back
FORGIVE_S = 3600.0  # without a change, after which that is forgotten
MOST_PATIENCE = 8


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
    now = current(seen.pools)
    held = state.roles or (now.prefill + now.lent, now.decode - now.lent)
    blind = _blind(seen)
    if blind is not None or seen.times is None:
        return Demand(held, held, f"hold: {blind}"), state
    expected = forecast(
        state.forecast, settings.predictor, settings.error_quantile, lead_s=lead_s, now_s=now_s
    )
    sizer = Sizer(seen, seen.times, own)
    if _idle(state, own, now_s):
        zero = own.prefill.min_replicas, own.decode.min_replicas
        return (
            Demand(zero, zero, f"no request for {own.idle_to_zero_s:g} s", expected),
            replace(state, roles=zero, wants=(), since_s=None),
        )
    rate = expected.rate + _backlog_rate(seen, sizer, expected.level, own, settings)
    least = max(own.prefill.min_replicas, 1), max(own.decode.min_replicas, 1)
    band = rate * (1 + settings.dead_band)
    wanted = sizer.cheapest(rate, least)
    want = Want(now_s, sizer.cost(sizer.cheapest(band, least)))
    window_s = settings.down_window_s * state.patience
    kept = [w for w in state.wants if w.at_s > now_s - window_s]
    state = replace(state, wants=(*kept, want), since_s=now_s if state.since_s is None else state.since_s)
    if own.together:
        # Decode workers compute the prompts too: they need what both roles would.
        wanted = 0, sum(wanted)
        most = round(max(w.cost for w in state.wants) / own.decode.cost)
        roles = 0, max(wanted[1], min(held[1], most) if _may_shrink(state, settings, now_s) else held[1])
    else:
        floor = max(held[0], least[0]), max(held[1], least[1])
        if floor != held or not sizer.meets(held, rate):
            roles = _more(sizer, held, floor, least, rate, flip=own.flips and _calm(state, now_s))
        elif _may_shrink(state, settings, now_s):
            roles = _fewer(sizer, held, least, band, max(w.cost for w in state.wants))
        else:
            roles = held
    roles = _bounded(roles, own)
    reason = _reason(roles, wanted, expected, rate, lead_s)
    state = _remember_turn(replace(state, roles=roles), sum(roles) - sum(held), now_s)
    return Demand(wanted, roles, reason, expected, sizer.unreachable), state


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


def _calm(state: VariantState, now_s: float) -> bool:
    return now_s - max(state.grown_s, state.since_s or now_s) >= PAUSE_S


def _may_shrink(state: VariantState, settings: Settings, now_s: float) -> bool:
    """The window was seen whole, and nothing grew just now."""
    window_s = settings.down_window_s * state.patience - settings.interval_s
    return state.since_s is not None and now_s - state.since_s >= window_s and _calm(state, now_s)


def _remember_turn(state: VariantState, change: int, now_s: float) -> VariantState:
    """Growth soon after a shrink says that the shrink was a mistake: be slower with the next one."""
    if change < 0:
        return replace(state, shrunk_s=now_s)
    if change > 0:
        regret = now_s - state.shrunk_s < REGRET_S
        patience = min(state.patience * 2, MOST_PATIENCE) if regret else state.patience
        return replace(state, grown_s=now_s, patience=patience)
    if now_s - max(state.grown_s, state.shrunk_s) > FORGIVE_S:
        return replace(state, patience=1)
    return state


def _more(sizer: Sizer, held: Roles, floor: Roles, least: Roles, rate: float, *, flip: bool) -> Roles:
    """Enough for `rate`. Growth never shrinks a pool: so do pools come to swing against each other."""
    if flip:
        flipped = sizer.cheapest(rate, least, near=held)
        spare = sizer.cost(held) - sizer.cost(flipped)
        if spare >= 0:
            return _with_spare(flipped, int(spare), held)
    return sizer.cheapest(rate, floor)


def _fewer(sizer: Sizer, held: Roles, least: Roles, rate: float, most: float) -> Roles:
    """Costing no more than `most`, and still enough for `rate`: checked with fewer, before they go."""
    if most >= sizer.cost(held):
        return held
    needed = sizer.cheapest(rate, least, near=held)
    return _with_spare(needed, int(most - sizer.cost(needed)), held)


def _with_spare(roles: Roles, spare: int, held: Roles) -> Roles:
    """What may be kept beyond what is needed stays where it is, both pools alike."""
    surplus = max(held[0] - roles[0], 0), max(held[1] - roles[1], 0)
    spare = min(max(spare, 0), sum(surplus))
    prefill = round(spare * surplus[0] / sum(surplus)) if spare else 0
    prefill = min(max(prefill, spare - surplus[1]), surplus[0])
    return roles[0] + prefill, roles[1] + spare - prefill


def _bounded(roles: Roles, own: VariantSettings) -> Roles:
    """Loans may take a role beyond the limit of its deployment, but not all together."""
    if own.flips and not own.together:
        total = own.prefill.max_replicas + own.decode.max_replicas
        prefill = min(roles[0], total - max(own.decode.min_replicas, 1))
        return prefill, min(roles[1], total - prefill)
    return min(roles[0], own.prefill.max_replicas), min(roles[1], own.decode.max_replicas)


def _reason(roles: Roles, wanted: Roles, expected: Forecast, rate: float, lead_s: float) -> str:
    why = f"{roles[0]}+{roles[1]} for {rate:.2f} requests/s"
    if rate > expected.rate * 1.001:
        why += f", {rate - expected.rate:.2f} of them a backlog"
    elif expected.rate > expected.level:
        why += f" in {lead_s:.0f} s, head-room {expected.headroom:.2f}"
    return why if roles == wanted else f"{why}, need {wanted[0]}+{wanted[1]}"
