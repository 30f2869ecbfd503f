"""The memory of the KV blocks: one tensor, allocated once and never freed (peers may read it)."""

from __future__ import annotations

import torch
from torch import Tensor

from serving.engine.base import KVMemory
from serving.kv.layout import KVLayout


class KVPool:
    """`n_blocks` blocks that sequences may own, and one more behind them that pads tables.

    Zeroed: masked positions are multiplied by zero, and zero times whatever must not be NaN.
    """

    def __init__(self, layout: KVLayout, n_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.n_blocks = n_blocks
        self.blocks: Tensor = torch.zeros(
            n_blocks + 1,
            layout.layers,
            2,
            layout.block_tokens,
            layout.kv_heads,
            layout.head_dim,
            dtype=dtype,
            device=device,
        )
        self.pages = self.blocks.view(-1, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.rows = self.blocks.view(-1, layout.kv_heads, layout.head_dim)

    @property
    def padding_block(self) -> int:
        return self.n_blocks

    @property
    def memory(self) -> KVMemory:
        """The region of all blocks but the padding one."""
        device = self.blocks.device
        return KVMemory(
            address=self.blocks.data_ptr(),
            block_bytes=self.layout.block_bytes,
            n_blocks=self.n_blocks,
            device=device.index or 0,
            kind="VRAM" if device.type == "cuda" else "DRAM",
            owner=self.blocks,
        )
