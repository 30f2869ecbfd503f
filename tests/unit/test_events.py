"""kvrouter.events: whatever order frames come in, the index ends up with what the worker holds, or asks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.events import EARLY_FRAMES, SILENT_PROMPTS, CacheEvents
from kvrouter.hashing import block_hashes, namespace_seed
from kvrouter.index import PrefixIndex
from kvrouter.predicted import PredictedCache
from serving.engine.base import AttemptId
from serving.kv.block_pool import BlockPool
from serving.wire import Events, Snapshot, Stored, decode, encode, pack_u64

EPOCH, NEXT_EPOCH = 11, 12
SIZE = 4  # tokens per block
SPACE = namespace_seed("m")
A = list(range(101, 107))  # a chain of six blocks
B = [201, 202]


def stored(parent: int | None, *hashes: int) -> Stored:
    return Stored(parent, pack_u64(list(hashes)))


def frame(seq: int, *chains: Stored, removed: tuple[int, ...] = (), cleared: bool = False) -> Events:
    return Events(seq, list(chains), pack_u64(list(removed)), cleared)


def following(*workers: str, total_blocks: int = 100, silent_s: float = 30.0) -> CacheEvents:
    events = CacheEvents(PrefixIndex(), silent_s=silent_s, predicted_ttl_s=60.0)
    for worker in workers:
        events.add_worker(worker, total_blocks)
    return events


def test_first_frames_need_no_snapshot() -> None:
    events = following("w")
    assert events.apply("w", EPOCH, frame(1, stored(None, *A[:3])))
    assert events.apply("w", EPOCH, frame(2, stored(A[2], *A[3:]), stored(None, *B)))
    assert events.match(A) == {"w": 6}
    assert events.match(B) == {"w": 2}


def test_duplicates_are_ignored() -> None:
    events = following("w")
    one, two = frame(1, stored(None, *A)), frame(2, removed=(A[5],))
    for message in (one, two, one, two):
        assert events.apply("w", EPOCH, message)
    assert events.match(A) == {"w": 5}
    assert events.counters.duplicates == 2


def test_event_gap_keeps_index() -> None:
    """What is known stays in use until the snapshot is here; frames after it are not lost."""
    events = following("w", "other")
    events.apply("other", EPOCH, frame(1, stored(None, *A)))
    events.apply("w", EPOCH, frame(1, stored(None, *A[:3])))
    assert not events.apply("w", EPOCH, frame(3, stored(A[3], A[4])))  # frame 2 stored A[3]
    assert events.apply("w", EPOCH, frame(4, stored(A[4], A[5])))  # asked once
    assert events.match(A) == {"w": 3, "other": 6}
    assert events.snapshot("w", EPOCH, Snapshot(3, [stored(None, *A[:5])]))
    assert events.match(A) == {"w": 6, "other": 6}
    assert (events.counters.gaps, events.counters.snapshots) == (1, 1)


def test_late_frame_closes_a_gap() -> None:
    events = following("w")
    assert events.apply("w", EPOCH, frame(1, stored(None, *A[:2])))
    assert not events.apply("w", EPOCH, frame(3, stored(A[2], A[3])))
    assert events.apply("w", EPOCH, frame(2, stored(A[1], A[2])))
    assert events.match(A) == {"w": 4}
    assert events.snapshot("w", EPOCH, Snapshot(3, [stored(None, *A[:4])]))
    assert events.match(A) == {"w": 4}


def test_event_orphan_parent() -> None:
    """A child of an unknown block: a snapshot is asked for, and the child counts with it or without."""
    events = following("w")
    assert events.apply("w", EPOCH, frame(1, cleared=True))
    assert not events.apply("w", EPOCH, frame(2, stored(A[2], *A[3:])))
    assert events.match(A) == {}
    assert events.apply("w", EPOCH, frame(3, stored(None, *A[:3])))  # its parent turns up
    assert events.match(A) == {"w": 6}
    assert events.snapshot("w", EPOCH, Snapshot(3, [stored(None, *A)]))
    assert events.match(A) == {"w": 6}
    assert events.counters.orphans == 1


def test_event_remove_then_restore_order() -> None:
    """Within a frame removals come first, across frames the order is the sequence's."""
    events = following("w")
    events.apply("w", EPOCH, frame(1, stored(None, *A)))
    events.apply("w", EPOCH, frame(2, stored(None, *A), removed=tuple(reversed(A))))
    assert events.match(A) == {"w": 6}
    remove, restore = frame(3, removed=(A[2],)), frame(4, stored(A[1], A[2]))
    events.apply("w", EPOCH, restore)
    events.apply("w", EPOCH, remove)
    assert events.match(A) == {"w": 6}  # what was hidden behind A[2] counts again


