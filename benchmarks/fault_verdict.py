"""What a fault did to the streams: tokens lost and repeated, by position, usage, gaps.

Every stream is compared with the answer to the same request when nothing was broken. Where that cannot be
known to the token (bfloat16) the positions alone are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from benchmarks.fault_client import Answer


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one stream."""

    completed: bool  # whole, and it ended as an undisturbed one does
    lost: int  # tokens that never came, or came too late to stand where they belong
    repeated: int  # tokens that came beyond those there should be
    wrong_usage: bool
    gap_ms: float  # longest wait between two events of it


def judge(answer: Answer, expected: Sequence[str] | None) -> Verdict:
    """`expected` None: only how many there are is known."""
    lost, repeated = difference(answer.tokens, expected, answer.ask.n_shown)
    return Verdict(
        completed=answer.whole and answer.error is None and answer.finish == answer.ask.finish,
        lost=lost,
        repeated=repeated,
        wrong_usage=not usage_is_right(answer),
        gap_ms=longest_gap_ms(answer.times_s),
    )


def difference(got: Sequence[str], expected: Sequence[str] | None, n_tokens: int) -> tuple[int, int]:
    """(lost, repeated) of an answer of `n_tokens`."""
    if expected is None:
        return max(n_tokens - len(got), 0), max(len(got) - n_tokens, 0)
    expected = expected[:n_tokens]
    if list(got) == list(expected):
        return 0, 0
    if list(got) == list(expected[: len(got)]):  # the usual way to fail: it just stops
        return len(expected) - len(got), 0
    blocks = SequenceMatcher(None, expected, got, autojunk=False).get_matching_blocks()
    common = sum(block.size for block in blocks)
    return len(expected) - common, len(got) - common


def usage_is_right(answer: Answer) -> bool:
    """As if nothing had happened: a resumed answer's own tokens are never billed as its prompt's."""
    usage = answer.usage
    if usage is None:
        return False
    prompt, generated = len(answer.ask.prompt), answer.ask.n_tokens
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return counts == (prompt, generated, prompt + generated) and 0 <= cached <= prompt


def longest_gap_ms(times_s: Sequence[float]) -> float:
    return max(((later - earlier) * 1e3 for earlier, later in pairwise(times_s)), default=0.0)


def wait_after_ms(answer: Answer, moment_s: float) -> float:
    """The longest wait from `moment_s` on, for the first token too; what was waited before is not its."""
    times = [answer.sent_s, *answer.times_s]
    return max(
        ((later - max(earlier, moment_s)) * 1e3 for earlier, later in pairwise(times) if later > moment_s),
        default=0.0,
    )


@dataclass(slots=True)
class Row:
    """One fault, as reported."""

    streams: int = 0
    completed: int = 0
    lost: int = 0
    repeated: int = 0
    wrong_usage: int = 0
    max_gap_ms: float = 0.0
    other_errors: int = 0
    leaked_blocks: int = 0

    def add(self, verdicts: Iterable[Verdict], *, gaps: bool = True) -> None:
        """`gaps` False: of streams whose gaps are reported elsewhere."""
        for verdict in verdicts:
            self.streams += 1
            self.completed += verdict.completed
            self.lost += verdict.lost
            self.repeated += verdict.repeated
            self.wrong_usage += verdict.wrong_usage
            if gaps:
                self.max_gap_ms = max(self.max_gap_ms, round(verdict.gap_ms, 1))
