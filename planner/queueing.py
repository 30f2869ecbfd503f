"""How many servers keep waits short: the tail of a queue, by formula and by replaying what arrived. Pure.

    formula   Allen and Cunneen's M/G/k tail:
              P(W > t) = ErlangC(k, a) * exp(-2 (k/E[S] - rate) t / (Ca^2 + Cs^2)),  a = rate * E[S]
    replay    recent arrivals at the rate in question through k servers, first come first served (Kiefer and
              Wolfowitz)

The replay knows how arrivals really come (in clumps, long ones after another); the formula needs few of
them. Both are first come, first served. Workers that serve by deadline let short prompts pass, and fewer
of them are late: about P^1.5, measured with the simulator (docs/planner.md). Waits of the replay grow with
every service time and shrink with every gap, so what follows from it is monotone in the demand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

__all__ = ["DEADLINE_POWER", "Row", "erlang_c", "late_counts", "tail"]

Row = tuple[float, float, float, int]  # at (see `pace_s`), service_s, allowed wait_s, class

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
    servers: int,
    rate: float,
    service_s: float,
    waits_s: Sequence[float],
    *,
    arrival_cv2: float,
    service_cv2: float,
) -> float:
    """P(W > wait) by the formula, mean over the waits; rate per second."""
    load = rate * service_s
    if load >= servers:
        return 1.0
    if load <= 0:
        return 0.0
    spare = servers / service_s - rate
    spread = max(arrival_cv2 + service_cv2, 0.1)
    fades = -2.0 * spare / spread
    return erlang_c(servers, load) * sum(math.exp(fades * wait_s) for wait_s in waits_s) / len(waits_s)


def late_counts(
    arrivals: Sequence[Row], servers: int, pace_s: float, most: Sequence[float], weight: int = 1
) -> list[int]:
    """How many `arrivals` of each class wait longer than allowed, in one pass.

    `arrivals`: in order, in units of `pace_s`: half of it is twice the demand. Each stands for `weight`: a
    part of the requests on the same part of the servers, which is on the safe side. `most`: by class; when
    one class has more late ones than that the rest is not counted.
    """
    count = -(-servers // weight)
    slower = count * weight / servers  # a part of a server is a slow one
    free = [0.0] * count
    late = [0] * len(most)
    for at, service_s, allowed_s, own in arrivals:
        now = at * pace_s
        start = free[0]
        if start <= now:
            start = now
        elif start - now > allowed_s:
            late[own] += 1
            if late[own] > most[own]:
                break
        heapq.heapreplace(free, start + service_s * slower)
    return late
