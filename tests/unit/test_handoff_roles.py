"""PrefillRole and DecodeRole against each other: every order of events, every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import permutations

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.config import Deadlines
from serving.engine.base import AttemptId
from serving.kv.local import Switchboard
from serving.wire import Chunk, Confirm, PeerAddress, PeerWelcome, Refused, Renew
from tests.unit.handoff_fakes import OWNER, TOKEN, Owner, Reader, until

A = AttemptId(1)
DEADLINES = Deadlines(transfer_ms=5000, prefill_ms=5000, queue_ms=5000)
HASTY = Deadlines(transfer_ms=100, prefill_ms=100, queue_ms=100)


class Pair:
    def __init__(self, deadlines: Deadlines = DEADLINES) -> None:
        self.board = Switchboard()
        self.owners = {OWNER: Owner(self.board, DEADLINES)}
        self.reader = Reader(self.board, deadlines, self.owners)

    @property
    def owner(self) -> Owner:
        return self.owners[OWNER]

    async def open(self) -> None:
        await self.owner.io.open(self.owner.engine.memory)
        await self.reader.io.open(self.reader.engine.memory)

    async def close(self) -> None:
        self.reader.transfer.faults.hang = False
        await self.reader.role.stop()
        await self.reader.peers.stop()
        for owner in self.owners.values():
            await owner.role.stop()
            await owner.io.close()
        await self.reader.io.close()

    async def arrives(self) -> None:
        await until(lambda: self.reader.engine.arrived)
        await until(lambda: self.owner.role.idle)

    async def fails(self) -> tuple[str, bool]:
        """Message and retryability of the failure of attempt 1."""
        await until(lambda: self.reader.failed)
        [(attempt, message, retryable)] = self.reader.failed
        assert attempt == A
        assert A in self.reader.engine.cancelled
        assert self.reader.engine.arrived == []
        return message, retryable

    async def reads_hang(self) -> None:
        """Up to the state in which a read is in flight for attempt 1, the prefill complete."""
        await self.is_attached()
        self.reader.transfer.faults.hang = True
        self.owner.chunk(0, [1, 2], last=True)
        await until(lambda: self.reader.transfer.busy)

    async def is_attached(self) -> None:
        self.owner.accept(1)
        self.reader.accept()
        self.reader.reserve([11, 12])
        await until(self.reader.attached)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.open()
    yield pair
    await pair.close()


@pytest_asyncio.fixture
async def hasty() -> AsyncIterator[Pair]:
    """The reader's deadlines are 100 ms."""
    pair = Pair(HASTY)
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


# ---------------------------------------------------------------- cancel, in every state


async def _nothing(pair: Pair) -> None:
    pair.reader.accept()


async def _dialing(pair: Pair) -> None:
    pair.reader.dial_s = 0.05
    pair.reader.accept()
    await asyncio.sleep(0.005)


async def _connected(pair: Pair) -> None:
    pair.reader.accept()
    await asyncio.sleep(0.02)


async def _attached(pair: Pair) -> None:
    await pair.is_attached()


async def _reading(pair: Pair) -> None:
    await pair.reads_hang()


async def _confirming(pair: Pair) -> None:
    pair.reader.hold = lambda message: isinstance(message, Confirm)
    await pair.is_attached()
    pair.owner.chunk(0, [1, 2], last=True)
    await until(lambda: any(isinstance(m, Confirm) for m in pair.reader.links[0].sent))


STATES = [_nothing, _dialing, _connected, _attached, _reading, _confirming]
State = Callable[[Pair], Awaitable[None]]


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__.strip("_"))
async def test_cancel_in_every_state(pair: Pair, reach: State) -> None:
    reader, owner = pair.reader, pair.owner
    await reach(pair)
    assert reader.role.cancel(A)
    await until(lambda: A in reader.engine.cancelled)
    reading = reach is _reading
    assert reader.engine.cancelled[A] is reading  # quarantined only while a read may still write
    if reading:
        assert reader.engine.unquarantined == []
        reader.transfer.faults.hang = False
        await until(lambda: reader.engine.unquarantined == [A])
    if reach in (_reading, _confirming):  # the owner frees at once, long before the lease runs out
        await until(lambda: owner.engine.released == [A])
    assert reader.role.idle
    assert reader.failed == []
    assert not reader.role.cancel(A)


async def test_queued_transferred_abort(pair: Pair) -> None:
    """KV is here and the attempt waits for its first step: the engine alone has it."""
    await pair.is_attached()
    pair.owner.chunk(0, [1, 2], last=True)
    await pair.arrives()
    assert not pair.reader.role.cancel(A)  # so its caller tells the engine
    assert pair.reader.role.idle


