"""Simulated workers of the replay: a block-LRU cache, an ordered prefill queue, and decodes.

Set-up of the comparisons in facts section 3.1: prefill linear at 20,480 tokens/s, no noise, a cache of a
fixed number of blocks that decodes do not take from, decode that prefill does not disturb.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.traces import BLOCK_TOKENS, TraceRequest
from kvrouter.deadline import Order, due_s
from planner.sim_worker import BlockCache

TOKENS_PER_S = 20_480.0
CHUNK_S = 0.05  # a deadline worker looks at its queue anew this often
FIXED_TPOT_S = 0.030
# Step time of a 32B model on two H100: weights, per sequence, KV read.
STEP_MS = (12.0, 0.2, 4e-5)


@dataclass(slots=True)
class Report:
    """A worker's load report, as far as the replay has something to say (serving.wire.LoadReport)."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    step_ms: float
    moves: int = 0
    moved_tokens: int = 0
    move_ms: float = 0.0
    queue: list[tuple[int, int, int]] | None = None
    computed_tokens: int | None = None
    decoded: tuple[int, int] | None = None


@dataclass(slots=True)
class Job:
    """One request on its way; times are in seconds of the replay."""

    attempt: int
    request: TraceRequest
    decode: str
    frontend: int
    due_s: float = 0.0
    submitted_s: float = 0.0  # to its prefill worker
    begun_s: float = 0.0
    cached_blocks: int | None = None  # found when its prefill began
    left_tokens: float = 0.0
    stored_blocks: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0


