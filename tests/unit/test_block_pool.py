"""serving.kv.block_pool: every block in one state, nothing handed out twice, no wrong content found."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.hashing import block_hashes, next_hash, token_bytes
from serving.engine.base import AttemptId, BlockHash, BlockStates, StoredRun
from serving.kv.block_pool import BlockPool, CachedBlock

SIZE = 4  # tokens per block
SPACE = 77  # namespace
A, B, C, D = (AttemptId(n) for n in range(1, 5))


def data_of(*blocks: int) -> bytes:
    """Token bytes of blocks that repeat one token each."""
    return token_bytes(array("I", [token for token in blocks for _ in range(SIZE)]))


def fill(pool: BlockPool, attempt: AttemptId, *content: int, spare: int = 0) -> list[int]:
    """Run `attempt` over `content` (a token per block): find, hold, commit the rest. Its blocks."""
    data = data_of(*content)
    hashes = block_hashes(data, SIZE, SPACE)
    found = pool.find(SPACE, hashes, data)
    blocks = pool.hold(attempt, SPACE, found, len(content) + spare)
    assert blocks is not None
    for i in range(len(found), len(content)):
        pool.commit(attempt, hashes[i], data_of(content[i]))
    return [int(block) for block in blocks]


def states(pool: BlockPool) -> tuple[int, int, int, int, int]:
    now = pool.states()
    assert now.conserved
    return now.used, now.leased, now.quarantined, now.cached, now.free


def found(pool: BlockPool, *content: int, namespace: int = SPACE) -> list[CachedBlock]:
    data = data_of(*content)
    return pool.find(namespace, block_hashes(data, SIZE, namespace), data)


def n_found(pool: BlockPool, *content: int, namespace: int = SPACE) -> int:
    return len(found(pool, *content, namespace=namespace))


def test_life_of_a_block() -> None:
    pool = BlockPool(8)
    fill(pool, A, 1, 2, spare=1)
    assert states(pool) == (3, 0, 0, 0, 5)
    pool.lease(A)
    assert states(pool) == (0, 3, 0, 0, 5)
    pool.release(A)
    assert states(pool) == (0, 0, 0, 2, 6)
    assert fill(pool, B, 1, 2, 3)[:2] == fill(pool, C, 1, 2)
    assert states(pool) == (3, 0, 0, 0, 5)
    pool.quarantine(B, first=2)
    assert states(pool) == (2, 0, 1, 0, 5)
    pool.free(C)
    assert states(pool) == (0, 0, 1, 2, 5)
    pool.end_quarantine(B)
    assert states(pool) == (0, 0, 0, 2, 6)


def test_precedence_of_shared_blocks() -> None:
    """A block that is leased and used counts as used, then as leased, then as cached."""
    pool = BlockPool(4)
    fill(pool, A, 1)
    pool.lease(A)
    fill(pool, B, 1)
    assert states(pool) == (1, 0, 0, 0, 3)
    pool.free(B)
    assert states(pool) == (0, 1, 0, 0, 3)
    pool.release(A)
    assert states(pool) == (0, 0, 0, 1, 3)


def test_ends_are_idempotent() -> None:
    pool = BlockPool(8)
    fill(pool, A, 1, 2)
    fill(pool, B, 1, 2)
    for _ in range(2):
        pool.free(A)
        pool.release(A)
        pool.end_quarantine(A)
        pool.quarantine(A)
    assert states(pool) == (2, 0, 0, 0, 6)


def test_late_free_of_old_attempt() -> None:
    """A late free names its own attempt and cannot touch who holds the blocks now."""
    pool = BlockPool(2)
    old = fill(pool, A, 1, 2)
    pool.free(A)
    assert sorted(fill(pool, B, 3, 4)) == sorted(old)
    pool.free(A)
    assert states(pool) == (2, 0, 0, 0, 0)


def test_same_attempt_may_come_back_while_quarantined() -> None:
    pool = BlockPool(6)
    fill(pool, A, 1, 2)
    pool.quarantine(A)
    fill(pool, A, 3)
    pool.quarantine(A)
    assert states(pool) == (0, 0, 3, 0, 3)
    pool.end_quarantine(A)
    assert states(pool) == (0, 0, 0, 0, 6)


@pytest.mark.parametrize(
    ("short", "givers", "kept", "expected"),
    [
        pytest.param(2, [A], (), 1, id="alone"),
        pytest.param(3, [A, B], (), 2, id="both"),
        pytest.param(4, [A, B], (), 2, id="shared_ones_count_when_nobody_is_left"),
        pytest.param(5, [A, B], (), 0, id="too_few"),
        pytest.param(1, [C], (), 0, id="leased_too"),
        pytest.param(3, [A, B], (1,), 2, id="but_those_it_shares"),
        pytest.param(4, [A, B], (1,), 0, id="are_no_gain"),
    ],
)
def test_enough(short: int, givers: list[AttemptId], kept: tuple[int, ...], expected: int) -> None:
    pool = BlockPool(12)
    fill(pool, A, 1, 2, 3)
    fill(pool, B, 1, spare=1)  # shares the first with A
    fill(pool, C, 7)
    fill(pool, D, 7)
    pool.lease(D)
    before = states(pool)
    assert pool.enough(short, givers, found(pool, *kept)) == expected
    assert states(pool) == before


def test_quarantined_content_is_not_found() -> None:
    pool = BlockPool(6)
    fill(pool, A, 1, 2)
    pool.quarantine(A, first=1)
    assert n_found(pool, 1, 2) == 1
    pool.end_quarantine(A)
    assert n_found(pool, 1, 2) == 1


def test_all_or_nothing() -> None:
    pool = BlockPool(3)
    fill(pool, A, 1, 2)
    assert pool.hold(B, SPACE, [], 2) is None
    assert states(pool) == (2, 0, 0, 0, 1)
    pool.free(A)
    data = data_of(1, 2)
    found = pool.find(SPACE, block_hashes(data, SIZE, SPACE), data)
    # The cached blocks cannot be both held and evicted.
    assert pool.cost(found, 4) == 4
    assert pool.hold(B, SPACE, found, 4) is None
    assert states(pool) == (0, 0, 0, 2, 1)


def test_hold_twice_is_an_error() -> None:
    pool = BlockPool(3)
    fill(pool, A, 1)
    with pytest.raises(ValueError, match="holds blocks already"):
        pool.hold(A, SPACE, [], 1)


def test_ends_of_chains_are_evicted_first() -> None:
    pool = BlockPool(4)
    fill(pool, A, 1, 2, 3)
    pool.free(A)
    fill(pool, B, 9, 8)
    assert n_found(pool, 1, 2, 3) == 2
    pool.free(B)
    fill(pool, C, 1, 2)  # touched: now B's content is the oldest
    pool.free(C)
    fill(pool, D, 5, 6)
    assert n_found(pool, 1, 2) == 2
    assert n_found(pool, 9) == 0


def test_hash_collision_guard() -> None:
    """Every hash is forced to 5, or to a clash further down: wrong KV is never found."""
    pool = BlockPool(8)
    clash, child = BlockHash(5), BlockHash(6)
    pool.hold(A, SPACE, [], 1)
    pool.commit(A, clash, data_of(1))
    assert len(pool.find(SPACE, [clash], data_of(1))) == 1
    assert pool.find(SPACE, [clash], data_of(2)) == []
    assert pool.find(SPACE + 1, [clash], data_of(1)) == []
    # B has other content under the same first hash; its second block must not hang under A's first.
    pool.hold(B, SPACE, [], 2)
    pool.commit(B, clash, data_of(2))
    pool.commit(B, child, data_of(3))
    assert len(pool.find(SPACE, [clash, child], data_of(1, 3))) == 1
    assert pool.find(SPACE, [clash, child], data_of(2, 3)) == []
    assert pool.drain_events() == ([StoredRun(None, [clash])], [])


def test_collision_with_another_parent() -> None:
    """Equal tokens under an equal hash, but after another beginning."""
    pool = BlockPool(8)
    one, two, same = BlockHash(1), BlockHash(2), BlockHash(3)
    pool.hold(A, SPACE, [], 2)
    pool.commit(A, one, data_of(1))
    pool.commit(A, same, data_of(9))
    pool.hold(B, SPACE, [], 2)
    pool.commit(B, two, data_of(2))
    pool.commit(B, same, data_of(9))
    assert len(pool.find(SPACE, [one, same], data_of(1, 9))) == 2
    assert len(pool.find(SPACE, [two, same], data_of(2, 9))) == 1


def test_equal_content_computed_twice_is_stored_once() -> None:
    pool = BlockPool(8)
    data = data_of(1, 2)
    hashes = block_hashes(data, SIZE, SPACE)
    for attempt in (A, B):
        pool.hold(attempt, SPACE, [], 2)
    for i in range(2):
        for attempt in (A, B):
            pool.commit(attempt, hashes[i], data[i * SIZE * 4 : (i + 1) * SIZE * 4])
    assert pool.drain_events() == ([StoredRun(None, hashes)], [])
    pool.free(A)
    pool.free(B)
    assert states(pool) == (0, 0, 0, 2, 6)


def test_nothing_is_stored_under_a_lost_parent() -> None:
    """The first of two equal blocks is evicted while the second computes on: its child has no parent."""
    pool = BlockPool(4)
    data = data_of(1, 2)
    hashes = block_hashes(data, SIZE, SPACE)
    for attempt, n_blocks in ((A, 1), (B, 2)):
        pool.hold(attempt, SPACE, [], n_blocks)
        pool.commit(attempt, hashes[0], data_of(1))
    pool.free(A)
    pool.hold(C, SPACE, [], 2)  # takes the free block and the cached one
    pool.commit(B, hashes[1], data_of(2))
    assert pool.drain_events() == ([], [])  # stored and removed within one window
    assert n_found(pool, 1, 2) == 0


def test_an_orphan_is_found_again_with_its_parent() -> None:
    pool = BlockPool(6)
    data = data_of(1, 2)
    hashes = block_hashes(data, SIZE, SPACE)
    pool.hold(A, SPACE, [], 1)
    pool.commit(A, hashes[0], data_of(1))
    pool.hold(B, SPACE, [], 2)
    pool.commit(B, hashes[0], data_of(1))
    pool.commit(B, hashes[1], data_of(2))
    pool.free(A)
    pool.hold(C, SPACE, [], 4)  # evicts A's block, the parent of B's second
    assert n_found(pool, 1, 2) == 0
    assert pool.chains() == []
    pool.free(C)
    fill(pool, D, 1)
    assert n_found(pool, 1, 2) == 2
    assert pool.chains() == [StoredRun(None, hashes)]


def test_event_remove_then_restore_order() -> None:
    """Evicted and stored again within one step: applied in order the content ends up known."""
    pool = BlockPool(1)
    fill(pool, A, 1)
    pool.free(A)
    pool.drain_events()
    fill(pool, B, 2)
    pool.free(B)
    fill(pool, C, 1)
    stored, removed = pool.drain_events()
    first = block_hashes(data_of(1), SIZE, SPACE)
    assert removed == first
    assert stored == [StoredRun(None, first)]


def test_chains_branch() -> None:
    pool = BlockPool(8)
    fill(pool, A, 1, 2, 3)
    fill(pool, B, 1, 4)
    trunk, other = (block_hashes(data_of(*c), SIZE, SPACE) for c in ((1, 2, 3), (1, 4)))
    runs = {(run.parent, *run.hashes) for run in pool.chains()}
    assert runs == {(None, *trunk), (trunk[0], other[1])}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 24))
def test_conservation(seed: int, n_blocks: int) -> None:
    """Random verbs in random order; a model of who holds what and what each block contains agrees."""
    rng = random.Random(seed)
    pool = BlockPool(n_blocks)
    tables: dict[AttemptId, list[int]] = {}
    leases: dict[AttemptId, list[int]] = {}
    parked: dict[AttemptId, list[int]] = {}
    content: dict[int, tuple[int, ...]] = {}  # block -> tokens of the chain it ends
    chain: dict[AttemptId, tuple[int, ...]] = {}
    hashes: dict[AttemptId, list[BlockHash]] = {}
    listener: set[BlockHash] = set()

    def weak_hash(parent: int, data: bytes) -> BlockHash:
        return BlockHash(next_hash(parent, data) % 7)  # collisions all the time

    for step in range(60):
        verb = rng.choice(["hold", "hold", "commit", "commit", "commit", "grow", "free", "end"])
        attempt = rng.choice(list(tables)) if tables else None
        if verb == "hold":
            attempt = AttemptId(step)
            wanted = tuple(rng.randrange(3) for _ in range(rng.randrange(5)))
            data = data_of(*wanted)
            names: list[BlockHash] = []
            for token in wanted:
                names.append(weak_hash(names[-1] if names else SPACE, data_of(token)))
            found = pool.find(SPACE, names, data)
            for i, entry in enumerate(found):
                assert content[entry.block] == wanted[: i + 1]
            blocks = pool.hold(attempt, SPACE, found, len(wanted) + 1)
            if blocks is not None:
                tables[attempt] = blocks  # type: ignore[assignment]
                chain[attempt], hashes[attempt] = wanted[: len(found)], names[: len(found)]
                busy = {b for held in (leases, parked) for bs in held.values() for b in bs}
                busy |= {b for a, bs in tables.items() if a != attempt for b in bs}
                assert not busy & set(blocks[len(found) :])
                assert len(set(blocks)) == len(blocks)
        elif attempt is None:
            continue
        elif verb == "commit" and len(chain[attempt]) < len(tables[attempt]):
            token = rng.randrange(3)
            names = hashes[attempt]
            block = tables[attempt][len(chain[attempt])]
            chain[attempt] += (token,)
            content[block] = chain[attempt]
            names.append(weak_hash(names[-1] if names else SPACE, data_of(token)))
            pool.commit(attempt, names[-1], data_of(token))
        elif verb == "grow":
            room = pool.available > 0
            assert pool.grow(attempt) is room
        elif verb == "free":
            held = list(tables.pop(attempt))
            how = rng.choice(["free", "lease", "quarantine"])
            if how == "free":
                pool.free(attempt)
            elif how == "lease":
                pool.lease(attempt)
                leases[attempt] = held
            else:
                first = rng.randrange(len(held))
                pool.quarantine(attempt, first)
                parked[attempt] = held[first:]
        elif verb == "end":
            for ends, end in ((leases, pool.release), (parked, pool.end_quarantine)):
                if ends:
                    gone = rng.choice(list(ends))
                    del ends[gone]
                    end(gone)
                    end(gone)
        stored, removed = pool.drain_events()
        listener -= set(removed)
        listener |= {name for run in stored for name in run.hashes}
        check(pool.states(), tables, leases, parked, n_blocks)
    told = {name for run in pool.chains() for name in run.hashes}
    assert told <= listener
    for attempt in list(tables):
        pool.free(attempt)
    for attempt in list(leases):
        pool.release(attempt)
    for attempt in list(parked):
        pool.end_quarantine(attempt)
    last = pool.states()
    assert last.cached + last.free == n_blocks
    assert last.conserved


def check(
    states: BlockStates,
    tables: dict[AttemptId, list[int]],
    leases: dict[AttemptId, list[int]],
    parked: dict[AttemptId, list[int]],
    n_blocks: int,
) -> None:
    used = {b for blocks in tables.values() for b in blocks}
    leased = {b for blocks in leases.values() for b in blocks} - used
    quarantined = {b for blocks in parked.values() for b in blocks} - used - leased
    assert states.conserved
    assert states.total == n_blocks
    assert (states.used, states.leased, states.quarantined) == (len(used), len(leased), len(quarantined))
