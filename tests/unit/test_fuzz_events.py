"""Random and mutated KV events and snapshots: the index stays sound, and nothing raises.

Longer: `--hypothesis-profile=fuzz-long`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.event_frame import Frame, limit_bytes, read_frame
from kvrouter.events import CacheEvents
from serving import wire
from serving.wire import Events, Snapshot, Step, Stored, pack_u64
from tests.fuzzing import fuzzed, memory_under, mutated

TOTAL = 64
U64 = st.integers(0, (1 << 64) - 1)
HASHES = st.lists(st.integers(0, 12) | U64, max_size=12)
COLUMNS = HASHES.map(pack_u64) | st.binary(max_size=40)
CHAINS = st.lists(st.builds(Stored, st.none() | st.integers(0, 12) | U64, COLUMNS), max_size=4)
EVENTS = st.builds(Events, st.integers(0, 6) | U64, CHAINS, COLUMNS, st.booleans())
SNAPSHOTS = st.builds(Snapshot, st.integers(0, 6) | U64, CHAINS)
ORIGINALS = [
    wire.encode(Step(events=Events(1, [Stored(None, pack_u64([1, 2, 3])), Stored(2, pack_u64([9]))], b""))),
    wire.encode(Step(events=Events(2, [], pack_u64([3, 9])))),
    wire.encode(Step(events=Events(3, [Stored(9, pack_u64([4, 5]))], pack_u64([1]), True))),
    wire.encode(Snapshot(2, [Stored(None, pack_u64([1, 2, 3, 4])), Stored(1, pack_u64([7, 8]))])),
]


def told(events: CacheEvents, worker: str, epoch: int, message: Any) -> None:
    if isinstance(message, Snapshot):
        events.snapshot(worker, epoch, message)
    else:
        events.apply(worker, epoch, message)


def check(events: CacheEvents) -> None:
    """The index answers, holds no more than was told of living workers, and lets them go."""
    found = events.match([1, 2, 3, 4])
    assert all(0 < depth <= 4 for depth in found.values())
    for worker in ("a", "b"):
        events.remove_worker(worker)
    assert events.match([1, 2, 3, 4]) == {}
    assert events.index.stats.blocks == 0


@fuzzed(80)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), EVENTS | SNAPSHOTS | st.none()), max_size=12
    )
)
def test_any_messages_in_any_order(messages: list[tuple[str, int, Any]]) -> None:
    events = CacheEvents()
    for worker in ("a", "b"):
        events.add_worker(worker, TOTAL)
    for worker, epoch, message in messages:
        told(events, worker, epoch, message)
        events.sweep(1.0)
    check(events)


@fuzzed(100)
@given(st.lists(mutated(ORIGINALS), max_size=6))
def test_mutated_messages(payloads: list[bytes]) -> None:
    events = CacheEvents()
    for worker in ("a", "b"):
        events.add_worker(worker, TOTAL)
    for payload in payloads:
        try:
            message = wire.decode(payload)
        except msgspec.MsgspecError:
            continue
        told(events, "a", 1, message.events if isinstance(message, Step) else message)
    check(events)


@fuzzed(40)
@given(st.lists(EVENTS, max_size=20))
def test_frames_ahead_of_their_turn_are_kept_within_bounds(frames: list[Events]) -> None:
    """A worker that never closes its gap cannot make us keep all it says."""
    events = CacheEvents()
    events.add_worker("a", TOTAL)
    with memory_under(4 << 20):
        for n, frame in enumerate(frames):
            frame.seq = 10 + 2 * n
            events.apply("a", 1, frame)
    stream = events._streams["a"]
    assert stream.early_blocks <= TOTAL + limit_bytes(TOTAL) // 8 * 2


@fuzzed(150)
@given(EVENTS | st.none() | st.integers() | st.binary(max_size=8))
def test_a_frame_is_read_or_refused(events: Any) -> None:
    frame = read_frame(events, limit_bytes(TOTAL))
    assert frame is None or isinstance(frame, Frame)
    if frame is not None:
        assert frame.blocks * 8 <= 2 * limit_bytes(TOTAL)
