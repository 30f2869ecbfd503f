"""PullRole and PrefillRole against each other: what is found, what is not, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.engine.base import LENT, AttemptId, BlockId, ChunkReady
from serving.wire import Chunk, Confirm, Detach, Lend, Refused, loan_of, pack_u32
from tests.unit.handoff_fakes import A, MemoryLink, Pair, until

LOAN = AttemptId(loan_of(A))


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.open()
    yield pair
    await pair.close()


def finds(pair: Pair, blocks: list[int]) -> None:
    """The owner's engine answers the loan that it was asked for."""
    ids = [BlockId(block) for block in blocks]
    pair.owner.role.on_chunk(ChunkReady(LOAN, 0, ids, True, LENT if ids else None))


async def asked(pair: Pair, n_cached: int = 0) -> None:
    pair.reader.pull()
    pair.reader.reserve([11, 12, 13], n_cached)
    await until(lambda: pair.owner.engine.lent)


async def ends(pair: Pair) -> int:
    """With how many blocks; nothing is held anywhere after it."""
    await until(lambda: pair.reader.engine.prefixes)
    await until(lambda: pair.reader.kv.idle and pair.owner.role.idle)
    [(attempt, n_blocks)] = pair.reader.engine.prefixes
    assert attempt == A
    assert not pair.reader.engine.cancelled
    assert not pair.reader.failed
    assert pair.owner.role.counters.leases_held == 0
    return n_blocks


# ---------------------------------------------------------------- what goes well


@pytest.mark.parametrize("found", [3, 2], ids=["all", "owner-has-less"])
@pytest.mark.parametrize("n_cached", [0, 1])
async def test_found(pair: Pair, found: int, n_cached: int) -> None:
    await asked(pair, n_cached)
    assert pair.owner.engine.lent == [(LOAN, 0, [1, 2, 3])]
    finds(pair, [1, 2, 3][:found])
    assert await ends(pair) == found
    engine = pair.reader.engine
    assert [engine.block(b) for b in (11, 12, 13)] == [
        101 + i if n_cached <= i < found else 11 + i for i in range(3)
    ]
    assert pair.owner.engine.released == [LOAN]
    assert pair.reader.pulls.counters.blocks == found - n_cached
    moves = pair.reader.kv.take_moves()
    assert (moves.count, moves.tokens) == (1, found - n_cached)
    assert moves.ms > 0
    assert pair.reader.kv.take_moves().count == 0


async def test_fully_cached_here_asks_nobody(pair: Pair) -> None:
    pair.reader.pull()
    pair.reader.reserve([11, 12], n_cached=2)
    assert await ends(pair) == 2
    assert pair.owner.engine.lent == []


async def test_owner_has_no_more_than_we(pair: Pair) -> None:
    await asked(pair, n_cached=2)
    finds(pair, [1, 2])
    assert await ends(pair) == 2
    assert pair.owner.engine.released == [LOAN]
    assert pair.reader.io.counters.blocks == 0


# ---------------------------------------------------------------- what does not: the prompt is computed


async def test_not_found(pair: Pair) -> None:
    await asked(pair)
    finds(pair, [])
    assert await ends(pair) == 0
    assert pair.owner.engine.released == []  # the engine kept nothing
    assert pair.reader.pulls.counters.failures == {"lease_refused": 1}


async def test_silent_owner_is_not_waited_for(pair: Pair) -> None:
    pair.reader.pull(within_ms=50)
    pair.reader.reserve([11, 12, 13])
    await until(lambda: pair.reader.engine.prefixes)
    assert pair.owner.engine.lent
    finds(pair, [1, 2, 3])  # comes after the reader left
    assert await ends(pair) == 0
    assert pair.owner.engine.released == [LOAN]
    assert pair.reader.pulls.counters.failures == {"timeout": 1}


async def test_unreachable_owner_does_not_hold_the_prompt_up(pair: Pair) -> None:
    pair.reader.pull(address="nobody:1")
    assert await ends(pair) == 0  # before its turn came


async def test_restarted_owner_is_not_believed(pair: Pair) -> None:
    pair.reader.pull(epoch=2)
    pair.reader.reserve([11])
    assert await ends(pair) == 0


async def test_other_layout_is_computed(pair: Pair) -> None:
    pair.owner.engine.layout = "layout-2"
    pair.reader.pull()
    pair.reader.reserve([11])
    assert await ends(pair) == 0
    assert pair.reader.pulls.counters.failures == {"layout_mismatch": 1}


async def test_lease_that_ran_out_is_not_used(pair: Pair) -> None:
    pair.reader.hold = lambda message: isinstance(message, Confirm)
    await asked(pair)
    finds(pair, [1, 2, 3])
    link = pair.reader.links[0]
    await until(lambda: any(isinstance(m, Confirm) for m in link.sent))
    pair.owner.wait(1000)
    assert await ends(pair) == 0
    assert pair.owner.engine.released == [LOAN]


async def test_owner_gone_before_it_answers(pair: Pair) -> None:
    await asked(pair)
    pair.reader.links[0].close("cut")
    await until(lambda: pair.reader.engine.prefixes)
    finds(pair, [1, 2, 3])
    assert await ends(pair) == 0
    assert pair.owner.engine.released == [LOAN]


