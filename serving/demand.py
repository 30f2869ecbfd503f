"""What the planner must know of one variant's requests, as this frontend sees them at admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvrouter.perf_model import LinearModel, WorkerModels
from serving.run import Run, Stage
from serving.wire import ArrivalRow, Fitted, FrontendReport

MOST_ROWS = 1 << 16  # kept while Control is away; then the oldest go
TYPICAL = 256  # requests after which those are taken to be that nobody read


class Demand:
    """Rows since the last report. `report` takes them away."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int, int, str | None]] = deque(maxlen=MOST_ROWS)
        self._outputs: deque[tuple[int, int]] = deque(maxlen=MOST_ROWS)
        self._typical: deque[tuple[int, int, str | None]] = deque(maxlen=TYPICAL)
        self._turned_away = 0

    def arrived(
        self, prompt_tokens: int, uncached_tokens: int, slo_class: str | None, now_s: float
    ) -> None:
        """A request came, admitted or not. `uncached_tokens`: as the router believes."""
        self._arrivals.append((now_s, prompt_tokens, uncached_tokens, slo_class))
        self._typical.append((prompt_tokens, uncached_tokens, slo_class))

    def turned_away(self, now_s: float) -> None:
        """One came and was refused before its body was read: it counts like one of the last that were."""
        if self._typical:
            self._turned_away += 1
            self._arrivals.append((now_s, *self._typical[self._turned_away % len(self._typical)]))

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        self._outputs.append((prompt_tokens, output_tokens))

    def report(
        self, model: str, variant: str, live: Iterable[Run], workers: Iterable[WorkerModels], now_s: float
    ) -> FrontendReport:
        arrivals, outputs = list(self._arrivals), list(self._outputs)
        self._arrivals.clear()
        self._outputs.clear()
        waiting, going, decoding = [], [], 0
        for run in live:
            if run.sent:
                going.append((len(run.request.prompt), len(run.sent)))
            else:
                waiting.append(run.started_s)
            decoding += run.stage is Stage.DECODE
        return FrontendReport(
            model=model,
            variant=variant,
            arrivals=[
                ArrivalRow(max(now_s - at_s, 0.0) * 1e3, prompt, uncached, slo_class)
                for at_s, prompt, uncached, slo_class in arrivals
            ],
            outputs=outputs,
            queued=len(waiting),
            queue_age_ms=max((now_s - min(waiting)) * 1e3, 0.0) if waiting else 0.0,
            decoding=decoding,
            fitted=fitted(list(workers)),
            going=going,
        )


def fitted(workers: list[WorkerModels]) -> Fitted | None:
    """The models with the most evidence; None while both times rest on a guess."""
    if not workers:
        return None
    prefill = max((models.prefill.linear for models in workers), key=_evidence)
    step = max((models.step.linear for models in workers), key=_evidence)
    samples = min(prefill.evidence, step.evidence)
    if not samples:
        return None
    a, b, c = prefill.coefficients
    d, e, f = step.coefficients
    return Fitted((a, b, c), (d, e, f), prefill.typical_error, step.typical_error, samples)


def _evidence(linear: LinearModel) -> int:
    return linear.evidence
