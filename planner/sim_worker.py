"""A worker on a virtual clock: prompts in the scheduler's order, a batch of decodes, a prefix cache.

Nothing is stepped through token by token. Between two events all that a worker does goes on at constant
rates, so that the end of each prompt and of each answer is known in advance:

    prompts alone     one after another in the order of kvrouter.deadline, anew at every chunk's end
    decodes alone     a token each per T_step(batch, kv)
    both              steps of T_step + one chunk: each gets its share of the time

Times are seconds of the simulation; work is in milliseconds of T_prefill.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrouter.deadline import Order, due_s
from kvrouter.router import Choice
from planner.workload import BLOCK_TOKENS, TraceRequest

__all__ = ["BlockCache", "EngineTimes", "Job", "SimWorker"]

CHUNK_MS = 50.0  # a worker looks at its queue anew this often
TINY = 1e-6


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What a worker's engine takes, by the forms of kvrouter.perf_model, and what it holds."""

    prefill: tuple[float, float, float]  # a, b, c of T_prefill, ms
    step: tuple[float, float, float]  # d, e, f of T_step, ms
    mixed_chunk_ms: float = 25.0  # prompt work in a step that decodes too
    cache_blocks: int = 3000  # of prefixes, of BLOCK_TOKENS
    kv_tokens: int = 1_500_000  # room for decodes
    max_batch: int = 256
    move_ms: float = 10.0  # from the first token to the decode worker's first step

    def prefill_ms(self, uncached: int, context: int) -> float:
        if uncached <= 0:
            return 0.0
        a, b, c = self.prefill
        return a + b * uncached + c * uncached * (context - 0.5 * uncached)

    def step_ms(self, batch: float, kv_tokens: float) -> float:
        d, e, f = self.step
        return d + e * batch + f * kv_tokens


class BlockCache:
    """Block-LRU: a use makes a chain recent, its end less than its start, so ends are evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, hashes: Sequence[int]) -> int:
        """Leading blocks of the chain that are here."""
        blocks = self._blocks
        for depth, block in enumerate(hashes):
            if block not in blocks:
                return depth
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Store or refresh a chain; returns what had to go."""
        blocks = self._blocks
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        evicted = []
        while len(blocks) > self._capacity:
            evicted.append(blocks.popitem(last=False)[0])
        return evicted


@dataclass(slots=True)
class Job:
    """One request on its way."""

    request: TraceRequest
    context_tokens: int  # prompt, and what was generated before a worker failed
    left_tokens: int  # to generate; its first token counts until it is resumed or moved
    attempt: int = 0
    stage: str = "prefill"  # prefill | moving | decode
    prefill: str = ""  # workers
    decode: str = ""
    due_s: float = 0.0
    waits_since_s: float = field(init=False)  # its client, for the next token
    cached_tokens: int | None = None  # found when its prefill began
    own_ms: float = 0.0  # T_prefill of the tokens it had to compute
    left_ms: float = 0.0
    end_count: float = 0.0  # at which the batch's count of tokens ends it
    first_token_s: float | None = None
    finished_s: float | None = None
    first_own_ms: float = 0.0  # own_ms of the attempt that gave the first token
    resumed: int = 0
    requeued: int = 0
    look_after_s: float = 0.0  # whether another worker would compute it sooner: not before
    rejected: bool = False
    refused_for: str | None = None  # why, as admission says it
    chosen: Choice | None = None  # what admission lets it in for, where it says
    limit_s: float = math.inf  # when its first token should be out, as admission promised
    moved: int = 0  # while it decoded, off workers that left

    def __post_init__(self) -> None:
        self.waits_since_s = self.request.arrival_s

    @property
    def resumed_tokens(self) -> int:
        """Generated before its last attempt."""
        return self.context_tokens - self.request.prompt_tokens


OnStored = Callable[[str, Sequence[int], int, list[int]], None]


