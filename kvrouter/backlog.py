"""The prompts one worker has still to compute, in its own order; time works them off. Pure.

Holds what is known by name (the router's own bookings) and what only the worker's reports tell of, work
that other frontends sent: each prompt where the report says when it is due, else a lump. Times are
predictions in milliseconds; `now_s` never goes back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

__all__ = ["Backlog", "Blocked"]

LATE_MS = 300.0  # later than this a prompt is not worth to be spared any more


@dataclass(frozen=True, slots=True)
class Blocked:
    """A prompt would make others late."""

    done_ms: float  # from now, when the last of them is done
    behind_ms: float  # from now, when a prompt like this one would not overtake it any more


@dataclass(slots=True)
class _Prompt:
    due_s: float
    number: int  # of arrival, for ties
    left_ms: float
    limit_s: float = inf  # when it should be done, whatever the order
    ours: bool = True

    def __lt__(self, other: _Prompt) -> bool:
        return (self.due_s, self.number) < (other.due_s, other.number)


class Backlog:
    """See the module docstring. A prompt stays until `remove`, also when it should long be done."""

    def __init__(self) -> None:
        self._queue: list[_Prompt] = []  # by due_s; those worked off have left_ms 0
        self._by_attempt: dict[int, _Prompt] = {}
        self._others_ms = 0.0
        self._n_others = 0  # in the queue
        self._worked_off_s = 0.0  # until when time has been taken into account
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._by_attempt

    def add(self, attempt: int, due_s: float, work_ms: float, now_s: float, limit_s: float = inf) -> None:
        self._work_off(now_s)
        self._arrivals += 1
        prompt = _Prompt(due_s, self._arrivals, work_ms, limit_s)
        self._by_attempt[attempt] = prompt
        insort(self._queue, prompt)

    def correct(self, attempt: int, left_ms: float, now_s: float) -> None:
        """What is left of `attempt` is known better than by prediction; unknown attempts are ignored."""
        self._work_off(now_s)
        prompt = self._by_attempt.get(attempt)
        if prompt is not None:
            prompt.left_ms = left_ms

    def remove(self, attempt: int) -> None:
        """Idempotent."""
        prompt = self._by_attempt.pop(attempt, None)
        if prompt is not None:
            self._queue.remove(prompt)

    def set_others(self, work_ms: float, now_s: float, prompts: Iterable[tuple[float, float]] = ()) -> None:
        """What a load report says beyond our own prompts: `prompts` as (due_s, left_ms), and a lump."""
        self._work_off(now_s)
        self._others_ms = work_ms
        if self._n_others:
            self._queue = [prompt for prompt in self._queue if prompt.ours]
        others = [_Prompt(due_s, 0, left_ms, ours=False) for due_s, left_ms in prompts]
        self._n_others = len(others)
        if others:
            self._queue = sorted(self._queue + others)

    def add_other(self, due_s: float, work_ms: float, now_s: float) -> None:
        """One more prompt of others', until the next `set_others`."""
        self._work_off(now_s)
        self._n_others += 1
        insort(self._queue, _Prompt(due_s, 0, work_ms, ours=False))

    def cap_own(self, most_ms: float, except_attempts: set[int], now_s: float) -> None:
        """The worker says less is left than we thought: shorten our prompts, the first ones first.

        `except_attempts` are too new to be in what it says.
        """
        self._work_off(now_s)
        new = {id(self._by_attempt[a]) for a in except_attempts if a in self._by_attempt}
        known = [p for p in self._queue if p.ours and id(p) not in new]
        surplus = sum(p.left_ms for p in known) - most_ms
        for prompt in known:
            if surplus <= 0:
                return
            cut = min(prompt.left_ms, surplus)
            prompt.left_ms -= cut
            surplus -= cut

    def total_ms(self, now_s: float) -> float:
        """All that is left, whoever sent it."""
        if not self._queue and not self._others_ms:
            return 0.0
        self._work_off(now_s)
        return self._others_ms + sum(prompt.left_ms for prompt in self._queue)

    def ahead_ms(self, due_s: float, now_s: float) -> float:
        """What is computed before a prompt that is due at `due_s` and arrives now.

        Where a lump of others' stands in the order is not known: it counts as ahead.
        """
        if not self._queue and not self._others_ms:
            return 0.0
        self._work_off(now_s)
        ahead = self._others_ms
        for prompt in self._queue:
            if prompt.due_s > due_s:
                break
            ahead += prompt.left_ms
        return ahead

    def until_ms(self, attempt: int, now_s: float) -> float | None:
        """From now until `attempt` is computed; None: it is not here."""
        prompt = self._by_attempt.get(attempt)
        if prompt is None:
            return None
        self._work_off(now_s)
        until = self._others_ms
        for other in self._queue:
            until += other.left_ms
            if other is prompt:
                break
        return until

    def blocked(
        self, due_s: float, work_ms: float, now_s: float, margin_ms: float, others_due_to_limit_ms: float
    ) -> Blocked | None:
        """By prompts that one due at `due_s` would overtake, and bring within `margin_ms` of their limits.

        Those that are much too late already do not count: to spare them would help nobody. Others' limits
        are taken to be so long after they are due (below 0: before). None: it makes nobody late.
        """
        if not self._queue:
            return None
        self._work_off(now_s)
        done_ms, blocked = self._others_ms, None
        for prompt in self._queue:
            done_ms += prompt.left_ms
            if prompt.due_s <= due_s or prompt.left_ms <= 0:
                continue
            limit_s = prompt.limit_s if prompt.ours else prompt.due_s + others_due_to_limit_ms / 1e3
            slack_ms = (limit_s - now_s) * 1e3 - done_ms
            if -LATE_MS <= slack_ms < work_ms + margin_ms:
                blocked = Blocked(done_ms, (prompt.due_s - due_s) * 1e3)
        return blocked

    def left_ms(self, attempts: Iterable[int], due_s: float | None, now_s: float) -> float:
        """What is left of `attempts`, or of those among them due by `due_s`."""
        self._work_off(now_s)
        prompts = [self._by_attempt[a] for a in attempts if a in self._by_attempt]
        return sum(p.left_ms for p in prompts if due_s is None or p.due_s <= due_s)

    def behind(self, due_s: float, now_s: float) -> int:
        """How many prompts, not done yet and not in a lump, a prompt due at `due_s` makes wait."""
        if not self._queue:
            return 0
        self._work_off(now_s)
        return sum(1 for prompt in self._queue if prompt.due_s > due_s and prompt.left_ms > 0)

    def _work_off(self, now_s: float) -> None:
        """The worker has computed since the last look: others' work and ours take turns by size."""
        passed_ms = (now_s - self._worked_off_s) * 1e3
        if passed_ms <= 0:
            return
        self._worked_off_s = now_s
        if self._others_ms > 0:
            own_ms = sum(prompt.left_ms for prompt in self._queue)
            spent = min(self._others_ms, passed_ms * self._others_ms / (self._others_ms + own_ms))
            self._others_ms -= spent
            passed_ms -= spent
        for prompt in self._queue:
            if prompt.left_ms > passed_ms:
                prompt.left_ms -= passed_ms
                return
            passed_ms -= prompt.left_ms
            prompt.left_ms = 0.0
