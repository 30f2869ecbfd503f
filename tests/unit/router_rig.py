"""A router with a virtual clock and no workers: what it is asked, told by reports and events, and books."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvrouter.hashing import block_hashes
from kvrouter.perf_model import WorkerModels
from kvrouter.policy_router import PolicyRouter, build_router
from kvrouter.router import Router, RouterRequest, WorkerView
from serving.wire import Events, Stored, pack_u64

BLOCK = 100
MS_PER_TOKEN = 0.05
NAMESPACE = 1


@dataclass
class Report:
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 10_000
    total_blocks: int = 10_000
    step_ms: float = 10.0
    moves: int = 0
    moved_tokens: int = 0
    move_ms: float = 0.0
    queue: list[tuple[int, int, int]] | None = None
    computed_tokens: int | None = None
    decoded: tuple[int, int] | None = None


def models() -> WorkerModels:
    return WorkerModels.from_priors(prefill=(0.0, MS_PER_TOKEN, 0.0), step=(10.0, 0.1, 1e-5))


def view(ident: str, role: str, total_blocks: int = 10_000) -> WorkerView:
    return WorkerView(ident, role, BLOCK, total_blocks, max_batch=256)


def router(
    prefill: int = 0, decode: int = 0, policy: str = "ttft_regret", **options: object
) -> PolicyRouter:
    made = build_router(policy, models=models, **options)  # type: ignore[arg-type]
    _: Router = made  # the type checker reads it
    for i in range(prefill):
        made.add_worker(view(f"p{i}", "prefill"))
    for i in range(decode):
        made.add_worker(view(f"d{i}", "decode"))
    return made


def request(n_tokens: int = 1000, prefix: int = 0, own: int = 0, **options: object) -> RouterRequest:
    """`prefix` tokens are the same for all; the others follow from `own`."""
    tokens = array("I", [7] * prefix) + array("I", [1000 + own] * (n_tokens - prefix))
    return RouterRequest(tokens, NAMESPACE, max_tokens=64, **options)  # type: ignore[arg-type]


def tell_cached(target: PolicyRouter, ident: str, wanted: RouterRequest, seq: int = 1) -> None:
    """The worker's event: it holds the whole prompt."""
    hashes = block_hashes(wanted.tokens, BLOCK, NAMESPACE)
    assert target.on_events(ident, 1, Events(seq, [Stored(None, pack_u64(list[int](hashes)))], b""))


def place(target: PolicyRouter, attempt: int, wanted: RouterRequest, now_s: float = 0.0) -> str:
    """Choose and book as the coordinator does; who computes the prompt."""
    choice = target.choose(wanted, now_s)
    target.book(attempt, choice.prefill or choice.decode, wanted, now_s)
    if choice.prefill is not None:
        target.book(attempt + 1_000_000, choice.decode, wanted, now_s)
    return choice.prefill or choice.decode


def finish(target: PolicyRouter, attempt: int, now_s: float = 0.0) -> None:
    target.computed(attempt, now_s)
    for one in (attempt, attempt + 1_000_000):
        target.release(one)
