"""What one worker has to do, as one router knows it: its own bookings, corrected by the worker's reports.

Bookings count at once. A report, one per step, knows what other frontends sent, but not what was sent
since; so the load is

    the report + our bookings since (times the number of frontends, who do as we do until a report says)

and never below our own bookings. A step's report comes at its end and knows what came before its begin.
It counts a waiting prompt by what was not cached when it came. Pure; times are parameters.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from kvrouter.backlog import Backlog, Blocked
from kvrouter.deadline import Order, due_s
from kvrouter.perf_model import WorkerModels
from kvrouter.router import LoadLike, WorkerView

__all__ = ["Booking", "WorkerLoad"]

ON_THE_WAY_S = 0.02  # a booking this much older than what a report tells of may still be missing in it
MOST_LATE = 256  # first tokens remembered until somebody asks how late they were
PERIOD_PROMPTS = 8  # most prompts in one sample of the prefill model


@dataclass(slots=True)
class Booking:
    """One attempt on one worker."""

    attempt: int
    computes: bool  # its prompt is computed here
    prompt_tokens: int
    uncached_tokens: int  # of them to compute, as predicted; corrected by `begun`
    prefill_ms: float  # for those, transfers of a pulled prefix included
    output_tokens: int  # expected
    blocks: int  # prompt and expected output, 0 where its KV does not stay
    booked_s: float
    counted_tokens: int = 0  # as which reports count it until it begins: not in the cache now
    limit_s: float = inf  # when its first token should be out
    waited_s: float = 0.0  # its client, before it was booked
    computed: bool = False


@dataclass(slots=True)
class _BusyPeriod:
    """Prompts computed one after another without a pause: their features and times add up."""

    began_s: float = 0.0
    running: set[int] = field(default_factory=set)
    features: tuple[float, float, float] = (0.0, 0.0, 0.0)
    disturbed: bool = False  # by others' work, and nobody says how much: no sample
    since_tokens: int | None = None  # all that the worker had computed when it began, if it says so

    def sample(self, computed_tokens: int | None) -> tuple[float, float, float] | None:
        """The features of all that was computed in it, by whom ever; None when that is not known."""
        n, tokens, pairs = self.features
        if self.since_tokens is None or computed_tokens is None:
            return None if self.disturbed else self.features
        every = computed_tokens - self.since_tokens
        # Others' prompts are taken to be like ours.
        return (n * every / tokens, every, pairs * every / tokens) if every > 0 else None


class WorkerLoad:
    """`book` and `release` are a pair."""

    def __init__(self, view: WorkerView, models: WorkerModels, order: Order, frontends: int = 1) -> None:
        self.view = view
        self.models = models
        self.order = order
        self.frontends = frontends
        self.bookings: dict[int, Booking] = {}
        self._backlog = Backlog()
        self._computing: dict[int, Booking] = {}  # own prompts not computed yet
        self._own_tokens = 0  # uncached, of those
        self._own_blocks = 0
        self._own_prompt_blocks = 0
        self._recent: deque[int] = deque()  # attempts on the way when the last report came, oldest first
        self._report: LoadLike | None = None
        self._ended_since_report = 0
        self._others_tokens = 0
        self._computed_tokens: int | None = None  # of prompts, since the worker began
        self._computed_before: int | None = None  # in the report before
        self._period = _BusyPeriod()
        self._told: dict[int, tuple[float, int]] = {}  # others' prompts in no report yet: when, tokens
        self._late_s: deque[float] = deque(maxlen=MOST_LATE)

    # ------------------------------------------------------------ own bookings

    def book(self, booking: Booking, now_s: float) -> None:
        """Raises ValueError when the attempt is booked already."""
        if booking.attempt in self.bookings:
            raise ValueError(f"attempt {booking.attempt:x} is booked on {self.view.ident} already")
        self.bookings[booking.attempt] = booking
        self._recent.append(booking.attempt)
        self._own_blocks += booking.blocks
        self._own_prompt_blocks += self._prompt_blocks(booking)
        if booking.computes:
            self._computing[booking.attempt] = booking
            self._own_tokens += booking.uncached_tokens
            due = due_s(self.order, now_s - booking.waited_s, booking.prefill_ms)
            self._backlog.add(booking.attempt, due, booking.prefill_ms, now_s, booking.limit_s)

    def begun(self, attempt: int, cached_tokens: int, now_s: float) -> None:
        """The worker began on the prompt in its last step and found `cached_tokens` of it."""
        booking = self.bookings.get(attempt)
        if booking is None or not booking.computes or booking.computed:
            return
        uncached = max(booking.prompt_tokens - cached_tokens, 1)
        self._own_tokens += uncached - booking.uncached_tokens
        booking.uncached_tokens = booking.counted_tokens = uncached
        booking.prefill_ms = self.models.prefill.ms(uncached, booking.prompt_tokens)
        self._backlog.correct(attempt, booking.prefill_ms, now_s)
        if not self._period.running:
            self._period = _BusyPeriod(
                now_s - self._step_s,
                disturbed=self._others_tokens > 0,
                since_tokens=self._computed_before,
            )
        self._period.running.add(attempt)

    def computed(self, attempt: int, now_s: float) -> None:
        """The prompt is computed: its first token is out."""
        booking = self.bookings.get(attempt)
        if booking is None or not booking.computes or booking.computed:
            return
        self._settle(booking)
        if booking.limit_s < inf:
            self._late_s.append(now_s - booking.limit_s)
        period = self._period
        if attempt not in period.running:
            return
        period.running.discard(attempt)
        u, context = booking.uncached_tokens, booking.prompt_tokens
        n, tokens, pairs = period.features
        period.features = (n + 1, tokens + u, pairs + u * (context - 0.5 * u))
        if not period.running or period.features[0] >= PERIOD_PROMPTS:
            elapsed_ms = (now_s - period.began_s) * 1e3
            sample = period.sample(self._computed_tokens)
            if sample is not None:
                self.models.prefill.linear.observe(sample, elapsed_ms)
            self._period = _BusyPeriod(
                now_s,
                period.running,
                disturbed=self._others_tokens > 0,
                since_tokens=self._computed_tokens,
            )

    def release(self, attempt: int) -> None:
        """Idempotent."""
        booking = self.bookings.pop(attempt, None)
        if booking is None:
            return
        self._settle(booking)
        self._own_blocks -= booking.blocks
        self._own_prompt_blocks -= self._prompt_blocks(booking)
        self._period.running.discard(attempt)
        if attempt in self._recent:
            self._recent.remove(attempt)
        else:
            self._ended_since_report += 1

    def settle(self, attempt: int) -> None:
        """Its prompt is computed, nobody says when."""
        booking = self.bookings.get(attempt)
        if booking is not None:
            self._settle(booking)

    def _settle(self, booking: Booking) -> None:
        """Its prompt is no work any more."""
        if booking.computes and not booking.computed:
            booking.computed = True
            del self._computing[booking.attempt]
            self._own_tokens -= booking.uncached_tokens
            self._backlog.remove(booking.attempt)

    def _prompt_blocks(self, booking: Booking) -> int:
        return -(-booking.prompt_tokens // self.view.block_tokens) if booking.blocks else 0

    # ------------------------------------------------------------ the worker's reports

    def report(self, report: LoadLike, now_s: float) -> None:
        """What the worker said of itself at about `now_s`."""
        self._report = report
        self._computed_before, self._computed_tokens = self._computed_tokens, report.computed_tokens
        self._ended_since_report = 0
        arrived_s = now_s - ON_THE_WAY_S
        while self._recent and self.bookings[self._recent[0]].booked_s <= arrived_s:
            self._recent.popleft()
        self._learn_step(report)
        if report.moves:  # as a sum: the model is linear
            self.models.move.linear.observe((report.moves, report.moved_tokens), report.move_ms)
        if report.queue is not None:
            self._report_queue(report.queue, report.waiting_tokens, arrived_s, now_s)
            return
        own = self._computing.values()
        # At most: part of them may be computed.
        others = max(0, report.waiting_tokens - sum(b.counted_tokens for b in own))
        self._others_tokens = others
        self._backlog.set_others(self._others_tokens * self.models.prefill.ms_per_token, now_s)
        if others == 0:
            old = [b for b in own if b.booked_s <= arrived_s - self._step_s]
            new = {b.attempt for b in own if b.booked_s > arrived_s - self._step_s}
            tokens = sum(b.uncached_tokens for b in old)
            left = min(report.waiting_tokens / tokens, 1.0) if tokens else 0.0
            self._backlog.cap_own(left * sum(b.prefill_ms for b in old), new, now_s)
        if self._others_tokens:
            self._period.disturbed = True

    def _report_queue(
        self, queue: list[tuple[int, int, int]], waiting_tokens: int, arrived_s: float, now_s: float
    ) -> None:
        """The worker names its prompts: ours are known better now, the others' take their places."""
        prefill = self.models.prefill
        named: set[int] = set()
        others: list[tuple[float, float]] = []
        others_tokens = 0
        seen_s = arrived_s - self._step_s
        for attempt, tokens, due_ms in queue:
            named.add(attempt)
            booking = self._computing.get(attempt)
            if booking is not None:
                # It cannot know yet what will be cached when it is this prompt's turn.
                left = min(tokens, booking.uncached_tokens)
                self._backlog.correct(attempt, prefill.ms(left, booking.prompt_tokens), now_s)
            elif attempt not in self.bookings:
                others.append((now_s + due_ms / 1e3, tokens * prefill.ms_per_token))
                others_tokens += tokens
        for attempt, (told_s, tokens) in list(self._told.items()):
            if attempt in named or told_s <= seen_s:
                del self._told[attempt]
            else:
                others.append(self._as_told(told_s, tokens))
                others_tokens += tokens
        unnamed = waiting_tokens - sum(tokens for _, tokens, _ in queue)
        ours = sum(b.counted_tokens for b in self._computing.values() if b.attempt not in named)
        lump = max(unnamed - ours, 0)
        if unnamed <= 0:
            for booking in self._computing.values():
                if booking.attempt not in named and booking.booked_s <= seen_s:
                    self._backlog.correct(booking.attempt, 0.0, now_s)
        self._others_tokens = others_tokens + lump
        self._backlog.set_others(lump * prefill.ms_per_token, now_s, others)
        if self._others_tokens:
            self._period.disturbed = True

    def told(self, attempt: int, uncached_tokens: int, now_s: float) -> None:
        """Another frontend has just sent this prompt, which no report knows yet."""
        if self.view.role == "prefill" or uncached_tokens:
            self._told[attempt] = (now_s, uncached_tokens)
            self._others_tokens += uncached_tokens
            self._backlog.add_other(*self._as_told(now_s, uncached_tokens), now_s)

    def _as_told(self, told_s: float, tokens: int) -> tuple[float, float]:
        work_ms = tokens * self.models.prefill.ms_per_token
        return due_s(self.order, told_s, work_ms), work_ms

    @property
    def _step_s(self) -> float:
        """How long the step took whose end the last report told; 0: that was of no step."""
        return 0.0 if self._report is None else self._report.step_ms / 1e3

    def _learn_step(self, report: LoadLike) -> None:
        if self.view.role != "decode":
            return
        if report.decoded is not None:
            self.models.step.observe(*report.decoded, report.step_ms)
        # What waits holds blocks that no step reads yet.
        elif report.running > 0 and not report.waiting and not report.waiting_tokens:
            used = report.total_blocks - report.free_blocks
            self.models.step.observe(report.running, used * self.view.block_tokens, report.step_ms)

    # ------------------------------------------------------------ predictions

    def due_s(self, prefill_ms: float, arrived_s: float) -> float:
        return due_s(self.order, arrived_s, prefill_ms)

    def wait_ms(self, due_s: float, now_s: float) -> float:
        """Until a prompt due then, arriving now, is computed up to its own work."""
        ahead = self._backlog.ahead_ms(due_s, now_s)
        return ahead + self._unreported_ms(now_s, due_s) if self.frontends > 1 else ahead

    def backlog_ms(self, now_s: float) -> float:
        total = self._backlog.total_ms(now_s)
        return total + self._unreported_ms(now_s, None) if self.frontends > 1 else total

    def until_computed_ms(self, attempt: int, now_s: float) -> float | None:
        """From now until the prompt of `attempt` is computed; None: it is, or is not computed here."""
        return self._backlog.until_ms(attempt, now_s)

    def made_to_wait(self, due_s: float, now_s: float) -> int:
        """Own prompts that one due then would delay."""
        return self._backlog.behind(due_s, now_s)

    def blocked(
        self, due_s: float, work_ms: float, now_s: float, margin_ms: float, others_due_to_limit_ms: float
    ) -> Blocked | None:
        """See Backlog."""
        if self.frontends > 1:
            margin_ms += self._unreported_ms(now_s, None)
        return self._backlog.blocked(due_s, work_ms, now_s, margin_ms, others_due_to_limit_ms)

    def take_lateness(self) -> list[float]:
        """Of first tokens since the last call: seconds after their limits, below 0 before."""
        late = list(self._late_s)
        self._late_s.clear()
        return late

    @property
    def computing_ms(self) -> list[float]:
        """Time of each own prompt that is not computed yet, as predicted when it came."""
        return [booking.prefill_ms for booking in self._computing.values()]

    def _unreported_ms(self, now_s: float, due_s: float | None) -> float:
        """What the other frontends are expected to have sent since the last report: as much as we did, less
        what the worker has told of already."""
        expected_ms = (self.frontends - 1) * self._backlog.left_ms(self._recent, due_s, now_s)
        if not self._told or not expected_ms:
            return expected_ms
        told_ms = sum(self._as_told(told_s, tokens)[1] for told_s, tokens in self._told.values())
        return max(expected_ms - told_ms, 0.0)

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens queued or computing."""
        return self._own_tokens + self._others_tokens

    @property
    def in_flight(self) -> int:
        """Requests here, queued, computing or decoding."""
        own = len(self.bookings)
        if self._report is None:
            return own * self.frontends
        reported = self._report.running + self._report.waiting - self._ended_since_report
        return max(own, reported + len(self._recent) * self.frontends)

    @property
    def running(self) -> int:
        """Of those, what the worker runs already, as it said last."""
        if self._report is None:
            return 0
        return min(max(self._report.running - self._ended_since_report, 0), self.in_flight)

    @property
    def kv_blocks(self) -> int:
        """Blocks held by the prompts of requests here."""
        return max(self._own_prompt_blocks, self.used_blocks)

    @property
    def promised_blocks(self) -> int:
        """Blocks of requests here when all of them have their expected output."""
        return max(self._own_blocks, self.used_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks in use as the worker said, and of what was sent since; 0 before it said anything."""
        if self._report is None:
            return 0
        recent = sum(self.bookings[attempt].blocks for attempt in self._recent)
        return self._report.total_blocks - self._report.free_blocks + recent * self.frontends
