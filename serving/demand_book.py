"""What all frontends reported, per variant, as the planner's observers want it. Runs where Control does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from planner.observation import Arrival, FittedTimes, PoolSeen, VariantSeen
from planner.observe import Observer
from serving.wire import FrontendReport

FRESH_S = 3.0  # a frontend that said nothing for longer is away

Key = tuple[str, str]  # model, variant


@dataclass(slots=True)
class _Said:
    report: FrontendReport
    at_s: float


class DemandBook:
    """Of all variants. Arrivals that were older than `FRESH_S` when they were told came while Control was
    away: they belong to no window that is still open, and are left out."""

    def __init__(
        self, variants: Iterable[Key], times: Mapping[Key, FittedTimes], clock: Callable[[], float]
    ) -> None:
        self._observers = {key: Observer(times.get(key)) for key in variants}
        self._said: dict[tuple[str, Key], _Said] = {}  # (frontend, variant) -> its last report
        self._told_s: dict[Key, float] = {}  # when any frontend last reported
        self._clock = clock

    def reported(self, frontend: str, report: FrontendReport) -> None:
        key = (report.model, report.variant)
        observer = self._observers.get(key)
        if observer is None:
            return  # of another configuration
        now = self._clock()
        if now - self._told_s.get(key, now) > FRESH_S:
            observer.missed(now - FRESH_S)
        self._told_s[key] = now
        self._said[frontend, key] = _Said(report, now)
        observer.reported(now)
        for row in report.arrivals:
            age_s = row.age_ms / 1e3
            if age_s <= FRESH_S:
                observer.arrived(
                    Arrival(now - age_s, row.prompt_tokens, row.uncached_tokens, row.slo_class)
                )
        for prompt, output in report.outputs:
            observer.finished(prompt, output)

    def in_flight(self) -> int | None:
        """Requests that all frontends hold; None while none of them says so."""
        said = self._fresh(self._clock())
        return sum(r.queued + r.decoding for r in said) if said else None

    def observe(
        self,
        key: Key,
        pools: Mapping[str, PoolSeen],
        now_s: float,
        *,
        kv_tokens: int | None,
        max_batch: int | None,
    ) -> VariantSeen:
        """Closes the window that began with the last call. Arrivals are unknown while no frontend tells."""
        observer = self._observers[key]
        said = self._fresh(now_s, key)
        fitted = max(
            (r.fitted for r in said if r.fitted is not None), key=lambda f: f.samples, default=None
        )
        if fitted is not None:
            observer.times = FittedTimes(
                prefill=fitted.prefill,
                step=fitted.step,
                prefill_spread=fitted.prefill_spread,
                step_spread=fitted.step_spread,
                samples=fitted.samples,
            )
        seen = observer.observe(
            now_s,
            pools,
            queue_age_s=max(r.queue_age_ms for r in said) / 1e3 if said else None,
            queued=sum(r.queued for r in said) if said else None,
            decoding=sum(r.decoding for r in said) if said else None,
            going=[row for r in said for row in r.going or ()],
            kv_tokens=kv_tokens,
            max_batch=max_batch,
        )
        return seen if said else replace(seen, arrivals=None)

    def skip(self, now_s: float) -> None:
        """Closes the windows of all variants unseen."""
        for observer in self._observers.values():
            observer.observe(now_s, {})

    def _fresh(self, now_s: float, key: Key | None = None) -> list[FrontendReport]:
        self._said = {at: said for at, said in self._said.items() if now_s - said.at_s < FRESH_S}
        return [said.report for (_, of), said in self._said.items() if key is None or of == key]
