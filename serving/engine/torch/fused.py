"""Fewer, larger matrix products: Q, K and V as one, gate and up as one, norms as one call.

Each class takes the place of a module in a loaded transformers model and computes the same. In float32
greedy tokens stay equal to the unfused model's (tests/unit/test_torch_runner.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from serving.engine.torch.attention import StepTables, attend


class FusedAttention(nn.Module):
    """For attention with q_proj, k_proj, v_proj, o_proj and perhaps q_norm, k_norm over a head."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        projections = (source.q_proj, source.k_proj, source.v_proj)
        self.weight = _joined([projection.weight for projection in projections])
        self.bias = None if source.q_proj.bias is None else _joined([p.bias for p in projections])
        self.o_proj = source.o_proj
        self.q_norm = _norm(source.q_norm) if hasattr(source, "q_norm") else None
        self.k_norm = _norm(source.k_norm) if hasattr(source, "k_norm") else None
        self.layer_idx: int = source.layer_idx
        self.scaling: float = source.scaling
        self.head_dim: int = source.head_dim
        self.heads = source.q_proj.out_features // self.head_dim
        self.kv_heads = source.k_proj.out_features // self.head_dim

    def forward(
        self,
        hidden_states: Tensor,  # (1, tokens, hidden)
        position_embeddings: tuple[Tensor, Tensor],  # of FusedRotary
        step: StepTables,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        states = linear(hidden_states[0], self.weight, self.bias)
        states = states.view(states.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rotating, value = states[:, : -self.kv_heads], states[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotating[:, : self.heads], rotating[:, self.heads :]
            rotating = torch.cat([self.q_norm(query), self.k_norm(key)], dim=1)
        rotating = torch.addcmul(rotating * cos, rotating.roll(self.head_dim // 2, -1), sin)
        query, key = rotating[:, : self.heads], rotating[:, self.heads :]
        out = attend(self.layer_idx, query, key, value, step=step, scaling=self.scaling)
        return self.o_proj(out.reshape(1, out.shape[0], -1)), None


class FusedMLP(nn.Module):
    """For down(act(gate(x)) * up(x))."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        projections = (source.gate_proj, source.up_proj)
        self.weight = _joined([projection.weight for projection in projections])
        self.bias = None if source.gate_proj.bias is None else _joined([p.bias for p in projections])
        self.act_fn = source.act_fn
        self.down_proj = source.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.weight, self.bias).chunk(2, dim=-1)
        product: Tensor = self.down_proj(self.act_fn(gate).mul_(up))
        return product


class FusedRotary(nn.Module):
    """Cosines and signed sines, (tokens, 1, head_dim) each: rotating is then one roll and one addcmul."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.source(x, position_ids=position_ids)  # (1, tokens, head_dim)
        first, second = sin[0].chunk(2, dim=-1)
        return cos[0][:, None], torch.cat([-first, second], dim=-1)[:, None]


def fuse(backbone: Any) -> None:
    """Replace the modules of a Llama-shaped backbone, in place; the old weights are let go of."""
    backbone.rotary_emb = FusedRotary(backbone.rotary_emb)
    backbone.norm = _norm(backbone.norm)
    for layer in backbone.layers:
        layer.self_attn = FusedAttention(layer.self_attn)
        layer.mlp = FusedMLP(layer.mlp)
        layer.input_layernorm = _norm(layer.input_layernorm)
        layer.post_attention_layernorm = _norm(layer.post_attention_layernorm)


def _joined(tensors: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([tensor.detach() for tensor in tensors]), requires_grad=False)


def _norm(source: Any) -> nn.RMSNorm:
    norm = nn.RMSNorm(source.weight.shape[0], eps=source.variance_epsilon)
    norm.weight = source.weight
    return norm
