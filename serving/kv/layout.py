"""The shape of a KV block, and the fingerprint by which two workers know that their blocks agree.

NIXL compares lengths and nothing else, so whatever gives bytes their meaning stands in the fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Block-major pool: `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`; one block, one range."""

    model: str  # digest of the weights' identity, not a path
    dtype: str  # "float32", "bfloat16", ...
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int
    tensor_parallel: int = 1

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal exactly when every field that gives the bytes meaning is equal."""
        text = (
            f"v{LAYOUT_VERSION}|{self.model}|{self.dtype}|{self.layers}|2|{self.block_tokens}|"
            f"{self.kv_heads}|{self.head_dim}|tp{self.tensor_parallel}"
        )
        return xxhash.xxh3_64_hexdigest(text.encode())
