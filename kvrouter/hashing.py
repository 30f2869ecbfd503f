"""The one hash of KV blocks, used by engines, routers and simulators alike.

Byte layout, version 1 (all integers little-endian; golden vectors in tests/golden/hashing.json):

    seed  = xxh3_64( "kvrelay-kv" 0x01 | field(model) | [field(adapter)] | [field(salt)] )
    field = kind u8 | length u32 | UTF-8 bytes        kinds: 1 model, 2 adapter, 3 salt
    h[0]  = xxh3_64( seed u64   | token ids of block 0, u32 each )
    h[i]  = xxh3_64( h[i-1] u64 | token ids of block i, u32 each )

Nothing depends on process, machine or time. A change of layout is a new version byte and new vectors.
A hash finds a block, it does not prove one: see serving.kv.block_pool.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct
from typing import cast

from xxhash import xxh3_64_intdigest

from serving.engine.base import BlockHash

__all__ = ["HASH_VERSION", "block_hashes", "namespace_seed", "next_hash", "token_bytes"]

HASH_VERSION = 1
_MAGIC = b"kvrelay-kv"
_MODEL, _ADAPTER, _SALT = 1, 2, 3
_U32 = 4  # bytes
_U64 = Struct("<Q")


def namespace_seed(model: str, adapter: str | None = None, salt: str | None = None) -> int:
    """u64 seed of all chains of (model, adapter, salt); None is "has none", distinct from ""."""
    data = bytearray(_MAGIC)
    data.append(HASH_VERSION)
    for kind, text in ((_MODEL, model), (_ADAPTER, adapter), (_SALT, salt)):
        if text is not None:
            raw = text.encode()
            data.append(kind)
            data += len(raw).to_bytes(4, "little")
            data += raw
    return int(xxh3_64_intdigest(bytes(data)))


def next_hash(parent: int, data: bytes) -> BlockHash:
    """Hash of a full block with token bytes `data` after `parent` (the namespace seed at the start)."""
    return BlockHash(xxh3_64_intdigest(parent.to_bytes(8, "little") + data))


def token_bytes(tokens: array[int]) -> bytes:
    """`tokens` (typecode 'I') as little-endian u32, whatever the machine."""
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = array(tokens.typecode, tokens)
    swapped.byteswap()
    return swapped.tobytes()


def block_hashes(tokens: array[int] | bytes, block_tokens: int, seed: int) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; a partial last block has none.

    To go on after a known block pass its hash as `seed` and the tokens that follow it.
    """
    data = tokens if isinstance(tokens, bytes) else token_bytes(tokens)
    size = block_tokens * _U32
    blocks = Struct(f"{size}s").iter_unpack(data[: len(data) // size * size])
    pack, digest, parent = _U64.pack, xxh3_64_intdigest, seed
    # Calling BlockHash, a name for int, would cost a third more.
    return cast("list[BlockHash]", [parent := digest(pack(parent) + block) for (block,) in blocks])
