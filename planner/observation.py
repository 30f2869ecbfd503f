"""What the planner sees, what it wants, and the settings between: plain frozen data.

All of it is JSON: `to_json` and `from_json` carry it over a wire and out of an HTTP answer. What is not
known is None, never 0. Times are seconds of one clock that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

__all__ = [
    "Arrival",
    "Decision",
    "FittedTimes",
    "Observation",
    "PoolSeen",
    "VariantDecision",
    "VariantSeen",
    "from_json",
    "to_json",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """The workers of one Serve deployment, whatever role they play now; the first four never overlap."""

    ready: int = 0  # in the role of their deployment
    lent: int = 0  # playing the other role, or draining in order to
    starting: int = 0  # ordered, not ready
    draining: int = 0  # leaving for good
    unplaced: int | None = None  # those of `starting` that the cluster has no place for yet; None: unknown


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """kvrouter.perf_model's coefficients for this variant, with their relative spread."""

    prefill: tuple[float, float, float]  # a, b, c; ms
    step: tuple[float, float, float]  # d, e, f; ms
    prefill_spread: float = 0.1  # typical relative error of a prediction
    step_spread: float = 0.1
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request at admission. `slo_class`: None is the model's own targets."""

    at_s: float
    prompt_tokens: int
    uncached_tokens: int
    slo_class: str | None = None


@dataclass(frozen=True, slots=True)
class VariantSeen:
    """One variant of one model, over all frontends, at admission.

    Attributes:
        arrivals: requests of the last `window_s`, refused ones too; None when no frontend reported.
        recent: of the last minutes, about oldest first; the newest stand for `weight` requests each.
        observed: (from, to) of the times that `recent` was seen in, oldest first, each alike; between two
            of them nothing is known. Empty: the `recent_s` from the first of `recent` on.
        recent_s: how long those are together.
        outputs: (prompt, output) tokens of recent answers, in the order of their ends; a bounded sample.
        outputs_s: for how long all ends are in `outputs`; None when its answers were seen from their start.
        going: (prompt, output so far) tokens of answers that are not complete; empty when unknown.
        cached_share: of the prompt tokens of `recent` that a cache had.
        queue_age_s: of the oldest prompt without a first token; None when unknown, 0 when none waits.
        queued: prompts without a first token.
        decoding: sequences in decode batches.
        pools: "prefill" and "decode".
        times: None until there is a profile or there are enough samples.
        kv_tokens, max_batch: of one worker.
    """

    window_s: float
    arrivals: int | None
    pools: dict[str, PoolSeen]
    recent_s: float = 0.0
    recent: tuple[Arrival, ...] = ()
    weight: int = 1
    outputs: tuple[tuple[int, int], ...] = ()
    cached_share: float | None = None
    queue_age_s: float | None = None
    queued: int | None = None
    decoding: int | None = None
    times: FittedTimes | None = None
    kv_tokens: int | None = None
    max_batch: int | None = None
    observed: tuple[tuple[float, float], ...] = ()
    outputs_s: float | None = None
    going: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Of the whole application. `inflight`: requests that all frontends hold."""

    variants: dict[str, VariantSeen]
    frontends: int | None = None
    inflight: int | None = None


@dataclass(frozen=True, slots=True)
class VariantDecision:
    """Targets, not steps: applying one twice changes nothing.

    Attributes:
        prefill, decode: replicas that each Serve deployment shall have.
        lent: how many replicas of the decode deployment shall play prefill; below 0 the other way round.
        reason: one line a person can act on.
        wanted: (prefill, decode) roles before the budget and the rules against flapping.
        forecast_rps: expected at start-up lead time; None when blind.
        reachable: best values where a target cannot be met by any number of workers; else None.
    """

    prefill: int
    decode: int
    lent: int
    reason: str
    wanted: tuple[int, int] | None = None
    forecast_rps: float | None = None
    reachable: str | None = None

    @property
    def roles(self) -> tuple[int, int]:
        return self.prefill + self.lent, self.decode - self.lent


@dataclass(frozen=True, slots=True)
class Decision:
    variants: dict[str, VariantDecision]
    frontends: int | None = None  # None: leave them as they are
    reason: str = ""


def to_json(value: Any) -> Any:
    """Plain lists, dicts, numbers and text."""
    return msgspec.to_builtins(value)


def from_json(data: Any, kind: type[T]) -> T:
    """Inverse of `to_json`; raises msgspec.ValidationError."""
    return msgspec.convert(data, kind)
