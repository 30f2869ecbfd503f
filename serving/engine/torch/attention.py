"""Attention of packed tokens over a paged KV pool, in the form that transformers' models call.

The pool is block-major, `(blocks, layers, 2, block_tokens, kv_heads, head_dim)`. Attention sees it as
flat pages `(blocks * layers * 2, block_tokens, kv_heads, head_dim)`, page `block * 2L + 2 * layer + (0 for
K, 1 for V)`, because gathering whole pages is a plain memory copy. All indices of a step, for every
layer, are made once (serving.engine.torch.batch) and only looked up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PAGED_ATTENTION = "kvrelay_paged"  # the name under which transformers finds `paged_attention`


@dataclass(slots=True)
class DecodeGroup:
    """Packed rows `[first, last)`, one token each, of sequences about equally long."""

    first: int
    last: int
    pages: Tensor  # (layers, 2 * rows * width_blocks): K pages of all rows, then V pages
    width: int  # tokens of the longest sequence
    mask: Tensor | None  # (rows, 1, 1, width), added to the scores; None when all are equally long


@dataclass(slots=True)
class PromptPiece:
    """Packed rows `[first, last)`: consecutive prompt tokens of one sequence."""

    first: int
    last: int
    past: int  # tokens before the piece
    pages: Tensor | None  # (layers, 2 * blocks); None without a past: the piece attends to itself
    mask: Tensor | None  # (rows, past + rows), added to the scores; None: plainly causal, without a past
    tile: int  # rows computed at once; fewer than all only without a past


@dataclass(slots=True)
class StepTables:
    """Where the tokens of one step write their KV, and what each of them reads."""

    pages: Tensor  # (blocks * layers * 2, block_tokens, kv_heads, head_dim), the whole pool
    rows: Tensor  # (blocks * layers * 2 * block_tokens, kv_heads, head_dim), the same memory
    write: Tensor  # (layers, 2, tokens): row of each token's K and V
    decodes: list[DecodeGroup]
    prompts: list[PromptPiece]


def paged_attention(
    module: Any,
    query: Tensor,  # (1, heads, tokens, head_dim)
    key: Tensor,  # (1, kv_heads, tokens, head_dim)
    value: Tensor,  # (1, kv_heads, tokens, head_dim)
    attention_mask: Tensor | None,
    *,
    step: StepTables,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """What transformers' own attention classes call; returns (1, tokens, heads, head_dim)."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(module.layer_idx, query, key, value, step=step, scaling=scaling)[None], None


def attend(
    layer: int, query: Tensor, key: Tensor, value: Tensor, *, step: StepTables, scaling: float | None
) -> Tensor:
    """Write K and V of this step's tokens to the pool, then attend to everything before each token.

    `query` (tokens, heads, head_dim), `key` and `value` (tokens, kv_heads, head_dim); returns like `query`.
    """
    write = step.write[layer]
    step.rows.index_copy_(0, write[0], key)
    step.rows.index_copy_(0, write[1], value)
    parts = [
        _decode(query[group.first : group.last], group, step.pages, group.pages[layer], scaling)
        for group in step.decodes
    ]
    for piece in step.prompts:
        here = slice(piece.first, piece.last)
        if piece.pages is None:
            keys, values = key[here], value[here]
        else:
            cache = step.pages.index_select(0, piece.pages[layer]).view(2, -1, *key.shape[1:])
            keys, values = cache[:, : piece.past + piece.last - piece.first].unbind()
        parts.append(_prompt(query[here], keys, values, piece, scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    query: Tensor, group: DecodeGroup, pool: Tensor, pages: Tensor, scaling: float | None
) -> Tensor:
    """One query a sequence, (rows, heads, head_dim), over the K and V in `pages` of `pool`."""
    rows, heads, dim = query.shape
    kv_heads = pool.shape[2]
    cache = pool.index_select(0, pages).view(2, rows, -1, kv_heads, dim)
    keys, values = cache[:, :, : group.width].transpose(2, 3).unbind()  # (rows, kv_heads, width, dim)
    # The heads that share a kv head stand where query positions would: K and V need no repeating.
    shared = query.view(rows, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(shared, keys, values, attn_mask=group.mask, scale=scaling)
    return out.reshape(rows, heads, dim)


def _prompt(
    query: Tensor, keys: Tensor, values: Tensor, piece: PromptPiece, scaling: float | None
) -> Tensor:
    """`query` (rows, heads, head_dim) over `keys` and `values` (past + rows, kv_heads, head_dim)."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    # kv heads as the batch, the heads that share one as its heads: K and V are expanded, never copied.
    shared = query.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    keys, values = (
        states.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for states in (keys, values)
    )
    mask = piece.mask
    if mask is None:
        out = scaled_dot_product_attention(shared, keys, values, is_causal=rows > 1, scale=scaling)
    elif piece.tile >= rows:
        out = scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=scaling)
    else:  # each tile sees the keys up to its own end only: half of a causal square is never computed
        tiles = []
        for first in range(0, rows, piece.tile):
            last = min(first + piece.tile, rows)
            tile = scaled_dot_product_attention(
                shared[:, :, first:last],
                keys[:, :, :last],
                values[:, :, :last],
                attn_mask=mask[first:last, :last],
                scale=scaling,
            )
            tiles.append(tile)
        out = torch.cat(tiles, dim=2)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
