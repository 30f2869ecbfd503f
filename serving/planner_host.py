"""The planner at work: collects what frontends and workers report, decides every few seconds, acts.

Lives beside Control, without Ray: replica counts go through a Connector, loans through Control's orders.
Every tick sets what the last decision wants once more, so a redeploy that put other counts back, or a call
that failed, is mended by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.decide import decide
from planner.observation import (
    Decision,
    FittedTimes,
    Observation,
    PoolSeen,
    VariantDecision,
    VariantSeen,
    to_json,
)
from planner.scaling import Connector, PoolWorker, ReplicaCounts, flips, pool_seen, set_aside
from planner.settings import Settings
from planner.state import State
from serving.change_times import ChangeTimes, Key
from serving.config import AppConfig
from serving.control_host import ControlHost
from serving.demand_book import DemandBook
from serving.deployment_name import FRONTEND, deployment_name
from serving.errors import ConfigError, InvalidRequest, Unavailable
from serving.live_settings import LivePlanner
from serving.planner_metrics import PlannerMetrics
from serving.planner_settings import (
    budget_of,
    budget_unit,
    merged_targets,
    planner_settings,
    unreachable,
    variant_settings,
)

log = logging.getLogger("kvrelay.planner")

HISTORY = 720  # ticks that GET /planner shows
LONGEST_BACK_OFF_S = 60.0


def steady_time() -> Callable[[], float]:
    """A clock that shows the time of day as it is now and never jumps: the forecast must know of days, and
    no window may end or last longer because somebody set the clock."""
    ahead_s = time.time() - time.monotonic()
    return lambda: ahead_s + time.monotonic()


class PlannerHost:
    """`start` and `stop` are a pair. `times`: profiles, by variant; `clock`: seconds since 1970."""

    def __init__(
        self,
        *,
        control: ControlHost,
        config: AppConfig,
        connector: Connector,
        times: Mapping[Key, FittedTimes] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._control = control
        self._config = config
        self._connector = connector
        self._clock = clock or steady_time()
        self._times = dict(times or {})
        self._variants = [(m.name, v.name) for m in config.models for v in m.variants]
        self.key_of = {"/".join(key): key for key in self._variants}
        self.book = DemandBook(self._variants, self._times, self._clock)
        self._state = State()
        self._decision: Decision | None = None
        self._observation: Observation | None = None
        self._counts: Mapping[str, ReplicaCounts] = {}
        self._trouble: str | None = None
        self._back_off_s = 0.0
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._took = ChangeTimes()
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._removals: dict[str, str] = {}  # worker -> its deployment, until both are done with
        self._one_removal = asyncio.Lock()
        self._metrics = PlannerMetrics(control.registry, self)
        control.on_demand = self.book.reported
        control.admin.add("planner", lambda arguments: self.told())
        control.admin.add("change_planner", self._change)
        control.admin.add("remove", self._remove)

    async def start(self) -> None:
        for model, variant in self._variants:
            if (model, variant) not in self._times and self.mode != "off":
                log.warning(
                    "%s/%s has no profile (python -m planner.profile makes one): "
                    "the planner holds until it has learnt from requests how long they take", model, variant
                )  # fmt: skip
        for name, found in unreachable(self._config, self.live, self._times).items():
            log.warning("%s: targets that no number of workers can meet: %s", name, "; ".join(found))
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ------------------------------------------------------------ settings

    @property
    def live(self) -> LivePlanner:
        return self._control.live.planner

    @property
    def mode(self) -> str:
        return self.live.mode or self._config.planner.mode

    def settings(self) -> Settings:
        """As configured, with the live changes. Raises ConfigError when they contradict each other."""
        return planner_settings(
            self._config, self.live, startups=self._took.startups_s, flips=self._took.flips_s
        )

    def _change(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Merge into the live settings; `targets` by model, and there `classes` by name. All or nothing.

        A redeploy may raise the minimum above a live budget. Only a new budget is checked: whatever stands
        in its way must not keep anybody from turning the planner off.
        """
        now = self._control.settings["planner"]
        targets = merged_targets(self._config, now["targets"], arguments.get("targets"))
        changed = {**now, **arguments, "targets": targets}
        check = self._check if "budget" in arguments else _anything
        self._control.change_settings({"planner": changed}, check=check)
        if self.mode == "off":
            self._end_loans()
        return self.told()

    def _remove(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take a drained worker away for good; answers at once, `workers` shows when it is gone."""
        ident = str(arguments.get("worker"))
        told = self._control.admin.told(ident)
        if not told["safe_to_remove"]:
            raise InvalidRequest(f"{ident} is not safe to remove: {told['unsafe_because']}")
        if ident in self._removals:
            return told | {"removing": True}
        deployment = deployment_name(told["model"], told["variant"], told["pool"])
        workers = self.workers((told["model"], told["variant"]))
        if not [w for w in workers if w.pool == told["pool"] and w.ident not in {ident, *self._removals}]:
            raise InvalidRequest(f"{ident} is the last of {deployment}; allowed: to remove others")
        self._removals[ident] = deployment
        self._tasks.add(task := asyncio.get_running_loop().create_task(self._removing(deployment, ident)))
        task.add_done_callback(self._tasks.discard)
        return told | {"removing": True}

    async def _removing(self, deployment: str, ident: str) -> None:
        try:
            async with self._one_removal:  # each tells by the counts when Serve has noticed
                await self._connector.remove(deployment, ident)
            log.info("removed", extra={"fields": {"worker": ident, "deployment": deployment}})
        except Unavailable as error:
            log.warning("%s was not removed: %s", ident, error.message)
        finally:
            del self._removals[ident]

    def _check(self, planner: LivePlanner) -> None:
        planner_settings(self._config, planner)

    # ------------------------------------------------------------ ticks

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.planner.interval_s + self._back_off_s)
            try:
                await self.tick()
            except Exception:
                self._metrics.failures.inc()
                log.exception("a tick failed")

    async def tick(self) -> None:
        """One look, one decision and, in mode act, what follows from it."""
        if self.mode == "off":
            self.book.skip(self._clock())
            self._end_loans()
            self._trouble, self._back_off_s = None, 0.0
            return
        try:
            counts = self._counts = await self._connector.counts()
            began_s = time.perf_counter()
            now = self._clock()
            observation = self._observation = self._observe(counts, now)
            decision, self._state = decide(observation, self._state, self.settings(), now)
            self._metrics.tick.observe(time.perf_counter() - began_s)
            self._note(observation, decision, now)
            if self.mode == "act":
                await self._act(observation, decision, counts)
        except (Unavailable, ConfigError) as error:
            self._hold(error.message)
        else:
            if self._trouble is not None:
                log.info("goes on")
            self._trouble, self._back_off_s = None, 0.0

    def _hold(self, why: str) -> None:
        """Leave everything as it is, and ask less often while it lasts."""
        self._metrics.failures.inc()
        if why != self._trouble:
            log.warning("holds: %s", why)
        self._trouble = why
        self._back_off_s = min(max(self._back_off_s * 2, 1.0), LONGEST_BACK_OFF_S)

    def _observe(self, counts: Mapping[str, ReplicaCounts], now: float) -> Observation:
        variants: dict[str, VariantSeen] = {}
        self._took.tick(now, self._config.planner.interval_s)
        for key in self._variants:
            pools: dict[str, PoolSeen] = {}
            workers = self.workers(key)
            for pool in ("prefill", "decode"):
                there = counts.get(deployment_name(*key, pool))
                if there is not None:
                    pools[pool] = pool_seen(pool, there, workers)
                    self._took.see_pool(key, pool, pools[pool], now)
            self._took.see_workers(key, workers, now)
            engine = self._engine(key)
            kv_blocks = [
                w.report.total_blocks
                for w in self._control.workers.values()
                if w.report is not None and (w.labels.get("model"), w.labels.get("variant")) == key
            ]
            variants["/".join(key)] = self.book.observe(
                key,
                pools,
                now,
                kv_tokens=min(kv_blocks) * engine.block_tokens if kv_blocks else None,
                max_batch=engine.max_batch,
            )
        frontends = counts.get(FRONTEND)
        return Observation(
            variants, frontends.running if frontends is not None else None, self.book.in_flight()
        )

    def workers(self, key: Key) -> list[PoolWorker]:
        """The linked workers of a variant, and those that an operator drains and Serve still counts."""
        model, variant = key
        orders = self._control.orders
        listed = {replica for there in self._counts.values() for replica in there.replicas}
        return [
            PoolWorker(
                ident=ident,
                pool=worker.labels["pool"],
                role=worker.report.role,
                draining=worker.report.draining or ident in orders.draining,
                requests=worker.report.attempts,
                ordered=orders.roles.get(ident),
                set_aside=ident in orders.draining,
            )
            for ident, worker in self._control.known_workers.items()
            if worker.report is not None
            and (worker.linked or ident in orders.draining & listed)
            and (worker.labels.get("model"), worker.labels.get("variant")) == (model, variant)
        ]

    def _engine(self, key: Key) -> Any:
        models = {m.name: m for m in self._config.models}
        return next(v for v in models[key[0]].variants if v.name == key[1]).engine

    # ------------------------------------------------------------ acting

    async def _act(
        self, observation: Observation, decision: Decision, counts: Mapping[str, ReplicaCounts]
    ) -> None:
        """Down before up, so that the budget holds at every moment; loans beside."""
        changes: list[tuple[int, str, int, tuple[Key, str]]] = []
        for key in self._variants:
            wanted = decision.variants.get("/".join(key))
            if wanted is None:
                continue
            for order in flips(wanted, self.workers(key)):
                if order.role is None:
                    self._control.orders.call_back(order.worker)
                else:
                    self._control.orders.lend(order.worker, order.role)
                pool = next(w.pool for w in self.workers(key) if w.ident == order.worker)
                self._took.turns(key, order.worker, order.role or pool, self._clock())
                self._metrics.flips.inc()
                self._say("flip", key, worker=order.worker, role=order.role or "its own", why=wanted.reason)
            for pool, wished in (("prefill", wanted.prefill), ("decode", wanted.decode)):
                name = deployment_name(*key, pool)
                there = counts.get(name)
                if there is None or name in self._removals.values():
                    continue
                replicas = wished + set_aside(pool, there, self.workers(key))
                if there.target != replicas:
                    changes.append((replicas - there.target, name, replicas, (key, pool)))
        frontends = counts.get(FRONTEND)
        if frontends is not None and decision.frontends not in (None, frontends.target):
            assert decision.frontends is not None
            await self._connector.scale(FRONTEND, decision.frontends)
        for change, name, replicas, (key, pool) in sorted(changes):
            await self._connector.scale(name, replicas)
            self._metrics.scalings.inc(labels=("up" if change > 0 else "down",))
            if change > 0:
                seen = observation.variants["/".join(key)].pools[pool]
                self._took.grows(key, pool, seen, self._clock())
            reason = decision.variants["/".join(key)].reason
            self._say("scale", key, pool=pool, change=change, replicas=replicas, why=reason)

    def _end_loans(self) -> None:
        """Nobody looks any more whether they help: every worker plays its own pool's role again."""
        for worker in list(self._control.orders.roles):
            self._control.orders.call_back(worker)
            self._metrics.flips.inc()
            fields = {"worker": worker, "role": "its own", "why": "the planner is off"}
            log.info("flip", extra={"fields": fields})

    # ------------------------------------------------------------ telling

    def _note(self, observation: Observation, decision: Decision, now: float) -> None:
        line: dict[str, Any] = {"at_s": round(now, 3), "mode": self.mode, "variants": {}}
        before = self._decision.variants if self._decision is not None else {}
        for name, wanted in decision.variants.items():
            seen = observation.variants[name]
            line["variants"][name] = {
                "arrivals": seen.arrivals,
                "queued": seen.queued,
                "decoding": seen.decoding,
                "pools": to_json(seen.pools),
                **to_json(wanted),
            }
            self._metrics.decided(name, wanted)
            if not _same(before.get(name), wanted):
                self._say("decision", self.key_of[name], **line["variants"][name])
            reachable = wanted.reachable
            if reachable is not None and reachable != getattr(before.get(name), "reachable", None):
                log.warning("%s: targets that no number of workers can meet: %s", name, reachable)
        self._decision = decision
        self._history.append(line)

    def _say(self, what: str, key: Key, **fields: Any) -> None:
        """One JSON line, with its reason."""
        log.info(what, extra={"fields": {"model": key[0], "variant": key[1], **fields}})

    @property
    def decision(self) -> Decision | None:
        return self._decision

    @property
    def counts(self) -> Mapping[str, ReplicaCounts]:
        return self._counts

    @property
    def variants(self) -> list[Key]:
        return self._variants

    def _contradiction(self) -> str | None:
        """Why no tick can decide anything."""
        try:
            self.settings()
        except ConfigError as error:
            return error.message
        return None

    def told(self) -> dict[str, Any]:
        """What GET /planner shows, also while the settings contradict each other."""
        seen = self._observation
        shown = None
        if seen is not None:
            small = {
                name: replace(variant, recent=(), outputs=()) for name, variant in seen.variants.items()
            }
            shown = to_json(replace(seen, variants=small))
        variants = variant_settings(self._config, self.live)
        return {
            "mode": self.mode,
            "trouble": self._trouble or self._contradiction(),
            "budget": budget_of(self._config, self.live),
            "budget_unit": budget_unit(self._config),
            "targets": to_json({name: v.targets for name, v in variants.items()}),
            "classes": to_json({name: v.classes for name, v in variants.items()}),
            "unreachable": unreachable(self._config, self.live, self._times),
            # Seconds from an order to a ready worker, and to one that plays its other role, once seen.
            "startup_s": {"/".join(key): round(s, 2) for key, s in self._took.startups_s.items()},
            "flip_s": {"/".join(key): round(s, 2) for key, s in self._took.flips_s.items()},
            "observation": shown,
            "decision": to_json(self._decision),
            "reason": self._decision.reason if self._decision is not None else None,
            "history": list(self._history),
        }


def _anything(planner: LivePlanner) -> None:
    """No check."""


def _same(before: VariantDecision | None, wanted: VariantDecision) -> bool:
    return before is not None and (before.prefill, before.decode, before.lent) == (
        wanted.prefill,
        wanted.decode,
        wanted.lent,
    )
