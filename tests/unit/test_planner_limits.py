"""planner.decide: what holds for any observation. Budget, minimum, monotony, JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from planner.decide import decide
from planner.observation import Decision, Observation, PoolSeen, from_json, to_json
from planner.settings import PoolLimits
from planner.state import State
from serving.errors import ConfigError
from tests.unit.planner_rig import COSTS, NAME, Service, pools, seen, settings, variant

WORKERS = st.builds(
    PoolSeen,
    ready=st.integers(0, 6),
    lent=st.integers(0, 2),
    starting=st.integers(0, 4),
    draining=st.integers(0, 3),
)


def test_a_minimum_beyond_the_budget_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"planner.budget = 1; allowed: at least 2"):
        settings(budget=1.0)


def test_everything_is_json() -> None:
    given = settings()
    service = Service(given, rate=10.0)
    service.run(300)
    state = from_json(to_json(service.state), State)
    assert state == service.state
    decision = service.decisions[-1]
    assert from_json(to_json(decision), Decision) == decision
    observation = Observation({NAME: seen(5.0)}, 1, 3)
    assert from_json(to_json(observation), Observation) == observation
    assert decide(observation, state, given, 301.0) == decide(observation, service.state, given, 301.0)


@limits(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0, 200), min_size=1, max_size=3),
    work=st.floats(0.1, 5),
    prefill=WORKERS,
    decode=WORKERS,
    workers=st.integers(4, 40),
    least=st.integers(0, 2),
    flips=st.booleans(),
    costs=st.sampled_from(list(COSTS.values())),
)
def test_never_over_budget_never_under_minimum(  # noqa: PLR0917 - drawn
    rates: list[float],
    work: float,
    prefill: PoolSeen,
    decode: PoolSeen,
    workers: int,
    least: int,
    flips: bool,
    costs: tuple[float, float],
) -> None:
    own = variant(costs, prefill=PoolLimits(least, 20), decode=PoolLimits(least, 20), flips=flips)
    given_settings = settings(own, workers)
    budget = given_settings.budget + 1e-9
    there = {"prefill": prefill, "decode": decode}
    cost = dict(zip(there, costs, strict=True))
    now = sum((p.ready + p.lent + p.starting + p.draining) * cost[name] for name, p in there.items())
    state = State()
    for number, rate in enumerate(rates):
        observation = Observation({NAME: seen(rate, work=work, there=there)})
        decision, state = decide(observation, state, given_settings, 300.0 + 5 * number)
        wanted = decision.variants[NAME]
        targets = {"prefill": wanted.prefill, "decode": wanted.decode}
        assert sum(target * cost[name] for name, target in targets.items()) <= budget
        held = sum(
            (max(targets[name], p.ready + p.lent + p.starting) + p.draining) * cost[name]
            for name, p in there.items()
        )
        assert held <= max(budget, now + 1e-9), "what leaves holds its place until it is gone"
        for name, pool in there.items():
            # A new worker may have to wait for room; what is there never falls below the minimum.
            assert targets[name] >= min(least, pool.ready + pool.lent + pool.starting)
        assert -wanted.prefill <= wanted.lent <= wanted.decode


@limits(max_examples=60, deadline=None)
@given(
    first=st.floats(1, 120),
    growth=st.floats(1, 4),
    longer=st.floats(1, 3),
    before=st.floats(1, 60),
    ticks=st.integers(0, 60),
    start=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    costs=st.sampled_from(list(COSTS.values())),
)
def test_wanted_in_all_is_monotone_in_demand(  # noqa: PLR0917 - drawn
    first: float,
    growth: float,
    longer: float,
    before: float,
    ticks: int,
    start: tuple[int, int],
    costs: tuple[float, float],
) -> None:
    """From equal state: more requests of the same kind, or longer ones, never want what costs less."""
    own = variant(costs, prefill=PoolLimits(1, 500), decode=PoolLimits(1, 500))
    given_settings = settings(own, workers=2000)
    state, now_s = State(), 300.0
    for _ in range(ticks):
        observation = Observation({NAME: seen(before, there=pools(*start), n=60)})
        _, state = decide(observation, state, given_settings, now_s)
        now_s += 5
    less = seen(first, there=pools(*start), n=60)
    more = seen(first * growth, work=longer, there=pools(*start), n=60)
    totals = []
    for observed in (less, more):
        _, after = decide(Observation({NAME: observed}), state, given_settings, now_s)
        roles = after.variants[NAME].roles
        assert roles is not None
        totals.append(roles[0] * costs[0] + roles[1] * costs[1])
    assert totals[0] <= totals[1] + 1e-9