@pytest.mark.parametrize("chunks", [0, 1, 2], ids=["queued", "computing", "complete"])
async def test_prefill_cancel_is_told_to_the_reader(pair: Pair, chunks: int) -> None:
    await pair.is_attached()
    pair.reader.hold = lambda message: isinstance(message, Confirm)
    for first in range(chunks):
        pair.owner.chunk(first, [first + 1], last=first == 1)
    pair.owner.role.cancel(A)
    message, retryable = await pair.fails()
    assert "cancelled" in message
    assert retryable
    assert pair.owner.role.idle


async def test_detach_of_a_computing_prefill_frees_it_when_complete(pair: Pair) -> None:
    owner = pair.owner
    await pair.is_attached()
    owner.chunk(0, [1])
    await until(lambda: owner.role.counters.leases_held == 1)
    pair.reader.role.cancel(A)
    await until(lambda: owner.role.counters.detached == 1)
    assert owner.engine.released == []
    owner.chunk(1, [2], last=True)
    assert owner.engine.released == [A]
    assert owner.role.idle


# ---------------------------------------------------------------- what goes wrong


async def test_transfer_post_failure_told(pair: Pair) -> None:
    await pair.is_attached()
    pair.reader.transfer.faults.failing_posts = 1
    pair.owner.chunk(0, [1])
    message, retryable = await pair.fails()
    assert "not posted" in message
    assert retryable
    assert pair.reader.role.counters.failures == {"transfer": 1}
    await until(lambda: pair.owner.role.counters.detached == 1)


async def test_layout_error_reaches_client(pair: Pair) -> None:
    pair.owner.engine.layout = "layout-2"
    pair.reader.accept()
    message, retryable = await pair.fails()
    assert "layout-2" in message
    assert not retryable
    assert pair.reader.role.counters.failures == {"layout_mismatch": 1}
    assert "agent-1" not in pair.reader.transfer._peers  # refused before the agents met


async def test_peer_restart_new_epoch(pair: Pair) -> None:
    reader, old = pair.reader, pair.owner
    await pair.is_attached()
    old.chunk(0, [1, 2], last=True)
    await pair.arrives()
    new = Owner(pair.board, DEADLINES, epoch=2)
    await new.io.open(new.engine.memory)
    pair.owners = reader.owners
    reader.owners[OWNER] = new
    reader.links[0].far.close("the old one stops")
    await old.io.close()

    reader.accept(attempt=2, epoch=2)
    reader.reserve([13], attempt=2)
    new.chunk(0, [5], last=True)
    await until(lambda: len(reader.engine.arrived) == 2)
    assert reader.engine.block(13) == 105
    await until(lambda: list(reader.transfer._peers) == ["agent-2"])

    reader.accept(attempt=3, epoch=1)  # a submit that still names the old incarnation
    await until(lambda: reader.failed)
    assert "restarted" in reader.failed[0][1]
    assert reader.failed[0][2]


async def test_read_deadline_quarantines(hasty: Pair) -> None:
    await hasty.reads_hang()
    message, retryable = await hasty.fails()
    assert "not read in" in message
    assert retryable
    engine = hasty.reader.engine
    assert engine.cancelled == {A: True}
    assert not hasty.reader.role.idle
    hasty.reader.transfer.faults.hang = False
    await until(lambda: engine.unquarantined == [A])
    assert hasty.reader.role.idle


async def _no_reservation(pair: Pair) -> None:
    pair.reader.accept()


async def _no_confirmation(pair: Pair) -> None:
    await _confirming(pair)


async def _no_welcome(pair: Pair) -> None:
    pair.reader.dial_s = 1.0
    pair.reader.accept()


@pytest.mark.parametrize(
    ("reach", "what"),
    [
        (_no_reservation, "no room"),
        (_attached, "next chunk"),
        (_no_confirmation, "confirmation"),
        (_no_welcome, "not connected"),
    ],
    ids=["reserve", "chunk", "confirm", "connect"],
)
async def test_every_wait_has_a_deadline(hasty: Pair, reach: State, what: str) -> None:
    await reach(hasty)
    message, retryable = await hasty.fails()
    assert what in message
    assert retryable
    assert hasty.reader.role.counters.failures == {"timeout": 1}


async def test_unreachable_owner(pair: Pair) -> None:
    pair.reader.owners.clear()
    pair.reader.accept()
    message, retryable = await pair.fails()
    assert "refused" in message
    assert retryable
    pair.reader.owners[OWNER] = Owner(pair.board, DEADLINES)  # for the fixture


