"""A frontend without Ray: the HTTP door, a router and a coordinator per variant, links to every worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from kvrouter.deadline import Order
from kvrouter.perf_model import WorkerModels
from kvrouter.policy_router import PolicyRouter, build_router
from planner.timing_profile import Profile
from serving.api import Api
from serving.api_keys import ApiKeys
from serving.bodies import BodyLimits
from serving.config import AppConfig
from serving.control_client import ControlClient
from serving.coordinator import Coordinator
from serving.door import NO_ROOM, Door
from serving.errors import KVRelayError, ModelNotFound, NoWorker, Stopping
from serving.frontend_metrics import FrontendMetrics
from serving.gate import Gate
from serving.generation import GenerationRequest, Sink, Ticket
from serving.link import Identity
from serving.live_settings import LiveSettings, slo_of
from serving.log_limit import LogLimit
from serving.metrics import Registry, render
from serving.provenance import merged
from serving.registry import Members
from serving.run import WorkerEntry
from serving.served_model import ServedModel
from serving.variant_choice import Offer, choose_variant, session_point
from serving.variant_links import VariantLinks
from serving.wire import FrontendReport, Register
from serving.wire import Members as Parties

log = logging.getLogger("kvrelay.frontend")

SWEEP_S = 0.25
DRAIN_POLL_S = 0.02
LAST_WORDS_S = 1.0  # for the errors of what is cut short to reach clients that read
GOLDEN = 0.6180339887498949


class VariantGenerator:
    """Sends each request to a variant of its model; implements `serving.generation.Generator`."""

    def __init__(
        self,
        config: AppConfig,
        variants: dict[tuple[str, str], VariantLinks],
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._variants = variants
        self._planner = config.planner
        self._clock = clock
        self._zero_since: dict[tuple[str, str], float] = {}  # requests have met no worker
        self.planner_acts = config.planner.mode == "act"
        self._prompts = {(m.name, v.name): v.prompt_tokens for m in config.models for v in m.variants}
        self._point = random.Random(seed).random()
        self.weights: dict[str, dict[str, float]] = {}  # live traffic weights, by model
        self.stopping = False

    def start(self, request: GenerationRequest, sink: Sink) -> Ticket:
        if self.stopping:
            raise Stopping("this frontend is stopping; try again")
        variants = [variant for model, variant in self._variants if model == request.model]
        if not variants:
            raise ModelNotFound(f"the model {request.model!r} is not served here", param="model")
        variant = self._pick(request, variants)
        key = request.model, variant
        try:
            ticket = self._variants[key].coordinator.start(request, sink)
        except NoWorker as error:
            raise NoWorker(error.message, retry_after_s=self._ready_in_s(key)) from None
        except KVRelayError:
            self._zero_since.pop(key, None)
            raise
        self._zero_since.pop(key, None)
        ticket.info.variant = variant
        return ticket

    def _ready_in_s(self, key: tuple[str, str]) -> int:
        """A pool at zero gets a worker because of the first request that met none."""
        planner = self._planner
        if planner.idle_to_zero_s is None or not self.planner_acts or self._variants[key].has_decoders:
            return 1
        now = self._clock()
        since = self._zero_since.setdefault(key, now)
        return max(ceil(since + planner.interval_s + planner.startup_s - now), 1)

    def _pick(self, request: GenerationRequest, variants: list[str]) -> str:
        model = request.model
        offers = [Offer(v, self._prompts[model, v], self._variants[model, v].can_answer) for v in variants]
        if request.session is not None:
            point = session_point(model, request.session)
        else:  # steps of the golden ratio: any few in a row are spread as evenly as can be
            point = self._point = (self._point + GOLDEN) % 1.0
        return choose_variant(offers, self.weights.get(model, {}), len(request.prompt), point)


class FrontendHost:
    """`start` and `stop` are a pair. `profiles`: by (model, variant), what times the router starts from."""

    def __init__(
        self,
        *,
        config: AppConfig,
        me: Identity,
        key: bytes,
        served: dict[str, ServedModel],
        admin_key: bytes | None = None,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        id_is_echoed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = Registry({"frontend": me.ident})
        self._refused = self.registry.counter(
            "admission_rejects", "Requests refused, by reason", ("reason",)
        )
        self._random = random.Random(me.epoch)
        self.variants: dict[tuple[str, str], VariantLinks] = {}
        self._wanted: dict[tuple[str, str], set[str]] = {}  # pools that the config does not leave empty
        self._config = config
        self._routers: list[PolicyRouter] = []
        self._gates: dict[tuple[str, str], Gate] = {}
        for model in config.models:
            for variant in model.variants:
                pools = {"prefill": variant.prefill, "decode": variant.decode}
                self._wanted[model.name, variant.name] = {r for r, p in pools.items() if p.replicas > 0}
                profile = profiles.get((model.name, variant.name)) if profiles is not None else None
                router = build_router(
                    config.router.policy,
                    models=WorkerModels if profile is None else profile.models,
                    regret_weight=config.router.regret_weight,
                    seed=me.epoch,
                    order=Order.DEADLINE,
                    pull=config.router.pull,
                    local=config.router.local_prefill,
                    frontends=config.frontend.replicas,
                )
                labels = {"model": model.name, "variant": variant.name}
                metrics = FrontendMetrics(self.registry.part(labels))
                metrics.watch(router.caches)
                entries: dict[str, WorkerEntry] = {}
                self._routers.append(router)
                gate = self._gates[model.name, variant.name] = Gate(
                    model.slo,
                    config.admission,
                    config.deadlines,
                    load_of=router.load_of,
                    loads=router.loads,
                    metrics=metrics,
                )
                coordinator = Coordinator(
                    model=model.name,
                    router=router,
                    workers=entries,
                    deadlines=config.deadlines,
                    max_inflight=config.frontend.max_inflight,
                    metrics=metrics,
                    clock=clock,
                    capabilities=served[model.name].capabilities,
                    gate=gate,
                )
                self.variants[model.name, variant.name] = VariantLinks(
                    name=f"{model.name}/{variant.name}",
                    me=me,
                    key=key,
                    router=router,
                    coordinator=coordinator,
                    entries=entries,
                    pull=config.router.pull,
                    silence_s=config.deadlines.silence_ms / 1e3,
                    clock=clock,
                )
        self.registry.gauge(
            "in_flight", "Requests in flight", lambda: {(): sum(c.in_flight for c in self._coordinators())}
        )
        self.control = ControlClient(
            me=me,
            key=key,
            registry=self.registry,
            register=Register(me.kind, me.ident, {}),
            on_settings=self._on_settings,
            on_members=self._on_members,
            report=self._report,
        )
        self._generator = VariantGenerator(config, self.variants, me.epoch, clock)
        self.api = Api(
            served,
            self._generator,
            health=self.health,
            metrics=self.scrape,
            door=self._door(config, admin_key),
            debug={"/debug/router": self.recent_choices},
            admin=self.control.ask,
            id_is_echoed=id_is_echoed,
            variants=self.provenances,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._sweep_failures = LogLimit()

    def _door(self, config: AppConfig, admin_key: bytes | None) -> Door:
        keys = config.security.api_keys_file
        return Door(
            keys=None if keys is None else ApiKeys(keys),
            admin_key=admin_key,
            max_inflight=config.frontend.max_inflight,
            max_inflight_per_key=config.frontend.max_inflight_per_key,
            bodies=BodyLimits(
                body_bytes=config.frontend.body_limit_bytes,
                body_s=config.deadlines.body_ms / 1e3,
                most_slow=config.frontend.max_slow_bodies,
                most_slow_per_key=config.frontend.max_slow_bodies_per_key,
                held_bytes=config.frontend.unread_bytes,
                held_bytes_per_key=config.frontend.unread_bytes_per_key,
            ),
            on_refused=self._on_refused,
        )

    def _on_refused(self, reason: str) -> None:
        """By the door. What it had no room for is demand, most likely for what fills the room."""
        self._refused.inc(labels=(reason,))
        if reason == NO_ROOM:
            coordinators = self._coordinators()
            weights = [coordinator.in_flight for coordinator in coordinators]
            if any(weights):
                self._random.choices(coordinators, weights)[0].turned_away()

    async def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    @property
    def in_flight(self) -> int:
        """HTTP requests that are not answered to their end."""
        return self.api.in_flight

    def refuse_new(self) -> None:
        """From now on, with a 503; /health says so too."""
        self._generator.stopping = True

    async def drain(self, limit_s: float) -> None:
        """Take nothing new and let what runs end, for `limit_s` at the most."""
        self.refuse_new()
        await self._until_answered(limit_s)

    async def end_answers(self) -> None:
        """Every answer that is left ends with an error; returns when that is with the sockets."""
        for coordinator in self._coordinators():
            coordinator.stop()
        await self._until_answered(LAST_WORDS_S)

    async def _until_answered(self, limit_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + limit_s
        while self.in_flight or any(c.in_flight for c in self._coordinators()):
            if asyncio.get_running_loop().time() > until_s:
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        await self.end_answers()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for links in self.variants.values():
            await links.stop()
        await self.control.stop()

    def update_pool(self, model: str, variant: str, role: str, members: Members) -> None:
        self.variants[model, variant].update(role, members)

    def _on_settings(self, settings: LiveSettings) -> None:
        self._generator.weights = settings.weights
        logging.getLogger("kvrelay").setLevel(settings.log_level)
        planner = settings.planner
        self._generator.planner_acts = (planner.mode or self._config.planner.mode) == "act"
        slos = {
            model.name: slo_of(model.slo, planner.targets.get(model.name)) for model in self._config.models
        }
        for (model, _), gate in self._gates.items():
            gate.retarget(slos[model])

    def _on_members(self, parties: Parties) -> None:
        """How many frontends place on the same workers."""
        count = sum(party.kind == "frontend" for party in parties.parties)
        for router in self._routers:
            router.set_frontends(count)

    def _report(self) -> list[FrontendReport]:
        """What the planner wants to know."""
        return [links.demand(model, variant) for (model, variant), links in self.variants.items()]

    # ------------------------------------------------------------ health and metrics

    def health(self) -> tuple[int, dict[str, Any]]:
        """200 while any model can be answered: a decode worker can do it alone.

        A pool is degraded when it should have workers and none of them is linked. `ill`: what workers say
        is wrong with them.
        """
        if self._generator.stopping:
            return 503, {"status": "stopping", "degraded": [], "ill": {}}
        degraded: list[str] = []
        ill: dict[str, str] = {}
        able = 0
        for key, links in self.variants.items():
            pools = links.pools()
            able += links.can_answer
            ill |= {f"{links.name}/{ident}": what for ident, what in links.ills().items()}
            wanted = self._wanted[key]
            degraded += [f"{links.name}/{role}" for role, n in pools.items() if n == 0 and role in wanted]
        status = "ok" if able and not degraded and not ill else "degraded" if able else "unavailable"
        return (200 if able else 503), {"status": status, "degraded": degraded, "ill": ill}

    def provenances(self, model: str) -> list[dict[str, Any]]:
        """What the linked workers of `model` serve, for /v1/models."""
        return merged(
            (variant, pool, provenance)
            for (name, variant), links in self.variants.items()
            if name == model
            for pool, provenance in links.provenances()
        )

    def recent_choices(self) -> dict[str, Any]:
        """The router's last choices by variant, newest last, with each worker's terms."""
        return {links.name: list(links.coordinator.recent) for links in self.variants.values()}

    async def scrape(self) -> bytes:
        return render(await self.control.scrape())

    def _coordinators(self) -> list[Coordinator]:
        return [links.coordinator for links in self.variants.values()]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for links in self.variants.values():
                for sweep in (links.coordinator.sweep, links.sweep):  # neither costs the other its turn
                    try:
                        sweep()
                    except Exception:
                        held = self._sweep_failures.pass_on()
                        if held is not None:
                            log.exception("a sweep of %s failed%s", links.name, held)
