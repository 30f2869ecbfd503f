"""What the policies know of caches beside the index: how fast they turn over, and what will be in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.pending_prefixes import PendingPrefixes
from kvrouter.turnover import CacheTurnover


def turnover(**sizes: int) -> CacheTurnover:
    made = CacheTurnover()
    for ident, size in sizes.items():
        made.add_worker(ident, size)
    return made


def test_excess_is_relative_to_the_peers() -> None:
    caches = turnover(a=1000, b=1000)
    caches.write("a", 200)
    assert caches.excess("a") == pytest.approx(0.1)
    assert caches.excess("b") == pytest.approx(-0.1)
    caches.write("b", 200)
    # The first 200 have faded a little.
    assert 0 < caches.excess("b") < 0.02


def test_a_large_cache_bears_more() -> None:
    caches = turnover(small=1000, large=4000)
    caches.write("small", 100)
    caches.write("large", 400)
    assert abs(caches.excess("small") - caches.excess("large")) < 0.02


def test_old_writes_fade() -> None:
    caches = turnover(a=1000, b=1000)
    caches.write("a", 1000)
    for _ in range(100):
        caches.write("a", 50)
        caches.write("b", 50)
    assert abs(caches.excess("a")) < 0.06


def test_new_and_leaving_workers() -> None:
    caches = turnover(a=1000, b=1000)
    caches.write("a", 500)
    caches.write("b", 500)
    caches.add_worker("c", 1000)
    assert caches.excess("c") == pytest.approx(0, abs=1e-9)
    caches.remove_worker("a")
    caches.remove_worker("a")
    assert caches.excess("a") == 0
    caches.write("a", 10)
    caches.remove_worker("b")
    assert caches.excess("c") == pytest.approx(0, abs=1e-9)


chains = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    # A chained name stands for the path to it, as a chained hash does.
    lambda path: [hash(tuple(path[: i + 1])) for i in range(len(path))]
)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), chains, st.booleans()), max_size=25),
    chains,
)
def test_pending_prefixes_against_a_naive_list(
    steps: list[tuple[str, list[int], bool]], wanted: list[int]
) -> None:
    pending, naive = PendingPrefixes(), dict[int, tuple[str, list[int]]]()
    for attempt, (worker, chain, drop) in enumerate(steps):
        pending.add(attempt, worker, chain)
        naive[attempt] = (worker, chain)
        if drop:
            pending.drop(attempt // 2)
            pending.drop(attempt // 2)
            naive.pop(attempt // 2, None)
    right: dict[str, int] = {}
    for worker, chain in naive.values():
        depth = next((i for i, (x, y) in enumerate(zip(chain, wanted, strict=False)) if x != y), None)
        depth = min(len(chain), len(wanted)) if depth is None else depth
        if depth:
            right[worker] = max(right.get(worker, 0), depth)
    assert pending.match(wanted) == right
    assert len(pending) == len(naive)
