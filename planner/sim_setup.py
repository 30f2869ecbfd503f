"""What a simulation is made of: its settings, its replicas, and what it notes at every tick."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouter.deadline import Order
from kvrouter.perf_model import WorkerModels
from kvrouter.router import Choice, RouterRequest
from planner.observation import Decision, Observation, PoolSeen, VariantDecision
from planner.sim_worker import EngineTimes, Job, SimWorker

__all__ = [
    "MOST_OUTPUT_TOKENS",
    "ROLES",
    "SAMPLES",
    "VARIANT",
    "Admit",
    "Policy",
    "Replica",
    "Sample",
    "SimSetup",
    "asks",
    "changes",
    "cost_of_leaving",
    "places",
    "pools_seen",
    "sample",
    "turns",
]

MOST_OUTPUT_TOKENS = 2048  # what requests allow; the router does not know how long they get
SAMPLES = 1000  # behind the workers' times: they are known, as from a profile
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

    def models(self) -> WorkerModels:
        """What a router believes of a worker from its first request on."""
        return WorkerModels.from_priors(prefill=self.times.prefill, step=self.times.step, evidence=SAMPLES)


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


def pools_seen(workers: Collection[Replica]) -> dict[str, PoolSeen]:
    """By deployment, as Control counts them."""
    pools: dict[str, PoolSeen] = {}
    for name in ROLES:
        own = [w for w in workers if w.deployment == name]
        ready = [w for w in own if w.state == "ready"]
        lent = sum(1 for w in ready if (w.becomes or w.role) != name)
        pools[name] = PoolSeen(
            ready=len(ready) - lent,
            lent=lent,
            starting=sum(1 for w in own if w.state in ("pending", "starting")),
            draining=sum(1 for w in own if w.state == "draining"),
            unplaced=sum(1 for w in own if w.state == "pending"),
        )
    return pools


def sample(now_s: float, workers: Sequence[Replica], decision: VariantDecision) -> Sample:
    """What is there at a tick that decided so."""
    states = [worker.state for worker in workers]
    staying = [w for w in workers if w.state == "ready" and w.becomes is None]
    prefill, decode = (sum(1 for w in staying if w.role == role) for role in ROLES)
    return Sample(
        at_s=now_s,
        ready=(prefill, decode),
        starting=states.count("starting") + states.count("pending"),
        draining=states.count("draining") + sum(1 for w in workers if w.becomes is not None),
        queued=sum(w.engine.queued for w in workers),
        decoding=sum(w.engine.batch for w in workers),
        targets=decision.roles,
        reason=decision.reason,
    )


def asks(job: Job, avoid: str | None, now_s: float) -> RouterRequest:
    """What it asks of the router; `avoid`: a worker that is taken only when nobody else is left."""
    return RouterRequest(
        tokens=array("I", bytes(4 * job.context_tokens)),  # only its length is looked at
        namespace=0,
        max_tokens=MOST_OUTPUT_TOKENS,
        avoid=frozenset() if avoid is None else frozenset((avoid,)),
        hashes=job.request.hashes,
        waited_s=now_s - job.waits_since_s,
        limit_s=job.limit_s,
    )


def places(job: Job) -> tuple[str, ...]:
    """The workers without which it cannot go on: while its KV moves these are two."""
    return {"prefill": (job.prefill,), "moving": (job.prefill, job.decode), "decode": (job.decode,)}[
        job.stage
    ]


def changes(before: VariantDecision | None, decision: VariantDecision) -> int:
    """Scale events: of prefill, decode, loans those that are told to change."""
    if before is None:
        return 0
    pairs = (
        (before.prefill, decision.prefill),
        (before.decode, decision.decode),
        (before.lent, decision.lent),
    )
    return sum(old != new for old, new in pairs)


def turns(workers: Collection[Replica], lent: int) -> list[tuple[Replica, str]]:
    """Who is to play which role, so that `lent` decode workers prefill; below 0: prefill workers decode."""
    found: list[tuple[Replica, str]] = []
    for deployment, role, count in (("decode", "prefill", lent), ("prefill", "decode", -lent)):
        ready = [w for w in workers if w.deployment == deployment and w.state == "ready"]
        away = [w for w in ready if (w.becomes or w.role) == role]
        home = [w for w in ready if (w.becomes or w.role) != role]
        more = max(count, 0) - len(away)
        found += [(worker, role) for worker in sorted(home, key=cost_of_leaving)[: max(more, 0)]]
        found += [(worker, deployment) for worker in sorted(away, key=cost_of_leaving)[: max(-more, 0)]]
    return found


def cost_of_leaving(worker: Replica) -> tuple[bool, bool, float]:
    """Who has not begun goes first, then who has least to do."""
    return worker.state != "pending", worker.state != "starting", worker.engine.queued + worker.engine.batch
