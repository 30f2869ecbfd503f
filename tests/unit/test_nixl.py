"""NixlTransfer under KvIo, over real NIXL: two processes, real deaths. The peer only polls.

UCX reads its settings once a process, so the tcp-only case runs its reader in a child as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serving.engine.base import BlockId, KVMemory
from serving.errors import PeerGone, StartError, TransferError, TransferTimeout
from serving.kv.io import KvIo
from serving.kv.nixl import NixlTransfer
from serving.kv.transfer import PeerInfo, ReadId

BLOCK_BYTES, N_BLOCKS = 1 << 16, 64
SPAWN = mp.get_context("spawn")
START_S = 60.0
SETTLE_S = 10.0


def new_memory(fill: int) -> KVMemory:
    size = BLOCK_BYTES * N_BLOCKS
    buffer = ctypes.create_string_buffer(size)
    ctypes.memset(buffer, fill, size)
    return KVMemory(ctypes.addressof(buffer), BLOCK_BYTES, N_BLOCKS, owner=buffer)


def block_of(memory: KVMemory, block: int) -> bytes:
    return ctypes.string_at(memory.address + block * BLOCK_BYTES, BLOCK_BYTES)


def owner_main(pipe: Connection, agent: str, fill: int) -> None:
    """Own a pool in which every byte is `fill`; poll; pass notes on."""
    memory, transfer = new_memory(fill), NixlTransfer(agent)
    transfer.open(memory)
    pipe.send(PeerInfo(agent, transfer.metadata(), memory.address, BLOCK_BYTES, N_BLOCKS))
    while not pipe.poll(0.0002):
        for note in transfer.poll()[1]:
            pipe.send(note)


@dataclass
class Owner:
    process: BaseProcess
    pipe: Connection
    info: PeerInfo

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)


@contextmanager
def new_owner(agent: str, fill: int) -> Iterator[Owner]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=owner_main, args=(theirs, agent, fill), daemon=True)
    process.start()
    try:
        assert ours.poll(START_S), "the owner did not start"
        yield Owner(process, ours, ours.recv())
    finally:
        process.kill()
        process.join(5)


def open_files(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until(condition: Callable[[], bool], seconds: float = SETTLE_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


@pytest_asyncio.fixture
async def reader() -> AsyncIterator[KvIo]:
    io = KvIo(NixlTransfer(f"reader-{time.monotonic_ns()}"))
    await io.open(new_memory(0))
    yield io
    await io.close()


async def test_bytes_are_equal_and_the_note_arrives(reader: KvIo) -> None:
    assert reader.memory is not None
    with new_owner("owner-a", 7) as owner:
        await reader.add_peer(owner.info, START_S)
        await reader.read("owner-a", ids(3, 9, 4), ids(1, 2, 5), b"read", SETTLE_S, token=1)
        sevens = b"\7" * BLOCK_BYTES
        assert [block_of(reader.memory, b) == sevens for b in range(7)] == [0, 1, 1, 0, 0, 1, 0]
        assert owner.pipe.poll(SETTLE_S)
        assert owner.pipe.recv() == b"read"
        assert (reader.counters.blocks, reader.counters.bytes) == (3, 3 * BLOCK_BYTES)


async def test_first_real_read_is_quick(reader: KvIo) -> None:
    with new_owner("owner-b", 7) as owner:
        await reader.add_peer(owner.info, START_S)
        started = time.monotonic()
        await reader.read("owner-b", ids(0), ids(0), b"", SETTLE_S, token=1)
        assert time.monotonic() - started < 0.5  # wiring up while nobody polls took seconds


async def test_killed_peer_is_gone_and_can_be_added_again(reader: KvIo) -> None:
    assert reader.memory is not None
    with new_owner("owner-c", 7) as owner:
        await reader.add_peer(owner.info, START_S)
        await reader.read("owner-c", ids(0), ids(0), b"", SETTLE_S, token=1)
        owner.kill()
        with pytest.raises(PeerGone):
            await reader.read("owner-c", ids(1), ids(1), b"", SETTLE_S, token=2)
        assert reader.in_flight(2) == 0
    with new_owner("owner-c", 9) as owner:  # the same name on purpose: epochs make it unique in earnest
        await reader.add_peer(owner.info, START_S)
        await reader.read("owner-c", ids(1), ids(1), b"", SETTLE_S, token=3)
        assert block_of(reader.memory, 1) == b"\x09" * BLOCK_BYTES


async def test_a_peer_that_comes_and_goes_costs_no_descriptors(reader: KvIo) -> None:
    """As a worker that freezes now and then. NIXL closes no connection to a peer that lives."""
    with new_owner("owner-i", 7) as owner:

        async def come_and_go() -> int:
            await reader.add_peer(owner.info, START_S)
            await reader.read("owner-i", ids(0), ids(0), b"", SETTLE_S, token=1)
            reader.remove_peer("owner-i")
            with pytest.raises(PeerGone):
                await reader.read("owner-i", ids(0), ids(0), b"", SETTLE_S, token=1)
            return open_files(os.getpid()) + open_files(owner.process.pid)

        first = await come_and_go()
        assert max([await come_and_go() for _ in range(4)]) <= first


async def test_a_kept_connection_that_broke_meanwhile_is_made_anew(reader: KvIo) -> None:
    with new_owner("owner-j", 7) as owner:
        await reader.add_peer(owner.info, START_S)
        reader.remove_peer("owner-j")
        transfer = reader._transfer
        assert isinstance(transfer, NixlTransfer)
        posts = 0
        post = transfer.start_read

        def broken_once(*args: Any) -> ReadId:
            nonlocal posts
            posts += 1
            if posts == 1:  # as NIXL tells of a connection that its peer or the kernel has reset
                transfer._peers["owner-j"].failed = True
                raise PeerGone("owner-j: read not posted: NIXL_ERR_REMOTE_DISCONNECT")
            return post(*args)

        transfer.start_read = broken_once  # type: ignore[method-assign]
        await reader.add_peer(owner.info, START_S)
        await reader.read("owner-j", ids(0), ids(0), b"", SETTLE_S, token=1)
        assert posts == 3


async def test_a_peer_that_was_given_up_is_forgotten_in_a_while(
    reader: KvIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that were replaced never come back."""
    monkeypatch.setattr("serving.kv.nixl.KEPT_S", 0.3)
    transfer = reader._transfer
    assert isinstance(transfer, NixlTransfer)
    with new_owner("owner-k", 7) as owner:
        await reader.add_peer(owner.info, START_S)
        reader.remove_peer("owner-k")
        await until(lambda: not transfer._peers and not transfer._given_up)


