"""The fingerprint by which two workers know that one engine can read the other's KV.

How many GPUs share a copy is not in it: the transceiver converts between them.
"""

from __future__ import annotations

import xxhash

from serving.config import EngineConfig
from serving.engine.trtllm.api import Api
from serving.engine.trtllm.checkpoint import Checkpoint


def layout_of(api: Api, config: EngineConfig, checkpoint: Checkpoint, digest: str) -> str:
    """16 hex digits. The package's version is in it because its opaque state has no format of its own."""
    ours, card = config.trtllm, checkpoint.card
    text = (
        f"trtllm1|{digest}|{api.version}|{ours.transceiver_runtime}|{ours.dtype}|{ours.kv_dtype}|"
        f"{config.block_tokens}|{card.layers}|{card.kv_heads}|{card.head_dim}"
    )
    return xxhash.xxh3_64_hexdigest(text.encode())
