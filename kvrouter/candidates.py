"""What a request would meet on each worker: the predictions that policies compare. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.cost import Candidate, Demand, cheapest_prefix
from kvrouter.load import WorkerLoad
from kvrouter.turnover import CacheTurnover

__all__ = ["candidates", "decode_candidates"]


def candidates(
    demand: Demand,
    loads: Sequence[WorkerLoad],
    matched: Mapping[str, int],
    turnover: CacheTurnover,
    now_s: float,
) -> list[Candidate]:
    """One per load, in that order. `matched`: leading blocks by worker that are cached, or will be when it
    is the request's turn; of workers of any role.
    """
    prompt = demand.prompt_tokens
    most_cached = max(prompt - 1, 0)  # the last token is always computed
    size = loads[0].view.block_tokens
    prompt_blocks = -(-prompt // size)
    needs_blocks = -(-(prompt + demand.output_tokens) // size)
    lender = demand.lender
    best = None if lender is None else (lender[0], lender[1] * size)
    seen = []
    for load in loads:
        ident = load.view.ident
        cached = min(matched.get(ident, 0) * size, most_cached)
        way = cheapest_prefix(load.models, prompt, cached, best, most_cached)
        due = load.due_s(way.ms, now_s - demand.waited_s)
        in_flight, kv_blocks = load.in_flight, load.kv_blocks
        seen.append(
            Candidate(
                ident=ident,
                cached_tokens=cached,
                uncached_tokens=way.uncached_tokens,
                prefill_ms=way.ms,
                wait_ms=load.wait_ms(due, now_s),
                backlog_ms=load.backlog_ms(now_s),
                queued_tokens=load.queued_tokens,
                delays=load.made_to_wait(due, now_s),
                in_flight=in_flight,
                kv_blocks=kv_blocks,
                prompt_blocks=prompt_blocks,
                itl_ms=load.models.step.ms(in_flight + 1, (kv_blocks + needs_blocks) * size),
                room_blocks=load.view.total_blocks - load.promised_blocks,
                needs_blocks=needs_blocks,
                turnover=turnover.excess(ident),
                compute_ms=way.compute_ms,
                pull_from=way.source,
                pull_tokens=way.tokens,
            )
        )
    return seen


def decode_candidates(
    demand: Demand, loads: Sequence[WorkerLoad], matched: Mapping[str, int]
) -> list[Candidate]:
    """As `candidates`, without what only matters to whoever computes the prompt: half the cost."""
    prompt = demand.prompt_tokens
    most_cached = max(prompt - 1, 0)
    size = loads[0].view.block_tokens
    prompt_blocks = -(-prompt // size)
    needs_blocks = -(-(prompt + demand.output_tokens) // size)
    seen = []
    for load in loads:
        view = load.view
        in_flight, kv_blocks = load.in_flight, load.kv_blocks
        seen.append(
            Candidate(
                ident=view.ident,
                cached_tokens=min(matched.get(view.ident, 0) * size, most_cached),
                in_flight=in_flight,
                kv_blocks=kv_blocks,
                prompt_blocks=prompt_blocks,
                itl_ms=load.models.step.ms(in_flight + 1, (kv_blocks + needs_blocks) * size),
                room_blocks=view.total_blocks - load.promised_blocks,
                needs_blocks=needs_blocks,
            )
        )
    return seen
