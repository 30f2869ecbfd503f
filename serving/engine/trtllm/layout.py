"""The fingerprint by which two workers know that one engine can read the other's KV.

The transceiver converts between pools of unequal shapes, but only some such pairs were compared
(`topology_pairs`). So the shapes of both pools are in it, the same on both sides: workers of one
configuration read each other's KV, and in a rollout to other shapes old and new ones do not.
"""

from __future__ import annotations

import xxhash

from serving.config import EngineConfig
from serving.engine.trtllm.api import Api
from serving.engine.trtllm.checkpoint import Checkpoint


def layout_of(api: Api, config: EngineConfig, checkpoint: Checkpoint, digest: str, topology: str) -> str:
    """16 hex digits. The package's version is in it because its opaque state has no format of its own.

    `topology`: of the variant's pools, as in "tp2pp1>tp1pp1".
    """
    ours, card = config.trtllm, checkpoint.card
    text = (
        f"trtllm1|{digest}|{api.version}|{ours.transceiver_runtime}|{ours.dtype}|{ours.kv_dtype}|"
        f"{config.block_tokens}|{card.layers}|{card.kv_heads}|{card.head_dim}|{topology}"
    )
    return xxhash.xxh3_64_hexdigest(text.encode())
