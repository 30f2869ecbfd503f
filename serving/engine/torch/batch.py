"""A step plan laid out as tensors: packed tokens, and every index that attention will need.

Tokens of all sequences stand in one row, without padding: decodes first, shortest sequence first (so
that neighbours can be padded to one length), then prompt pieces in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.engine.sequence import PrefillSlice, Sequence, StepPlan
from serving.engine.torch.attention import DecodeGroup, PromptPiece, StepTables
from serving.engine.torch.pool import KVPool

Ids = NDArray[np.int64]

# Decodes padded to one length are one attention call a layer. A call costs about as much as reading the
# KV of 64 tokens; beyond a quarter of padding two calls are cheaper.
_ALWAYS_TOGETHER_TOKENS = 64
_TOGETHER_RATIO = 1.25

# The CPU kernel computes most of the masked half of a causal square; in tiles of this many rows it does not
# (512 tokens: 4.7 ms a layer instead of 7.1).
_CPU_TILE = 64


@dataclass(slots=True)
class PackedStep:
    """What the model is called with."""

    token_ids: Tensor  # (1, tokens)
    positions: Tensor  # (1, tokens)
    drawing: Tensor  # (draws,): packed row of the last token of each of `StepPlan.drawing`
    tables: StepTables


class Packer:
    """Lays plans out for one pool, model shape and device."""

    def __init__(self, pool: KVPool, dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool
        self._dtype = dtype
        self._device = device
        layers = pool.layout.layers
        self._page_offsets = 2 * np.arange(layers, dtype=np.int64)[:, None]  # K page of each layer

    def pack(self, plan: StepPlan) -> PackedStep:
        """`plan` is not empty; the blocks of all its tokens are allocated."""
        order = sorted(range(len(plan.decodes)), key=lambda i: len(plan.decodes[i].tokens))
        decodes = [plan.decodes[i] for i in order]
        n_decodes = len(decodes)
        token_ids = [np.array([sequence.tokens[-1] for sequence in decodes], dtype=np.int64)]
        positions = [np.array([len(sequence.tokens) - 1 for sequence in decodes], dtype=np.int64)]
        block = self._pool.layout.block_tokens
        blocks = [np.array([s.blocks[(len(s.tokens) - 1) // block] for s in decodes], dtype=np.int64)]
        drawing = np.empty(n_decodes, dtype=np.int64)
        drawing[order] = np.arange(n_decodes)
        last_rows = drawing.tolist()
        prompts: list[PromptPiece] = []
        row = n_decodes
        for piece in plan.prefills:
            tokens = piece.sequence.tokens[piece.start : piece.start + piece.count]
            token_ids.append(np.array(tokens, dtype=np.int64))
            at = np.arange(piece.start, piece.start + piece.count)
            positions.append(at)
            blocks.append(np.array(piece.sequence.blocks, dtype=np.int64)[at // block])
            prompts.append(self._prompt(piece, row))
            row += piece.count
            if piece.draws:
                last_rows.append(row - 1)
        position = np.concatenate(positions)
        tables = StepTables(
            pages=self._pool.pages,
            rows=self._pool.rows,
            write=self._write_rows(np.concatenate(blocks), position % block),
            decodes=[self._group(decodes, first, last) for first, last in _groups(decodes)],
            prompts=prompts,
        )
        return PackedStep(
            token_ids=self._to_device(np.concatenate(token_ids))[None],
            positions=self._to_device(position)[None],
            drawing=self._to_device(np.array(last_rows, dtype=np.int64)),
            tables=tables,
        )

    def _write_rows(self, blocks: Ids, offsets: Ids) -> Tensor:
        layout = self._pool.layout
        pages = blocks * (2 * layout.layers) + self._page_offsets  # (layers, tokens)
        keys = pages * layout.block_tokens + offsets
        return self._to_device(np.stack([keys, keys + layout.block_tokens], axis=1))  # V is the next page

    def _pages(self, table: Ids) -> Tensor:
        """K pages, then V pages of `table` (blocks in order), for each layer: (layers, 2 * table.size)."""
        base = table.reshape(-1) * (2 * self._pool.layout.layers)
        return self._to_device(np.concatenate([base, base + 1]) + self._page_offsets)

    def _group(self, decodes: list[Sequence], first: int, last: int) -> DecodeGroup:
        lengths = np.array([len(sequence.tokens) for sequence in decodes[first:last]])
        width = int(lengths[-1])
        width_blocks = -(-width // self._pool.layout.block_tokens)
        table = np.full((last - first, width_blocks), self._pool.padding_block, dtype=np.int64)
        for line, sequence in zip(table, decodes[first:last], strict=True):
            used = min(len(sequence.blocks), width_blocks)
            line[:used] = sequence.blocks[:used]
        mask = None
        if lengths[0] != width:
            beyond = np.arange(width) >= lengths[:, None]
            mask = self._mask(self._to_device(beyond))[:, None, None]
        return DecodeGroup(first, last, self._pages(table), width, mask)

    def _prompt(self, piece: PrefillSlice, row: int) -> PromptPiece:
        past, count = piece.start, piece.count
        pages = None
        tile = count
        if past:
            used = -(-(past + count) // self._pool.layout.block_tokens)
            pages = self._pages(np.array(piece.sequence.blocks[:used], dtype=np.int64))
        elif self._device.type == "cpu":
            tile = min(count, _CPU_TILE)
        mask = None
        if past or tile < count:
            beyond = torch.ones(count, past + count, dtype=torch.bool, device=self._device).triu_(past + 1)
            mask = self._mask(beyond)
        return PromptPiece(row, row + count, past, pages, mask, tile)

    def _mask(self, hidden: Tensor) -> Tensor:
        """Zeros, and -inf where `hidden`; in the model's dtype, or every layer would convert it."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(
            hidden, -torch.inf
        )

    def _to_device(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)


def _groups(decodes: list[Sequence]) -> list[tuple[int, int]]:
    """Ranges of `decodes` (sorted by length) that are cheap enough to pad to their longest."""
    ranges: list[tuple[int, int]] = []
    first = 0
    while first < len(decodes):
        shortest = len(decodes[first].tokens)
        limit = max(shortest + _ALWAYS_TOGETHER_TOKENS, int(shortest * _TOGETHER_RATIO))
        last = first + 1
        while last < len(decodes) and len(decodes[last].tokens) <= limit:
            last += 1
        ranges.append((first, last))
        first = last
    return ranges
