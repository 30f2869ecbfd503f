"""The KV events of the fake engine: blocks stored and removed, in a buffer that drops what is too much."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.fake_trtllm.knobs import Knobs

Block = tuple[int, int | None, list[int]]  # hash, hash of its parent, tokens


class EventLog:
    """What nobody polls stays until the buffer is full. Its owner holds a lock around every call."""

    def __init__(self, profile: str, kv_cache_config: Any, context: int, knobs: Knobs) -> None:
        self._is_main = profile == "main"
        self._room: int = kv_cache_config.event_buffer_max_size
        self._context = context
        self._knobs = knobs
        self._events: deque[dict[str, Any]] = deque()
        self._next = 0

    def poll(self) -> list[dict[str, Any]]:
        if self._knobs.poll_errors:
            self._knobs.poll_errors -= 1
            raise TypeError("'NoneType' object is not subscriptable")
        found = list(self._events)
        self._events.clear()
        return found

    def restart(self) -> None:
        """Events count from the beginning."""
        self._next = 0

    def created(self, n_blocks: int) -> None:
        self._add({"type": "created", "num_blocks_per_cache_level": [n_blocks, 0]})

    def stored(self, salt: str | None, blocks: Sequence[Block]) -> None:
        """A run of blocks, each the parent of the next."""
        described = []
        for digest, _, tokens in blocks:
            block: dict[str, Any] = {
                "type": "stored_block",
                "block_hash": self._spelled(digest),
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
                ],
                "cache_level": 0,
                "priority": 35,
            }
            if self._is_main:
                block["cache_salt"] = salt
            described.append(block)
        parent = blocks[0][1]
        told = None if self._knobs.no_parents or parent is None else self._spelled(parent)
        self._add({"type": "stored", "parent_hash": told, "blocks": described})

    def removed(self, hashes: Sequence[int]) -> None:
        if hashes:
            self._add({"type": "removed", "block_hashes": [self._spelled(digest) for digest in hashes]})

    def _add(self, data: dict[str, Any]) -> None:
        """One event a window."""
        for window in [512, self._context] if self._knobs.small_window else [self._context]:
            self._add_of(window, data)

    def _add_of(self, window: int, data: dict[str, Any]) -> None:
        if not self._room or self._knobs.events_off:
            return
        event: dict[str, Any] = {"event_id": self._next, "data": data, "window_size": window}
        if self._is_main:
            event |= {"attention_dp_rank": 0, "hash_algo": "v1_block_key"}
        self._next += 1
        if self._knobs.drop_events:
            self._knobs.drop_events -= 1
        elif len(self._events) < self._room:  # a full buffer drops in silence
            self._events.append(event)

    def _spelled(self, digest: int) -> int | str:
        return f"{digest:016x}" if self._knobs.hex_hashes else digest
