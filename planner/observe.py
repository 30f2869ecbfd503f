"""From what frontends see at admission to the planner's Observation. Pure; times are parameters.

One Observer a variant, where the planner runs. Frontends report their arrivals and answers in rows; their
clocks must agree to about a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from planner.observation import Arrival, FittedTimes, PoolSeen, VariantSeen

__all__ = ["MOST_ROWS", "RECENT_S", "Observer"]

RECENT_S = 300.0  # of arrivals that are kept
MOST_ROWS = 1200  # of them; when there are more, every second one is dropped and the rest count double
OUTPUTS = 512  # answers whose lengths are kept


class Observer:
    """`arrived` and `finished` per request; `observe` closes the window that began with the last one."""

    def __init__(self, times: FittedTimes | None = None) -> None:
        self.times = times
        self._since_s: float | None = None  # None: nobody has reported yet
        self._began_s: float | None = None
        self._arrivals = 0
        self._number = 0
        self._weight = 1
        self._recent: deque[Arrival] = deque()
        self._outputs: deque[tuple[int, int]] = deque(maxlen=OUTPUTS)

    def reported(self, now_s: float) -> None:
        """A frontend reported, possibly nothing: from here on no arrivals means none, not unknown."""
        if self._began_s is None:
            self._began_s = self._since_s = now_s

    def arrived(self, arrival: Arrival) -> None:
        """A request came, whether or not it is admitted; in order of time, about."""
        self.reported(arrival.at_s)
        self._arrivals += 1
        self._number += 1
        if self._number % self._weight == 0:
            self._recent.append(arrival)

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is complete."""
        self._outputs.append((prompt_tokens, output_tokens))

    def observe(
        self,
        now_s: float,
        pools: Mapping[str, PoolSeen],
        *,
        queue_age_s: float | None = None,
        queued: int | None = None,
        decoding: int | None = None,
        kv_tokens: int | None = None,
        max_batch: int | None = None,
    ) -> VariantSeen:
        known = self._since_s is not None and self._began_s is not None and now_s > self._since_s
        window_s = now_s - self._since_s if known and self._since_s is not None else 0.0
        arrivals = self._arrivals if known else None
        if known:
            self._arrivals = 0
            self._since_s = now_s
        self._forget(now_s)
        prompts = sum(row.prompt_tokens for row in self._recent)
        uncached = sum(row.uncached_tokens for row in self._recent)
        return VariantSeen(
            window_s=window_s,
            arrivals=arrivals,
            pools=dict(pools),
            recent_s=min(now_s - self._began_s, RECENT_S) if self._began_s is not None else 0.0,
            recent=tuple(self._recent),
            weight=self._weight,
            outputs=tuple(self._outputs),
            cached_share=1 - uncached / prompts if prompts else None,
            queue_age_s=queue_age_s,
            queued=queued,
            decoding=decoding,
            times=self.times,
            kv_tokens=kv_tokens,
            max_batch=max_batch,
        )

    def _forget(self, now_s: float) -> None:
        recent = self._recent
        while recent and recent[0].at_s < now_s - RECENT_S:
            recent.popleft()
        while len(recent) > MOST_ROWS:
            self._recent = recent = deque(list(recent)[1::2])
            self._weight *= 2
        if self._weight > 1 and len(recent) < MOST_ROWS // 8:
            recent.clear()  # old rows cannot be made to count less: begin anew
            self._weight = 1
