"""How many servers keep waits short: the tail of a queue, by formula and by replaying what arrived. Pure.

    formula   Allen and Cunneen's M/G/k tail:
              P(W > t) = ErlangC(k, a) * exp(-2 (k/E[S] - rate) t / (Ca^2 + Cs^2)),  a = rate * E[S]
    replay    the recent arrivals through k servers, first come first served (Kiefer and Wolfowitz)

The replay knows how arrivals really come (in clumps, long ones after another); the formula needs few of
them. Both are first come, first served. Workers that serve by deadline let short prompts pass, and fewer
of them are late: about P^1.5, measured with the simulator (docs/planner.md). Waits of the replay grow with
every service time and shrink with every gap, so what follows from it is monotone in the demand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

__all__ = ["DEADLINE_POWER", "erlang_c", "late_share", "tail"]

DEADLINE_POWER = 1.5


def erlang_c(servers: int, load: float) -> float:
    """Probability that a customer has to wait; 1 when `load` (in Erlang) is not below `servers`."""
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def tail(
    servers: int, rate: float, service_s: float, wait_s: float, *, arrival_cv2: float, service_cv2: float
) -> float:
    """P(W > wait_s) by the formula; rate per second."""
    load = rate * service_s
    if load >= servers:
        return 1.0
    if load <= 0:
        return 0.0
    spare = servers / service_s - rate
    spread = max(arrival_cv2 + service_cv2, 0.1)
    return erlang_c(servers, load) * math.exp(-2.0 * spare * wait_s / spread)


def late_share(
    arrivals: Sequence[tuple[float, float, float]],
    servers: int,
    growth: float,
    weight: int = 1,
    most: float = 1.0,
) -> float:
    """Share of `arrivals` that wait longer than allowed.

    `arrivals`: (at_s from 0 on, service_s, allowed wait_s), in order. `growth` times the demand: gaps
    between arrivals are that much shorter. Each arrival stands for `weight`: a part of the requests on the
    same part of the servers, which is on the safe side. Above `most` it is not counted on.
    """
    if not arrivals:
        return 0.0
    count = -(-servers // weight)
    slower = count * weight / servers  # a part of a server is a slow one
    free = [0.0] * count
    late = 0
    enough = most * len(arrivals)
    shorter = 1 / growth
    for at_s, service_s, allowed_s in arrivals:
        now = at_s * shorter
        start = free[0]
        if start <= now:
            start = now
        elif start - now > allowed_s:
            late += 1
            if late > enough:
                break
        heapq.heapreplace(free, start + service_s * slower)
    return late / len(arrivals)
