"""From the engine's KV events to ours: its block hashes mean nothing to the router, its tokens do.

Rules of the consumer, each with its counter:

    gap        `event_id` counts by one per attention-DP rank. Any other number: events were lost or the
               engine began anew, so all that is known of that rank is removed.
    window     with several attention windows only the largest one's blocks can serve a prompt.
    partial    a stored block with fewer tokens than a block is a tail: nobody can find it.
    demotion   an update of the level moves a block to host memory; it is still found.
    orphan     a parent that is missing or unknown is worked out from the prompts that were sent, by the
               block's own tokens; else the block is dropped.

A block's chain begins with its namespace. Requests are salted with theirs, and newer engines tell the salt;
with older ones the prompts that were sent tell it too.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrouter.hashing import next_hash, token_bytes
from serving.engine.base import BlockHash, StoredRun

EXPECTED_BLOCKS = 1 << 16  # blocks of sent prompts that are remembered
_U64 = (1 << 64) - 1
_TOKEN_BYTES = 4

EngineHash = int | str


def salt_of(namespace: int) -> str:
    """What requests of a namespace are salted with."""
    return f"{namespace:016x}"


def namespace_of(salt: object) -> int | None:
    """None for what is no salt of ours."""
    if not isinstance(salt, str) or len(salt) != 16:
        return None
    try:
        return int(salt, 16)
    except ValueError:
        return None


@dataclass(slots=True)
class _Place:
    """Where in a sent prompt a block stands."""

    namespace: int
    index: int
    parent: BlockHash | None


@dataclass(slots=True)
class _Held:
    """One of our hashes, and how many of the engine's blocks stand for it."""

    parent: BlockHash | None
    copies: int = 0


@dataclass(slots=True)
class _Rank:
    """What is known of one attention-DP rank."""

    last_id: int | None = None
    blocks: dict[EngineHash, BlockHash] = field(default_factory=dict)
    tails: set[EngineHash] = field(default_factory=set)
    namespaces: dict[EngineHash, int] = field(default_factory=dict)


