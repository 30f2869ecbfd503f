"""PrefillRole and DecodeRole against each other: cancel in every state, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from serving.config import Deadlines
from serving.wire import Confirm, PeerWelcome, Refused
from tests.unit.handoff_fakes import DEADLINES, OWNER, A, MemoryLink, Owner, Pair, Reader, hello, until

HASTY = Deadlines(transfer_ms=100, prefill_ms=100, queue_ms=100)


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
    assert reader.kv.cancel(A)
    await until(lambda: A in reader.engine.cancelled)
    reading = reach is _reading
    assert reader.engine.cancelled[A] is reading  # quarantined only while a read may still write
    if reading:
        assert reader.engine.unquarantined == []
        reader.transfer.faults.hang = False
        await until(lambda: reader.engine.unquarantined == [A])
    if reach in (_reading, _confirming):  # the owner frees at once, long before the lease runs out
        await until(lambda: owner.engine.released == [A])
    assert reader.kv.idle
    assert reader.failed == []
    assert not reader.kv.cancel(A)


async def test_queued_transferred_abort(pair: Pair) -> None:
    """KV is here and the attempt waits for its first step: the engine alone has it."""
    await pair.is_attached()
    pair.owner.chunk(0, [1, 2], last=True)
    await pair.arrives()
    assert not pair.reader.kv.cancel(A)  # so its caller tells the engine
    assert pair.reader.kv.idle


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
    pair.reader.kv.cancel(A)
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
    message, alike = await pair.fails()
    assert "layout-2" in message
    assert not alike
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
    assert not hasty.reader.kv.idle
    hasty.reader.transfer.faults.hang = False
    await until(lambda: engine.unquarantined == [A])
    assert hasty.reader.kv.idle


async def _no_confirmation(pair: Pair) -> None:
    await _confirming(pair)


async def _no_welcome(pair: Pair) -> None:
    pair.reader.dial_s = 1.0
    pair.reader.accept()


@pytest.mark.parametrize(
    ("reach", "what"),
    [
        (_attached, "next chunk"),
        (_no_confirmation, "confirmation"),
        (_no_welcome, "not connected"),
    ],
    ids=["chunk", "confirm", "connect"],
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
    pair.reader.kv.on_engine_failed(A)
    await until(lambda: pair.reader.kv.idle)
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
    await second.kv.stop()
    await second.peers.stop()
    await second.io.close()


async def test_a_stranger_cannot_confirm(pair: Pair) -> None:
    """Another keyed peer that knows attempt and lease: the KV stays until its reader has it."""
    pair.reader.hold = lambda message: isinstance(message, Confirm)
    await pair.is_attached()
    pair.owner.chunk(0, [1, 2], last=True)
    await until(lambda: any(isinstance(m, Confirm) for m in pair.reader.links[0].sent))
    (confirm,) = [m for m in pair.reader.links[0].sent if isinstance(m, Confirm)]
    stranger = MemoryLink.pair(Deaf(), hello(5), pair.owner, hello(1))
    stranger.send(confirm)
    await until(lambda: stranger.far.sent)
    assert stranger.far.sent == [Refused(confirm.attempt, "another reader has it")]
    assert pair.owner.engine.released == []
    pair.reader.links[0].far.deliver(confirm)  # it gets through at last
    await pair.arrives()
    assert pair.owner.engine.released == [A]


class Deaf:
    def on_message(self, link: object, message: object) -> None:
        pass

    def on_lost(self, link: object, reason: str) -> None:
        pass


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