async def test_wrong_ids_and_metadata_are_refused(reader: KvIo) -> None:
    with new_owner("owner-d", 7) as owner:
        info = owner.info
        with pytest.raises(TransferError):
            await reader.add_peer(PeerInfo("x", b"garbage", info.base_address, BLOCK_BYTES, 1), SETTLE_S)
        with pytest.raises(TransferError):
            await reader.add_peer(PeerInfo("x", info.metadata, 0, BLOCK_BYTES, 1), SETTLE_S)
        await reader.add_peer(info, START_S)
        with pytest.raises(TransferError, match="outside"):
            await reader.read("owner-d", ids(N_BLOCKS), ids(0), b"", SETTLE_S, token=1)


async def test_idle_agent_costs_nothing(reader: KvIo) -> None:
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.05  # a collection of garbage alone costs 0.01


def frozen_peer_main(pipe: Connection) -> None:
    try:
        asyncio.run(read_from_frozen_peer())
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


async def read_from_frozen_peer() -> None:
    memory, ended = new_memory(0), list[object]()
    io = KvIo(NixlTransfer("reader-tcp"))
    io.on_ended = ended.append
    await io.open(memory)
    with new_owner("owner-tcp", 7) as owner:
        await io.add_peer(owner.info, START_S)
        owner.signal(signal.SIGSTOP)
        try:
            with pytest.raises(TransferTimeout):
                await io.read("owner-tcp", ids(*range(32)), ids(*range(32)), b"", 0.3, token=1)
            assert io.in_flight(1) == 1
            io.remove_peer("owner-tcp")
            await asyncio.sleep(0.1)
            assert (io.in_flight(1), ended) == (1, [])  # neither the deadline nor the removal fences
        finally:
            owner.signal(signal.SIGCONT)
        await until(lambda: ended == [1])
        assert block_of(memory, 31) == b"\7" * BLOCK_BYTES  # it did land, late
        with pytest.raises(PeerGone):
            await io.read("owner-tcp", ids(0), ids(0), b"", 1, token=2)
        await io.add_peer(owner.info, START_S)
        await io.read("owner-tcp", ids(0), ids(0), b"", SETTLE_S, token=3)
        # A frozen peer that dies ends its reads at once.
        owner.signal(signal.SIGSTOP)
        dying = asyncio.create_task(io.read("owner-tcp", ids(1), ids(1), b"", SETTLE_S, token=4))
        await asyncio.sleep(0.1)
        owner.kill()
        with pytest.raises(PeerGone):
            await dying
        assert io.in_flight(4) == 0
    await io.close()


def test_frozen_peer_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=frozen_peer_main, args=(theirs,))  # not daemonic: it has a child
    process.start()
    try:
        assert ours.poll(START_S), "no answer from the reader"
        failure = ours.recv()
        assert failure is None, failure
    finally:
        process.kill()
        process.join(5)


@pytest.mark.parametrize(
    ("gpu", "allowed", "told"),
    [
        (True, "tcp,self", True),
        (True, "cuda_copy,tcp", False),
        (True, None, False),
        (False, "tcp,self", False),
    ],
)
def test_transports_that_nixl_refuses_beside_a_gpu_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, allowed: str | None, told: bool
) -> None:
    """NIXL tells why only a log, and in ours its lines are not wanted."""
    driver = tmp_path / "version"
    if gpu:
        driver.touch()
    monkeypatch.setattr("serving.kv.nixl.DRIVER_FILE", driver)
    monkeypatch.delenv("UCX_TLS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("UCX_TLS", allowed)
    broken = KVMemory(address=0, block_bytes=1, n_blocks=1, kind="nowhere")
    with pytest.raises(StartError) as refused:
        NixlTransfer("x").open(broken)
    assert ("UCX_TLS = 'tcp,self' must have cuda_copy" in refused.value.message) is told
