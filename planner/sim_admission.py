"""The live admission in front of simulated workers, as `serving.gate` holds it on a frontend."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.policy_router import PolicyRouter
from kvrouter.router import Choice
from planner.settings import Targets
from planner.sim_setup import MOST_OUTPUT_TOKENS, asks
from planner.sim_worker import Job
from serving.admission import Admission, Ask
from serving.config import AdmissionConfig, Deadlines, Slo

__all__ = ["MODES", "Door", "admission_for"]

MODES = ("off", "deadline", "slo")  # of AdmissionConfig


class Door:
    """One frontend's. Requests of a simulation are of one tenant and one class."""

    def __init__(self, slo: Slo, config: AdmissionConfig, router: PolicyRouter) -> None:
        self._router = router
        self._admission = Admission(slo, config, router.load_of)

    def admit(self, job: Job, choice: Choice, now_s: float) -> bool:
        wanted = asks(job, None, now_s)

        def again(short: frozenset[str]) -> Choice:
            wanted.avoid |= short
            return self._router.choose(wanted, now_s)

        ask = Ask(job.context_tokens, MOST_OUTPUT_TOKENS)
        verdict = self._admission.decide(ask, choice, now_s, again)
        job.refused_for, job.limit_s, job.chosen = verdict.reason, verdict.limit_s, verdict.choice
        return verdict.reason is None

    def ended(self, output_tokens: int) -> None:
        self._admission.ended(output_tokens)


def admission_for(mode: str, targets: Targets) -> Callable[[PolicyRouter], Door] | None:
    """For a Cluster; `mode`: one of MODES."""
    if mode == "off":
        return None
    slo = Slo(
        ttft_ms=targets.ttft_ms,
        ttft_ms_per_1k_tokens=targets.ttft_ms_per_1k_tokens,
        itl_ms=targets.itl_ms,
        percentile=targets.percentile,
    )
    if mode == "deadline":
        slo = Slo(ttft_ms=Deadlines().queue_ms, ttft_ms_per_1k_tokens=0)
    config = AdmissionConfig(mode=mode)  # type: ignore[arg-type]
    return lambda router: Door(slo, config, router)
