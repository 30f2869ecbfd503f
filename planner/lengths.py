"""How long answers get, from those that ended and those that go on. Pure.

Of answers that began together the short ones end first: for minutes the mean of those that ended says too
little. Kaplan and Meier's estimate lets those that go on count as longer than what they have, and the ones
that were seen only from some token on count only from there (delayed entry); so it is as right at a fresh
start as in the steady state, where the ended ones alone would be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["DEFAULT_OUTPUT", "expected_answers"]

DEFAULT_OUTPUT = 256  # tokens, before any answer was seen

Answer = tuple[int, int]  # tokens of prompt and output


def expected_answers(
    ended: Sequence[Answer], going: Sequence[Answer], seen_tokens: float
) -> list[tuple[float, int, float]]:
    """(share, prompt, output) of the answers to come; the shares add up to 1. Not both may be empty.

    `going`: with the tokens they have so far. `ended`: in the order of their ends, evenly over a time in
    which an answer gets `seen_tokens`; what an answer had before that time was not seen.
    """
    entries = [output - seen_tokens * (i + 1) / len(ended) for i, (_, output) in enumerate(ended)]
    entries += [so_far - seen_tokens for _, so_far in going]
    entries = sorted(max(tokens, 0.0) for tokens in entries)
    exits = sorted(output for _, output in (*ended, *going))
    left, found = 1.0, []
    for prompt, output in sorted(ended, key=lambda answer: answer[1]):
        # One more than there were: so nobody who was seen alone stands for all.
        there = max(bisect_left(entries, max(output, 1)) - bisect_left(exits, output), 1) + 1
        found.append((left / there, prompt, float(output)))
        left -= left / there
    longest = max((output for _, output in ended), default=0)
    beyond = [(prompt, so_far) for prompt, so_far in going if so_far > longest or not ended]
    lived = sum(output for _, output in ended) + sum(so_far for _, so_far in going)
    rest = lived / len(ended) if ended else float("inf")
    for prompt, so_far in beyond:
        # As long again, or as much more as an answer takes: the less.
        total = so_far + min(rest, max(so_far, DEFAULT_OUTPUT - so_far))
        found.append((left / len(beyond), prompt, total))
    whole = sum(share for share, _, _ in found)
    return [(share / whole, prompt, output) for share, prompt, output in found]