class PrefillQueue:
    """One worker's prompts; `on_stored(worker, chain, first new, evicted)` tells of the cache.

    `chunked`: in slices of `CHUNK_S`, and as from an engine whatever there is to tell comes at the end of
    one. Otherwise a prompt is one slice, and `on_begun` tells of it at once. `packed`: a slice in which a
    prompt ends is filled up from the next ones, as engines do whose steps cost something by themselves;
    its token comes at the end all the same.
    """

    def __init__(
        self,
        ident: str,
        order: Order,
        capacity: int,
        on_begun: Callable[[Job, float], None],
        on_stored: Callable[[str, Sequence[int], int, list[int]], None],
        *,
        chunked: bool,
        packed: bool = False,
    ) -> None:
        self.ident = ident
        self._order = order
        self._cache = BlockCache(capacity)
        self._chunked = chunked
        self._packed = packed
        self._on_begun = on_begun
        self._on_stored = on_stored
        self._waiting: list[tuple[float, int, Job]] = []
        self._running: list[tuple[Job, float]] = []  # in this slice, and how many tokens of each
        self._slice_began_s = 0.0
        self._known_until_s = 0.0  # what came later is in no report yet
        self.computed_tokens = 0.0  # in all
        self.slice_ms = 0.0  # of the last one that is done
        self.begun: list[Job] = []  # in that one

    def submit(self, job: Job, now_s: float) -> float | None:
        """When to call `advance`, if the worker was idle."""
        request = job.request
        uncached = request.prompt_tokens - self._cache.match(request.hashes) * BLOCK_TOKENS
        job.submitted_s = now_s
        job.left_tokens = max(uncached, 1)
        job.due_s = due_s(self._order, now_s, job.left_tokens / TOKENS_PER_S * 1e3)
        heapq.heappush(self._waiting, (job.due_s, job.attempt, job))
        return None if self._running else self._next(now_s)

    def advance(self, now_s: float) -> tuple[list[Job], float | None]:
        """A slice is done: the jobs that are complete now, and when to call again."""
        assert self._running
        self._known_until_s = self._slice_began_s
        self.slice_ms = (now_s - self._slice_began_s) * 1e3
        done: list[Job] = []
        self.begun = []
        for job, n_tokens in self._running:
            if self._chunked and job.begun_s == self._slice_began_s:
                self.begun.append(job)
            job.left_tokens -= n_tokens
            self.computed_tokens += n_tokens
            hashes = job.request.hashes
            if job.left_tokens <= 1e-6:
                done.append(job)
                have = len(hashes)
            else:
                have = int((job.request.prompt_tokens - job.left_tokens) // BLOCK_TOKENS)
                heapq.heappush(self._waiting, (job.due_s, job.attempt, job))
            if have > job.stored_blocks:
                self._store(hashes[:have], job.stored_blocks)
                job.stored_blocks = have
        self._running = []
        return done, self._next(now_s)

    def load(self) -> tuple[int, int]:
        """Prompts queued or computing and their tokens to compute, as an engine tells them when a slice is
        done: without what came during it, and of waiting ones what was not cached when they came."""
        jobs = [entry[2] for entry in self._waiting] + [job for job, _ in self._running]
        known = [job for job in jobs if job.submitted_s <= self._known_until_s]
        return len(known), int(sum(job.left_tokens for job in known))

    def queue(self, now_s: float) -> list[tuple[int, int, int]]:
        """The same prompts one by one (kvrouter.router.LoadLike)."""
        jobs = [entry[2] for entry in self._waiting] + [job for job, _ in self._running]
        return sorted(
            (
                (job.attempt, int(job.left_tokens), round((job.due_s - now_s) * 1e3))
                for job in jobs
                if job.submitted_s <= self._known_until_s
            ),
            key=lambda prompt: prompt[2],
        )

    def _next(self, now_s: float) -> float | None:
        """Begin a slice; when it will be done, None without any work."""
        room = CHUNK_S * TOKENS_PER_S
        total = 0.0
        while self._waiting and (not self._running or (self._packed and room > 1e-6)):
            job = heapq.heappop(self._waiting)[2]
            if job.cached_blocks is None:
                self._begin(job, now_s)
            n_tokens = min(job.left_tokens, room) if self._chunked else job.left_tokens
            self._running.append((job, n_tokens))
            room -= n_tokens
            total += n_tokens
        self._slice_began_s = now_s
        return now_s + total / TOKENS_PER_S if self._running else None

    def _begin(self, job: Job, now_s: float) -> None:
        hashes = job.request.hashes
        job.cached_blocks = job.stored_blocks = self._cache.match(hashes)
        job.left_tokens = max(job.request.prompt_tokens - job.cached_blocks * BLOCK_TOKENS, 1)
        if job.cached_blocks:
            self._cache.use(hashes[: job.cached_blocks])
        job.begun_s = now_s
        if not self._chunked:
            self._on_begun(job, now_s)

    def _store(self, chain: Sequence[int], first_new: int) -> None:
        evicted = self._cache.use(chain)
        self._on_stored(self.ident, chain, first_new, evicted)


class DecodeBatch:
    """One worker's decodes. `fixed`: 30 ms a token, whatever the batch; else by STEP_MS.

    All of a batch advance together, so one count of tokens per sequence, growing at 1 / step time, tells
    when each ends.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._jobs: list[tuple[float, int, Job]] = []  # by the count at which each ends
        self._kv_tokens = 0.0
        self._count = 0.0
        self._now_s = 0.0

    def add(self, job: Job, now_s: float) -> None:
        self._go_to(now_s)
        heapq.heappush(self._jobs, (self._count + job.request.output_tokens - 1, job.attempt, job))
        self._kv_tokens += job.request.prompt_tokens

    def __len__(self) -> int:
        return len(self._jobs)

    def next_end_s(self) -> float | None:
        if not self._jobs:
            return None
        return self._now_s + max(self._jobs[0][0] - self._count, 0.0) * self._step_s()

    def pop_ended(self, now_s: float) -> list[Job]:
        self._go_to(now_s)
        ended = []
        while self._jobs and self._jobs[0][0] - self._count <= 1e-6:
            job = heapq.heappop(self._jobs)[2]
            self._kv_tokens -= job.request.prompt_tokens + job.request.output_tokens - 1
            ended.append(job)
        return ended

    def _step_s(self) -> float:
        if self._fixed:
            return FIXED_TPOT_S
        base, per_sequence, per_token = STEP_MS
        return (base + per_sequence * len(self._jobs) + per_token * self._kv_tokens) / 1e3

    def _go_to(self, now_s: float) -> None:
        tokens = (now_s - self._now_s) / self._step_s()
        self._now_s = now_s
        self._count += tokens
        self._kv_tokens += tokens * len(self._jobs)
