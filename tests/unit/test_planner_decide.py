"""planner.decide: limits, steadiness, and what it does when it does not know."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.decide import decide
from planner.observation import Observation, PoolSeen
from planner.placement import lendable
from planner.settings import PoolLimits, Settings
from planner.state import State
from tests.unit.planner_rig import COSTS, NAME, TIMES, Service, seen, settings, variant

Costs = tuple[float, float]


@pytest.fixture(params=list(COSTS.values()), ids=list(COSTS))
def costs(request: pytest.FixtureRequest) -> Costs:
    """Of a prefill and of a decode worker."""
    value: Costs = request.param
    return value


def test_grows_at_once_and_by_as_many_as_needed(costs: Costs) -> None:
    service = Service(settings(variant(costs)), rate=40.0)
    service.run(30)
    assert service.replicas[0] >= 9, "40 x 0.2 s of prefill are 8 Erlang"
    assert len(set(service.targets)) <= 5


def test_planner_cold_start(costs: Costs) -> None:
    """Case planner_cold_start: what starts is counted, the same need is not ordered twice."""
    service = Service(settings(variant(costs)), rate=20.0, startup_s=25.0)
    service.run(15)
    asked = service.replicas
    service.run(60)
    assert sum(service.replicas) <= sum(asked) + 1
    needed = service.decisions[-1].variants[NAME].wanted
    assert needed is not None
    assert sum(service.replicas) <= 1.4 * sum(needed) + 2


def test_planner_no_flap(costs: Costs) -> None:
    """Case planner_no_flap: a constant load that one worker would not bear; two stay two."""
    service = Service(settings(variant(costs)), rate=5.2, start=(2, 1), even=True)
    service.run(1800)
    assert set(service.targets) == {(2, 1)}


def test_few_changes_under_a_load_that_is_constant_but_random(costs: Costs) -> None:
    """At the edge between one worker and two, each mistaken shrink doubles the time to the next."""
    service = Service(settings(variant(costs)), rate=3.5, start=(2, 2))
    service.run(3600)
    changes = [after for before, after in pairwise(service.targets) if before != after]
    assert len(changes) <= 7


def test_shrinks_after_the_window_and_not_before(costs: Costs) -> None:
    service = Service(settings(variant(costs)), rate=40.0)
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
def test_holds_with_a_reason_when_blind(costs: Costs, changes: dict[str, object], says: str) -> None:
    service = Service(settings(variant(costs)), rate=0.0, start=(3, 4))
    for _ in range(100):
        decision = service.tick(**changes)
    wanted = decision.variants[NAME]
    assert (wanted.prefill, wanted.decode) == (3, 4)
    assert says in wanted.reason
    assert wanted.reason.startswith("hold")


def test_a_scale_up_that_is_never_placed_is_taken_back(costs: Costs) -> None:
    given = settings(variant(costs), unplaced_s=120.0, retry_s=300.0)
    service = Service(given, rate=40.0, placed=False)
    service.run(60)
    assert sum(service.replicas) > 4
    service.run(120)
    assert service.replicas == (1, 1)
    assert "not placed" in service.decisions[-1].variants[NAME].reason
    service.run(400)
    assert any(sum(target) > 4 for target in service.targets[-60:]), "tried again later"


@pytest.mark.parametrize("cost", [0.1, 1.0, 8.0])
def test_flips_before_new_workers(cost: float) -> None:
    """Prompts get longer and answers shorter: decode lends to prefill, nobody new is ordered."""
    service = Service(settings(variant((cost, cost))), rate=12.0, start=(3, 6), prompt=1000, output=800)
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


def test_without_flips_nobody_is_lent(costs: Costs) -> None:
    service = Service(settings(variant(costs, flips=False)), rate=12.0, start=(2, 8))
    service.run(600)
    assert all(d.variants[NAME].lent == 0 for d in service.decisions)


def test_scales_to_zero_and_back(costs: Costs) -> None:
    none = PoolLimits(0, 8)
    given = settings(variant(costs, prefill=none, decode=none, idle_to_zero_s=60.0))
    service = Service(given, rate=2.0)
    service.run(120)
    assert sum(service.replicas) >= 2
    service.rate = 0.0
    service.run(100)
    assert service.replicas == (0, 0)
    service.tick(queued=1, arrivals=1)
    assert min(service.replicas) >= 1


def test_a_variant_without_a_prefill_pool_sizes_decode_for_both(costs: Costs) -> None:
    given = settings(variant(costs, prefill=PoolLimits(0, 0)))
    state = State()
    there = {"decode": PoolSeen(ready=1)}
    for number in range(5):
        observation = Observation({NAME: seen(40.0, there=there)})
        decision, state = decide(observation, state, given, 300.0 + 5 * number)
    wanted = decision.variants[NAME]
    assert wanted.prefill == 0
    assert wanted.decode >= 9
    assert wanted.lent == 0


def test_two_variants_share_the_budget_alike(costs: Costs) -> None:
    given = Settings({"a": variant(costs), "b": variant(costs)}, budget=12 * costs[0])
    observation = Observation({"a": seen(40.0), "b": seen(40.0)})
    state = State()
    for number in range(5):
        decision, state = decide(observation, state, given, 300.0 + 5 * number)
    totals = [d.prefill * costs[0] + d.decode * costs[1] for d in decision.variants.values()]
    assert sum(totals) <= given.budget + 1e-9
    assert abs(totals[0] - totals[1]) <= max(costs) + 1e-9
    assert f"budget {given.budget:g} allows" in decision.variants["a"].reason


def test_frontends_follow_the_load(costs: Costs) -> None:
    given = settings(variant(costs), frontend_rps=10.0, max_frontends=8)
    observation = Observation({NAME: seen(40.0)}, frontends=1, inflight=100)
    decision, _ = decide(observation, State(), given, 300.0)
    assert decision.frontends is not None
    assert 2 <= decision.frontends <= 8
    unknown, _ = decide(replace(observation, inflight=None), State(), given, 300.0)
    assert unknown.frontends is None
