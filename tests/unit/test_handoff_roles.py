"""PrefillRole and DecodeRole against each other: every order of events, and any interleaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import permutations

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.kv.peer_link import Peer
from serving.wire import Chunk, PeerAddress, Renew
from tests.unit.handoff_fakes import OWNER, TOKEN, A, Pair, until


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.open()
    yield pair
    await pair.close()


# ---------------------------------------------------------------- what goes well


@pytest.mark.parametrize("order", sorted(set(permutations(["attach", "first", "last"]))), ids="-".join)
async def test_any_order_of_attach_and_chunks(pair: Pair, order: tuple[str, ...]) -> None:
    """`last` before `first` cannot happen: it then stands for both, one after the other."""
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    sent = 0
    for event in order:
        if event == "attach":
            reader.accept()
            reader.reserve([11, 12, 13])
            await until(reader.attached)
        elif sent == 0:
            owner.chunk(0, [1, 2])
            sent = 1
        else:
            owner.chunk(2, [3], last=True)
        await asyncio.sleep(0.002)
    await pair.arrives()
    assert reader.engine.arrived == [(A, TOKEN)]
    assert [reader.engine.block(b) for b in (11, 12, 13)] == [101, 102, 103]
    assert owner.engine.released == [A]
    assert owner.role.counters.leases_held == 0
    assert reader.failed == []


async def test_reader_may_be_ahead_of_its_prefill(pair: Pair) -> None:
    pair.reader.accept()
    pair.reader.reserve([11])
    await until(pair.reader.attached)
    await asyncio.sleep(0.01)
    pair.owner.accept(1)
    pair.owner.wait(1000)  # a known prefill takes as long as it takes
    pair.owner.chunk(0, [1], last=True)
    await pair.arrives()


async def test_large_prompt_over_chunk(pair: Pair) -> None:
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    reader.accept()
    reader.reserve(list(range(20, 30)))
    await until(reader.attached)
    for first in (0, 3, 6):
        owner.chunk(first, [first + 1, first + 2, first + 3])
        await asyncio.sleep(0.002)
    owner.chunk(9, [10], last=True)
    await pair.arrives()
    assert [reader.engine.block(b) for b in range(20, 30)] == [101 + i for i in range(10)]
    assert reader.io.counters.blocks == 10  # each once


async def test_cached_blocks_are_not_moved(pair: Pair) -> None:
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    reader.accept()
    reader.reserve([11, 12, 13, 14], n_cached=3)
    owner.chunk(0, [1, 2])
    owner.chunk(2, [3, 4], last=True)
    await pair.arrives()
    assert [reader.engine.block(b) for b in (11, 12, 13, 14)] == [11, 12, 13, 104]
    assert reader.role.counters.blocks == 1


async def test_fully_cached_prompt_still_asks_for_the_token(pair: Pair) -> None:
    pair.owner.accept(1)
    pair.reader.accept()
    pair.reader.reserve([11, 12], n_cached=2)
    pair.owner.chunk(0, [1])
    pair.owner.chunk(1, [2], last=True)
    await pair.arrives()
    assert pair.reader.engine.arrived == [(A, TOKEN)]
    assert pair.reader.role.counters.blocks == 0
    assert pair.owner.engine.released == [A]


@pytest.mark.parametrize("again", ["before the chunk", "after it"])
async def test_room_that_was_taken_back_is_not_written_to(pair: Pair, again: str) -> None:
    """The engine gave the blocks to others before there was anything to read; others come later."""
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    reader.accept()
    assert reader.reserve([11, 12, 13]).claim()
    if again == "before the chunk":
        reader.reserve([14, 15, 16], n_cached=1)
    await until(reader.attached)
    owner.chunk(0, [1, 2])
    owner.chunk(2, [3], last=True)
    if again == "after it":
        await until(lambda: reader.engine.begun == [A])
        assert reader.reserve([17, 18, 19]).claim()  # and once more
        await until(lambda: reader.engine.begun == [A, A])
        reader.reserve([14, 15, 16], n_cached=1)
    await pair.arrives()
    assert [reader.engine.block(b) for b in range(11, 20)] == [11, 12, 13, 14, 102, 103, 17, 18, 19]


async def test_the_lease_is_kept_alive_while_there_is_no_room(pair: Pair) -> None:
    pair.owner.accept(1)
    pair.reader.accept()
    pair.owner.chunk(0, [1], last=True)
    await until(lambda: pair.reader.engine.begun == [A])
    await until(lambda: any(isinstance(m, Renew) for link in pair.reader.links for m in link.sent))
    pair.reader.reserve([11])
    await pair.arrives()


async def test_a_link_that_is_lost_as_soon_as_it_is_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is told before the one who asked for it has had a turn."""
    connect = pair.reader.peers._connect

    async def connect_and_lose(address: str, epoch: int) -> Peer:
        peer = await connect(address, epoch)
        peer.link.close("cut")
        return peer

    monkeypatch.setattr(pair.reader.peers, "_connect", connect_and_lose)
    pair.owner.accept(1)
    pair.reader.accept()
    await until(lambda: pair.reader.failed)
    assert pair.reader.engine.cancelled == {A: False}


