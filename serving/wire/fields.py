"""What a field may hold at most: checked by the decoder before it allocates.

Integers need no upper bound here: MessagePack has none beyond u64.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

U64 = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]  # a finite number of milliseconds or the like

FEW = Meta(max_length=4096)  # processes, families of metrics
ROWS = Meta(max_length=1 << 16)  # attempts that one frame tells of
MANY = Meta(max_length=1 << 20)  # tokens, chains of blocks, samples
