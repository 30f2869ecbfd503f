"""The whole application in one process, without Ray: frontends, simulated workers, Control, loopback links.

The simulated engine checks every transferred byte and its tokens follow from prompt and seed alone, so an
equal text means that nothing was lost, repeated or mixed up.
"""

from __future__ import annotations

import os
from typing import Any
from zlib import crc32

import msgspec

from serving.config import AppConfig, SimProfile, load_config
from serving.control_client import ControlClient
from serving.control_host import ControlHost
from serving.coordinator import Coordinator
from serving.engine.base import BlockStates, Counters, Mode
from serving.engine.sim import CAPABILITIES, build_sim_engine
from serving.frontend_host import FrontendHost
from serving.kv.io import KvIo
from serving.kv.local import LocalTransfer, Switchboard
from serving.kv.nixl import NixlTransfer
from serving.link import Identity
from serving.metrics import Registry
from serving.provenance import Provenance, export
from serving.run import Run
from serving.wire import Register
from serving.worker_host import WorkerHost
from serving.worker_orders import OrderedWorker
from tests.scripted import Client, Reply
from tests.tiny_tokenizer import tiny_model, tiny_tokenizer
from tests.unit.handoff_fakes import until

LONG_S = 40.0
PROVENANCE = Provenance(
    engine="sim",
    engine_version="1",
    kvrelay_version="1",
    gpu="cpu",
    driver="cpu",
    cuda="cpu",
    parallel="tp1pp1",
    weights_digest="0" * 32,
    quantization="NO_QUANT",
    kv_dtype="unknown",
    settings_digest="0" * 16,
)
BLOCK_TOKENS = 8
CONTEXT_TOKENS = 1024
# Answers are plain text, so that a text tells its tokens.
PLAIN = [
    token
    for token in range(2, tiny_tokenizer().vocab_size)
    if (text := tiny_tokenizer().decode([token])).isascii() and text.isprintable() and text
]


def config(
    profile: SimProfile,
    kv_bytes: int,
    max_batch: int = 64,
    slo: dict[str, Any] | None = None,
    **settings: Any,
) -> AppConfig:
    engine = {
        "kind": "sim",
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": 64,
        "kv_bytes": kv_bytes,
        "max_batch": max_batch,
        "profile": profile,
    }
    variant = {"name": "main", "weights": "none", "engine": engine}
    model = {"name": "tiny", "variants": [variant], "slo": slo or {}}
    return load_config({"models": [model], **settings})


class SimWorker:
    """One worker process; `kill` is its death as others see it."""

    def __init__(self, app: App, role: str, number: int) -> None:
        self.role = role
        self.me = Identity.fresh("worker", f"{role}-{number}")
        self._make(app)
        labels = {"model": "tiny", "variant": "main", "pool": role}
        registry = Registry({**labels, "worker": self.me.ident})
        self.provenance = PROVENANCE
        export(registry, self.provenance)
        self.host = WorkerHost(
            me=self.me,
            role=role,
            engine=self.engine,
            kv_io=KvIo(self.transfer),
            key=app.key,
            deadlines=app.config.deadlines,
            registry=registry,
            health=app.config.health,
        )
        self.ordered = OrderedWorker(self.host, role)
        self.control = ControlClient(
            me=self.me,
            key=app.key,
            registry=registry,
            register=Register("worker", self.me.ident, labels),
            on_orders=self.ordered.on_orders,
            report=self.ordered.report,
        )
        self.address = ""

    def _make(self, app: App) -> None:
        """Engine and transfer."""
        spec = app.config.models[0].variants[0]
        profile = spec.engine.profile
        assert isinstance(profile, SimProfile)
        self.engine = build_sim_engine(spec.engine, profile, PLAIN, app.model.eos_ids, "tiny")
        self.transfer = (
            NixlTransfer(f"{self.me.ident}-{self.me.epoch:x}")
            if app.nixl
            else LocalTransfer(self.me.ident, app.board)
        )

    @property
    def meta(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "epoch": self.me.epoch,
            "role": self.role,
            "layout": self.engine.layout,
            "block_tokens": self.engine.block_tokens,
            "total_blocks": self.engine.memory.n_blocks,
            "max_batch": 64,
            "provenance": msgspec.to_builtins(self.provenance),
        }

    @property
    def counters(self) -> Counters:
        return self.engine.counters

    @property
    def states(self) -> BlockStates:
        return self.engine.block_states()

    @property
    def is_free(self) -> bool:
        states = self.states
        assert states.conserved
        held = states.used + states.leased + states.quarantined
        return not held and not self.host.busy and self.engine._scheduler.n_live == 0

    async def kill(self, frozen: bool) -> None:
        """All links break at once, nobody listens any more, its KV is gone or, `frozen`, stays in reach."""
        await self.host._server.stop()
        for peer in list(self.host.peers._peers.values()):
            peer.link.close("killed")
        if isinstance(self.transfer, LocalTransfer) and not frozen:
            self.transfer.close()
        await self.control.stop()


