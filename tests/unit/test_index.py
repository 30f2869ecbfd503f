"""kvrouter.index: what it says of every worker is what a dictionary of sets says."""

from __future__ import annotations

import contextlib
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter import hashing
from kvrouter.hashing import block_hashes, namespace_seed
from kvrouter.index import DEVICE, Contradiction, IndexStats, PrefixIndex
from kvrouter.prefix_tree import PrefixTree
from serving.engine import live_sequence

SIZE = 4  # tokens per block
WORKERS = ("w0", "w1", "w2")


def chain(*content: int, namespace: int = 7) -> list[int]:
    """Hashes of blocks that repeat one token each."""
    return list(block_hashes(array("I", [t for token in content for t in [token] * SIZE]), SIZE, namespace))


def index_of(*workers: str, max_entries: int = 10_000) -> PrefixIndex:
    index = PrefixIndex(max_entries)
    for worker in workers:
        index.add_worker(worker)
    return index


class Naive:
    """Blocks as sets. A match is a walk."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {worker: set() for worker in WORKERS}

    def match(self, hashes: list[int]) -> dict[str, int]:
        found = {}
        for worker, held in self.held.items():
            depth = next((i for i, name in enumerate(hashes) if name not in held), len(hashes))
            if depth:
                found[worker] = depth
        return found


def check(tree: PrefixTree) -> None:
    """The rules of the module docstring, and the books."""
    runs = set(tree._runs.values())
    assert len(tree._places) == sum(len(run.hashes) for run in runs)
    assert tree.holders == sum(len(run.held) for run in runs)
    assert tree.hidden == sum(len(mine.hidden) for mine in tree._workers.values())
    for run in runs:
        assert run.held
        assert max(run.held.values()) == run.end
        assert min(run.held.values()) > run.base
        assert run.branches == sum(1 for other in runs if other.parent is run)
        for depth, name in enumerate(run.hashes, run.base + 1):
            assert tree._places[name] == run.number << 24 | depth
        if run.parent is not None:
            assert run.parent in runs
            assert all(run.parent.held[worker] >= run.base for worker in run.held)
    for worker, mine in tree._workers.items():
        assert set(mine.runs) == {run for run in runs if worker in run.held}
        assert mine.shown == sum(run.held[worker] - run.base for run in mine.runs)
        for run, branches in mine.runs.items():
            assert (branches or set()) == {other for other in mine.runs if other.parent is run}


# Few tokens and short prompts: chains meet, fork and are cut in all ways.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(lambda content: chain(*content))
WORKER = st.sampled_from(WORKERS)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), WORKER, PROMPTS, st.integers(0, 6)),
        st.tuples(st.just("remove"), WORKER, PROMPTS, st.integers(0, 6)),
        st.tuples(st.just("evict"), WORKER, PROMPTS, st.integers(0, 6)),
        st.tuples(st.just("clear"), WORKER, PROMPTS, st.just(0)),
        st.tuples(st.just("die"), WORKER, PROMPTS, st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(OPERATIONS, st.lists(PROMPTS, min_size=4, max_size=4))
def test_equals_naive(operations: list[tuple[str, str, list[int], int]], probes: list[list[int]]) -> None:
    index, naive = index_of(*WORKERS), Naive()
    for what, worker, hashes, at in operations:
        held = naive.held[worker]
        first = min(at, len(hashes) - 1)
        if what == "store":  # the tail of a prompt, whether or not what is before it is there
            parent = hashes[first - 1] if first else None
            known = parent is None or parent in held
            assert index.store(worker, parent, hashes[first:]) is known
            held.update(hashes[first:])
        elif what == "remove":  # from the middle
            index.remove(worker, [hashes[first]])
            held.discard(hashes[first])
        elif what == "evict":  # from the end
            index.remove(worker, hashes[:first:-1])
            held.difference_update(hashes[:first:-1])
        elif what == "clear":
            index.clear(worker)
            held.clear()
        else:
            index.remove_worker(worker)
            index.add_worker(worker)
            held.clear()
        check(index._tiers[DEVICE])
        for prompt in (hashes, *probes):
            assert index.match(prompt) == naive.match(prompt)
        assert all(index.n_held(worker) == len(held) for worker, held in naive.held.items())
    for worker in WORKERS:
        index.remove_worker(worker)
    assert index.stats == IndexStats(0, 0, 0, 0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_bound_only_shortens(operations: list[tuple[str, str, list[int], int]]) -> None:
    """With too little room a match is never longer than the truth, and the bound holds after every call."""
    index, naive = index_of(*WORKERS, max_entries=9), Naive()
    for what, worker, hashes, at in operations:
        first = min(at, len(hashes) - 1)
        if what == "store":
            index.store(worker, hashes[first - 1] if first else None, hashes[first:])
            naive.held[worker].update(hashes[first:])
        else:
            index.remove(worker, hashes[first:])
            naive.held[worker].difference_update(hashes[first:])
        tree = index._tiers[DEVICE]
        check(tree)
        assert tree.entries <= 9 or what != "store"
        truth = naive.match(hashes)
        assert all(depth <= truth.get(worker, 0) for worker, depth in index.match(hashes).items())


# Arbitrary claims: nothing but Contradiction may come of them, and the books stay right.
CLAIMS = st.lists(
    st.tuples(
        WORKER,
        st.one_of(st.none(), st.integers(1, 9)),
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        st.booleans(),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(CLAIMS)
def test_lies_do_not_break_the_books(claims: list[tuple[str, int | None, list[int], bool]]) -> None:
    index = index_of(*WORKERS)
    for worker, parent, hashes, store in claims:
        if store:
            with contextlib.suppress(Contradiction):
                index.store(worker, parent, hashes)
        else:
            index.remove(worker, hashes)
        check(index._tiers[DEVICE])
        assert set(index.match(hashes).values()) <= set(range(1, len(hashes) + 1))
    for worker in WORKERS:
        index.remove_worker(worker)
    assert index.stats.blocks == index.stats.hidden == index.stats.holders == 0


def test_router_hash_equals_engine_hash() -> None:
    """Both sides import one function; its golden vectors stand in test_hashing."""
    for name in ("block_hashes", "next_hash", "token_bytes"):
        assert getattr(live_sequence, name) is getattr(hashing, name)


def test_namespaces_do_not_meet() -> None:
    index = index_of("w0")
    index.store("w0", None, chain(1, 2, 3, namespace=namespace_seed("m", salt="a")))
    assert index.match(chain(1, 2, 3, namespace=namespace_seed("m", salt="b"))) == {}
    assert index.match(chain(1, 2, 3, namespace=namespace_seed("m", salt="a"))) == {"w0": 3}


def test_every_worker_in_one_call() -> None:
    index = index_of(*(f"w{n}" for n in range(50)))
    hashes = chain(*range(100))
    for n in range(50):
        index.store(f"w{n}", None, hashes[: 2 * n])
    assert index.match(hashes) == {f"w{n}": 2 * n for n in range(1, 50)}
    assert index.match(hashes[:30])["w40"] == 30
    assert index.match([*hashes[:30], 5])["w40"] == 30
    assert index.match(chain(5, 5)) == index.match([]) == {}


def test_tiers_are_apart() -> None:
    index = index_of("w0")
    index.store("w0", None, chain(1, 2))
    index.store("w0", None, chain(1, 2, 3), tier="host")
    assert (index.match(chain(1, 2, 3)), index.match(chain(1, 2, 3), "host")) == ({"w0": 2}, {"w0": 3})
    assert index.match(chain(1), "disk") == {}
    index.clear("w0", "host")
    assert (index.match(chain(1, 2, 3)), index.match(chain(1, 2, 3), "host")) == ({"w0": 2}, {})


def test_long_chain_hidden_and_shown_again() -> None:
    """No recursion: the first of 20,000 blocks goes and comes back."""
    index = index_of("w0", max_entries=100_000)
    hashes = list(range(1, 20_001))
    index.store("w0", None, hashes)
    index.remove("w0", hashes[:1])
    assert (index.match(hashes), index.stats.hidden, index.n_held("w0")) == ({}, 19_999, 19_999)
    index.store("w0", None, hashes[:1])
    assert (index.match(hashes), index.stats.hidden) == ({"w0": 20_000}, 0)


def test_unused_chains_go_first() -> None:
    index = index_of("w0", max_entries=100)
    prompts = [chain(n, *range(9)) for n in range(30)]
    for prompt in prompts:
        index.store("w0", None, prompt)
        assert index.match(prompts[0]) == {"w0": 10}  # used all the time
        assert index.stats.blocks <= 100
    assert index.match(prompts[-1]) == {"w0": 10}
    assert index.match(prompts[1]) == {}
    assert index.stats.evicted > 0


@pytest.mark.parametrize("shape", ["one_chain", "many_chains", "one_chain_many_workers", "hidden"])
def test_memory_is_what_it_says(shape: str) -> None:
    """The estimate is within a factor of 1.6 of what is allocated."""
    workers = [f"w{n}" for n in range(200)]
    index = PrefixIndex()
    for worker in workers:
        index.add_worker(worker)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    if shape == "many_chains":
        for n in range(2_000):
            index.store(workers[n % 200], None, chain(n, *range(9)))
    elif shape == "one_chain_many_workers":
        for worker in workers:
            index.store(worker, None, chain(*range(500)))
    else:
        hashes = chain(*range(20_000))
        index.store("w0", None if shape == "one_chain" else 5, hashes)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert index.stats.memory_bytes / 1.6 < used < index.stats.memory_bytes * 1.6


def test_unknown_worker() -> None:
    index = PrefixIndex()
    with pytest.raises(KeyError):
        index.store("w", None, [1])
    with pytest.raises(KeyError):
        index.remove("w", [1])
    with pytest.raises(KeyError):
        index.clear("w")
    index.remove_worker("w")