async def test_a_refusal_right_after_a_chunk_whose_room_was_taken_back(pair: Pair) -> None:
    pair.owner.accept(1)
    pair.reader.accept()
    offer = pair.reader.reserve([11, 12])
    await until(pair.reader.attached)
    assert offer.claim()
    pair.owner.chunk(0, [1])
    pair.owner.role.on_failed(A, "boom")  # both are heard in one turn of the loop
    await until(lambda: pair.reader.failed)
    assert pair.reader.engine.cancelled == {A: False}


@pytest.mark.parametrize("how", ["link", "refusal"])
async def test_an_owner_that_is_lost_while_there_is_no_room(pair: Pair, how: str) -> None:
    """Its frontend can go on elsewhere at once."""
    pair.owner.accept(1)
    pair.reader.accept()
    pair.owner.chunk(0, [1], last=True)
    await until(lambda: pair.reader.engine.begun == [A])
    if how == "link":
        pair.reader.links[0].close("gone")
    else:
        pair.owner.role.cancel(A)
    await until(lambda: pair.reader.failed)
    assert pair.reader.engine.cancelled == {A: False}  # nothing writes


@pytest.mark.parametrize("late", [False, True], ids=["attached", "attaches-late"])
async def test_finished_on_first_token(pair: Pair, late: bool) -> None:
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    reader.accept()
    owner.chunk(0, [1])
    if not late:
        reader.reserve([11, 12])
        await until(reader.attached)
    owner.chunk(1, [2], last=True, token=None)
    reader.reserve([11, 12])
    await until(lambda: reader.unneeded == [A])
    assert A in reader.engine.cancelled
    assert reader.failed == []
    assert owner.engine.released == []  # the engine kept nothing
    assert owner.role.idle


async def test_peer_is_dialled_once(pair: Pair) -> None:
    pair.reader.dial_s = 0.02
    owner, reader = pair.owner, pair.reader
    reader.peers.warm([PeerAddress(OWNER, "owner", 1, reader.engine.layout)] * 2)
    owner.accept(1)
    reader.accept()
    reader.reserve([11])
    owner.chunk(0, [1], last=True)
    await pair.arrives()
    assert len(reader.links) == 1


async def test_renewals_outlast_a_slow_prefill(pair: Pair) -> None:
    owner = pair.owner
    await pair.is_attached()
    owner.chunk(0, [1])
    await until(lambda: owner.role.counters.leases_held == 1)
    for _ in range(5):
        owner.wait(9)  # the lease is 10 s long
        [generation] = [m.generation for m in owner.links[0].sent if isinstance(m, Chunk)]
        pair.reader.links[0].send(Renew(1, generation))
        await asyncio.sleep(0.002)
    owner.chunk(1, [2], last=True)
    await pair.arrives()


# ---------------------------------------------------------------- whatever happens in whatever order

EVENTS = [
    "chunk",
    "chunk",
    "reserve",
    "turn",
    "turn",
    "hang",
    "flow",
    "cancel",
    "prefill_cancel",
    "cut",
    "wait",
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(EVENTS), max_size=14), st.integers(0, 3))
def test_every_interleaving_frees_everything(events: list[str], n_cached: int) -> None:
    asyncio.run(interleave(events, n_cached))


async def interleave(events: list[str], n_cached: int) -> None:
    pair = Pair()
    await pair.open()
    owner, reader = pair.owner, pair.reader
    owner.accept(1)
    reader.accept()
    sent, prefill_over = 0, False

    def next_chunk() -> None:
        nonlocal sent
        if not prefill_over and sent < 3:
            owner.chunk(sent, [sent + 1], last=sent == 2)
            sent += 1

    for event in events:
        match event:
            case "chunk":
                next_chunk()
            case "reserve":
                reader.reserve([11, 12, 13], n_cached)
            case "turn":
                await asyncio.sleep(0.001)
            case "hang" | "flow":
                reader.transfer.faults.hang = event == "hang"
            case "cancel":
                reader.kv.cancel(A)
            case "prefill_cancel":
                owner.role.cancel(A)
                prefill_over = True
            case "cut" if reader.links:
                reader.links[-1].close("cut")
            case "wait":
                owner.wait(6)
    reader.transfer.faults.hang = False
    reader.reserve([11, 12, 13], n_cached)
    while not prefill_over and sent < 3:
        next_chunk()
        await asyncio.sleep(0.001)
    await until(lambda: reader.kv.idle)
    owner.wait(100)  # a reader that was cancelled before it attached never comes
    engine = reader.engine
    assert len(engine.arrived) + len(engine.cancelled) == 1
    assert engine.unquarantined == [a for a, quarantined in engine.cancelled.items() if quarantined]
    assert len(reader.failed) <= len(engine.cancelled)
    if engine.arrived:
        moved = range(n_cached, 3)
        assert [engine.block(11 + b) for b in range(3)] == [
            101 + b if b in moved else 11 + b for b in range(3)
        ]
    await until(lambda: owner.role.idle)
    assert owner.engine.released == ([A] if sent == 3 else [])
    assert owner.role.counters.leases_held == 0
    await pair.close()
