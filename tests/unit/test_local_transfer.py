"""KvIo over the in-process transfer: deadlines, abandoned reads, faults, idle cost."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from serving.engine.base import BlockId, KVMemory
from serving.errors import PeerGone, TransferError, TransferTimeout
from serving.kv.io import KvIo
from serving.kv.local import LocalTransfer, Switchboard
from serving.kv.prefault import SLICE_BYTES, Prefault
from serving.kv.transfer import PeerInfo

BLOCK_BYTES, N_BLOCKS = 64, 8


def new_memory(fill: int = 0) -> KVMemory:
    buffer = ctypes.create_string_buffer(bytes([fill]) * (BLOCK_BYTES * N_BLOCKS), BLOCK_BYTES * N_BLOCKS)
    return KVMemory(ctypes.addressof(buffer), BLOCK_BYTES, N_BLOCKS, owner=buffer)


def block_of(memory: KVMemory, block: int) -> bytes:
    return ctypes.string_at(memory.address + block * memory.block_bytes, memory.block_bytes)


def info_of(io: KvIo) -> PeerInfo:
    assert io.memory is not None
    return PeerInfo(io.agent, io.metadata, io.memory.address, io.memory.block_bytes, io.memory.n_blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


class Ends:
    """Two opened KvIo; `ours` reads `theirs`."""

    def __init__(self) -> None:
        board = Switchboard()
        self.transfer = LocalTransfer("ours", board)
        self.their_transfer = LocalTransfer("theirs", board)
        self.ours, self.theirs = KvIo(self.transfer), KvIo(self.their_transfer)
        self.notes: list[bytes] = []
        self.ended: list[object] = []
        self.theirs.on_note = self.notes.append
        self.ours.on_ended = self.ended.append

    async def read(self, blocks: list[int], deadline_s: float = 5, token: int = 1) -> None:
        ids = [BlockId(block) for block in blocks]
        await self.ours.read("theirs", ids, ids, b"note", deadline_s, token=token)


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.ours.open(new_memory())
    await ends.theirs.open(new_memory(7))
    await ends.ours.add_peer(info_of(ends.theirs), 5)
    yield ends
    await ends.ours.close()
    await ends.theirs.close()


async def test_blocks_and_note_arrive(ends: Ends) -> None:
    await ends.read([2, 5])
    memory = ends.ours.memory
    assert memory is not None
    assert [block_of(memory, b) == b"\7" * BLOCK_BYTES for b in (1, 2, 5, 6)] == [False, True, True, False]
    await until(lambda: ends.notes == [b"note"])
    assert ends.ours.counters.bytes == 2 * BLOCK_BYTES
    assert ends.ours.in_flight(1) == 0


async def test_deadline_abandons_and_the_end_is_told_later(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    with pytest.raises(TransferTimeout):
        await ends.read([1], deadline_s=0.02)
    assert ends.ours.in_flight(1) == 1
    assert ends.ended == []
    ends.transfer.faults.hang = False
    await until(lambda: ends.ended == [1])
    assert ends.ours.in_flight(1) == 0


async def test_cancel_abandons(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    task = asyncio.create_task(ends.read([1]))
    await until(lambda: ends.transfer.busy)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends.ours.in_flight(1) == 1
    ends.transfer.faults.hang = False
    await until(lambda: ends.ended == [1])


async def test_two_reads_of_a_token_end_it_once(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    tasks = [asyncio.create_task(ends.read([block], deadline_s=0.02)) for block in (1, 2)]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ends.ours.in_flight(1) == 2
    ends.transfer.faults.hang = False
    await until(lambda: ends.ours.in_flight(1) == 0)
    assert ends.ended == [1]


async def test_failing_post_is_told_at_once(ends: Ends) -> None:
    ends.transfer.faults.failing_posts = 1
    with pytest.raises(TransferError, match="not posted"):
        await ends.read([1])
    await ends.read([1])  # the next one works


@pytest.mark.parametrize("blocks", [[N_BLOCKS], [0, -1]], ids=["beyond", "negative"])
async def test_ids_outside_the_pool_are_refused(ends: Ends, blocks: list[int]) -> None:
    with pytest.raises(TransferError, match="outside"):
        await ends.read(blocks)


async def test_dead_peer_is_gone(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    task = asyncio.create_task(ends.read([1]))
    await until(lambda: ends.transfer.busy)
    await ends.theirs.close()
    with pytest.raises(PeerGone):
        await task
    with pytest.raises(PeerGone):
        await ends.read([1])


async def test_dropped_peer_fails_its_callers_but_not_the_quarantine(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    task = asyncio.create_task(ends.read([1]))
    await until(lambda: ends.transfer.busy)
    ends.ours.remove_peer("theirs")
    with pytest.raises(PeerGone):
        await task
    assert ends.ours.in_flight(1) == 1  # removing is no fence
    ends.transfer.faults.hang = False
    await until(lambda: ends.ended == [1])


async def test_peer_with_foreign_metadata_is_refused(ends: Ends) -> None:
    with pytest.raises(TransferError):
        await ends.ours.add_peer(PeerInfo("theirs", b"?", 0, BLOCK_BYTES, N_BLOCKS), 1)


async def test_close_fails_whoever_waits(ends: Ends) -> None:
    ends.transfer.faults.hang = True
    task = asyncio.create_task(ends.read([1]))
    await until(lambda: ends.transfer.busy)
    await ends.ours.close()
    with pytest.raises(TransferError):
        await task
    with pytest.raises(TransferError):
        await ends.read([1])


async def test_idle_thread_costs_nothing(ends: Ends) -> None:
    await asyncio.sleep(0.05)
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.01


async def test_expected_blocks_keep_their_content(ends: Ends) -> None:
    memory = ends.theirs.memory
    assert memory is not None
    ends.theirs.expect([BlockId(0), BlockId(3), BlockId(0)])
    await asyncio.sleep(0.01)
    assert block_of(memory, 3) == b"\7" * BLOCK_BYTES


def test_prefault_works_in_slices_and_once() -> None:
    block_bytes = SLICE_BYTES // 2
    buffer = mmap.mmap(-1, block_bytes * 5)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    prefault = Prefault(KVMemory(address, block_bytes, 5, owner=buffer))
    blocks = [BlockId(block) for block in (4, 0, 1, 2)]
    assert prefault.touch(blocks) == [1, 2]
    assert prefault.touch(blocks) == []  # the first two are done, so the slice reaches to the end


async def test_attention_is_given_and_taken_back(ends: Ends) -> None:
    def polls_of(transfer: LocalTransfer) -> list[float]:
        times: list[float] = []
        plain = transfer.poll

        def poll():  # type: ignore[no-untyped-def]
            times.append(time.monotonic())
            return plain()

        transfer.poll = poll  # type: ignore[method-assign]
        return times

    polls = polls_of(ends.their_transfer)
    ends.theirs.attend("reader")
    await asyncio.sleep(0.1)
    assert len(polls) > 10
    ends.theirs.dismiss("reader")
    await asyncio.sleep(0.02)
    polls.clear()
    await asyncio.sleep(0.1)
    assert len(polls) <= 2
