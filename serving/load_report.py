"""What a worker tells frontends of its load, with a frame that leaves anyway."""

from __future__ import annotations

from serving.engine.base import Load
from serving.kv.reader import Moves
from serving.wire import LoadReport


def load_report(load: Load, role: str, moves: Moves) -> LoadReport:
    """`role`: what the worker plays now; `moves`: the reads since the report before."""
    blocks = load.blocks
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
    )
