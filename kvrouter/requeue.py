"""Is a prompt that waits on one worker computed sooner on another one? Pure.

A placement is right for the moment it is made. Then a worker is added while prompts wait on the others, or
one turns out to be slow: what came before would stand where it was sent, and what comes now overtakes it.
"""

from __future__ import annotations

from kvrouter.router import Router, RouterRequest

__all__ = [
    "LEAST_GAIN_MS",
    "LEAST_WAIT_S",
    "LOOKS_A_SECOND",
    "LOOK_AGAIN_S",
    "MOST_REQUEUES",
    "is_sooner_elsewhere",
]

LEAST_WAIT_S = 1.0  # on a worker, before anyone looks
LOOK_AGAIN_S = 1.0
LOOKS_A_SECOND = 32  # at half a millisecond each, with 64 workers a pool: tokens wait meanwhile
MOST_REQUEUES = 2  # of a prompt: each costs it its place in an order
LEAST_GAIN_MS = 1000.0  # to move costs a message, and the prompt's place in the old worker's order
MOST_LEFT = 0.7  # elsewhere, of the time that is left here: predictions are not exact


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
