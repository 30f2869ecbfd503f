"""planner.decide over time: shrinking by workers, time nobody saw, slow starts, tight budgets, crashes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from planner.decide import decide
from planner.observation import Observation, PoolSeen
from planner.settings import Settings, Targets
from planner.sim_cluster import Cluster
from planner.sim_policies import Planner
from planner.sim_report import anti_phase
from planner.sim_setup import SimSetup
from planner.sim_worker import EngineTimes
from planner.simulate import settings_for
from planner.state import State, VariantState
from planner.workload import made_up
from tests.unit.planner_rig import NAME, Service, seen, settings, variant

Roles = tuple[int, int]


# ------------------------------------------------------------ what a worker costs


def high_and_low(costs: tuple[float, float]) -> Service:
    service = Service(settings(variant(costs, startup_s=25.0)), rate=40.0, output=400)
    service.run(300)
    service.rate = 4.0
    service.run(600)
    return service


def test_the_unit_of_cost_changes_nothing() -> None:
    """Whatever a worker costs, as many are asked for when the budget is worth as many."""
    of_one = high_and_low((1.0, 1.0)).targets
    assert min(sum(target) for target in of_one[-20:]) < max(sum(target) for target in of_one) / 2
    for cost in (0.1, 2.0, 8.0):
        assert high_and_low((cost, cost)).targets == of_one


@pytest.mark.parametrize("costs", [(1.0, 1.0), (0.1, 0.1), (8.0, 8.0), (8.0, 1.0), (0.5, 4.0)])
def test_shrinks_to_what_the_most_demanding_tick_cost(costs: tuple[float, float]) -> None:
    """Neither above it by as much as a worker nor below it."""
    service = Service(settings(variant(costs)), rate=40.0, output=400)
    service.run(300)
    service.rate = 4.0
    shrunk = 0
    for _ in range(120):
        service.tick()
        before, after = service.targets[-2:]
        if after == before or after[0] > before[0] or after[1] > before[1]:
            continue
        shrunk += 1
        state = service.state.variants[NAME]
        most = max(want.cost for want in state.wants)
        cost = after[0] * costs[0] + after[1] * costs[1]
        assert cost <= most + 1e-6 or after == before
        left = [own for own, new, old in zip(costs, after, before, strict=True) if new < old]
        assert all(cost + own > most - 1e-6 for own in left)
    assert shrunk > 0


# ------------------------------------------------------------ time that nobody saw


@pytest.mark.parametrize("gap_s", [20.0, 240.0, 3600.0])
@pytest.mark.parametrize("how", ["blind", "away"])
def test_after_time_that_nobody_saw_the_window_begins_anew(how: str, gap_s: float) -> None:
    """What was needed meanwhile is not known: one tick's demand is no maximum."""
    service = Service(settings(), rate=30.0, output=200)
    service.run(600)
    held = service.targets[-1]
    if how == "away":
        service.unseen(gap_s)
    else:
        for _ in range(int(gap_s / 5)):
            service.tick(arrivals=None)
        assert service.targets[-1] == held
    first = len(service.targets)
    service.rate = 3.0
    service.run(170)
    assert all(sum(target) >= sum(held) for target in service.targets[first:])
    service.run(400)
    assert sum(service.targets[-1]) < sum(held)


def test_a_tick_that_is_left_out_starts_nothing_anew() -> None:
    service = Service(settings(), rate=30.0)
    service.run(600)
    since_s = service.state.variants[NAME].since_s
    service.unseen(5)
    service.tick(arrivals=None)
    service.tick()
    assert service.state.variants[NAME].since_s == since_s


def test_what_somebody_added_while_nobody_looked_is_held() -> None:
    service = Service(settings(), rate=30.0)
    service.run(600)
    prefill, decode = service.replicas
    service.unseen(300)
    service.add(prefill=3)
    service.run(150)
    assert set(service.targets[-30:]) == {(prefill + 3, decode)}


# ------------------------------------------------------------ starts


@pytest.mark.parametrize("tells", [False, True], ids=["placed or not is unknown", "placed"])
def test_a_slow_start_is_waited_for(tells: bool) -> None:
    """Starts of 700 s, more than `unplaced_s`: no worker that loads is taken back."""
    own = variant(startup_s=700.0)
    service = Service(settings(own, workers=16), rate=20.0, startup_s=700.0, even=True, tells=tells)
    service.run(2400)
    for before, after in zip(service.targets[:130], service.targets[1:130], strict=False):
        assert after[0] >= before[0]
        assert after[1] >= before[1]
    assert not any("not placed" in d.variants[NAME].reason for d in service.decisions)


@pytest.mark.parametrize(
    ("startup_s", "unplaced", "taken_back_s"),
    [
        pytest.param(60.0, 3, 600, id="no place: after unplaced_s"),
        pytest.param(700.0, 3, 600, id="no place: however long a start takes"),
        pytest.param(60.0, 0, 600, id="a start that hangs"),
        pytest.param(700.0, 0, 1400, id="a start that hangs: after twice its time"),
        pytest.param(60.0, None, 600, id="unknown"),
        pytest.param(700.0, None, 1400, id="unknown: after twice its time"),
    ],
)
def test_when_starts_are_taken_back(startup_s: float, unplaced: int | None, taken_back_s: int) -> None:
    """Prefill is loading; decode, made of the same, is not asked to play prefill instead."""
    own = variant(startup_s=startup_s)
    waiting = {"prefill": PoolSeen(6, starting=3, unplaced=unplaced), "decode": PoolSeen(3, unplaced=0)}
    cut = watched(settings(own), waiting, rate=40.0, limit_s=1600)
    assert cut == (taken_back_s, (6, 3, 0))