async def test_owner_gone_while_reading_fails_retryable(pair: Pair) -> None:
    """peer_death_mid_read: what may still be written stays out of use, the request goes on elsewhere."""
    await asked(pair)
    pair.reader.transfer.faults.hang = True
    finds(pair, [1, 2, 3])
    await until(lambda: pair.reader.transfer.busy)
    pair.reader.links[0].close("killed")
    message, retryable = await pair.fails()
    assert retryable
    assert "pull" in message
    engine = pair.reader.engine
    assert engine.cancelled == {A: True}
    assert engine.prefixes == []
    assert engine.unquarantined == []
    pair.reader.transfer.faults.hang = False
    await until(lambda: engine.unquarantined == [A])
    await until(lambda: pair.reader.kv.idle and pair.owner.role.idle)
    assert pair.owner.engine.released == [LOAN]


async def test_read_not_posted_is_computed(pair: Pair) -> None:
    await asked(pair)
    pair.reader.transfer.faults.failing_posts = 1
    finds(pair, [1, 2, 3])
    assert await ends(pair) == 0


# ---------------------------------------------------------------- cancel, in every state


async def _dialing(pair: Pair) -> None:
    pair.reader.dial_s = 0.05
    pair.reader.pull()
    await asyncio.sleep(0.005)


async def _connected(pair: Pair) -> None:
    pair.reader.pull()
    await asyncio.sleep(0.02)


async def _asked(pair: Pair) -> None:
    await asked(pair)


async def _reading(pair: Pair) -> None:
    await asked(pair)
    pair.reader.transfer.faults.hang = True
    finds(pair, [1, 2, 3])
    await until(lambda: pair.reader.transfer.busy)


async def _confirming(pair: Pair) -> None:
    pair.reader.hold = lambda message: isinstance(message, Confirm)
    await asked(pair)
    finds(pair, [1, 2, 3])
    await until(lambda: any(isinstance(m, Confirm) for m in pair.reader.links[0].sent))


STATES = [_dialing, _connected, _asked, _reading, _confirming]


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__.strip("_"))
async def test_cancel_in_every_state(pair: Pair, reach: Callable[[Pair], Awaitable[None]]) -> None:
    await reach(pair)
    assert pair.reader.kv.cancel(A)
    engine = pair.reader.engine
    await until(lambda: A in engine.cancelled)
    assert engine.cancelled[A] is (reach is _reading)
    pair.reader.transfer.faults.hang = False
    if reach is _asked:
        finds(pair, [1, 2, 3])  # the engine had it in hand
    await until(lambda: pair.reader.kv.idle and pair.owner.role.idle)
    assert engine.prefixes == []
    assert pair.reader.failed == []
    assert pair.owner.engine.released == ([LOAN] if reach in (_asked, _reading, _confirming) else [])
    assert pair.reader.pulls.counters.cancelled == 1


# ---------------------------------------------------------------- what the owner refuses


async def test_owner_refuses_what_it_cannot_lend(pair: Pair) -> None:
    await asked(pair)
    link = pair.reader.links[0]
    for message in (Lend(LOAN, 0, pack_u32([1]), 0), Lend(7, 0, b"odd", 0)):
        link.send(message)
    far: MemoryLink = link.far
    await until(lambda: sum(isinstance(m, Refused) for m in far.sent) == 2)
    assert len(pair.owner.engine.lent) == 1
    await until(lambda: pair.reader.engine.prefixes)  # its own name was refused
    finds(pair, [1, 2, 3])
    await until(lambda: pair.owner.role.idle)
    assert any(isinstance(m, Detach) for m in link.sent)
    assert not any(isinstance(m, Chunk) for m in far.sent)


# ---------------------------------------------------------------- whatever happens in whatever order

EVENTS = ["find", "reserve", "turn", "turn", "turn", "hang", "flow", "cancel", "cut", "wait"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(EVENTS), max_size=12), st.integers(0, 3), st.integers(0, 3))
def test_every_interleaving_frees_everything(events: list[str], n_cached: int, found: int) -> None:
    asyncio.run(interleave(events, n_cached, found))


async def interleave(events: list[str], n_cached: int, found: int) -> None:
    pair = Pair()
    await pair.open()
    owner, reader = pair.owner, pair.reader
    reader.pull()
    answered = False

    def find() -> None:
        nonlocal answered
        if owner.engine.lent and not answered:
            answered = True
            finds(pair, [1, 2, 3][:found])

    for event in events:
        match event:
            case "find":
                find()
            case "reserve":
                reader.reserve([11, 12, 13], n_cached)
            case "turn":
                await asyncio.sleep(0.001)
            case "hang" | "flow":
                reader.transfer.faults.hang = event == "hang"
            case "cancel":
                reader.kv.cancel(A)
            case "cut" if reader.links:
                reader.links[-1].close("cut")
            case "wait":
                owner.wait(6)
    reader.transfer.faults.hang = False
    reader.reserve([11, 12, 13], n_cached)
    while not reader.kv.idle:
        find()
        await asyncio.sleep(0.001)
    find()
    owner.wait(1000)
    engine = reader.engine
    assert len(engine.prefixes) + len(engine.cancelled) == 1
    assert engine.unquarantined == [a for a, quarantined in engine.cancelled.items() if quarantined]
    assert len(reader.failed) <= len(engine.cancelled)
    if engine.prefixes:
        [(_, n_blocks)] = engine.prefixes
        assert n_blocks in (0, n_cached, max(n_cached, found))
        assert [engine.block(11 + b) for b in range(n_cached)] == [11 + b for b in range(n_cached)]
        if n_blocks > n_cached:
            moved = range(n_cached, n_blocks)
            assert [engine.block(11 + b) for b in moved] == [101 + b for b in moved]
    await until(lambda: owner.role.idle)
    assert owner.engine.released == ([LOAN] if answered and found else [])
    assert owner.role.counters.leases_held == 0
    await pair.close()
