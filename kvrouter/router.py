"""The router's interface: where a request goes, and why.

Pure: no sockets, no clock of its own (`now_s` is a parameter), no Ray. A router lives in each frontend;
its bookings are its own and are corrected by the load reports of the workers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from kvrouter.perf_model import WorkerModels

__all__ = ["Choice", "LoadLike", "Router", "RouterRequest", "WorkerView"]


class LoadLike(Protocol):
    """What a router reads of a worker's load report (serving.wire.LoadReport)."""

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    step_ms: float
    moves: int  # reads of KV from peers since the report before
    moved_tokens: int
    move_ms: float  # summed
    # Prompts to compute, soonest due first: attempt, tokens left, due in so many ms; None: not told.
    queue: list[tuple[int, int, int]] | None
    computed_tokens: int | None  # of prompts, since the worker began; None: it does not tell
    decoded: tuple[int, int] | None  # sequences and KV tokens of a step of decodes alone; None: not told


@dataclass(slots=True)
class RouterRequest:
    """What the router may know of a request."""

    tokens: array[int]  # 'I', prompt and already generated
    namespace: int  # hash seed of (model, adapter, salt)
    max_tokens: int  # output still allowed
    session: str | None = None
    avoid: frozenset[str] = frozenset()  # workers that failed it: only when nobody else is left
    hashes: Sequence[int] | None = None  # of the full blocks of `tokens`; None: the router makes them
    choice: Choice | None = None  # what `choose` answered last, for `book`
    limit_s: float = inf  # when its first token should be out, for `book`
    waited_s: float = 0.0  # its client, for the next token: it is as old as that in a worker's order
    handoff: bool = True  # False: its KV goes nowhere, so whoever decodes computes the prompt too


@dataclass(slots=True)
class WorkerView:
    """A worker as the router sees it."""

    ident: str
    role: str  # prefill | decode
    block_tokens: int
    total_blocks: int
    max_batch: int
    draining: bool = False  # it gets a request only when nobody else is left
    layout: str = ""  # of its KV: only workers of one layout read each other's


@dataclass(slots=True)
class Choice:
    """The router's answer. `prefill` is None when the decode worker computes the prompt itself.

    `reasons`: per candidate, the terms (milliseconds or tokens, as named) it was compared by.
    """

    decode: str
    prefill: str | None
    cached_tokens: int = 0
    predicted_ttft_ms: float | None = None
    predicted_itl_ms: float | None = None
    pull_from: str | None = None  # worker to read `pull_tokens` of cached prefix from before computing
    pull_tokens: int = 0
    pull_within_ms: float = 0.0  # to wait longer for the owner's answer would not be worth it
    reasons: dict[str, dict[str, float]] = field(default_factory=dict)


class Router(Protocol):
    def add_worker(self, worker: WorkerView) -> None: ...

    def remove_worker(self, ident: str) -> None: ...

    def models(self) -> list[WorkerModels]:
        """The time models of all workers, as learnt so far."""

    def choose(self, request: RouterRequest, now_s: float, *, look: bool = False) -> Choice:
        """Raises NoWorker when no worker may take the request. Books nothing. `look`: nothing is to come of
        it, so policies that take turns remember nothing either."""

    def choose_decode(self, request: RouterRequest, source: str, now_s: float) -> Choice:
        """Where a running request can go on with the KV that `source` has; the choice's `prefill` is it.

        Raises NoWorker when none of its layout is there but `source` and draining ones. Books nothing.
        """

    def book(self, attempt: int, worker: str, request: RouterRequest, now_s: float) -> None:
        """Count `attempt` as work of `worker` until `release`."""

    def begun(self, attempt: int, cached_tokens: int, now_s: float) -> None:
        """The worker starts on the prompt of `attempt` and found `cached_tokens` of it."""

    def computed(self, attempt: int, now_s: float) -> None:
        """The prompt of `attempt` is computed: its first token is out. Before `progress` or `release`."""

    def progress(self, attempt: int, tokens: int) -> None:
        """`attempt` produced `tokens` more tokens (its prompt is computed)."""

    def release(self, attempt: int) -> None:
        """Idempotent."""

    def until_computed_ms(self, attempt: int, now_s: float) -> float | None:
        """From now until its prompt is computed, as predicted; None: no prompt of it is to be computed."""

    def can_spare(self, worker: str) -> bool:
        """Another worker of its role is there and not leaving: `choose` need not fall back on this one.
        Of whatever layout: it is for requests that have no KV yet."""

    def is_uneven(self, by_ms: float, now_s: float) -> bool:
        """Some worker has so much less to compute than another one of its role. Cheap."""

    def on_load(self, ident: str, report: LoadLike, now_s: float) -> None: ...

    def told(self, ident: str, attempt: int, uncached_tokens: int, now_s: float) -> None:
        """Worker `ident` has just got a prompt from another frontend."""

    @property
    def in_flight(self) -> int:
        """Bookings not released yet."""

    def on_events(self, ident: str, epoch: int, events: object) -> bool:
        """False: there is a gap, ask the worker for a snapshot."""

    def on_snapshot(self, ident: str, epoch: int, message: object) -> bool:
        """False: ask for another one."""

    def sweep(self, now_s: float) -> list[str]:
        """Call about once a second. Workers that turned out to send no events since the last call."""
