"""What a worker tells of its load: with frames that leave anyway, and of a new prompt at once."""

from __future__ import annotations

from collections.abc import Iterable

from serving.engine.base import Load
from serving.kv.reader import Moves
from serving.link import Link
from serving.wire import LoadReport, Step, Submit


def load_report(load: Load, role: str, moves: Moves, now_s: float) -> LoadReport:
    """`role`: what the worker plays now; `moves`: the reads since the report before."""
    blocks = load.blocks
    queue: list[tuple[int, int, int]] | None = None
    if load.prompts is not None:
        queue = [(attempt, left, round((due_s - now_s) * 1e3)) for attempt, left, due_s in load.prompts]
    return LoadReport(
        step=load.step,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_blocks=blocks.free + blocks.cached,
        total_blocks=blocks.total,
        step_ms=load.step_ms,
        role=role,
        moves=moves.count,
        moved_tokens=moves.tokens,
        move_ms=moves.ms,
        queue=queue,
        computed_tokens=load.computed_tokens,
        decoded=load.decoded,
    )


def tell_others(sender: Link, submit: Submit, frontends: Iterable[Link]) -> None:
    """A report knows of a prompt when the step after it ends. Until then all frontends but its sender would
    think this worker as free as before, and place theirs here too."""
    tokens = len(submit.tokens) // 4 if submit.uncached_tokens is None else submit.uncached_tokens
    for link in frontends:
        if link is not sender:
            link.send(Step(placed=[(submit.attempt, tokens)]))
