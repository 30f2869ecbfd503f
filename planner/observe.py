"""From what frontends see at admission to the planner's Observation. Pure; times are parameters.

One Observer a variant, where the planner runs. Frontends report their arrivals and answers in rows; their
clocks must agree to about a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from planner.observation import Arrival, FittedTimes, PoolSeen, VariantSeen

__all__ = ["MOST_ROWS", "RECENT_S", "Observer"]

RECENT_S = 300.0  # of arrivals that are kept
MOST_ROWS = 1200  # of them; when there are more, every second one is dropped and the rest count double
LOOK_S = 30.0  # of arrivals so few that less of each would be too many: then they count less
OUTPUTS = 512  # answers whose lengths are kept


class Observer:
    """`arrived` and `finished` per request; `observe` closes the window that began with the last one."""

    def __init__(self, times: FittedTimes | None = None) -> None:
        self.times = times
        self._since_s: float | None = None  # None: nobody has reported yet
        self._told_s = 0.0  # when somebody last reported
        self._arrivals = 0
        self._number = 0
        self._weight = 1
        self._recent: deque[Arrival] = deque()
        self._closed: deque[tuple[float, float]] = deque()  # times that were seen, before the open one
        self._open_s = 0.0  # since when all is seen, and each row stands for as many requests
        self._outputs: deque[tuple[int, int, float]] = deque(maxlen=OUTPUTS)
        self._outputs_since_s = 0.0

    def reported(self, now_s: float) -> None:
        """A frontend reported, possibly nothing: from here on no arrivals means none, not unknown."""
        if self._since_s is None:
            self._since_s = self._open_s = self._outputs_since_s = now_s
        self._told_s = max(self._told_s, now_s)

    def missed(self, until_s: float) -> None:
        """What came after the last report and before `until_s` nobody tells any more."""
        if self._since_s is not None and until_s > self._told_s:
            self._begin_anew(until_s)

    def arrived(self, arrival: Arrival) -> None:
        """A request came, whether or not it is admitted; in order of time, about."""
        self.reported(arrival.at_s)
        self._arrivals += 1
        self._number += 1
        if self._number % self._weight == 0:
            self._recent.append(arrival)

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is complete."""
        if len(self._outputs) == OUTPUTS:
            self._outputs_since_s = self._outputs[0][2]
        self._outputs.append((prompt_tokens, output_tokens, self._told_s))

    def observe(
        self,
        now_s: float,
        pools: Mapping[str, PoolSeen],
        *,
        queue_age_s: float | None = None,
        queued: int | None = None,
        decoding: int | None = None,
        going: Sequence[tuple[int, int]] = (),
        kv_tokens: int | None = None,
        max_batch: int | None = None,
    ) -> VariantSeen:
        known = self._since_s is not None and now_s > self._since_s
        window_s = now_s - self._since_s if known and self._since_s is not None else 0.0
        arrivals = self._arrivals if known else None
        if known:
            self._arrivals = 0
            self._since_s = now_s
        self._forget(now_s)
        prompts = sum(row.prompt_tokens for row in self._recent)
        uncached = sum(row.uncached_tokens for row in self._recent)
        observed = self._observed(now_s)
        return VariantSeen(
            window_s=window_s,
            arrivals=arrivals,
            pools=dict(pools),
            recent_s=sum(to_s - from_s for from_s, to_s in observed),
            recent=tuple(self._recent),
            weight=self._weight,
            outputs=tuple((prompt, output) for prompt, output, _ in self._outputs),
            cached_share=1 - uncached / prompts if prompts else None,
            queue_age_s=queue_age_s,
            queued=queued,
            decoding=decoding,
            times=self.times,
            kv_tokens=kv_tokens,
            max_batch=max_batch,
            observed=observed,
            outputs_s=now_s - self._outputs_since_s if self._since_s is not None else None,
            going=tuple(going),
        )

    def _observed(self, now_s: float) -> tuple[tuple[float, float], ...]:
        if self._since_s is None:
            return ()
        begin_s = now_s - RECENT_S
        spans = [(max(from_s, begin_s), to_s) for from_s, to_s in self._closed if to_s > begin_s]
        open_s = min(max(self._open_s, begin_s), now_s)
        return (*spans, (open_s, now_s))

    def _forget(self, now_s: float) -> None:
        """Of what is too old, and of every second row when there are too many.

        When few come again they count less from now on. The rows before, thinned more, stay: as a sample of
        how long requests are and how they come, each stretch of the time at the rate that is asked for.
        """
        recent = self._recent
        while recent and recent[0].at_s < now_s - RECENT_S:
            recent.popleft()
        while self._closed and self._closed[0][1] < now_s - RECENT_S:
            self._closed.popleft()
        while len(recent) > MOST_ROWS:
            self._recent = recent = deque(list(recent)[1::2])
            self._weight *= 2
        if self._weight == 1 or self._told_s - self._open_s < LOOK_S:
            return
        expected = sum(1 for row in recent if row.at_s >= self._told_s - LOOK_S) * RECENT_S / LOOK_S
        if expected < MOST_ROWS // 8:
            self._begin_anew(self._told_s)
            while self._weight > 1 and 2 * expected <= MOST_ROWS:
                self._weight //= 2
                expected *= 2

    def _begin_anew(self, at_s: float) -> None:
        if self._told_s > self._open_s:
            self._closed.append((self._open_s, self._told_s))
        self._open_s = at_s
