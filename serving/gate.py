"""Admission where a request is placed: its decision becomes an error for the client, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil

from kvrouter.load import WorkerLoad
from kvrouter.router import Choice, RouterRequest
from serving.admission import Admission, Ask, Verdict
from serving.config import AdmissionConfig, Deadlines, Slo
from serving.errors import Overloaded
from serving.frontend_metrics import FrontendMetrics
from serving.generation import GenerationRequest
from serving.length_lanes import LANES

_WHY = {
    "ttft": "its first token would come too late",
    "itl": "tokens would come too slowly",
    "kv": "there is no room for its context",
    "share": "room is kept for other keys, which have had less",
    "lane": "room is kept for prompts of other lengths, which have had less",
    "priority": "room is kept for requests of a higher priority",
}


class Refused(Overloaded):
    """By admission. `uncached_tokens`: what it would have cost."""

    def __init__(self, verdict: Verdict, uncached_tokens: int) -> None:
        assert verdict.reason is not None
        seconds = max(ceil(verdict.retry_after_s), 1)
        super().__init__(
            f"at this load {_WHY[verdict.reason]}; try again in {seconds} s", retry_after_s=seconds
        )
        self.uncached_tokens = uncached_tokens


def gate_for(
    slo: Slo,
    config: AdmissionConfig,
    deadlines: Deadlines,
    *,
    load_of: Callable[[str], WorkerLoad],
    loads: Callable[[], Iterable[WorkerLoad]],
    metrics: FrontendMetrics,
) -> Gate | None:
    """As `config.mode` says; None: everybody is let in. Others as for Gate."""
    if config.mode == "off":
        return None
    if config.mode == "deadline":
        slo = Slo(ttft_ms=deadlines.queue_ms, ttft_ms_per_1k_tokens=0)
    return Gate(slo, config, load_of=load_of, loads=loads, metrics=metrics)


class Gate:
    """Of one variant on one frontend."""

    def __init__(
        self,
        slo: Slo,
        config: AdmissionConfig,
        *,
        load_of: Callable[[str], WorkerLoad],
        loads: Callable[[], Iterable[WorkerLoad]],
        metrics: FrontendMetrics,
    ) -> None:
        """`load_of`, `loads`: the router's view of one worker, and of all."""
        self._admission = Admission(slo, config, load_of)
        self._classes = slo.classes
        self._loads = loads
        self._metrics = metrics
        metrics.watch_lanes(self._queued)

    def check(
        self, request: GenerationRequest, wanted: RouterRequest, choice: Choice, now_s: float
    ) -> None:
        """Set the limit of `wanted`, by which its first token should be out. Raises Refused."""
        ask = Ask(
            len(request.prompt),
            request.params.max_tokens,
            request.priority,
            request.tenant,
            request.timeout_ms,
            self._classes.get(request.slo_class or ""),
        )
        verdict = self._admission.decide(ask, choice, now_s)
        self._metrics.predicted_wait.observe(verdict.wait_ms / 1e3)
        if verdict.reason is not None:
            self._metrics.rejects.inc(labels=(verdict.reason,))
            uncached = ask.prompt_tokens - choice.cached_tokens - choice.pull_tokens
            raise Refused(verdict, max(uncached, 1))
        wanted.limit_s = verdict.limit_s

    def ended(self, output_tokens: int) -> None:
        """An answer is complete."""
        self._admission.ended(output_tokens)

    def _queued(self) -> Counter[str]:
        """Own prompts that are not computed yet, by lane."""
        lane = self._admission.lengths.lane
        return Counter(LANES[lane(ms)] for load in self._loads() for ms in load.computing_ms)
