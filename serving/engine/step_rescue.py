"""A step that failed, run again in halves until whoever broke it stands alone. Pure but for the runner.

Running a part of a plan again is safe: a runner changes the blocks of the planned tokens only, and the same
tokens give the same KV. With k guilty ones among n that is about k * log2(n) more steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine.base import TokenLogprobs
from serving.engine.sequence import Drawn, PrefillSlice, Runner, Sequence, StepPlan

__all__ = ["Rescued", "rescue"]

Piece = Sequence | PrefillSlice  # a decode, or a slice of a prompt


@dataclass(slots=True)
class Rescued:
    """`plan` is what was computed, in the order of the one that failed; `drawn` goes with it."""

    plan: StepPlan = field(default_factory=StepPlan)
    drawn: Drawn = field(default_factory=lambda: Drawn([]))
    guilty: list[Sequence] = field(default_factory=list)


def rescue(plan: StepPlan, runner: Runner) -> Rescued:
    """`plan` just failed as a whole, so a plan of one piece is not tried again."""
    pieces: list[Piece] = [*plan.decodes, *plan.prefills]
    survived: dict[int, tuple[int, TokenLogprobs | None] | None] = {}  # piece -> its token, if it drew
    guilty: list[Sequence] = []
    _halves(list(range(len(pieces))), pieces, runner, survived, guilty)
    rescued = Rescued(guilty=guilty)
    for index in sorted(survived):
        piece = pieces[index]
        if isinstance(piece, PrefillSlice):
            rescued.plan.prefills.append(piece)
        else:
            rescued.plan.decodes.append(piece)
        drawn = survived[index]
        if drawn is not None:
            token, logprobs = drawn
            if logprobs is not None:
                rescued.drawn.logprobs[len(rescued.drawn.tokens)] = logprobs
            rescued.drawn.tokens.append(token)
    return rescued


def _halves(
    indices: list[int],
    pieces: list[Piece],
    runner: Runner,
    survived: dict[int, tuple[int, TokenLogprobs | None] | None],
    guilty: list[Sequence],
) -> None:
    """`indices` failed together."""
    if len(indices) == 1:
        piece = pieces[indices[0]]
        guilty.append(piece.sequence if isinstance(piece, PrefillSlice) else piece)
        return
    middle = len(indices) // 2
    for half in (indices[:middle], indices[middle:]):
        part = StepPlan()
        for index in half:
            piece = pieces[index]
            if isinstance(piece, PrefillSlice):
                part.prefills.append(piece)
            else:
                part.decodes.append(piece)
        try:
            drawn = runner.run(part)
        except Exception:  # whatever it is: the halves tell whose it is
            _halves(half, pieces, runner, survived, guilty)
            continue
        row = 0
        for index in half:  # decodes come before prefills in both, so the order is that of `drawing`
            piece = pieces[index]
            if isinstance(piece, PrefillSlice) and not piece.draws:
                survived[index] = None
                continue
            survived[index] = drawn.tokens[row], drawn.logprobs.get(row)
            row += 1
