"""planner.placement: the budget shared over pools, and loans to a role that has nobody."""

from __future__ import annotations

import pytest

from planner.observation import PoolSeen
from planner.placement import Placed, Pool, Roles, place, rescue, share_budget
from planner.settings import PoolLimits
from tests.unit.planner_rig import variant

A, B = "a", "b"


def shared(
    wanted: dict[str, Roles],
    held: dict[str, Roles],
    budget: float,
    firm: set[Pool] | None = None,
    costs: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Roles]:
    return share_budget(wanted, held, firm or set(), dict.fromkeys(wanted, variant(costs)), budget)


@pytest.mark.parametrize("cost", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(
    ("wanted", "held", "workers", "firm", "roles"),
    [
        pytest.param((5, 3), (2, 2), 10, {0, 1}, (5, 3), id="there is enough"),
        pytest.param((12, 18), (2, 2), 10, set(), (4, 6), id="both grow alike"),
        pytest.param((20, 9), (4, 6), 10, {0, 1}, (4, 6), id="both grew just now: the split stands"),
        pytest.param((20, 9), (4, 6), 10, {0}, (7, 3), id="decode may give"),
        pytest.param((20, 9), (4, 6), 10, {1}, (4, 6), id="it would be decode that gives"),
        pytest.param((12, 14), (4, 6), 10, set(), (4, 6), id="too little gained by a switch"),
        pytest.param((20, 9), (4, 6), 13, {0, 1}, (7, 6), id="what is free goes to the poorest"),
        pytest.param((4, 9), (6, 4), 10, {0, 1}, (4, 6), id="what is not wanted goes to the other"),
        pytest.param((4, 8), (4, 8), 6, {0, 1}, (2, 4), id="the budget was lowered"),
        pytest.param((0, 0), (3, 4), 10, {0, 1}, (1, 1), id="never below the minimum"),
    ],
)
def test_the_budget_is_shared(  # noqa: PLR0917 - a table's row
    cost: float, wanted: Roles, held: Roles, workers: int, firm: set[int], roles: Roles
) -> None:
    given = shared({A: wanted}, {A: held}, workers * cost, {(A, role) for role in firm}, (cost, cost))
    assert given == {A: roles}


@pytest.mark.parametrize(
    ("costs", "budget", "roles"),
    [
        pytest.param((8, 1), 40, (4, 8), id="dear prefill"),
        pytest.param((1, 8), 40, (8, 4), id="dear decode"),
        pytest.param((0.1, 8), 20, (20, 2), id="a fraction and many"),
    ],
)
def test_workers_of_different_cost_are_shared_as_they_fit(
    costs: tuple[float, float], budget: float, roles: Roles
) -> None:
    assert shared({A: (20, 20)}, {A: (1, 1)}, budget, costs=costs) == {A: roles}


@pytest.mark.parametrize(
    ("held", "firm", "roles"),
    [
        pytest.param({A: (1, 1), B: (5, 5)}, set(), {A: (3, 3), B: (3, 3)}, id="the rich one gives"),
        pytest.param({A: (1, 1), B: (5, 5)}, {(B, 0)}, {A: (1, 1), B: (5, 5)}, id="it grew just now"),
    ],
)
def test_variants_share_alike(held: dict[str, Roles], firm: set[Pool], roles: dict[str, Roles]) -> None:
    assert shared({A: (5, 5), B: (5, 5)}, held, 12, firm) == roles


def test_a_variant_that_wakes_gets_workers_at_once() -> None:
    none = PoolLimits(0, 64)
    limits = {A: variant(prefill=none, decode=none), B: variant()}
    firm: set[Pool] = {(B, 0), (B, 1)}
    given = share_budget({A: (2, 2), B: (5, 5)}, {A: (0, 0), B: (5, 5)}, firm, limits, 10)
    assert min(given[A]) >= 1


@pytest.mark.parametrize(
    ("roles", "prefill", "decode", "lent"),
    [
        pytest.param((6, 4), PoolSeen(6), PoolSeen(starting=4), -2, id="decode crashed: its share"),
        pytest.param((6, 4), PoolSeen(1), PoolSeen(starting=4), -1, id="the last one can do both"),
        pytest.param((6, 6), PoolSeen(starting=6), PoolSeen(6), 3, id="prefill crashed: its share"),
        pytest.param((6, 1), PoolSeen(starting=6), PoolSeen(1), 0, id="the last one does both as it is"),
        pytest.param((6, 4), PoolSeen(6), PoolSeen(1, starting=3), 0, id="one is there"),
        pytest.param((6, 4), PoolSeen(starting=6), PoolSeen(starting=4), 0, id="nobody to lend"),
        pytest.param((0, 4), PoolSeen(), PoolSeen(4), 0, id="no prefill is wanted"),
    ],
)
def test_a_role_with_nobody_borrows(roles: Roles, prefill: PoolSeen, decode: PoolSeen, lent: int) -> None:
    assert rescue(0, roles, {"prefill": prefill, "decode": decode}) == lent


def test_whom_a_loan_that_ends_fills_needs_no_rescue() -> None:
    there = {"prefill": PoolSeen(0, lent=1), "decode": PoolSeen(4)}
    assert rescue(0, (6, 4), there) == 0


def test_unlike_workers_are_not_lent() -> None:
    own = variant((8.0, 1.0))
    assert place((4, 6), Placed(6, 4, 0), own, (64, 64)) == Placed(4, 6, 0)
    assert place((4, 6), Placed(6, 4, 0), variant((8.0, 8.0)), (64, 64)) == Placed(6, 4, -2)
