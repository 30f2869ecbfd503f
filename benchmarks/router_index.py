"""The router's index: prefix search, events, hashing, memory, a whole decision; beside Dynamo's.

    python -m benchmarks.router_index [--json] [--peer]

`--peer` runs the same prompts and chains through Dynamo's Rust index in the same process. Its wheel alone
is enough and needs a glibc of 2.28 or newer (this is the extra `bench-peer`):

    pip install --no-deps ai-dynamo-runtime==1.6.1

- `find_us`: median time from block hashes to a dictionary worker -> matched blocks, by BLOCKSxWORKERS; the
  slowest of the shapes in `find_us_by_shape`. full: all workers hold the whole prompt; graded: worker i
  holds its first (i + 1) / n; half: all hold its first half; turns: a conversation that forked off at
  every sixteenth of the prompt, half as many workers after each fork; none: nobody holds any.
- `stored_blocks_s`, `removed_blocks_s`: by blocks an event, from decoded wire messages through
  kvrouter/events.py. The peer takes JSON; it is made beforehand.
- `hash_32k_ms`: 32,768 tokens in blocks of 16. The peer hashes each block alone, ours are chained.
- `decision_us`: `choose` of the default router for 2,048 tokens over 64 workers, hashing included.
- `bytes_per_block`: of the index, per distinct block (tracemalloc); chains of 64 blocks, one worker each.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

from benchmarks.report import Progress, command, print_report
from kvrouter.events import CacheEvents
from kvrouter.hashing import block_hashes
from kvrouter.index import PrefixIndex
from kvrouter.policy_router import build_router
from kvrouter.router import RouterRequest, WorkerView
from serving.wire import Events, Stored, pack_u64

BLOCKS = (16, 128, 1024, 4096)
WORKERS = (8, 64, 512)
SHAPES = ("full", "graded", "half", "turns", "none")
EVENT_BLOCKS = (1, 4, 16, 64)
BLOCK_TOKENS = 16
OTHER_CHAINS = 2_000  # of 64 blocks, so that the index is not empty but for the prompt
EVENTS = 4_000

Chain = tuple[int, int | None, list[int]]  # worker, parent, hashes


def median_us(call: Callable[[], object], rounds: int = 300) -> float:
    for _ in range(20):
        call()
    spent = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - began)
    return round(statistics.median(spent) / 1e3, 2)


class Ours:
    """kvrouter.index behind kvrouter.events."""

    def __init__(self, workers: int) -> None:
        self.events = CacheEvents(PrefixIndex())
        self.names = [f"worker-{n}" for n in range(workers)]
        for name in self.names:
            self.events.add_worker(name, 10_000_000)

    def store(self, chains: list[Chain]) -> None:
        for worker, parent, hashes in chains:
            self.events.index.store(self.names[worker], parent, hashes)

    def find(self, hashes: list[int]) -> dict[str, int]:
        return self.events.match(hashes)

    def time_events(self, stored: list[Chain]) -> tuple[float, float]:
        """Seconds to store these chains on one worker, an event each; and to remove them, ends first."""
        frames = [Events(n, [Stored(p, pack_u64(h))], b"") for n, (_, p, h) in enumerate(stored, 1)]
        removals = [
            Events(n, [], pack_u64(h[::-1]))
            for n, (_, _, h) in enumerate(reversed(stored), 1 + len(stored))
        ]
        spent = []
        for messages in (frames, removals):
            began = time.perf_counter()
            for message in messages:
                self.events.apply(self.names[0], 1, message)
            spent.append(time.perf_counter() - began)
        assert self.events.index.stats.blocks == 0
        return spent[0], spent[1]


class Peer:
    """dynamo.llm.RadixTree."""

    def __init__(self, workers: int) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found,unused-ignore]

        self.tree = RadixTree()
        self._serial = 0

    def _event(self, data: dict[str, Any]) -> bytes:
        self._serial += 1
        return json.dumps({"event_id": self._serial, "dp_rank": 0, "data": data}).encode()

    def _stored(self, chain: Chain) -> bytes:
        _, parent, hashes = chain
        blocks = [{"block_hash": name, "tokens_hash": name} for name in hashes]
        return self._event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def store(self, chains: list[Chain]) -> None:
        for chain in chains:
            self.tree.apply_event(chain[0], self._stored(chain))

    def find(self, hashes: list[int]) -> dict[Any, int]:
        scores: dict[Any, int] = self.tree.find_matches(hashes).scores
        return scores

    def time_events(self, stored: list[Chain]) -> tuple[float, float]:
        frames = [self._stored(chain) for chain in stored]
        removals = [self._event({"removed": {"block_hashes": h[::-1]}}) for _, _, h in reversed(stored)]
        spent = []
        for messages in (frames, removals):
            began = time.perf_counter()
            for message in messages:
                self.tree.apply_event(0, message)
            spent.append(time.perf_counter() - began)
        return spent[0], spent[1]


def random_hashes(source: random.Random, count: int) -> list[int]:
    return [source.getrandbits(64) for _ in range(count)]


def other_chains(source: random.Random, workers: int) -> list[Chain]:
    return [(n % workers, None, random_hashes(source, 64)) for n in range(OTHER_CHAINS)]


def shaped(shape: str, prompt: list[int], workers: int, source: random.Random) -> list[Chain]:
    """What the workers hold of `prompt`."""
    blocks = len(prompt)
    if shape == "full":
        return [(n, None, prompt) for n in range(workers)]
    if shape == "graded":
        return [(n, None, prompt[: max(1, blocks * (n + 1) // workers)]) for n in range(workers)]
    if shape == "half":
        return [(n, None, prompt[: blocks // 2]) for n in range(workers)]
    chains: list[Chain] = []
    if shape == "turns":
        turn = max(blocks // 16, 1)
        for end in range(turn, blocks + 1, turn):
            holders = max(workers >> (end // turn - 1), 1)
            for n in range(holders):
                # Another answer was stored first, so the conversation forks off here.
                chains.append((n, None, prompt[:end]))
                chains.append((n, prompt[end - 1], random_hashes(random.Random(prompt[end - 1]), 4)))
    return chains


def find(side: type[Ours | Peer]) -> tuple[dict[str, float], dict[str, float]]:
    """Slowest shape by size, and every shape."""
    worst: dict[str, float] = {}
    every: dict[str, float] = {}
    for workers in WORKERS:
        for shape in SHAPES:
            source = random.Random(7)
            index = side(workers)
            index.store(other_chains(source, workers))
            prompts = {blocks: random_hashes(source, blocks) for blocks in BLOCKS}
            for blocks, prompt in prompts.items():
                index.store(shaped(shape, prompt, workers, source))
                found = len(index.find(prompt))
                assert found == (0 if shape == "none" else workers), (shape, blocks, workers, found)
            for blocks, prompt in prompts.items():
                spent = median_us(lambda find=index.find, prompt=prompt: find(prompt))  # type: ignore[misc]
                size = f"{blocks}x{workers}"
                every[f"{size} {shape}"] = spent
                worst[size] = max(spent, worst.get(size, 0.0))
    return worst, every


def events(side: type[Ours | Peer]) -> tuple[dict[str, int], dict[str, int]]:
    """Blocks a second, by blocks an event: stored and removed. Chains of 64 blocks."""
    stored: dict[str, int] = {}
    removed: dict[str, int] = {}
    for size in EVENT_BLOCKS:
        best = [float("inf"), float("inf")]
        for _ in range(3):
            source = random.Random(3)
            chains: list[Chain] = []
            while len(chains) < EVENTS:
                hashes = random_hashes(source, 64)
                for start in range(0, 64, size):
                    parent = hashes[start - 1] if start else None
                    chains.append((0, parent, hashes[start : start + size]))
            index = side(1)
            gc.collect()
            best = [min(old, new) for old, new in zip(best, index.time_events(chains), strict=True)]
        stored[str(size)] = round(len(chains) * size / best[0])
        removed[str(size)] = round(len(chains) * size / best[1])
    return stored, removed


def hash_ms(hashes: Callable[[Any, int], object], tokens: object) -> float:
    return round(median_us(lambda: hashes(tokens, BLOCK_TOKENS), 100) / 1e3, 4)


def decision_us() -> float:
    source = random.Random(5)
    index = CacheEvents(PrefixIndex())
    router = build_router(caches=index)
    views = [
        WorkerView(f"{role}-{n}", role, BLOCK_TOKENS, total_blocks=10_000, max_batch=256)
        for role in ("prefill", "decode")
        for n in range(32)
    ]
    prompt = array("I", [source.randrange(50_000) for _ in range(2048)])
    hashes: list[int] = [*block_hashes(prompt, BLOCK_TOKENS, 1)]
    for n, view in enumerate(views):
        router.add_worker(view)
        index.index.store(view.ident, None, hashes[: 2 * (n % 32) + 1])
    return median_us(lambda: router.choose(RouterRequest(prompt, 1, 128), 0.0))


def bytes_per_block() -> float:
    source = random.Random(9)
    chains = [(n % 8, random_hashes(source, 64)) for n in range(1_000)]
    index = PrefixIndex()
    for n in range(8):
        index.add_worker(f"worker-{n}")
    columns = [(worker, pack_u64(hashes)) for worker, hashes in chains]
    del chains
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for worker, column in columns:
        index.store(f"worker-{worker}", None, array("Q", column).tolist())
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return round(used / index.stats.blocks, 1)


def main() -> None:
    parser = command("router_index", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peer", action="store_true", help="measure Dynamo's index in the same run")
    options = parser.parse_args()
    if options.peer:
        try:
            from dynamo.llm import compute_block_hash_for_seq
        except ImportError:
            sys.exit("--peer needs Dynamo's wheel: pip install --no-deps ai-dynamo-runtime==1.6.1")
    progress = Progress(quiet=options.json)
    tokens = array("I", [random.Random(1).randrange(50_000) for _ in range(32_768)])
    report: dict[str, Any] = {}
    progress.say("hashing, a decision, memory")
    report["hash_32k_ms"] = hash_ms(lambda ids, size: block_hashes(ids, size, 1), tokens)
    if options.peer:
        report["peer_hash_32k_ms"] = hash_ms(compute_block_hash_for_seq, tokens.tolist())
    report["decision_us"] = decision_us()
    report["bytes_per_block"] = bytes_per_block()
    sides: dict[str, type[Ours | Peer]] = {"": Ours}
    if options.peer:
        sides["peer_"] = Peer
    for prefix, side in sides.items():
        progress.say(f"{'the peer' if prefix else 'our index'}: search")
        report[f"{prefix}find_us"], report[f"{prefix}find_us_by_shape"] = find(side)
        progress.say(f"{'the peer' if prefix else 'our index'}: events")
        report[f"{prefix}stored_blocks_s"], report[f"{prefix}removed_blocks_s"] = events(side)
    if options.json:
        print(json.dumps(report))
    else:
        print_report("Router index", report)


if __name__ == "__main__":
    main()
