"""Transfer over NIXL (UCX): one agent, one registered pool, one descriptor per block.

What was measured and shapes this file (NIXL 1.5.1):

* The progress thread of the wheel spins on a whole core, so it is off: nothing moves, here or for our
  readers over tcp, unless `poll` is called. Who calls it when is serving/kv/io.py's business.
* Neither releasing a handle nor removing the peer stops an RMA: over tcp its bytes still land when the
  peer wakes up. So a read in flight keeps its handle and its peer until NIXL says that it ended.
* After a disconnect a peer must be removed before it can be added again under its name.
* Removing a peer that lives closes nothing: to add it again costs both sides two more sockets over tcp. So
  one that was given up is kept for a while, and taken up again as it is.
* NIXL has no time-out of its own. A frozen peer stays in progress for ever; a host cut off for good too,
  unless the *deployment* sets UCX_TCP_USER_TIMEOUT (say 5s: under the lease time, over expected blips).
  Hosts with several interfaces want UCX_NET_DEVICES. Both are read by UCX when `open` runs.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import logging.config
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from serving.engine.base import BlockId, KVMemory
from serving.errors import PeerGone, StartError, TransferError
from serving.gpu_probe import DRIVER_FILE
from serving.kv.transfer import PeerInfo, ReadEnded, ReadId, ReadState, TransferCounters

# Failures reach the caller as errors; UCX's and NIXL's own warnings would only repeat them on stderr.
QUIET = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
# A peer that was given up. Longer outages are rare, and a process that ended closes its sockets.
KEPT_S = 60.0
SCRATCH_BYTES = 64  # where a read that only connects puts its bytes
PROBE_BYTES = 8


@dataclass(slots=True)
class _Peer:
    info: PeerInfo
    blocks: Any  # prepared list of all its blocks
    failed: bool = False  # disconnected: must be removed before it can be added again
    given_up_s: float | None = None  # since when no new reads are allowed
    reads: set[ReadId] = field(default_factory=set)


@dataclass(slots=True)
class _Read:
    peer: str
    handle: Any
    n_blocks: int
    posted_s: float
    done: bool = False  # the post itself completed it, as CMA does


class NixlTransfer:
    """See `Transfer`. `agent` must be unique per incarnation of the worker."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.counters = TransferCounters()
        self._api: Any = None
        self._agent: Any = None
        self._memory: KVMemory | None = None  # kept: KV memory is never freed under a registration
        self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        self._blocks: Any = None  # prepared list of our own blocks
        self._peers: dict[str, _Peer] = {}
        self._given_up: set[str] = set()
        self._reads: dict[ReadId, _Read] = {}
        self._last_id = 0

    def open(self, memory: KVMemory) -> None:
        """Raises StartError if NIXL is missing or cannot run here."""
        api = self._api = _load_nixl()
        try:
            agent = api.nixl_agent(self.agent, api.nixl_agent_config(enable_prog_thread=False))
            agent.register_memory([(memory.address, memory.n_bytes, memory.device, "")], memory.kind)
            agent.register_memory([(ctypes.addressof(self._scratch), SCRATCH_BYTES, 0, "")], "DRAM")
            blocks = _block_list(memory.address, memory.block_bytes, memory.n_blocks, memory.device)
            self._blocks = agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks, memory.kind)
        except Exception as error:  # the binding's errors share no base class
            why = f"NIXL cannot use this worker's KV memory: {_text(error)}{_transports_hint()}"
            raise StartError(why) from error
        self._agent, self._memory = agent, memory

    def metadata(self) -> bytes:
        blob: bytes = self._agent.get_agent_metadata()
        return blob

    def add_peer(self, peer: PeerInfo) -> bool:
        """A peer that failed is removed and added anew, once its last read has ended."""
        known = self._peers.get(peer.agent)
        if known is not None and not known.failed and known.info == peer:
            known.given_up_s = None
            self._given_up.discard(peer.agent)
            return True
        if known is not None:
            if known.reads:
                raise PeerGone(f"{peer.agent}: disconnected, with reads that have not ended")
            self._forget(known)
        memory = self._memory
        if memory is None or peer.block_bytes != memory.block_bytes:
            raise TransferError(f"{peer.agent}: its blocks have {peer.block_bytes} bytes, ours do not")
        try:
            name = self._agent.add_remote_agent(peer.metadata)
            name = name.decode() if isinstance(name, bytes) else name
            if name != peer.agent:
                self._agent.remove_remote_agent(name)
                raise TransferError(f"metadata names agent {name!r}, expected {peer.agent!r}")
            blocks = _block_list(peer.base_address, peer.block_bytes, peer.n_blocks, peer.device)
            prepared = self._agent.prep_xfer_dlist(peer.agent, blocks, peer.kind)
        except TransferError:
            raise
        except Exception as error:
            raise PeerGone(f"{peer.agent}: cannot connect: {_text(error)}") from error
        self._peers[peer.agent] = _Peer(peer, prepared)
        return False

    def remove_peer(self, agent: str) -> None:
        peer = self._peers.get(agent)
        if peer is None or peer.given_up_s is not None:
            return
        peer.given_up_s = monotonic()
        self._given_up.add(agent)
        if peer.failed and not peer.reads:
            self._forget(peer)

    def start_read(
        self, peer: str, source: list[BlockId], target: list[BlockId], note: bytes = b""
    ) -> ReadId:
        to = self._peers.get(peer)
        if to is None or to.failed or to.given_up_s is not None:
            raise PeerGone(f"{peer}: not connected")
        assert self._memory is not None
        _check_ids(source, to.info.n_blocks, "the peer's")
        _check_ids(target, self._memory.n_blocks, "our")
        if len(source) != len(target):
            raise ValueError(f"{len(source)} blocks cannot be read into {len(target)}")
        posted_s = monotonic()
        try:
            handle = self._connect(to) if not source else self._prepare(to, source, target, note)
            state = self._agent.transfer(handle)
        except Exception as error:
            to.failed = to.failed or _is_disconnect(error)
            self.counters.failures += 1
            kind = PeerGone if to.failed else TransferError
            raise kind(f"{peer}: read not posted: {_text(error)}") from error
        self._last_id += 1
        read = ReadId(self._last_id)
        self._reads[read] = _Read(peer, handle, len(source), posted_s, done=state == "DONE")
        to.reads.add(read)
        return read

    def poll(self) -> tuple[list[ReadEnded], list[bytes]]:
        arrived = self._agent.get_new_notifs()
        notes = [note for sent in arrived.values() for note in sent] if arrived else []
        ended: list[ReadEnded] = []
        for read_id, read in list(self._reads.items()):
            error: str | None = None
            if not read.done:
                try:
                    state = self._agent.check_xfer_state(read.handle)
                except Exception as raised:  # how a dead peer shows; "ERR" is hardly ever seen
                    state, error = "ERR", _text(raised)
                if state == "PROC":
                    continue
                if state != "DONE":
                    error = error or "NIXL reports an error"
            ended.append(self._end(read_id, read, error))
        if self._given_up:
            self._forget_old(monotonic() - KEPT_S)
        return ended, notes

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def close(self) -> None:
        for read in self._reads.values():
            _release(read.handle)
        self._reads.clear()
        for peer in list(self._peers.values()):
            self._forget(peer)
        self._blocks = self._agent = None

    def _prepare(self, to: _Peer, source: list[BlockId], target: list[BlockId], note: bytes) -> Any:
        ours, theirs = np.array(target, np.int32), np.array(source, np.int32)
        return self._agent.make_prepped_xfer("READ", self._blocks, ours, to.blocks, theirs, note)

    def _connect(self, to: _Peer) -> Any:
        """A read of a few bytes into our scratch: it ends when both sides have wired up."""
        agent, info = self._agent, to.info
        here = agent.get_xfer_descs([(ctypes.addressof(self._scratch), PROBE_BYTES, 0)], "DRAM")
        there = agent.get_xfer_descs([(info.base_address, PROBE_BYTES, info.device)], info.kind)
        return agent.initialize_xfer("READ", here, there, info.agent)

    def _end(self, read_id: ReadId, read: _Read, error: str | None) -> ReadEnded:
        del self._reads[read_id]
        _release(read.handle)
        peer, totals = self._peers[read.peer], self.counters
        peer.reads.discard(read_id)
        if error is None:
            assert self._memory is not None
            totals.reads += 1
            totals.blocks += read.n_blocks
            totals.descriptors += read.n_blocks
            totals.bytes += read.n_blocks * self._memory.block_bytes
            totals.seconds += monotonic() - read.posted_s
        else:
            totals.failures += 1
            peer.failed = True
        if peer.given_up_s is not None and peer.failed and not peer.reads:
            self._forget(peer)
        return ReadEnded(read_id, ReadState.DONE if error is None else ReadState.FAILED, error)

    def _forget_old(self, before_s: float) -> None:
        for peer in [self._peers[agent] for agent in self._given_up]:
            if peer.given_up_s is not None and peer.given_up_s < before_s and not peer.reads:
                self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        """Only ever without reads in flight."""
        del self._peers[peer.info.agent]
        self._given_up.discard(peer.info.agent)
        _release(peer.blocks)
        try:
            self._agent.remove_remote_agent(peer.info.agent)
        except Exception as error:
            logging.getLogger(__name__).debug("removing %s: %s", peer.info.agent, _text(error))


