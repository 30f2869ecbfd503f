"""The order in which a prefill worker computes its prompts. Pure; used by whoever orders or predicts it.

DEADLINE: earliest first, of

    due = arrival + slack + the prompt's own prefill time

looked at anew at every chunk border, so a long prompt does not block a short one. It is size-aware because
the own time is in it. It ages by itself: `due` is fixed at arrival, and what arrives after it cannot
overtake. The own time counts up to `LONGEST_MS`, which bounds how long the longest can be overtaken.
Slack is the same for all prompts of a class and orders only between classes. Measured against FIFO with
benchmarks/router_replay.py.

FIFO: due = arrival. What engines do whose scheduler is not ours.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["LONGEST_MS", "SLACK_MS", "Order", "due_s"]

SLACK_MS = 2000.0  # an interactive TTFT; a class of requests may have its own
LONGEST_MS = 30_000.0  # own time beyond this postpones no further


class Order(str, Enum):
    FIFO = "fifo"
    DEADLINE = "deadline"


def due_s(order: Order, arrival_s: float, prefill_ms: float, slack_ms: float = SLACK_MS) -> float:
    """The sort key of a prompt: the smaller, the sooner. Ties go to the one that came first.

    `prefill_ms` is of the tokens it must compute, on this worker, as predicted on arrival.
    """
    if order is Order.FIFO:
        return arrival_s
    return arrival_s + (slack_ms + min(prefill_ms, LONGEST_MS)) / 1e3
