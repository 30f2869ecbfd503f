"""One attempt in the engine: what was asked, what it has said so far, and what it may still do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from serving.engine.base import AttemptId, Mode, Work


class Stage(str, Enum):
    WAITING = "waiting"  # DECODE: for its prompt's state
    MOVING = "moving"  # DECODE: the engine fetches the KV; an abort now may wedge both sides
    COMPUTING = "computing"


@dataclass(slots=True, eq=False)
class Live:
    """`taken` tokens of the engine's cumulative list are told, or were told by somebody else."""

    work: Work
    stage: Stage
    began_s: float
    output: Any = None  # the engine's RequestOutput: the only handle to abort by
    taken: int = 0
    started: bool = False
    cancelled: bool = False  # nobody hears of it any more; it still ends in order
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    deadline: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def attempt(self) -> AttemptId:
        return self.work.attempt

    @property
    def first_position(self) -> int:
        """Of the first token in the engine's list."""
        return len(self.work.tokens) - self.work.n_prompt

    @property
    def computes_prompt(self) -> bool:
        return self.work.mode is not Mode.DECODE and not self.started

    def new_tokens(self) -> tuple[int, list[int]]:
        """Index of the first one not taken, and the tokens from there; they count as taken."""
        told = self.output.outputs[0].token_ids or []
        at, self.taken = self.taken, max(self.taken, len(told))
        return at, [int(token) for token in told[at:]]

    def logprobs_at(self, index: int) -> Any | None:
        """What the engine says of token `index` of its list.

        After a hand-over the list may lack the tokens that were handed over, so it is aligned at its end.
        """
        completion = self.output.outputs[0]
        entries = completion.logprobs or []
        at = index - len(completion.token_ids) + len(entries)
        return entries[at] if 0 <= at < len(entries) else None

    def end_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
