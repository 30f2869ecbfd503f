"""What a model takes of one GPU's memory: its share of the weights, and KV bytes a token. Exact, and pure.

docs/capacity.md has the formulas; tests/unit/test_footprint.py has them worked out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from serving.model_shape import ModelShape
from serving.quantization import DTYPE_BYTES, KV_BYTES, Quantization


@dataclass(frozen=True, slots=True)
class Placement:
    """How one worker spreads over GPUs. `attention_dp`: each GPU attends for sequences of its own and holds
    all heads; only the experts are divided."""

    tensor: int = 1
    pipeline: int = 1
    attention_dp: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Precision:
    weights: Quantization | None  # None: all at `dtype`
    dtype: str  # a key of DTYPE_BYTES
    kv: str  # a key of KV_BYTES


# ---------------------------------------------------------------- weights


def _layer_parameters(shape: ModelShape, place: Placement, with_experts: bool) -> tuple[float, float]:
    """(in linear layers, others) of one layer, as one GPU holds them."""
    divided = 1 if place.attention_dp else place.tensor
    if latent := shape.latent:
        head = latent.nope_dim + latent.rope_dim
        from_q = latent.q_rank or shape.hidden
        split = (
            from_q * shape.heads * head  # q, or its upper half
            + latent.kv_rank * shape.heads * (latent.nope_dim + latent.value_dim)
            + shape.heads * latent.value_dim * shape.hidden
        )
        whole = shape.hidden * (latent.width + (latent.q_rank or 0))
        linear = split / divided + whole
        plain: float = latent.kv_rank + (latent.q_rank or 0)  # their norms
    else:
        q_width = shape.heads * shape.head_dim
        kv_width = 2 * _kv_heads_on_gpu(shape, place) * shape.head_dim
        linear = shape.hidden * (2 * q_width / divided + kv_width)  # q and o, k and v
        plain = (q_width / divided + kv_width if shape.qkv_bias else 0) + 2 * shape.head_dim * shape.qk_norm
    plain += 2 * shape.hidden + shape.hidden * shape.output_bias
    matrices = 3 if shape.gated else 2
    if with_experts and (experts := shape.experts):
        linear += matrices * shape.hidden * experts.routed * experts.width / place.tensor
        linear += matrices * shape.hidden * experts.shared_width / divided
        plain += shape.hidden * experts.routed  # the router
        plain += experts.routed * (shape.latent is not None)  # DeepSeek's bias of it
    else:
        linear += matrices * shape.hidden * shape.mlp_width / divided
    return linear, plain


def _kv_heads_on_gpu(shape: ModelShape, place: Placement) -> int:
    """With more GPUs than KV heads every head is held more than once."""
    return shape.kv_heads if place.attention_dp else math.ceil(shape.kv_heads / place.tensor)


def _stages(layers: int, pipeline: int) -> Iterator[range]:
    """Layers by pipeline stage; the first ones take what does not divide."""
    start = 0
    for stage in range(pipeline):
        size = layers // pipeline + (stage < layers % pipeline)
        yield range(start, start + size)
        start += size


def _stage_parameters(shape: ModelShape, place: Placement, layers: range) -> tuple[float, float]:
    """(in linear layers, others) that a GPU of this stage holds. Layers without experts come first."""
    with_experts = shape.experts.layers if shape.experts else 0
    linear = plain = 0.0
    for layer in layers:
        a, b = _layer_parameters(shape, place, layer >= shape.layers - with_experts)
        linear += a
        plain += b
    table = shape.vocab * shape.hidden / (1 if place.attention_dp else place.tensor)
    first, last = layers.start == 0, layers.stop == shape.layers
    plain += table * first + shape.hidden * last  # the embedding; the last norm
    if last and not (shape.tied and first):
        plain += table
    return linear, plain


def parameter_count(shape: ModelShape) -> int:
    """As the model's card would say; without what is loaded for speculation only (DeepSeek's MTP layer)."""
    return round(sum(_stage_parameters(shape, Placement(), range(shape.layers))))


def weights_bytes(shape: ModelShape, precision: Precision, place: Placement) -> int:
    """Of the GPU that holds most."""
    plain_bytes = DTYPE_BYTES[precision.dtype]
    linear_bytes = precision.weights.weight_bytes if precision.weights else plain_bytes
    return max(
        math.ceil(linear * linear_bytes + plain * plain_bytes)
        for linear, plain in (
            _stage_parameters(shape, place, layers) for layers in _stages(shape.layers, place.pipeline)
        )
    )


# ---------------------------------------------------------------- KV


@dataclass(frozen=True, slots=True)
class KvCost:
    """KV bytes on one GPU: of every token, and of tokens within the window of layers that have one."""

    full_bytes: float  # a token, over the layers that keep everything
    window_bytes: float  # a token, over the layers with a window
    window_tokens: int | None
    block_tokens: int

    @property
    def token_bytes(self) -> float:
        return self.full_bytes + self.window_bytes

    @property
    def block_bytes(self) -> float:
        return self.token_bytes * self.block_tokens

    def sequence_bytes(self, tokens: int) -> float:
        blocks = math.ceil(tokens / self.block_tokens)
        kept = blocks
        if self.window_tokens is not None:  # a window reaches into one block more than it fills
            kept = min(blocks, math.ceil(self.window_tokens / self.block_tokens) + 1)
        return self.block_tokens * (blocks * self.full_bytes + kept * self.window_bytes)


def kv_cost(shape: ModelShape, kv_dtype: str, place: Placement, block_tokens: int) -> KvCost:
    """Latent attention keeps one vector a token on every GPU: tensor parallelism does not divide it."""
    values = shape.latent.width if shape.latent else 2 * _kv_heads_on_gpu(shape, place) * shape.head_dim
    stage = math.ceil(shape.layers / place.pipeline) / shape.layers
    layer_bytes = values * KV_BYTES[kv_dtype]
    return KvCost(
        full_bytes=layer_bytes * shape.full_layers * stage,
        window_bytes=layer_bytes * shape.window_layers * stage,
        window_tokens=shape.window_tokens,
        block_tokens=block_tokens,
    )
