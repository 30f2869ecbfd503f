"""Give the blocks that a read will write their memory before the read comes.

A fresh pool is untouched: its pages exist only once written. When a CMA copy is the first to write them it
runs at a fifth of its speed (measured: 0.8 against 6 GB/s; populating alone: 3 GB/s). So the kv-io thread
populates a prompt's blocks as soon as they are reserved, while the owner still computes. Contents stay.
"""

from __future__ import annotations

import ctypes
import mmap

from serving.engine.base import BlockId, KVMemory

MADV_POPULATE_WRITE = 23  # Linux 5.14; elsewhere it fails, and the copy faults the pages in itself
SLICE_BYTES = 8 << 20  # at a time, a few milliseconds: reads wait for no more than that


class Prefault:
    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._fresh = bytearray(b"\1") * memory.n_blocks
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._useful = memory.kind == "DRAM"

    def touch(self, blocks: list[BlockId]) -> list[BlockId]:
        """Populate the first `SLICE_BYTES` of those `blocks` that are fresh; returns what is left to do."""
        memory, budget = self._memory, SLICE_BYTES
        for done, block in enumerate(blocks):
            if not self._useful or budget <= 0:
                return blocks[done:] if self._useful else []
            if self._fresh[block]:
                self._fresh[block] = 0
                begin = memory.address + block * memory.block_bytes
                start = begin - begin % mmap.PAGESIZE
                end = begin + memory.block_bytes
                self._useful = self._madvise(start, end - start, MADV_POPULATE_WRITE) == 0
                budget -= memory.block_bytes
        return []