class App:
    """Use as `async with App(...)`; leaving it checks that nothing is held anywhere."""

    worker_type = SimWorker

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        frontends: int = 1,
        nixl: bool = False,
        profile: dict[str, float] | None = None,  # how slow it is
        kv_bytes: int = 1 << 18,  # 512 blocks
        **settings: Any,
    ) -> None:
        """`settings`: sections of the config. Prefill gets every prompt unless `router` says otherwise."""
        settings.setdefault("router", {"local_prefill": False})
        slow: dict[str, Any] = dict(profile or {})
        self.config = config(SimProfile(context_tokens=CONTEXT_TOKENS, **slow), kv_bytes, **settings)
        self.model = tiny_model(context_tokens=CONTEXT_TOKENS, capabilities=CAPABILITIES)
        self.key = os.urandom(32)
        self.board = Switchboard()
        self.nixl = nixl
        self.control = ControlHost(me=Identity.fresh("control", "control"), key=self.key)
        self.workers = [self.worker_type(self, "prefill", n) for n in range(prefill)]
        self.workers += [self.worker_type(self, "decode", n) for n in range(decode)]
        self.dead: list[SimWorker] = []
        self.frontends = [
            FrontendHost(
                config=self.config,
                me=Identity.fresh("frontend", f"frontend-{n}"),
                key=self.key,
                served={"tiny": self.model},
            )
            for n in range(frontends)
        ]

    async def __aenter__(self) -> App:
        address = self.control_address = await self.control.start("127.0.0.1")
        for worker in self.workers:
            worker.address = await worker.host.start("127.0.0.1")
            await worker.control.connect(address)
        for frontend in self.frontends:
            await frontend.start()
            await frontend.control.connect(address)
        self.publish()
        await until(self.is_ready, LONG_S)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self.is_idle()
                assert [worker.counters.content_errors for worker in self.workers] == [0] * len(
                    self.workers
                )
        finally:
            for frontend in self.frontends:
                await frontend.stop()
            for worker in self.workers + self.dead:
                await worker.control.stop()
                await worker.host.stop()
            await self.control.stop()
            for frontend in self.frontends:
                frontend.api._intake.close()

    def publish(self) -> None:
        """What Serve says of both pools."""
        for role in ("prefill", "decode"):
            members = {w.me.ident: w.meta for w in self.workers if w.role == role}
            for frontend in self.frontends:
                frontend.update_pool("tiny", "main", role, members)

    def is_ready(self) -> bool:
        wanted = {role: len(self.pool(role)) for role in ("prefill", "decode")}
        parties = len(self.workers) + len(self.frontends)
        return (
            all(frontend.variants["tiny", "main"].pools() == wanted for frontend in self.frontends)
            and len(self.control.members) == parties
            and all(
                len(decode.host.peers._peers) == len(self.pool("prefill")) for decode in self.pool("decode")
            )
        )

    def pool(self, role: str) -> list[SimWorker]:
        return [worker for worker in self.workers if worker.role == role]

    def coordinator(self, frontend: int = 0) -> Coordinator:
        return self.frontends[frontend].variants["tiny", "main"].coordinator

    async def kill(self, worker: SimWorker, frozen: bool = False) -> None:
        """It stays in Serve's lists for a while, as it would."""
        self.workers.remove(worker)
        self.dead.append(worker)
        await worker.kill(frozen)

    async def is_idle(self) -> None:
        """Within a while: nothing in flight, nothing booked, no block held."""
        for frontend in range(len(self.frontends)):
            coordinator = self.coordinator(frontend)
            await until(lambda c=coordinator: c.in_flight == 0, LONG_S)
            assert coordinator.attempts_in_flight == 0
            assert coordinator._router.in_flight == 0
        for worker in self.workers:
            await until(lambda w=worker: w.is_free, LONG_S)

    # ------------------------------------------------------------ asking

    def client(self, frontend: int = 0) -> Client:
        client = Client(self.frontends[frontend].api)
        client.patience_s = LONG_S
        return client

    async def complete(self, prompt: Any, frontend: int = 0, **fields: Any) -> Answer:
        """A completion, greedy and not streamed unless `fields` say otherwise."""
        asked = {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
        if asked.get("stream"):
            asked["stream_options"] = {"include_usage": True}
        return Answer(await self.client(frontend).complete(**asked), bool(asked.get("stream")))

    async def run_reaches(self, n_tokens: int, frontend: int = 0) -> Run:
        """A request that has sent so many tokens."""
        found: list[Run] = []

        def reached() -> bool:
            found[:] = [r for r in self.coordinator(frontend)._live if len(r.sent) >= n_tokens]
            return bool(found)

        await until(reached, LONG_S)
        return found[0]

    def working_on(self, run: Run, mode: Mode) -> SimWorker:
        (ident,) = [a.worker for a in run.attempts.values() if a.mode is mode]
        return next(worker for worker in self.workers if worker.me.ident == ident)


class Answer:
    """What a client got, streamed or not."""

    def __init__(self, reply: Reply, stream: bool) -> None:
        self.reply = reply
        assert reply.status == 200, reply.body
        assert reply.complete
        if stream:
            self.text = reply.text()
            (self.reason,) = reply.reasons()
            self.usage = reply.chunks[-1]["usage"]
        else:
            (choice,) = reply.json["choices"]
            self.text = choice["text"]
            self.reason = choice["finish_reason"]
            self.usage = reply.json["usage"]
        assert 0 <= self.cached <= self.usage["prompt_tokens"]  # cached_within_prompt
        assert self.usage["total_tokens"] == self.usage["prompt_tokens"] + self.n_tokens

    @property
    def n_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def said(self) -> tuple[str, str, int]:
        return self.text, self.reason, self.n_tokens


def prompt(n_tokens: int, salt: int = 0) -> list[int]:
    """Token ids; equal `salt` means equal beginnings."""
    return [PLAIN[crc32(f"{salt}.{i}".encode()) % len(PLAIN)] for i in range(n_tokens)]