def _transports_hint() -> str:
    """Where there is a GPU, used or not, NIXL wants a transport for CUDA, and its error does not say so."""
    allowed = os.environ.get("UCX_TLS", "all")
    if allowed == "all" or "cuda" in allowed or not DRIVER_FILE.exists():
        return ""
    return f"; this host has a GPU: UCX_TLS = {allowed!r} must have cuda_copy (and cuda_ipc within a host)"


def _load_nixl() -> Any:
    """The binding for this machine's CUDA, or for none. `import nixl` would pull torch in (1 s)."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    torch = sys.modules.get("torch")
    cuda = str(torch.version.cuda or "") if torch is not None else ""
    names = ["nixl_cu13", "nixl_cu12"] if cuda.startswith("13") else ["nixl_cu12", "nixl_cu13"]
    loaded = [name for name in names if f"{name}._api" in sys.modules]  # two in one process clash
    for name in loaded or names:
        try:
            with _handlers_left_alone():
                api = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints INFO lines on stdout
        return api
    raise StartError(f"NIXL is not installed; looked for {' and '.join(names)}")


@contextmanager
def _handlers_left_alone() -> Iterator[None]:
    """NIXL configures logging when it is imported, by a `dictConfig` that closes every handler there is.

    Serve's log handler loses its file by that, and a Serve controller that starts anew asks each replica
    for the file's name: it would replace all those that cannot say.
    """
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure


def _block_list(address: int, block_bytes: int, n_blocks: int, device: int) -> np.ndarray[Any, Any]:
    """(n_blocks, 3): address, length, device."""
    rows = np.empty((n_blocks, 3), np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(n_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    rows[:, 2] = device
    return rows


def _check_ids(blocks: list[BlockId], n_blocks: int, whose: str) -> None:
    if blocks and (min(blocks) < 0 or max(blocks) >= n_blocks):
        raise ValueError(f"block ids outside {whose} pool of {n_blocks}: {min(blocks)}..{max(blocks)}")


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:  # it stays in NIXL's own list of leaked handles
        logging.getLogger(__name__).debug("release: %s", _text(error))


def _is_disconnect(error: Exception) -> bool:
    return type(error).__name__ in ("nixlRemoteDisconnectError", "nixlBackendError", "nixlNotFoundError")


def _text(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
