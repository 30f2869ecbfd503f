"""Is a prompt that waits on one worker computed sooner on another one? Pure.

A placement is right for the moment it is made. Then a worker is added while prompts wait on the others, or
one turns out to be slow: what came before would stand where it was sent, and what comes now overtakes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from kvrouter.router import Router, RouterRequest

__all__ = [
    "LEAST_GAIN_MS",
    "LEAST_WAIT_S",
    "LOOKS_A_SECOND",
    "MOST_REQUEUES",
    "is_sooner_elsewhere",
    "whose_turn",
]

LEAST_WAIT_S = 1.0  # on a worker, before anyone looks
LOOK_AGAIN_S = 1.0
LOOKS_A_SECOND = 32  # at half a millisecond each, with 64 workers a pool: tokens wait meanwhile
MOST_REQUEUES = 2  # of a prompt: what looks free to all of them must not be asked for ever
LEAST_GAIN_MS = 1000.0  # predictions differ by less than that from one look to the next
MOST_LEFT = 0.7  # elsewhere, of the time that is left here: predictions are not exact


class Waits(Protocol):
    """A request whose prompt waits."""

    look_after_s: float  # whether another worker would be sooner: not before


T = TypeVar("T", bound=Waits)


def whose_turn(waiting: Sequence[T], now_s: float, most: int) -> Iterator[T]:
    """At most so many to look at now, the first ones first; each is put off until all had their turn."""
    again_s = now_s + max(LOOK_AGAIN_S, len(waiting) / LOOKS_A_SECOND)
    for one in islice((one for one in waiting if one.look_after_s <= now_s), most):
        one.look_after_s = again_s
        yield one


def is_sooner_elsewhere(router: Router, attempt: int, wanted: RouterRequest, now_s: float) -> bool:
    """Well before, and by a second at least. The prompt of `attempt` is booked and has not begun; `wanted`
    avoids its worker. Raises NoWorker."""
    here_ms = router.until_computed_ms(attempt, now_s)
    if here_ms is None or here_ms < LEAST_GAIN_MS:
        return False
    choice = router.choose(wanted, now_s, look=True)
    there_ms = choice.predicted_ttft_ms
    # What is avoided is chosen when nothing else is left.
    if there_ms is None or (choice.prefill or choice.decode) in wanted.avoid:
        return False
    return there_ms <= MOST_LEFT * here_ms and here_ms - there_ms >= LEAST_GAIN_MS