@dataclass(slots=True)
class SimWorker:
    """`submit` prompts, `hand_over` decodes; call `advance` when `next_event_s` comes.

    `on_stored(worker, chain, first new, evicted)` tells of the cache.
    """

    ident: str
    times: EngineTimes
    order: Order
    on_stored: OnStored
    cache: BlockCache = field(init=False)
    _waiting: list[tuple[float, int, Job]] = field(default_factory=list)
    _running: Job | None = None
    _slice_ms: float = 0.0  # work of this slice, up to a chunk's end or the prompt's
    _done_ms: float = 0.0  # of it
    _decodes: list[tuple[float, int, Job]] = field(default_factory=list)
    _for_room: deque[Job] = field(default_factory=deque)
    _kv_tokens: float = 0.0
    _promised_tokens: int = 0
    _count: float = 0.0
    _now_s: float = 0.0
    begun: list[Job] = field(default_factory=list)  # since the caller last looked
    busy_prefill_s: float = 0.0
    busy_decode_s: float = 0.0

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.times.cache_blocks)

    # ------------------------------------------------------------ work

    def submit(self, job: Job, now_s: float) -> None:
        self._go_to(now_s)
        cached = self.cache.match(job.request.hashes) * BLOCK_TOKENS
        uncached = max(job.context_tokens - cached, 1)
        job.left_ms = self.times.prefill_ms(uncached, job.context_tokens)
        job.due_s = due_s(self.order, job.waits_since_s, job.left_ms)
        heapq.heappush(self._waiting, (job.due_s, job.attempt, job))
        if self._running is None:
            self._next_slice()
        elif self._waiting[0][0] < self._running.due_s:
            border = math.ceil(self._done_ms / CHUNK_MS) * CHUNK_MS
            self._slice_ms = min(self._slice_ms, max(border, TINY))

    def waiting(self) -> list[Job]:
        """Prompts that have not begun."""
        return [job for _, _, job in self._waiting if job.cached_tokens is None]

    def withdraw(self, job: Job, now_s: float) -> None:
        """Take back a prompt that has not begun."""
        self._go_to(now_s)
        self._waiting.remove((job.due_s, job.attempt, job))
        heapq.heapify(self._waiting)

    def hand_over(self, job: Job, now_s: float) -> None:
        """Its KV is here; decode begins as soon as there is room."""
        self._go_to(now_s)
        self._for_room.append(job)
        self._let_in()

    def streams(self) -> list[Job]:
        """Those whose KV is here to decode."""
        return [entry[2] for entry in self._decodes] + list(self._for_room)

    def take_away(self, job: Job, now_s: float) -> None:
        """One of `streams` leaves with its KV: its lengths are by now what is left of it."""
        self._go_to(now_s)
        if job in self._for_room:
            self._for_room.remove(job)
            return
        given = self.emitted(job) - 1
        self._decodes.remove((job.end_count, job.attempt, job))
        heapq.heapify(self._decodes)
        self._kv_tokens -= job.context_tokens + job.left_tokens - (job.end_count - self._count)
        self._promised_tokens -= job.context_tokens + job.left_tokens
        job.context_tokens += given
        job.left_tokens -= given
        self._let_in()

    def lose(self) -> None:
        """All that is here: the worker failed."""
        self._running = None
        self._waiting.clear()
        self._decodes.clear()
        self._for_room.clear()

    @property
    def idle(self) -> bool:
        return self._running is None and not self._decodes and not self._for_room

    @property
    def batch(self) -> int:
        return len(self._decodes) + len(self._for_room)

    @property
    def queued(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def oldest_s(self) -> float | None:
        """When the prompt that waits longest arrived."""
        arrivals = [entry[2].request.arrival_s for entry in self._waiting]
        if self._running is not None:
            arrivals.append(self._running.request.arrival_s)
        return min(arrivals, default=None)

    # ------------------------------------------------------------ time

    def next_event_s(self) -> float | None:
        ends = []
        work_rate, token_rate = self._rates()
        if self._running is not None:
            ends.append(max(self._slice_ms - self._done_ms, 0.0) / (1e3 * work_rate))
        if self._decodes:
            ends.append(max(self._decodes[0][0] - self._count, 0.0) / token_rate)
        return self._now_s + min(ends) if ends else None

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Prompts that are computed now, and answers that are complete."""
        self._go_to(now_s)
        computed = []
        job = self._running
        if job is not None and self._slice_ms - self._done_ms <= TINY:
            job.left_ms -= self._slice_ms
            self._running = None
            if job.left_ms <= TINY:
                computed.append(job)
                self._store(job)
            else:
                heapq.heappush(self._waiting, (job.due_s, job.attempt, job))
            self._next_slice()
        ended = []
        while self._decodes and self._decodes[0][0] - self._count <= TINY:
            job = heapq.heappop(self._decodes)[2]
            self._kv_tokens -= job.context_tokens + job.left_tokens
            self._promised_tokens -= job.context_tokens + job.left_tokens
            ended.append(job)
        if ended:
            self._let_in()
        if not self._decodes:
            self._kv_tokens = 0.0
        return computed, ended

    def emitted(self, job: Job) -> int:
        """Tokens that a decode has given so far, its first one included."""
        return max(int(job.left_tokens - (job.end_count - self._count)), 1)

    def going(self) -> list[tuple[int, int]]:
        """(prompt, output so far) tokens of what decodes."""
        emitted = [(job, self.emitted(job)) for _, _, job in self._decodes]
        emitted += [(job, 1) for job in self._for_room]
        return [(job.request.prompt_tokens, job.resumed_tokens + n) for job, n in emitted]

    def step_ms(self) -> float | None:
        """Of the batch as it is; None while nothing decodes."""
        return self.times.step_ms(len(self._decodes), self._kv_tokens) if self._decodes else None

    def _rates(self) -> tuple[float, float]:
        """Work done per second of time (1: all of it), and tokens per second of each decode."""
        step_s = self.times.step_ms(len(self._decodes), self._kv_tokens) / 1e3
        if not self._decodes:
            return 1.0, 1.0 / step_s
        if self._running is None:
            return 1.0, 1.0 / step_s
        chunk_s = self.times.mixed_chunk_ms / 1e3
        return chunk_s / (step_s + chunk_s), 1.0 / (step_s + chunk_s)

    def _go_to(self, now_s: float) -> None:
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        work_rate, token_rate = self._rates()
        if self._running is not None:
            self._done_ms += passed_s * work_rate * 1e3
            self.busy_prefill_s += passed_s * work_rate
        if self._decodes:
            tokens = passed_s * token_rate
            self._count += tokens
            self._kv_tokens += tokens * len(self._decodes)
            self.busy_decode_s += passed_s * (1.0 - work_rate if self._running is not None else 1.0)
        self._now_s = now_s

    def _next_slice(self) -> None:
        if not self._waiting:
            return
        job = heapq.heappop(self._waiting)[2]
        if job.cached_tokens is None:
            self._begin(job)
        self._running = job
        self._slice_ms = job.left_ms
        self._done_ms = 0.0

    def _begin(self, job: Job) -> None:
        hashes = job.request.hashes
        blocks = self.cache.match(hashes)
        if blocks:
            self.cache.use(hashes[:blocks])
        job.cached_tokens = min(blocks * BLOCK_TOKENS, job.context_tokens - 1)
        job.left_ms = self.times.prefill_ms(job.context_tokens - job.cached_tokens, job.context_tokens)
        job.own_ms = job.left_ms
        self.begun.append(job)

    def _store(self, job: Job) -> None:
        chain = job.request.hashes
        if chain:
            evicted = self.cache.use(chain)
            self.on_stored(self.ident, chain, (job.cached_tokens or 0) // BLOCK_TOKENS, evicted)

    def _let_in(self) -> None:
        while self._for_room and len(self._decodes) < self.times.max_batch:
            job = self._for_room[0]
            needs = job.context_tokens + job.left_tokens
            if self._decodes and self._promised_tokens + needs > self.times.kv_tokens:
                return
            self._for_room.popleft()
            self._promised_tokens += needs
            self._kv_tokens += job.context_tokens + 1
            job.end_count = self._count + job.left_tokens - 1
            heapq.heappush(self._decodes, (job.end_count, job.attempt, job))