def test_worker_restart_forgets() -> None:
    events = following("w", "other")
    for worker in ("w", "other"):
        events.apply(worker, EPOCH, frame(1, stored(None, *A)))
    assert events.apply("w", NEXT_EPOCH, frame(1, stored(None, *B)))
    assert events.match(A) == {"other": 6}
    assert events.match(B) == {"w": 2}
    assert events.apply("w", EPOCH, frame(2, stored(A[5], 999)))  # a late frame of the old one
    assert events.match(B) == {"w": 2}
    assert (events.counters.restarts, events.counters.old_epoch) == (1, 1)


def test_restart_in_the_middle_asks() -> None:
    events = following("w")
    events.apply("w", EPOCH, frame(1, stored(None, *A)))
    assert not events.apply("w", NEXT_EPOCH, frame(7, stored(None, *B)))
    assert events.match(A) == events.match(B) == {}
    assert events.snapshot("w", NEXT_EPOCH, Snapshot(6, []))
    assert events.match(B) == {"w": 2}


def test_dead_worker_is_forgotten_at_once() -> None:
    events = following("w", "other")
    for worker in ("w", "other"):
        events.apply(worker, EPOCH, frame(1, stored(None, *A)))
    events.remove_worker("w")
    assert events.match(A) == {"other": 6}
    events.remove_worker("other")
    assert events.index.stats.blocks == 0
    assert events.apply("w", EPOCH, frame(2, stored(A[5], 999)))
    assert events.counters.unknown_worker == 1


def test_returning_worker_is_asked() -> None:
    """It left the membership and came back on the same link: what it said meanwhile is not known."""
    events = following("w")
    events.apply("w", EPOCH, frame(1, stored(None, *A)))
    events.remove_worker("w")
    events.add_worker("w", 100)
    assert not events.apply("w", EPOCH, frame(9, stored(None, *B)))
    assert events.snapshot("w", EPOCH, Snapshot(9, [stored(None, *A), stored(None, *B)]))
    assert events.match(A) == {"w": 6}


def test_snapshot_replaces_all() -> None:
    events = following("w")
    events.apply("w", EPOCH, frame(1, stored(None, *A)))
    assert events.snapshot("w", EPOCH, Snapshot(5, [stored(None, *B), stored(B[0], 301)]))
    assert events.match(A) == {}
    assert events.match([B[0], 301]) == {"w": 2}
    assert events.snapshot("w", EPOCH, Snapshot(2, []))  # older than what is known
    assert events.match(B) == {"w": 2}


def test_cleared() -> None:
    events = following("w")
    events.apply("w", EPOCH, frame(1, stored(None, *A)))
    events.apply("w", EPOCH, frame(2, stored(None, *B), cleared=True))
    assert events.match(A) == {}
    assert events.match(B) == {"w": 2}


