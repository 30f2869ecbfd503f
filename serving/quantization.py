"""How weights and KV are stored: bytes an element, where a checkpoint says it, which GPUs can do it. Pure.

Names are TensorRT-LLM's QuantAlgo. Which architecture computes with which is the hardware matrix of its
documentation (features/quantization); what it has no column for is marked as not listed. One cell differs:
MXFP4 weights with 16-bit activations run on Hopper too, on kernels that the matrix does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigError
from serving.gpu_catalog import Architecture

A, L, H, B, R = (
    Architecture.AMPERE,
    Architecture.ADA,
    Architecture.HOPPER,
    Architecture.BLACKWELL,
    Architecture.BLACKWELL_RTX,
)

NONE = "NO_QUANT"
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of the linear layers; embedding, head, norms and routers of experts stay at 16 bits."""

    name: str
    weight_bytes: float  # an element, its share of the scales included
    architectures: frozenset[Architecture] | None  # None: the matrix does not list it


def _q(name: str, weight_bytes: float, *architectures: Architecture, listed: bool = True) -> Quantization:
    return Quantization(name, weight_bytes, frozenset(architectures) if listed else None)


# Scales: a 32-bit one a block of 128 x 128; a 16-bit one and a zero point a group of 128 (AWQ, GPTQ);
# an 8-bit one a group of 16 (NVFP4) or 32 (MXFP4). One a tensor or a channel is too little to count.
_INT4 = 0.5 + 2.5 / 128
ALGORITHMS = {
    q.name: q
    for q in (
        _q("FP8", 1.0, L, H, B, R),
        _q("FP8_PER_CHANNEL_PER_TOKEN", 1.0, H),
        _q("FP8_BLOCK_SCALES", 1.0 + 4 / 128**2, H, B),
        _q("W4A16_AWQ", _INT4, A, L, H),
        _q("W4A8_AWQ", _INT4, L, H),
        _q("W4A16_GPTQ", _INT4, A, L, H),
        _q("NVFP4", 0.5 + 1 / 16, B, R),
        _q("W4A16_MXFP4", 0.5 + 1 / 32, H, B, R),
        _q("W4A8_MXFP4_FP8", 0.5 + 1 / 32, B, R),
        _q("W4A8_MXFP4_MXFP8", 0.5 + 1 / 32, B, R),
        _q("INT8", 1.0, listed=False),
        _q("W8A16", 1.0, listed=False),
        _q("W8A16_GPTQ", 1.0, listed=False),
        _q("W8A8_SQ_PER_CHANNEL", 1.0, listed=False),
        _q("W4A16", _INT4, listed=False),
    )
}

# KV: 16 bits anywhere; fp8 is stored so on every listed architecture, nvfp4 on those with FP4 units.
KV_BYTES = {**DTYPE_BYTES, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5 + 1 / 16}
KV_ARCHITECTURES = {"fp8": frozenset((A, L, H, B, R)), "nvfp4": frozenset((B,))}


def find_quantization(name: str | None, what: str) -> Quantization | None:
    """None for no quantisation. Raises ConfigError naming `what` for an unknown name."""
    if name is None or name.upper() in (NONE, "NONE", *(dtype.upper() for dtype in DTYPE_BYTES)):
        return None
    found = ALGORITHMS.get(name.upper())
    if found is None:
        raise ConfigError(f"{what} = {name!r}; allowed: {NONE}, {', '.join(ALGORITHMS)}")
    return found


def checkpoint_quantization(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None
) -> tuple[str | None, str | None]:
    """(weights, KV) as the checkpoint says: its hf_quant_config.json (`modelopt`), else in config.json.

    None where it says nothing. Names are a QuantAlgo where there is one, else the checkpoint's own word.
    """
    if modelopt is not None:
        said = modelopt.get("quantization") or {}
        return _algorithm(said.get("quant_algo")), _kv(said.get("kv_cache_quant_algo"))
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or not said:
        return None, None
    method = str(said.get("quant_method", "")).lower()
    if method == "modelopt":
        return _algorithm(said.get("quant_algo")), _kv(said.get("kv_cache_quant_algo"))
    return _algorithm(_huggingface_name(method, said)), None


def _huggingface_name(method: str, said: Mapping[str, Any]) -> str:
    bits = said.get("bits", 4)
    if method == "fp8":
        return "FP8_BLOCK_SCALES" if said.get("weight_block_size") else "FP8"
    if method == "compressed-tensors":
        form = str(said.get("format", ""))
        group: Mapping[str, Any] = next(iter((said.get("config_groups") or {}).values()), {})
        bits = (group.get("weights") or {}).get("num_bits", 4)
        names = {
            "float-quantized": "FP8",
            "int-quantized": "INT8",
            "pack-quantized": f"W{bits}A16",
            "nvfp4-pack-quantized": "NVFP4",
        }
        return names.get(form, f"compressed-tensors {form}")
    by_method = {"awq": "W4A16_AWQ", "gptq": f"W{bits}A16_GPTQ", "mxfp4": "W4A16_MXFP4"}
    return by_method.get(method, method)


def _algorithm(name: Any) -> str | None:
    return None if name is None or str(name).upper() == NONE else str(name)


def _kv(name: Any) -> str | None:
    return str(name).lower() if name else None
