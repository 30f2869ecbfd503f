"""What a worker tells of its load: with frames that leave anyway, and of a new prompt at once."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable

from serving.engine.base import Load
from serving.kv.reader import Moves
from serving.link import Link
from serving.wire import LoadReport, Step, Submit

PERIOD_S = 0.02  # steps can be shorter than anybody can use a report


class ReportPeriod:
    """`flush` is called when a report that came too soon is due: the last one is always told."""

    def __init__(self, loop: AbstractEventLoop, flush: Callable[[], None]) -> None:
        self._loop = loop
        self._flush = flush
        self._sent_s = 0.0
        self._untold = False
        self._timer = False

    def now(self) -> None:
        """The next one is due at once: somebody is new."""
        self._sent_s = 0.0

    def is_due(self) -> bool:
        """Then it is to be sent."""
        now_s = self._loop.time()
        left_s = self._sent_s + PERIOD_S - now_s
        if left_s <= 0:
            self._sent_s, self._untold = now_s, False
            return True
        self._untold = True
        if not self._timer:
            self._timer = True
            self._loop.call_later(left_s, self._end)
        return False

    def _end(self) -> None:
        self._timer = False
        if self._untold:
            self._flush()


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
        parked=None if load.parked is None else [*load.parked],
    )


def tell_others(sender: Link, submit: Submit, frontends: Iterable[Link]) -> None:
    """A report knows of a prompt when the step after it ends. Until then all frontends but its sender would
    think this worker as free as before, and place theirs here too."""
    tokens = len(submit.tokens) // 4 if submit.uncached_tokens is None else submit.uncached_tokens
    for link in frontends:
        if link is not sender:
            link.send(Step(placed=[(submit.attempt, tokens)]))