def watched(given: Settings, there: dict[str, PoolSeen], rate: float, limit_s: int) -> object:
    """Seconds until a pool is asked for less than it has, and (prefill, decode, lent) then."""
    state, now_s = State({NAME: VariantState(roles=(9, 3))}), 1000.0
    most = tuple(pool.ready + pool.starting for pool in there.values())
    for second in range(0, limit_s, 5):
        observed = replace(seen(rate, there=there, now_s=now_s + second), queued=5)
        decision, state = decide(Observation({NAME: observed}), state, given, now_s + second)
        own = decision.variants[NAME]
        if own.prefill < most[0] or own.decode < most[1]:
            assert "not placed" in own.reason
            return second, (own.prefill, own.decode, own.lent)
    return None


def test_those_that_have_a_place_go_on_loading() -> None:
    waiting = {"prefill": PoolSeen(6, starting=3, unplaced=2), "decode": PoolSeen(3, unplaced=0)}
    assert watched(settings(), waiting, rate=40.0, limit_s=1600) == (600, (7, 3, 0))


def test_unlike_workers_may_find_a_place_where_others_did_not() -> None:
    own = variant((8.0, 1.0))
    state, now_s = State({NAME: VariantState(roles=(9, 3))}), 1000.0
    there = {"prefill": PoolSeen(6, starting=3, unplaced=3), "decode": PoolSeen(1, unplaced=0)}
    for second in range(0, 700, 5):
        observed = seen(40.0, there=there, now_s=now_s + second)
        decision, state = decide(Observation({NAME: observed}), state, settings(own), now_s + second)
    assert decision.variants[NAME].prefill == 6
    assert decision.variants[NAME].decode == 3


# ------------------------------------------------------------ crashes


@pytest.mark.parametrize("quiet_s", [5.0, 500.0], ids=["right after growth", "long after growth"])
def test_an_empty_decode_role_is_lent_ready_workers(quiet_s: float) -> None:
    now_s = 1000.0
    grown_s = now_s - quiet_s
    before = VariantState(roles=(6, 4), since_s=0.0, grown_s=grown_s, role_grown_s=(grown_s, grown_s))
    state = State({NAME: before})
    lent = 0
    for ready in (0, 0, 0, 4, 4):
        there = {
            "prefill": PoolSeen(6 - lent, lent=lent),
            "decode": PoolSeen(ready, starting=4 - ready),
        }
        observed = replace(seen(20.0, there=there, now_s=now_s), queued=50)
        decision, state = decide(Observation({NAME: observed}), state, settings(workers=10), now_s)
        own = decision.variants[NAME]
        assert (own.prefill, own.decode) == (6, 4)
        assert own.lent == (0 if ready else -2), "until its own are back"
        lent = -own.lent
        now_s += 5


def test_without_requests_nobody_is_lent_in_a_hurry() -> None:
    """At the start of an application one pool is ready before the other."""
    there = {"prefill": PoolSeen(6), "decode": PoolSeen(starting=4)}
    observed = seen(0.0, there=there)
    decision, _ = decide(Observation({NAME: observed}), State(), settings(), 300.0)
    assert decision.variants[NAME].lent == 0


# ------------------------------------------------------------ a budget that binds


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        pytest.param([(0, (2, 2)), (5, (4, 6)), (70, (4, 5))], 0, id="a shrink long after"),
        pytest.param([(0, (2, 2)), (5, (4, 2)), (60, (4, 1))], 1, id="the other one grew"),
        pytest.param([(0, (2, 2)), (5, (4, 2)), (60, (3, 2))], 0, id="the same one grew"),
        pytest.param([(0, (4, 6)), (5, (5, 5))], 1, id="both at once"),
        pytest.param([(0, (4, 6)), (5, (3, 6)), (10, (3, 7))], 0, id="the shrink came before"),
    ],
)
def test_anti_phase(targets: list[tuple[float, Roles]], found: int) -> None:
    samples = [SimpleNamespace(at_s=at_s, targets=roles) for at_s, roles in targets]
    assert anti_phase(cast(Cluster, SimpleNamespace(samples=samples))) == found


@pytest.mark.parametrize("budget", [8, 12, 16, 40])
def test_no_pool_gives_to_the_other_one_in_a_burst(budget: int) -> None:
    times = EngineTimes(prefill=(0.0, 0.1, 0.0), step=(20.0, 0.5, 0.0), move_ms=0.0)
    policy = Planner(settings_for(Targets(1000, 100, 40, 95), startup_s=20.0, budget=budget))
    run = Cluster(SimSetup(times, initial=(2, 2), startup_s=20.0), policy)
    run.run(made_up(3.0, 600.0, 1000, 50, burst=(300.0, 30.0, 8.0), seed=4))
    assert max(sum(sample.targets) for sample in run.samples) <= budget
    assert anti_phase(run) == 0


def test_what_is_held_is_what_the_budget_allowed() -> None:
    service = Service(settings(workers=10), rate=60.0, output=400)
    service.run(300)
    assert service.state.variants[NAME].roles == service.targets[-1]
    assert sum(service.targets[-1]) == 10
    assert len(set(service.targets[-50:])) == 1, "the split stands"


def test_a_blind_variant_keeps_what_it_has() -> None:
    given = Settings({"a": variant(), "b": variant()}, budget=12.0)
    state, there = State(), {"prefill": PoolSeen(5), "decode": PoolSeen(5)}
    for number in range(100):
        blind = replace(seen(1.0, there=there), arrivals=None)
        observed = Observation({"a": seen(40.0), "b": blind})
        decision, state = decide(observed, state, given, 300.0 + 5 * number)
        assert decision.variants["b"].roles == (5, 5)
    assert "budget 12" in decision.variants["a"].reason
