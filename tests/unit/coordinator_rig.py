"""A coordinator over workers without links: what it sends is recorded, what they say is told by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvrouter.policy_router import build_router
from kvrouter.router import Router, WorkerView
from serving.config import Deadlines
from serving.coordinator import Coordinator
from serving.engine.base import Capabilities, SamplingParams
from serving.frontend_metrics import FrontendMetrics
from serving.generation import CollectedText, GenerationRequest
from serving.metrics import Registry
from serving.run import Run, WorkerEntry
from serving.wire import Cancel, Ended, Message, Step, Submit, Tokens, pack_u32, pack_u64


def coordinator_over(
    router: Router, entries: dict[str, WorkerEntry], clock: Callable[[], float], *, max_inflight: int = 100
) -> Coordinator:
    return Coordinator(
        model="m",
        router=router,
        workers=entries,
        deadlines=Deadlines(),
        max_inflight=max_inflight,
        capabilities=Capabilities(migrate_kv=True),
        metrics=FrontendMetrics(Registry({})),
        clock=clock,
    )


class Bench:
    """A coordinator over workers that record what they were sent."""

    def __init__(
        self, prefill: int = 1, decode: int = 1, max_inflight: int = 100, policy: str = "least_tokens"
    ) -> None:
        self.now = 100.0
        self.sent: dict[str, list[Message]] = {}
        self.router = build_router(policy, local=False)
        self.entries: dict[str, WorkerEntry] = {}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                self.add(f"{role[0]}{index}", role)
        self.coordinator = coordinator_over(
            self.router, self.entries, lambda: self.now, max_inflight=max_inflight
        )

    def add(self, ident: str, role: str) -> None:
        self.sent[ident] = []
        self.entries[ident] = WorkerEntry(ident, 1, f"host:{ident}", self.sent[ident].append)
        self.router.add_worker(WorkerView(ident, role, 32, 100, 64))

    def lose(self, ident: str) -> None:
        del self.entries[ident]
        self.router.remove_worker(ident)
        self.coordinator.on_worker_lost(ident)

    def start(
        self,
        max_tokens: int = 4,
        logprobs: int | None = None,
        temperature: float = 1.0,
        prompt: Sequence[int] = (1, 2, 3),
    ) -> tuple[Run, CollectedText]:
        sink = CollectedText()
        request = GenerationRequest(
            "r",
            "m",
            array("I", prompt),
            SamplingParams(max_tokens=max_tokens, seed=1, logprobs=logprobs, temperature=temperature),
        )
        return self.coordinator.start(request, sink), sink

    def submits(self, ident: str) -> list[Submit]:
        return [m for m in self.sent[ident] if isinstance(m, Submit)]

    def cancels(self, ident: str) -> list[int]:
        return [m.attempt for m in self.sent[ident] if isinstance(m, Cancel)]

    def tokens(self, attempt: int, first: int, *tokens: int, ended: str | None = None) -> None:
        n = len(tokens)
        self.coordinator.on_step(
            Step(
                tokens=Tokens(
                    pack_u64([attempt] * n), pack_u32(list(range(first, first + n))), pack_u32(list(tokens))
                ),
                ended=[Ended(attempt, ended)] if ended else None,
            )
        )

    def check_idle(self) -> None:
        assert self.coordinator.in_flight == 0
        assert self.coordinator.attempts_in_flight == 0
        assert self.router.in_flight == 0
