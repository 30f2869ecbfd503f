"""Admission where a request is placed: its decision becomes an error for the client, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import ceil

from kvrouter.load import WorkerLoad
from kvrouter.router import Choice, RouterRequest
from serving.admission import TIMEOUT, Admission, Again, Ask, Verdict
from serving.config import AdmissionConfig, Deadlines, Slo
from serving.errors import ContextLengthExceeded, InvalidRequest, Overloaded
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


class TimeoutTooShort(InvalidRequest):
    """No worker could answer it in its client's own time, ever: no 429, which says to come again."""

    def __init__(self, timeout_ms: float, least_ms: float) -> None:
        super().__init__(
            f"x-request-timeout-ms = {timeout_ms:g}, and to answer this takes about {least_ms:.0f} ms "
            "at the least; allow more, or ask for less",
            param="x-request-timeout-ms",
        )


class Gate:
    """Of one variant on one frontend."""

    def __init__(
        self,
        slo: Slo,
        config: AdmissionConfig,
        deadlines: Deadlines,
        *,
        load_of: Callable[[str], WorkerLoad],
        loads: Callable[[], Collection[WorkerLoad]],
        metrics: FrontendMetrics,
    ) -> None:
        """`load_of`, `loads`: the router's view of one worker, and of all."""
        self._by_slo = config.mode == "slo"
        if not self._by_slo:
            slo = Slo(ttft_ms=deadlines.queue_ms, ttft_ms_per_1k_tokens=0)
        self._admission = Admission(slo, config, load_of) if config.mode != "off" else None
        self._classes = slo.classes
        self._load_of = load_of
        self._loads = loads
        self._metrics = metrics
        if self._admission is not None:
            metrics.watch_lanes(self._queued)

    def retarget(self, slo: Slo) -> None:
        """The model's targets changed; only mode `slo` goes by them."""
        if self._by_slo and self._admission is not None:
            self._admission.retarget(slo)
            self._classes = slo.classes

    def check(
        self,
        request: GenerationRequest,
        wanted: RouterRequest,
        choice: Choice,
        now_s: float,
        again: Again,
    ) -> Choice:
        """Where it may go: `choice`, or what `again` chose instead. Sets the limit of `wanted`, by which
        its first token should be out. Raises Refused, TimeoutTooShort, ContextLengthExceeded."""
        self._check_fits(len(request.prompt), choice)
        if self._admission is None:
            return choice
        ask = Ask(
            prompt_tokens=len(request.prompt),
            max_tokens=request.params.max_tokens,
            min_tokens=request.params.min_tokens,
            priority=request.priority,
            tenant=request.tenant,
            timeout_ms=request.timeout_ms,
            slo=self._classes.get(request.slo_class or ""),
        )
        verdict = self._admission.decide(ask, choice, now_s, again)
        self._metrics.predicted_wait.observe(verdict.wait_ms / 1e3)
        if verdict.reason is not None:
            self._metrics.rejects.inc(labels=(verdict.reason,))
            if verdict.reason == TIMEOUT:
                raise TimeoutTooShort(request.timeout_ms or 0.0, verdict.least_ms)
            uncached = ask.prompt_tokens - choice.cached_tokens - choice.pull_tokens
            raise Refused(verdict, max(uncached, 1))
        wanted.limit_s = verdict.limit_s
        return verdict.choice or choice

    def ended(self, output_tokens: int) -> None:
        """An answer is complete."""
        if self._admission is not None:
            self._admission.ended(output_tokens)

    def _check_fits(self, n_prompt: int, choice: Choice) -> None:
        """Workers fail what their whole KV pool cannot hold."""
        for ident, needed in ((choice.prefill, n_prompt), (choice.decode, n_prompt + 1)):
            if ident is None or needed <= _room(self._load_of(ident)):
                continue
            role = self._load_of(ident).view.role
            most = max(_room(load) for load in self._loads() if load.view.role == role)
            if needed > most:
                raise ContextLengthExceeded(
                    f"the prompt has {n_prompt} tokens; the KV of the largest {role} worker holds {most}"
                )

    def _queued(self) -> Counter[str]:
        """Own prompts that are not computed yet, by lane."""
        assert self._admission is not None
        lane = self._admission.lengths.lane
        return Counter(LANES[lane(ms)] for load in self._loads() for ms in load.computing_ms)


def _room(load: WorkerLoad) -> int:
    """Tokens that all of its KV holds."""
    return load.view.total_blocks * load.view.block_tokens
