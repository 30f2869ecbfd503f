"""More than the workers can do, on a virtual clock: the real router, a gate before it, simulated workers.

The workers are those of benchmarks/router_replay.py in the separate layout, whose decode steps grow with
the batch, and that also report their decodes. Frontends take turns, and know of each other only what
workers report. A request is good when its first token came within the target for its length and its mean
time between tokens within the target; a refused one is not.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from benchmarks.replay_workers import STEP_MS, TOKENS_PER_S, Job, Report
from benchmarks.router_replay import MOST_OUTPUT_TOKENS, Replay, Setup
from benchmarks.traces import BLOCK_TOKENS, TraceRequest
from kvrouter.policy_router import PolicyRouter
from kvrouter.router import Choice, RouterRequest
from serving.admission import Admission, Again, Ask, Verdict
from serving.config import AdmissionConfig, Slo
from serving.length_lanes import LANES

ON_THE_WAY_S = 0.002  # from one frontend through a worker to another
PROBE_S = 0.05  # how often a refused request is asked about again
PROBES = 12  # refused requests asked about at a time

Tenant = Callable[[int], str | None]  # of the request with that number


class Gate(Protocol):
    """In front of one frontend, or of all."""

    def admit(self, ask: Ask, choice: Choice, now_s: float, again: Again) -> Verdict | None:
        """None: let in, no verdict given."""

    def ended(self, output_tokens: int) -> None: ...


@dataclass
class Open:
    """Lets everybody in."""

    def admit(self, ask: Ask, choice: Choice, now_s: float, again: Again) -> Verdict | None:
        return None

    def ended(self, output_tokens: int) -> None:
        pass


REFUSED = Verdict("static", 0, 0.0, 0.0, 0.0)


@dataclass
class AtMost(Open):
    """A fixed number of requests at once, over all frontends."""

    most: int
    inside: int = 0

    def admit(self, ask: Ask, choice: Choice, now_s: float, again: Again) -> Verdict | None:
        if self.inside >= self.most:
            return REFUSED
        self.inside += 1
        return None

    def ended(self, output_tokens: int) -> None:
        self.inside -= 1


@dataclass
class Rate(Open):
    """A fixed number of requests a second, over all frontends, of which `burst` at once."""

    per_s: float
    burst: float = 4.0
    _tokens: float = field(default=4.0)
    _at_s: float = 0.0

    def admit(self, ask: Ask, choice: Choice, now_s: float, again: Again) -> Verdict | None:
        self._tokens = min(self._tokens + (now_s - self._at_s) * self.per_s, self.burst)
        self._at_s = now_s
        if self._tokens < 1.0:
            return REFUSED
        self._tokens -= 1.0
        return None


@dataclass
class Predicted(Open):
    """serving.admission."""

    admission: Admission

    def admit(self, ask: Ask, choice: Choice, now_s: float, again: Again) -> Verdict | None:
        return self.admission.decide(ask, choice, now_s, again)

    def ended(self, output_tokens: int) -> None:
        self.admission.ended(output_tokens)


@dataclass(slots=True)
class Refused:
    request: TraceRequest
    verdict: Verdict


@dataclass(slots=True)
class Probe:
    """A refused request that is asked about until it would be let in."""

    ask: Ask
    request: TraceRequest
    frontend: int
    refused_s: float
    told_s: float


class OverloadReplay(Replay):
    def __init__(
        self,
        setup: Setup,
        slo: Slo,
        gates: Callable[[PolicyRouter], Gate],
        tenant: Tenant = lambda number: None,
        priority: Callable[[int], int] = lambda number: 0,
    ) -> None:
        """`gates`: makes the gate of a frontend, whose router is given."""
        super().__init__("ttft_regret", setup)
        self.slo = slo
        self.gates = [gates(router) for router in self._routers]
        self.refused: list[Refused] = []
        self.tenants: dict[int, str | None] = {}  # attempt -> tenant
        self.retry_errors_s: list[tuple[float, float]] = []  # (told, what it was)
        self._tenant, self._priority = tenant, priority
        self._arrived = 0
        self._told: deque[tuple[float, int, str, str, int, int]] = deque()
        self._coming: Counter[str] = Counter()  # to decode workers, while their prompts compute
        self._coming_tokens: Counter[str] = Counter()
        self._probes: list[Probe] = []
        self._probed_s = 0.0

    def _arrive(self, request: TraceRequest) -> None:
        now_s = request.arrival_s
        frontend = self._arrived % len(self._routers)
        ask = Ask(
            request.prompt_tokens,
            max(request.output_tokens, 1) if request.output_tokens <= 1 else MOST_OUTPUT_TOKENS,
            self._priority(self._arrived),
            self._tenant(self._arrived),
        )
        self._arrived += 1
        self._tell(now_s)
        self._probe(now_s)
        router = self._routers[frontend]
        wanted = _wanted(request)
        choice = router.choose(wanted, now_s)
        verdict = self.gates[frontend].admit(ask, choice, now_s, _again(router, wanted, now_s))
        if verdict is not None:
            if verdict.reason is not None:
                self.refused.append(Refused(request, verdict))
                if verdict is not REFUSED and len(self._probes) < PROBES:
                    self._probes.append(Probe(ask, request, frontend, now_s, verdict.retry_after_s))
                return
            wanted.limit_s, choice = verdict.limit_s, verdict.choice or choice
        computes = choice.prefill or choice.decode
        self._attempts += 2
        job = Job(self._attempts, request, choice.decode, frontend)
        self.jobs.append(job)
        self.tenants[job.attempt] = ask.tenant
        router.book(job.attempt, computes, wanted, now_s)
        if choice.prefill is not None:
            router.book(job.attempt + 1, choice.decode, wanted, now_s)
        self._coming[choice.decode] += 1
        self._coming_tokens[choice.decode] += request.prompt_tokens
        self._plan(self._queues[computes].submit(job, now_s), "prefill", computes)
        uncached = max(request.prompt_tokens - choice.cached_tokens, 1)
        self._told.append((now_s + ON_THE_WAY_S, frontend, computes, choice.decode, job.attempt, uncached))

    def _on_computed(self, done: Job, name: str, now_s: float) -> None:
        self._coming[done.decode] -= 1
        self._coming_tokens[done.decode] -= done.request.prompt_tokens
        super()._on_computed(done, name, now_s)
        self._report_decode(done.decode, now_s)

    def _on_decoded(self, name: str, now_s: float) -> None:
        super()._on_decoded(name, now_s)
        self._report_decode(name, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        super()._finish(job, now_s)
        self.gates[job.frontend].ended(job.request.output_tokens)

    def _report_decode(self, name: str, now_s: float) -> None:
        batch = self._decodes[name]
        total = self._setup.blocks
        # A hand-off holds its blocks from when it is sent.
        step_ms = batch._step_s() * 1e3 if len(batch) else 0.0
        used = min(int((batch._kv_tokens + self._coming_tokens[name]) // BLOCK_TOKENS), total)
        report = Report(len(batch), self._coming[name], 0, total - used, total, step_ms)
        for router in self._routers:
            router.on_load(name, report, now_s)

    def _tell(self, now_s: float) -> None:
        """Workers tell all frontends but the sender of the prompts they get."""
        while self._told and self._told[0][0] <= now_s:
            _, sender, worker, decode, attempt, uncached = self._told.popleft()
            self._report_decode(decode, now_s)
            for number, router in enumerate(self._routers):
                if number != sender:
                    router.told(worker, attempt, uncached, now_s)

    def _probe(self, now_s: float) -> None:
        """Would those that were refused be let in by now?"""
        if now_s - self._probed_s < PROBE_S:
            return
        self._probed_s = now_s
        for probe in list(self._probes):
            gate = self.gates[probe.frontend]
            assert isinstance(gate, Predicted)
            router, wanted = self._routers[probe.frontend], _wanted(probe.request)
            choice = router.choose(wanted, now_s)
            if gate.admission.look(probe.ask, choice, now_s, _again(router, wanted, now_s)).reason is None:
                self._probes.remove(probe)
                self.retry_errors_s.append((probe.told_s, now_s - probe.refused_s))

    # ------------------------------------------------------------ what came of it

    def target_s(self, job: Job) -> float:
        own_ms = (job.request.prompt_tokens - (job.cached_blocks or 0) * BLOCK_TOKENS) / TOKENS_PER_S * 1e3
        by_length_ms = self.slo.ttft_ms_per_1k_tokens * job.request.prompt_tokens / 1e3
        return (self.slo.ttft_ms + max(by_length_ms, own_ms)) / 1e3

    def is_good(self, job: Job) -> bool:
        in_time = job.first_token_s - job.request.arrival_s <= self.target_s(job)
        return in_time and itl_ms(job) <= self.slo.itl_ms

    def summary(self) -> dict[str, Any]:
        requests = [job.request for job in self.jobs] + [entry.request for entry in self.refused]
        last_s = max(request.arrival_s for request in requests)
        good = [job for job in self.jobs if self.is_good(job)]
        ttft = [job.first_token_s - job.request.arrival_s for job in self.jobs]
        of_target = [t / self.target_s(job) for t, job in zip(ttft, self.jobs, strict=True)]
        itl = [itl_ms(job) for job in self.jobs if job.request.output_tokens > 1]
        reasons = [entry.verdict.reason for entry in self.refused]
        return {
            "offered_rps": round(len(requests) / last_s, 3),
            "goodput_rps": round(len(good) / last_s, 3),
            "accepted": len(self.jobs),
            "good_of_accepted": round(len(good) / max(len(self.jobs), 1), 4),
            "accepted_p99_ttft_s": _quantile(ttft, 99),
            "accepted_p99_ttft_of_target": _quantile(of_target, 99),
            "accepted_p99_itl_ms": _quantile(itl, 99),
            "accepted_prompt_tokens_mean": round(
                sum(job.request.prompt_tokens for job in self.jobs) / max(len(self.jobs), 1)
            ),
            "refused": {str(reason): reasons.count(reason) for reason in sorted(set(reasons), key=str)},
        }

    def by_lane(self) -> dict[str, float]:
        """Share let in of each third of the work that came, by length of prompt."""
        lengths = sorted(job.request.prompt_tokens for job in self.jobs)
        lengths += [entry.request.prompt_tokens for entry in self.refused]
        lengths.sort()
        sums = np.cumsum(lengths)
        borders = [lengths[int(np.searchsorted(sums, sums[-1] * part / 3))] for part in (1, 2)]
        shares = {}
        for lane, (low, high) in zip(LANES, pairwise([0, *borders, 1 << 30]), strict=True):
            inside = sum(low <= job.request.prompt_tokens < high for job in self.jobs)
            outside = sum(low <= entry.request.prompt_tokens < high for entry in self.refused)
            shares[lane] = round(inside / max(inside + outside, 1), 3)
        return shares


def itl_ms(job: Job) -> float:
    n = job.request.output_tokens - 1
    return (job.finished_s - job.first_token_s) / n * 1e3 if n > 0 else 0.0


def predicted(slo: Slo, config: AdmissionConfig) -> Callable[[PolicyRouter], Gate]:
    return lambda router: Predicted(Admission(slo, config, router.load_of))


def shared(gate: Gate) -> Callable[[PolicyRouter], Gate]:
    """One gate for all frontends."""
    return lambda router: gate


def _wanted(request: TraceRequest) -> RouterRequest:
    return RouterRequest(
        tokens=array("I", bytes(4 * request.prompt_tokens)),  # only its length is looked at
        namespace=0,
        max_tokens=MOST_OUTPUT_TOKENS,
        hashes=request.hashes,
    )


def _again(router: PolicyRouter, wanted: RouterRequest, now_s: float) -> Again:
    """As `serving.placement` chooses once more."""

    def choose(short: frozenset[str]) -> Choice:
        wanted.avoid |= short
        return router.choose(wanted, now_s)

    return choose


def _quantile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4) if values else 0.0


__all__ = [
    "LANES",
    "STEP_MS",
    "AtMost",
    "Gate",
    "Open",
    "OverloadReplay",
    "Predicted",
    "Rate",
    "itl_ms",
    "predicted",
    "shared",
]