MALFORMED: dict[str, Any] = {
    "stored_length": Events(2, [Stored(None, b"1234567")], b""),
    "removed_length": Events(2, [], b"123456789"),
    "second_stored_length": Events(2, [stored(None, *B), Stored(None, b"1")], b""),
    "absurd_size": Events(2, [Stored(None, bytes(8 * 5000))], b""),
    "absurd_sum": Events(2, [Stored(None, bytes(8 * 3000))] * 2, b""),
    "absurd_removed": Events(2, [], bytes(8 * 5000)),
    "sequence": Events(0, [], b""),
    "no_events": {"seq": 2},
    "a_block_twice": frame(2, stored(None, 7, 8, 7)),
    "a_block_at_two_places": frame(2, stored(None, A[3])),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_hurts_its_sender_only(name: str) -> None:
    events = following("bad", "good")
    for worker in ("bad", "good"):
        events.apply(worker, EPOCH, frame(1, stored(None, *A)))
    assert not events.apply("bad", EPOCH, MALFORMED[name])
    assert events.counters.malformed + events.counters.contradictions == 1
    assert events.match(A)["good"] == 6
    assert events.apply("good", EPOCH, frame(2, stored(A[5], *B)))
    assert events.match(A + B)["good"] == 8
    assert events.snapshot("bad", EPOCH, Snapshot(2, [stored(None, *A[:2])]))
    assert events.match(A) == {"bad": 2, "good": 6}


def test_malformed_snapshot_is_not_asked_for_again() -> None:
    events = following("w")
    assert not events.apply("w", EPOCH, frame(3))
    assert events.snapshot("w", EPOCH, Snapshot(3, [Stored(None, b"123")]))
    assert events.apply("w", EPOCH, frame(4))
    assert events.counters.snapshots_asked == 1


def test_a_faulty_worker_causes_few_snapshots() -> None:
    """Every frame is an orphan, and the snapshots do not help: we copy no more than it sends."""
    events = following("w", total_blocks=10_000)
    held = [stored(None, *range(10_000, 12_000))]
    events.snapshot("w", EPOCH, Snapshot(1, held))
    asked = 0
    for seq in range(2, 2002):
        if not events.apply("w", EPOCH, frame(seq, stored(50_000 + 2 * seq, 50_001 + 2 * seq))):
            asked += 1
            events.snapshot("w", EPOCH, Snapshot(seq, held))
    assert 2 <= asked <= 5


def test_more_blocks_than_the_pool_has() -> None:
    """Blocks that were lost without a word: the snapshot puts it right."""
    events = following("w", total_blocks=5)
    assert not events.apply("w", EPOCH, frame(1, stored(None, *A)))
    assert events.counters.overfull == 1
    assert events.snapshot("w", EPOCH, Snapshot(1, [stored(None, *A[:5])]))
    assert events.match(A) == {"w": 5}


def test_frames_kept_aside_are_bounded() -> None:
    events = following("w")
    asked = [events.apply("w", EPOCH, frame(seq)) for seq in range(2, 2 + 3 * EARLY_FRAMES)].count(False)
    assert asked == 3
    assert len(events._streams["w"].early) <= EARLY_FRAMES


def test_transferred_blocks_indexed() -> None:
    """Blocks that a decode worker received and committed are told like any others: no orphans."""
    pool, events = BlockPool(8), following("decode")
    tokens = array("I", range(4 * SIZE))
    hashes = block_hashes(tokens, SIZE, SPACE)
    attempt = AttemptId(1)
    assert pool.hold(attempt, SPACE, [], 4) is not None
    for seq, received in ((1, range(3)), (2, range(3, 4))):  # by transfer; then extended by decoding
        for i in received:
            pool.commit(attempt, hashes[i], tokens[i * SIZE : (i + 1) * SIZE].tobytes())
        runs, removed = pool.drain_events()
        chains = [stored(run.parent, *run.hashes) for run in runs]
        assert events.apply("decode", EPOCH, frame(seq, *chains, removed=tuple(removed)))
    assert events.match(hashes) == {"decode": 4}
    assert events.counters.orphans == 0


# ------------------------------------------------------------ silence


def test_silent_worker_is_told_and_predicted() -> None:
    events = following("mute", "idle", "talks", silent_s=10.0)
    for n in range(SILENT_PROMPTS):
        events.placed("mute", A, 0, now_s=float(n))
        events.placed("talks", A, 0, now_s=float(n))
    events.apply("talks", EPOCH, frame(1, stored(None, *A[:2])))
    assert events.sweep(9.0) == []
    assert events.match(A) == {"talks": 2}
    assert events.sweep(10.0) == ["mute"]
    assert events.sweep(11.0) == []  # told once
    assert events.silent == {"mute"}
    assert events.counters.silent == 1
    assert events.match([*A, 999]) == {"mute": 6, "talks": 2}
    events.sweep(70.0)  # predictions age
    assert events.match(A) == {"talks": 2}
    assert events.apply("mute", EPOCH, frame(1, stored(None, A[0])))
    assert events.silent == frozenset()
    assert events.match(A) == {"mute": 1, "talks": 2}


def test_cached_prompts_owe_no_events() -> None:
    events = following("w", silent_s=1.0)
    for n in range(10):
        events.placed("w", A, len(A), now_s=float(n))
    assert events.sweep(100.0) == []


def test_predictions_are_bounded() -> None:
    """No more blocks than the pool has; the oldest go first; of a longer prompt the beginning counts."""
    cache = PredictedCache(blocks=20, ttl_s=60.0)
    for n in range(100):
        cache.add(range(1000 * n, 1000 * n + 4), now_s=float(n) / 10)
        assert len(cache) <= 20
    assert cache.match(range(99_000, 99_010), 10.0) == 4
    assert cache.match(range(1000, 1004), 10.0) == 0
    cache.add(range(500), 10.0)
    assert cache.match(range(500), 10.0) == 10


# ------------------------------------------------------------ against a real pool


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_follows_a_block_pool(data: st.DataObject) -> None:
    """A pool under pressure; frames get lost, come twice or swapped, snapshots late. It ends well."""
    pool, events = BlockPool(6), following("w", total_blocks=6)
    delivered: list[Events] = []
    seq, attempt = 0, 0
    pending = 0  # snapshots asked for
    prompts = [block_hashes(array("I", [t for c in p for t in [c] * SIZE]), SIZE, SPACE) for p in _PROMPTS]
    for _ in range(data.draw(st.integers(1, 25))):
        content = data.draw(st.sampled_from(_PROMPTS))
        _run(pool, AttemptId(attempt := attempt + 1), content)
        runs, removed = pool.drain_events()
        if runs or removed:
            seq += 1
            chains = [stored(run.parent, *run.hashes) for run in runs]
            delivered.append(frame(seq, *chains, removed=tuple(removed)))
        fate = data.draw(st.sampled_from(["pass", "pass", "lose", "repeat", "swap"]))
        if fate == "lose" and delivered:
            delivered.pop()
        elif fate == "repeat":
            delivered += delivered[-2:]
        elif fate == "swap":
            delivered[-2:] = reversed(delivered[-2:])
        if data.draw(st.booleans()):
            pending += _deliver(events, delivered)
        if pending and data.draw(st.booleans()):
            pending = _answer(pool, seq, events)
    _deliver(events, delivered)
    _answer(pool, seq, events)  # the link breaks and opens again, at the latest
    for hashes, content in zip(prompts, _PROMPTS, strict=True):
        tokens = array("I", [t for c in content for t in [c] * SIZE])
        n_found = len(pool.find(SPACE, hashes, tokens.tobytes()))
        assert events.match(hashes) == ({"w": n_found} if n_found else {})


_PROMPTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 2, 2, 2), (1,), (1, 1, 1, 1), (2, 0, 0)]


def _run(pool: BlockPool, attempt: AttemptId, content: tuple[int, ...]) -> None:
    tokens = array("I", [t for c in content for t in [c] * SIZE])
    hashes = block_hashes(tokens, SIZE, SPACE)
    found = pool.find(SPACE, hashes, tokens.tobytes())
    if pool.hold(attempt, SPACE, found, len(content)) is None:
        return
    for i in range(len(found), len(content)):
        pool.commit(attempt, hashes[i], tokens[i * SIZE : (i + 1) * SIZE].tobytes())
    pool.free(attempt)


def _deliver(events: CacheEvents, frames: list[Events]) -> int:
    asked = 0
    for message in frames:
        received: Any = decode(encode(_step(message)))
        asked += not events.apply("w", EPOCH, received.events)
    frames.clear()
    return asked


def _answer(pool: BlockPool, seq: int, events: CacheEvents) -> int:
    return not events.snapshot(
        "w", EPOCH, Snapshot(seq, [stored(run.parent, *run.hashes) for run in pool.chains()])
    )


def _step(message: Events) -> Any:
    from serving.wire import Step

    return Step(events=message)
