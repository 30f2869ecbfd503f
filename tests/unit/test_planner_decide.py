"""planner.decide: limits, steadiness, and what it does when it does not know."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from planner.decide import decide
from planner.observation import Decision, Observation, PoolSeen, from_json, to_json
from planner.placement import lendable
from planner.settings import PoolLimits, Settings
from planner.state import State
from serving.errors import ConfigError
from tests.unit.planner_rig import NAME, TIMES, Service, pools, seen, settings, variant

WORKERS = st.builds(
    PoolSeen,
    ready=st.integers(0, 6),
    lent=st.integers(0, 2),
    starting=st.integers(0, 4),
    draining=st.integers(0, 3),
)


def test_grows_at_once_and_by_as_many_as_needed() -> None:
    service = Service(settings(), rate=40.0)
    service.run(30)
    assert service.replicas[0] >= 9, "40 x 0.2 s of prefill are 8 Erlang"
    assert len(set(service.targets)) <= 5


def test_planner_cold_start() -> None:
    """Case planner_cold_start: what starts is counted, the same need is not ordered twice."""
    service = Service(settings(), rate=20.0, startup_s=25.0)
    service.run(15)
    asked = service.replicas
    service.run(60)
    assert sum(service.replicas) <= sum(asked) + 1
    needed = service.decisions[-1].variants[NAME].wanted
    assert needed is not None
    assert sum(service.replicas) <= 1.4 * sum(needed) + 2


def test_planner_no_flap() -> None:
    """Case planner_no_flap: a constant load that one worker would not bear; two stay two."""
    service = Service(settings(), rate=5.2, start=(2, 1), even=True)
    service.run(1800)
    assert set(service.targets) == {(2, 1)}


def test_few_changes_under_a_load_that_is_constant_but_random() -> None:
    """At the edge between one worker and two, each mistaken shrink doubles the time to the next."""
    service = Service(settings(), rate=3.5, start=(2, 2))
    service.run(3600)
    changes = [after for before, after in pairwise(service.targets) if before != after]
    assert len(changes) <= 7


def test_shrinks_after_the_window_and_not_before() -> None:
    service = Service(settings(), rate=40.0)
    service.run(600)
    high = service.replicas
    service.rate = 4.0
    service.run(120)
    assert min(service.targets[-20:]) >= high
    service.run(900)
    assert sum(service.replicas) < sum(high) / 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"arrivals": None}, "no frontend reports", id="no reports"),
        pytest.param({"times": None}, "no profile", id="no times"),
        pytest.param({"times": replace(TIMES, samples=3)}, "3 samples", id="few samples"),
        pytest.param({"recent": (), "queued": 3}, "not seen", id="restarted amid requests"),
    ],
)
def test_holds_with_a_reason_when_blind(changes: dict[str, object], says: str) -> None:
    service = Service(settings(), rate=0.0, start=(3, 4))
    for _ in range(100):
        decision = service.tick(**changes)
    wanted = decision.variants[NAME]
    assert (wanted.prefill, wanted.decode) == (3, 4)
    assert says in wanted.reason
    assert wanted.reason.startswith("hold")


def test_a_scale_up_that_is_never_placed_is_taken_back() -> None:
    given = settings(unplaced_s=120.0, retry_s=300.0)
    service = Service(given, rate=40.0, placed=False)
    service.run(60)
    assert sum(service.replicas) > 4
    service.run(120)
    assert service.replicas == (1, 1)
    assert "not placed" in service.decisions[-1].variants[NAME].reason
    service.run(400)
    assert any(sum(target) > 4 for target in service.targets[-60:]), "tried again later"


def test_flips_before_new_workers() -> None:
    """Prompts get longer and answers shorter: decode lends to prefill, nobody new is ordered."""
    service = Service(settings(), rate=12.0, start=(3, 6), prompt=1000, output=800)
    service.run(600)
    total = sum(service.replicas)
    service.prompt, service.output = 2200, 100
    service.run(600)
    assert max(d.variants[NAME].lent for d in service.decisions) > 0
    assert max(sum(target) for target in service.targets[120:]) <= total


@pytest.mark.parametrize(
    ("lent", "prefill", "decode", "allowed"),
    [
        pytest.param(
            -1, PoolSeen(ready=1, starting=1), PoolSeen(ready=5), 0, id="the only ready one stays"
        ),
        pytest.param(-1, PoolSeen(ready=2), PoolSeen(ready=5), -1, id="a spare one goes"),
        pytest.param(2, PoolSeen(ready=1), PoolSeen(ready=5, lent=1), 1, id="decode has just enough"),
        pytest.param(0, PoolSeen(ready=1), PoolSeen(ready=5, lent=1), 0, id="coming home"),
    ],
)
def test_only_what_is_ready_and_spare_is_lent(
    lent: int, prefill: PoolSeen, decode: PoolSeen, allowed: int
) -> None:
    roles = (1, 5)
    assert lendable(lent, roles, {"prefill": prefill, "decode": decode}) == allowed


def test_without_flips_nobody_is_lent() -> None:
    service = Service(settings(variant(flips=False)), rate=12.0, start=(2, 8))
    service.run(600)
    assert all(d.variants[NAME].lent == 0 for d in service.decisions)


def test_scales_to_zero_and_back() -> None:
    none = PoolLimits(0, 8)
    given = settings(variant(prefill=none, decode=none, idle_to_zero_s=60.0))
    service = Service(given, rate=2.0)
    service.run(120)
    assert sum(service.replicas) >= 2
    service.rate = 0.0
    service.run(100)
    assert service.replicas == (0, 0)
    service.tick(queued=1, arrivals=1)
    assert min(service.replicas) >= 1


def test_a_variant_without_a_prefill_pool_sizes_decode_for_both() -> None:
    given = settings(variant(prefill=PoolLimits(0, 0)))
    state = State()
    there = {"decode": PoolSeen(ready=1)}
    for number in range(5):
        observation = Observation({NAME: seen(40.0, there=there)})
        decision, state = decide(observation, state, given, 300.0 + 5 * number)
    wanted = decision.variants[NAME]
    assert wanted.prefill == 0
    assert wanted.decode >= 9
    assert wanted.lent == 0


def test_two_variants_share_the_budget_alike() -> None:
    given = Settings({"a": variant(), "b": variant()}, budget=12.0)
    observation = Observation({"a": seen(40.0), "b": seen(40.0)})
    state = State()
    for number in range(5):
        decision, state = decide(observation, state, given, 300.0 + 5 * number)
    totals = [d.prefill + d.decode for d in decision.variants.values()]
    assert sum(totals) <= 12
    assert abs(totals[0] - totals[1]) <= 1
    assert "budget 12" in decision.variants["a"].reason


def test_frontends_follow_the_load() -> None:
    given = settings(frontend_rps=10.0, max_frontends=8)
    observation = Observation({NAME: seen(40.0)}, frontends=1, inflight=100)
    decision, _ = decide(observation, State(), given, 300.0)
    assert decision.frontends is not None
    assert 2 <= decision.frontends <= 8
    unknown, _ = decide(replace(observation, inflight=None), State(), given, 300.0)
    assert unknown.frontends is None


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


# ------------------------------------------------------------ properties


@limits(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(0, 200), min_size=1, max_size=3),
    work=st.floats(0.1, 5),
    prefill=WORKERS,
    decode=WORKERS,
    budget=st.integers(4, 40),
    least=st.integers(0, 2),
    flips=st.booleans(),
)
def test_never_over_budget_never_under_minimum(  # noqa: PLR0917 - drawn
    rates: list[float],
    work: float,
    prefill: PoolSeen,
    decode: PoolSeen,
    budget: int,
    least: int,
    flips: bool,
) -> None:
    own = variant(prefill=PoolLimits(least, 20), decode=PoolLimits(least, 20), flips=flips)
    given_settings = settings(own, budget=float(budget))
    there = {"prefill": prefill, "decode": decode}
    now = sum(p.ready + p.lent + p.starting + p.draining for p in there.values())
    state = State()
    for number, rate in enumerate(rates):
        observation = Observation({NAME: seen(rate, work=work, there=there)})
        decision, state = decide(observation, state, given_settings, 300.0 + 5 * number)
        wanted = decision.variants[NAME]
        targets = {"prefill": wanted.prefill, "decode": wanted.decode}
        assert sum(targets.values()) <= budget
        held = sum(
            max(targets[name], p.ready + p.lent + p.starting) + p.draining for name, p in there.items()
        )
        assert held <= max(budget, now), "what leaves holds its place until it is gone"
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
)
def test_wanted_in_all_is_monotone_in_demand(  # noqa: PLR0917 - drawn
    first: float, growth: float, longer: float, before: float, ticks: int, start: tuple[int, int]
) -> None:
    """From equal state: more requests of the same kind, or longer ones, never want fewer workers."""
    given_settings = settings(budget=2000.0)
    given_settings = replace(
        given_settings, variants={NAME: variant(prefill=PoolLimits(1, 500), decode=PoolLimits(1, 500))}
    )
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
        totals.append(sum(roles))
    assert totals[0] <= totals[1]


# ------------------------------------------------------------ cost


def test_a_tick_for_200_workers_takes_under_50_ms_of_cpu() -> None:
    """Twenty variants of ten workers, each with as many recent arrivals as are kept."""
    names = [f"m{i}/main" for i in range(20)]
    given_settings = Settings({name: variant() for name in names}, budget=400.0)
    one = Settings({NAME: variant(prefill=PoolLimits(1, 200), decode=PoolLimits(1, 200))}, budget=400.0)
    big = Observation({NAME: seen(500.0, there=pools(100, 100), n=1200)}, 4, 1000)
    assert _cpu_ms(big, one) < 50
    many = Observation({name: seen(10.0, there=pools(5, 5), n=60) for name in names}, 4, 1000)
    assert _cpu_ms(many, given_settings) < 50


def _cpu_ms(observation: Observation, given_settings: Settings) -> float:
    """The least of some: this measures the code and not the machine's other work."""
    state, best = State(), float("inf")
    for number in range(5):
        began = time.process_time()
        _, state = decide(observation, state, given_settings, 300.0 + 5 * number)
        best = min(best, (time.process_time() - began) * 1e3)
    return best