class EventTranslator:
    """Feed it what was polled, in order; `counts` tells what was odd. Pure."""

    def __init__(self, block_tokens: int) -> None:
        self.counts: Counter[str] = Counter()  # gaps, orphans, tails, windows, malformed
        self.seen = 0  # whole blocks that were told as stored
        self.total_blocks: int | None = None  # on the GPU, as the engine announced it
        self._size = block_tokens
        self._ranks: dict[int, _Rank] = {}
        self._window = 0
        self._held: dict[BlockHash, _Held] = {}
        self._expected: OrderedDict[bytes, list[_Place]] = OrderedDict()
        self._stored: list[StoredRun] = []
        self._removed: list[BlockHash] = []

    def expect(self, tokens: array[int], namespace: int) -> None:
        """A prompt goes to the engine; its blocks may be stored."""
        data = token_bytes(tokens)
        width = self._size * _TOKEN_BYTES
        parent: BlockHash | None = None
        for index in range(len(tokens) // self._size):
            block = data[index * width : (index + 1) * width]
            places = self._expected.setdefault(block, [])
            self._expected.move_to_end(block)
            if all((p.namespace, p.index, p.parent) != (namespace, index, parent) for p in places):
                places.append(_Place(namespace, index, parent))
            parent = next_hash(namespace if parent is None else parent, block)
        while len(self._expected) > EXPECTED_BLOCKS:
            self._expected.popitem(last=False)

    def translate(
        self, events: Iterable[Mapping[str, Any]]
    ) -> list[tuple[list[StoredRun], list[BlockHash]]]:
        """What became findable and what no longer is, as steps to be told one after the other.

        Within a step removals count first. An event that cannot be read counts as a gap.
        """
        steps: list[tuple[list[StoredRun], list[BlockHash]]] = [([], [])]
        fresh: set[BlockHash] = set()  # stored by the last step
        for event in events:
            self._stored, self._removed = [], []
            try:
                self._take(event)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.counts["malformed"] += 1
                self._clear(self._rank_of(event))
            if not fresh.isdisjoint(self._removed):
                steps.append(([], []))
                fresh = set()
            steps[-1][0].extend(self._stored)
            steps[-1][1].extend(self._removed)
            fresh.update(block for run in self._stored for block in run.hashes)
        return [step for step in steps if step[0] or step[1]]

    def chains(self) -> list[StoredRun]:
        """All that can be found now, parents before children."""
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block, held in self._held.items():
            children.setdefault(held.parent, []).append(block)
        runs: list[StoredRun] = []
        heads: list[tuple[BlockHash | None, BlockHash]] = [
            (None, block) for block in children.get(None, ())
        ]
        while heads:
            parent, block = heads.pop()
            run = StoredRun(parent, [block])
            while True:
                following = children.get(run.hashes[-1], [])
                heads += [(run.hashes[-1], other) for other in following[1:]]
                if not following:
                    break
                run.hashes.append(following[0])
            runs.append(run)
        return runs

    # ------------------------------------------------------------ one event

    def _take(self, event: Mapping[str, Any]) -> None:
        rank = self._ranks.setdefault(self._rank_of(event), _Rank())
        event_id, data = event["event_id"], event["data"]
        if rank.last_id is not None and event_id != rank.last_id + 1:
            self.counts["gaps"] += 1
            self._clear(self._rank_of(event))
        rank.last_id = event_id
        window = event.get("window_size") or 0
        kind = data["type"]
        if kind == "created":
            if window >= self._window:
                self._window = window
                self.total_blocks = int(data["num_blocks_per_cache_level"][0])
            return
        if window < self._window:
            self.counts["windows"] += 1
        elif kind == "stored":
            self._store(rank, data)
        elif kind == "removed":
            for name in data["block_hashes"]:
                self._drop(rank, _key(name))
        # "updated" changes a level or a priority: the block is where it can be found all the same.

    @staticmethod
    def _rank_of(event: Mapping[str, Any]) -> int:
        rank = event.get("attention_dp_rank") if isinstance(event, Mapping) else None
        return rank if isinstance(rank, int) else 0

    def _store(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        parent_name = data.get("parent_hash")
        above: BlockHash | None = None
        namespace: int | None = None
        at_root = parent_name is None
        if parent_name is not None:
            key = _key(parent_name)
            above = rank.blocks.get(key)
            namespace = rank.namespaces.get(key)
        run: StoredRun | None = None
        for block in data["blocks"]:
            name = _key(block["block_hash"])
            tokens = array("I", [token["token_id"] for token in block["tokens"]])
            if len(tokens) < self._size:
                self.counts["tails"] += 1
                rank.tails.add(name)
                return  # nothing can follow it
            self.seen += 1
            known = rank.blocks.get(name)
            if known is not None:  # told twice
                above, namespace, at_root, run = known, rank.namespaces[name], False, None
                continue
            content = token_bytes(tokens)
            if above is None or namespace is None:
                salted = namespace_of(block.get("cache_salt"))
                if block.get("cache_salt") is not None and salted is None:
                    return  # not one of our requests
                place = self._place(content, salted, at_root)
                if place is None:
                    self.counts["orphans"] += 1
                    return
                above, namespace = place.parent, place.namespace
            ours = next_hash(namespace if above is None else above, content)
            rank.blocks[name], rank.namespaces[name] = ours, namespace
            held = self._held.get(ours)
            if held is None:
                held = self._held[ours] = _Held(above)
                if run is None:
                    run = StoredRun(above, [])
                    self._stored.append(run)
                run.hashes.append(ours)
            else:
                run = None
            held.copies += 1
            above, at_root = ours, False

    def _place(self, content: bytes, namespace: int | None, at_root: bool) -> _Place | None:
        """Where a block without a known parent may stand: at a prompt's start, else within one."""
        places = [p for p in self._expected.get(content, ()) if namespace in (None, p.namespace)]
        if at_root:
            roots = [p for p in places if p.index == 0]
            fresh = [p for p in roots if next_hash(p.namespace, content) not in self._held]
            if fresh or roots:
                return (fresh or roots)[0]
            if namespace is not None and not places:
                return _Place(namespace, 0, None)  # its salt says enough
        return next((p for p in places if p.parent is not None and p.parent in self._held), None)

    def _drop(self, rank: _Rank, name: EngineHash) -> None:
        if name in rank.tails:
            rank.tails.discard(name)
            return
        ours = rank.blocks.pop(name, None)
        rank.namespaces.pop(name, None)
        if ours is None:
            return
        held = self._held[ours]
        held.copies -= 1
        if held.copies <= 0:
            del self._held[ours]
            self._removed.append(ours)

    def _clear(self, number: int) -> None:
        rank = self._ranks.setdefault(number, _Rank())
        for name in list(rank.blocks):
            self._drop(rank, name)
        rank.tails.clear()
        rank.last_id = None


def _key(name: object) -> EngineHash:
    """A block's name as the engine spells it, whatever the sign of its 64 bits."""
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise TypeError(f"{name!r} is no block hash")
    return name & _U64 if isinstance(name, int) else name
