"""Least predicted work: every worker's outstanding tokens, own bookings corrected by its load reports.

A prefill worker's work is the prompt tokens still to compute; a decode worker's is the tokens its batch
still has to produce, plus the prompts it holds. Ties are broken at random, by a seeded generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvrouter.router import Choice, LoadLike, RouterRequest, WorkerView
from serving.errors import NoWorker

EXPECTED_OUTPUT_TOKENS = 256  # what a request without a small max_tokens is expected to produce


@dataclass(slots=True)
class _Booking:
    worker: str
    prompt: int  # prompt tokens not yet known to be computed
    output: int  # tokens still expected


@dataclass(slots=True)
class _Worker:
    view: WorkerView
    booked_prompt: int = 0
    booked_output: int = 0
    reported_waiting: int = 0  # prompt tokens, of all frontends
    reported_running: int = 0  # sequences, of all frontends
    attempts: set[int] = field(default_factory=set)

    def terms(self, prompt: int) -> dict[str, float]:
        """In tokens. Our own bookings are newer than the report, the report knows other frontends."""
        waiting = max(self.booked_prompt, self.reported_waiting)
        running = max(len(self.attempts), self.reported_running)
        return {"waiting_tokens": waiting + prompt, "running": running, "output_tokens": self.booked_output}


class LeastWork:
    """See the module docstring; implements `kvrouter.router.Router`."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._workers: dict[str, _Worker] = {}
        self._bookings: dict[int, _Booking] = {}

    def add_worker(self, worker: WorkerView) -> None:
        self._workers[worker.ident] = _Worker(worker)

    def remove_worker(self, ident: str) -> None:
        worker = self._workers.pop(ident, None)
        for attempt in worker.attempts if worker else ():
            self._bookings.pop(attempt, None)

    def choose(self, request: RouterRequest, now_s: float) -> Choice:
        reasons: dict[str, dict[str, float]] = {}
        prefill = self._best("prefill", request, reasons)
        decode = self._best("decode", request, reasons)
        if decode is None:
            raise NoWorker("no decode worker can take the request")
        return Choice(decode=decode, prefill=prefill, reasons=reasons)

    def book(self, attempt: int, worker: str, request: RouterRequest, now_s: float) -> None:
        entry = self._workers.get(worker)
        if entry is None:
            return
        output = min(request.max_tokens, EXPECTED_OUTPUT_TOKENS)
        self._bookings[attempt] = _Booking(worker, len(request.tokens), output)
        entry.attempts.add(attempt)
        entry.booked_prompt += len(request.tokens)
        entry.booked_output += output

    def begun(self, attempt: int, cached_tokens: int, now_s: float) -> None:
        pass  # this policy does not look at caches

    def computed(self, attempt: int, now_s: float) -> None:
        pass  # `progress` says it as well

    def progress(self, attempt: int, tokens: int) -> None:
        booking = self._bookings.get(attempt)
        if booking is None:
            return
        worker = self._workers[booking.worker]
        worker.booked_prompt -= booking.prompt
        booking.prompt = 0
        done = min(tokens, booking.output)
        booking.output -= done
        worker.booked_output -= done

    def release(self, attempt: int) -> None:
        booking = self._bookings.pop(attempt, None)
        if booking is None:
            return
        worker = self._workers[booking.worker]
        worker.booked_prompt -= booking.prompt
        worker.booked_output -= booking.output
        worker.attempts.discard(attempt)

    def on_load(self, ident: str, report: LoadLike, now_s: float) -> None:
        worker = self._workers.get(ident)
        if worker is not None:
            worker.reported_waiting = report.waiting_tokens
            worker.reported_running = report.running + report.waiting

    def on_events(self, ident: str, epoch: int, events: object) -> bool:
        return True  # this policy does not look at caches

    def on_snapshot(self, ident: str, epoch: int, message: object) -> bool:
        return True

    def sweep(self, now_s: float) -> list[str]:
        return []

    @property
    def in_flight(self) -> int:
        return len(self._bookings)

    def _best(self, role: str, request: RouterRequest, reasons: dict[str, dict[str, float]]) -> str | None:
        prompt = len(request.tokens)
        best: list[str] = []
        best_cost = float("inf")
        able = [i for i, w in self._workers.items() if w.view.role == role and not w.view.draining]
        for ident in [i for i in able if i not in request.avoid] or able:
            worker = self._workers[ident]
            terms = worker.terms(prompt)
            reasons[ident] = terms
            cost = terms["waiting_tokens"] if role == "prefill" else sum(terms.values())
            if cost < best_cost:
                best, best_cost = [ident], cost
            elif cost == best_cost:
                best.append(ident)
        return self._random.choice(best) if best else None
