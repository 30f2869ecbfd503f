"""A worker's frame of tokens, found to be sane before anything of it is used.

The decoder checked types, ranges and lengths; here is what one field says of another.
"""

from __future__ import annotations

from serving.engine.base import FinishReason
from serving.errors import FrameRefused
from serving.wire import Step

_REASONS = {reason.value for reason in FinishReason} | {"moved"}
_U64, _U32 = 8, 4  # bytes of a column's entry


def check_step(step: Step) -> None:
    """Raises FrameRefused for what no honest worker sends."""
    rows = 0
    if step.tokens is not None:
        columns = step.tokens
        rows, rest = divmod(len(columns.tokens), _U32)
        if rest or len(columns.positions) != rows * _U32 or len(columns.attempts) != rows * _U64:
            raise FrameRefused("columns of tokens that disagree in their lengths")
    for drawn in step.logprobs or ():
        if drawn.row >= rows:
            raise FrameRefused(f"log-probabilities of row {drawn.row} of {rows}")
    if step.load is not None and step.load.role not in ("", "prefill", "decode"):
        raise FrameRefused("a worker with a role we do not know")
    for ended in step.ended or ():
        if ended.error is None and ended.reason not in _REASONS:
            raise FrameRefused("an attempt that ended for a reason we do not know")
