"""A frontend's links to workers that are one end of a link each and say what they are told to."""

from __future__ import annotations

from array import array
from typing import Any

from kvrouter.policy_router import build_router
from serving.engine.base import SamplingParams
from serving.generation import CollectedText, GenerationRequest
from serving.link import Identity, Link, LinkServer
from serving.run import Run, WorkerEntry
from serving.variant_links import VariantLinks
from serving.wire import AnyMessage, Beat, Ended, Message, Step, Submit, Tokens, pack_u32, pack_u64
from tests.unit.coordinator_rig import coordinator_over
from tests.unit.handoff_fakes import until

KEY = b"k" * 32
LONG_S = 20.0
SILENCE_S = 5.0


class Worker:
    """A worker's end: remembers what it is sent and says what it is told to say."""

    def __init__(self, ident: str, role: str) -> None:
        self.me = Identity.fresh("worker", ident)
        self.role = role
        self.link: Link | None = None
        self.opened = 0
        self.lost = 0
        self.messages: list[AnyMessage] = []
        self.beat = Beat()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self.server = LinkServer(self.me, KEY, self, beat=lambda: self.beat)
        self.address = await self.server.start("127.0.0.1", int(self.address.split(":")[1]))

    async def stop(self) -> None:
        await self.server.stop()

    def on_open(self, link: Link) -> None:
        self.link = link
        self.opened += 1

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost += 1

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)

    def got(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def say(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message)

    def answer(self, submit: Submit, *tokens: int, ended: str | None = None) -> None:
        """The next tokens of the attempt, from the first it was not given."""
        n = len(tokens)
        first = len(submit.tokens) // 4 - submit.n_prompt
        self.say(
            Step(
                tokens=Tokens(
                    pack_u64([submit.attempt] * n),
                    pack_u32(list(range(first, first + n))),
                    pack_u32(list(tokens)),
                ),
                ended=[Ended(submit.attempt, ended)] if ended else None,
            )
        )

    @property
    def meta(self) -> dict[str, Any]:
        """As its replica publishes it."""
        return {
            "address": self.address,
            "epoch": self.me.epoch,
            "role": self.role,
            "layout": "l",
            "block_tokens": 32,
            "total_blocks": 100,
            "max_batch": 64,
        }


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.router = build_router("least_tokens", local=False)
        self.entries: dict[str, WorkerEntry] = {}
        self.workers: dict[str, Worker] = {}
        self.coordinator = coordinator_over(self.router, self.entries, lambda: self.now)
        self.links = VariantLinks(
            name="m/main",
            me=Identity.fresh("frontend", "f"),
            key=KEY,
            router=self.router,
            coordinator=self.coordinator,
            entries=self.entries,
            silence_s=SILENCE_S,
            clock=lambda: self.now,
        )

    async def worker(self, ident: str, role: str = "decode") -> Worker:
        worker = self.workers[ident] = Worker(ident, role)
        await worker.start()
        return worker

    def members(self, *idents: str, role: str = "decode") -> None:
        self.links.update(role, {ident: self.workers[ident].meta for ident in idents})

    async def linked(self, *idents: str) -> None:
        await until(lambda: set(self.entries) == set(idents), LONG_S)

    async def decoders(self, *idents: str) -> list[Worker]:
        """Only decode workers: each request is one local attempt."""
        workers = [await self.worker(ident) for ident in idents]
        self.members(*idents)
        await self.linked(*idents)
        await until(lambda: all(worker.link is not None for worker in workers), LONG_S)
        return workers

    def ask(self, max_tokens: int = 4) -> tuple[Run, CollectedText]:
        sink = CollectedText()
        params = SamplingParams(max_tokens=max_tokens, seed=1)
        request = GenerationRequest("r", "m", array("I", [1, 2, 3]), params)
        return self.coordinator.start(request, sink), sink

    async def asked(self, worker: Worker, n: int = 1) -> Submit:
        """The n-th submit that `worker` got."""
        await until(lambda: len(worker.got(Submit)) >= n, LONG_S)
        submit = worker.got(Submit)[n - 1]
        assert isinstance(submit, Submit)
        return submit

    async def placed_on(self) -> str:
        """Where a request goes now; it is cancelled again."""
        run, _ = self.ask()
        (attempt,) = run.attempts.values()
        run.cancel()
        return attempt.worker

    async def gone(self, worker: Worker) -> None:
        """The frontend closed its link and dials no more."""
        await until(lambda: worker.lost == worker.opened, LONG_S)
        assert worker.me.ident not in self.entries
        await until(lambda: not self.links._stopping, LONG_S)

    async def stop(self) -> None:
        await self.links.stop()
        for worker in self.workers.values():
            await worker.stop()
        assert self.coordinator.in_flight == self.coordinator.attempts_in_flight == 0
        assert self.router.in_flight == 0
        assert self.entries == {}