@pytest.mark.parametrize(
    "reach", [_attached, _reading, _confirming], ids=["attached", "reading", "confirming"]
)
async def test_lost_link_fails_the_reader_and_frees_the_owner(pair: Pair, reach: State) -> None:
    await reach(pair)
    pair.reader.links[0].close("cut")
    _, retryable = await pair.fails()
    assert retryable
    if reach is _attached:
        pair.owner.chunk(0, [1, 2], last=True)
    await until(lambda: pair.owner.engine.released == [A])
    assert pair.owner.role.idle


async def test_lease_expiry_refuses_the_confirmation(pair: Pair) -> None:
    owner = pair.owner
    await pair.reads_hang()
    owner.wait(11)  # no renewal came in for longer than the lease
    assert owner.engine.released == [A]
    assert owner.role.counters.expired == 1
    pair.reader.transfer.faults.hang = False  # the bytes arrive, of blocks that are others' by now
    message, retryable = await pair.fails()
    assert "ran out" in message
    assert retryable
    assert pair.reader.role.counters.failures == {"lease_refused": 1}


async def test_lease_expiry_while_computing_frees_at_the_end(pair: Pair) -> None:
    owner = pair.owner
    await pair.is_attached()
    owner.chunk(0, [1])
    owner.wait(11)
    assert owner.engine.released == []
    await pair.fails()
    owner.chunk(1, [2], last=True)
    assert owner.engine.released == [A]
    assert owner.role.idle


async def test_reader_that_never_comes(pair: Pair) -> None:
    owner = pair.owner
    owner.accept(1)
    owner.chunk(0, [1], last=True)
    owner.wait(9)
    assert owner.engine.released == []
    owner.wait(2)  # queue_ms + transfer_ms are 10 s
    assert owner.engine.released == [A]
    assert owner.role.idle
    pair.reader.accept()
    pair.reader.reserve([11])
    message, _ = await pair.fails()
    assert "ran out" in message


async def test_unknown_attempt_is_refused_in_bounded_time(pair: Pair) -> None:
    pair.reader.accept()
    pair.reader.reserve([11])
    await until(pair.reader.attached)
    await asyncio.sleep(0.005)
    pair.owner.wait(11)
    message, _ = await pair.fails()
    assert "no prefill" in message
    assert pair.owner.role.idle


async def test_engine_failure_is_told_to_the_reader(pair: Pair) -> None:
    await pair.is_attached()
    pair.owner.role.on_failed(A, "bad weights")
    message, _ = await pair.fails()
    assert "bad weights" in message


@pytest.mark.parametrize(
    ("first", "blocks", "last"),
    [(1, [2], False), (0, [1, 2, 3], True), (0, [1], True)],
    ids=["hole", "too-many", "too-few"],
)
async def test_chunks_that_do_not_fit_are_refused(
    pair: Pair, first: int, blocks: list[int], last: bool
) -> None:
    await pair.is_attached()
    pair.owner.chunk(first, blocks, last=last)
    await pair.fails()


async def test_decode_engine_failure_ends_quietly(pair: Pair) -> None:
    await pair.is_attached()
    pair.reader.role.on_engine_failed(A)
    await until(lambda: pair.reader.role.idle)
    assert pair.reader.failed == []


async def test_second_reader_is_refused(pair: Pair) -> None:
    await pair.is_attached()
    second = Reader(pair.board, DEADLINES, pair.owners)
    second.transfer.agent = "agent-second"
    await second.io.open(second.engine.memory)
    second.accept()
    second.reserve([11, 12])
    await until(lambda: second.failed)
    assert "another reader" in second.failed[0][1]
    pair.owner.chunk(0, [1, 2], last=True)
    await pair.arrives()
    await second.role.stop()
    await second.peers.stop()
    await second.io.close()


async def test_owner_stop_refuses_its_readers(pair: Pair) -> None:
    await pair.is_attached()
    await pair.owner.role.stop()
    message, _ = await pair.fails()
    assert "stops" in message
    assert any(isinstance(m, Refused) for m in pair.owner.links[0].sent)


async def test_owner_that_never_welcomes(hasty: Pair) -> None:
    hasty.owner.role._welcome = lambda link: None  # type: ignore[method-assign]
    hasty.reader.accept()
    message, _ = await hasty.fails()
    assert "not connected" in message
    assert not any(isinstance(m, PeerWelcome) for m in hasty.owner.links[0].sent)


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
                reader.role.cancel(A)
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
    await until(lambda: reader.role.idle)
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
