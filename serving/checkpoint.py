"""Does a checkpoint hold what its config.json says? Reads the headers of safetensors files, no weights."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from serving.errors import ConfigError
from serving.model_shape import ModelShape

MOST_HEADER_BYTES = 100 << 20  # what the format allows
PACKED = {"I32", "U8", "I8"}  # several weights in one element: such a tensor's shape is not the layer's
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def tensor_shapes(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """(dtype, shape) of every tensor by name. Raises ConfigError for a file that is no safetensors."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                tensors[name] = (str(entry["dtype"]), list(entry["shape"]))
    return tensors


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= MOST_HEADER_BYTES:
                raise ConfigError(f"{file}: not a safetensors file")
            header = json.loads(handle.read(length))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: not a safetensors file")
    return header


def verify_checkpoint(path: Path, shape: ModelShape) -> None:
    """`path`: the checkpoint's directory; anything else, or one without weights, has nothing to contradict.

    Raises ConfigError with one line for the first contradiction between tensors and shape.
    """
    if not path.is_dir():
        return
    tensors = tensor_shapes(path)
    found = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    if found and not shape.layers <= len(found) <= shape.layers + 1:  # one more: DeepSeek's for speculation
        raise ConfigError(
            f"{path}: the weights have {len(found)} layers and config.json says "
            f"num_hidden_layers = {shape.layers}"
        )
    for suffix, expected, setting in _expected(shape):
        for name, (dtype, actual) in tensors.items():
            if name.endswith(suffix) and dtype not in PACKED and actual != expected:
                raise ConfigError(
                    f"{path}: {name} is {_times(actual)}; config.json says {_times(expected)} ({setting})"
                )


def _expected(shape: ModelShape) -> list[tuple[str, list[int], str]]:
    expected = [("embed_tokens.weight", [shape.vocab, shape.hidden], "vocab_size x hidden_size")]
    if shape.latent is None:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        expected += [
            ("self_attn.q_proj.weight", [q, shape.hidden], "heads * head_dim x hidden_size"),
            ("self_attn.k_proj.weight", [kv, shape.hidden], "num_key_value_heads * head_dim x hidden_size"),
        ]
    if shape.experts is None:
        expected.append(
            ("mlp.up_proj.weight", [shape.mlp_width, shape.hidden], "intermediate_size x hidden_size")
        )
    return expected


def _times(shape: list[int]) -> str:
    return " x ".join(map(str, shape))
