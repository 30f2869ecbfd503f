"""What a simulation is made of: its settings, its replicas, and what it notes at every tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrouter.deadline import Order
from kvrouter.router import Choice
from planner.observation import Decision, Observation
from planner.sim_worker import EngineTimes, Job, SimWorker

__all__ = [
    "ROLES",
    "VARIANT",
    "Admit",
    "Policy",
    "Replica",
    "Sample",
    "SimSetup",
    "cost_of_leaving",
    "places",
]

VARIANT = "main"
ROLES = ("prefill", "decode")


class Admit(Protocol):
    """Who is let in, after the router has chosen; serving.admission behind an adapter, for instance."""

    def admit(self, job: Job, choice: Choice, now_s: float) -> bool: ...

    def ended(self, output_tokens: int) -> None:
        """An answer is complete."""


class Policy(Protocol):
    """What decides. `decide` is called every `interval_s`."""

    interval_s: float

    def decide(self, observation: Observation, now_s: float) -> Decision: ...


@dataclass(frozen=True, slots=True)
class SimSetup:
    times: EngineTimes
    initial: tuple[int, int] = (1, 1)  # prefill, decode replicas that are ready at 0
    startup_s: float = 60.0
    startup_spread: float = 0.0  # relative, uniform
    capacity: int | None = None  # workers that the cluster can place; None: any number
    mean_time_to_failure_s: float | None = None  # of one worker
    router: str = "ttft_regret"
    local_prefill: bool = True
    order: Order = Order.DEADLINE
    seed: int = 0


@dataclass(slots=True)
class Replica:
    """A replica and what is to become of it."""

    ident: str
    deployment: str
    role: str
    ordered_s: float
    engine: SimWorker
    state: str = "pending"  # pending | starting | ready | draining | gone
    becomes: str | None = None  # the role it drains for
    gone_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """At one tick."""

    at_s: float
    ready: tuple[int, int]  # by role, those that take requests
    starting: int
    draining: int  # those on the way to another role too
    queued: int
    decoding: int
    targets: tuple[int, int]
    reason: str


def places(job: Job) -> tuple[str, ...]:
    """The workers without which it cannot go on: while its KV moves these are two."""
    return {"prefill": (job.prefill,), "moving": (job.prefill, job.decode), "decode": (job.decode,)}[
        job.stage
    ]


def cost_of_leaving(worker: Replica) -> tuple[bool, bool, float]:
    """Who has not begun goes first, then who has least to do."""
    return worker.state != "pending", worker.state != "starting", worker.engine.queued + worker.engine.batch
