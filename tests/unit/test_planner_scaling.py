"""planner.scaling: which workers are lent, what a pool has, and which replicas are set aside."""

from __future__ import annotations

from typing import Any

import pytest

from planner.observation import PoolSeen, VariantDecision
from planner.scaling import LentWorker, PoolWorker, ReplicaCounts, flips, pool_seen, set_aside


def worker(ident: str, pool: str = "decode", requests: int = 0, **more: Any) -> PoolWorker:
    fields = {"role": pool, "draining": False, **more}
    return PoolWorker(ident=ident, pool=pool, requests=requests, **fields)


def aside(ident: str, **more: Any) -> PoolWorker:
    return worker(ident, draining=True, set_aside=True, **more)


@pytest.mark.parametrize(
    ("lent", "workers", "orders"),
    [
        (0, [worker("a"), worker("b")], []),
        (1, [worker("a", requests=5), worker("b", requests=2)], [LentWorker("b", "prefill")]),
        (1, [worker("a", ordered="prefill"), worker("b")], []),
        (0, [worker("a", ordered="prefill"), worker("b")], [LentWorker("a", None)]),
        (-1, [worker("p", "prefill"), worker("a")], [LentWorker("p", "decode")]),
        (1, [worker("p", "prefill", ordered="decode"), worker("a")],
         [LentWorker("a", "prefill"), LentWorker("p", None)]),
        (1, [worker("a", draining=True), worker("b", requests=9)], [LentWorker("b", "prefill")]),
        (1, [aside("a", ordered="prefill"), worker("b")], [LentWorker("b", "prefill")]),
    ],
    ids=["none", "least to move", "already", "back", "other way", "turn round", "not a draining one",
         "one that is set aside is no help"],
)  # fmt: skip
def test_flips(lent: int, workers: list[PoolWorker], orders: list[LentWorker]) -> None:
    assert flips(VariantDecision(1, 2, lent, ""), workers) == orders


@pytest.mark.parametrize(
    ("counts", "workers", "seen"),
    [
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b")], PoolSeen(2, 0, 0, 0)),
        (ReplicaCounts(3, 2, 1, 0), [worker("a"), worker("b")], PoolSeen(2, 0, 1, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b", role="prefill")], PoolSeen(1, 1, 0, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("b", ordered="prefill")], PoolSeen(1, 1, 0, 0)),
        (ReplicaCounts(1, 1, 0, 1), [worker("a"), worker("b", draining=True)], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), worker("p", "prefill")], PoolSeen(1, 0, 1, 0)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), aside("b")], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(3, 2, 1, 0), [worker("a"), aside("b")], PoolSeen(1, 0, 1, 1)),
        (ReplicaCounts(1, 1, 0, 1, frozenset({"b"})), [worker("a"), aside("b")], PoolSeen(1, 0, 0, 1)),
        (ReplicaCounts(2, 2, 0, 0), [worker("a"), aside("b", ordered="prefill")], PoolSeen(1, 0, 0, 1)),
    ],
    ids=[
        "ready", "starting", "lent", "told to", "leaving once", "not linked yet",
        "set aside", "set aside, starting", "set aside, then stopped", "lent, then set aside",
    ],
)  # fmt: skip
def test_pool_seen(counts: ReplicaCounts, workers: list[PoolWorker], seen: PoolSeen) -> None:
    assert pool_seen("decode", counts, workers) == seen


@pytest.mark.parametrize(("told", "unplaced"), [(None, None), (0, 0), (2, 2), (9, 3)])
def test_replicas_without_a_place_are_some_of_those_that_start(
    told: int | None, unplaced: int | None
) -> None:
    counts = ReplicaCounts(5, 2, 3, 0, unplaced=told)
    there = [worker("a"), worker("b")]
    assert pool_seen("decode", counts, there) == PoolSeen(2, starting=3, unplaced=unplaced)


def test_set_aside() -> None:
    workers = [worker("a"), aside("b"), aside("c"), aside("p", pool="prefill")]
    assert set_aside("decode", ReplicaCounts(3, 3, 0, 0), workers) == 2
    assert set_aside("decode", ReplicaCounts(2, 2, 0, 1, frozenset({"c"})), workers) == 1
