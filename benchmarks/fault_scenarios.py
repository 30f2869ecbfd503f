"""The faults: what breaks, when, and what is put right afterwards.

`act` runs while streams are live and returns when the fault is over. Until then every slot starts a new
stream as its last one ends, so that long faults meet fresh requests too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import psutil

from benchmarks.fault_app import App, Replica, by_worker, total
from benchmarks.fault_client import Ask
from benchmarks.fault_load import Load, random_prompt
from serving.local_cluster import LocalCluster

LONG_PROMPTS = 4
HANGUPS = 32
SEEN_S = 60.0  # a state that a fault waits for comes sooner, or the run makes no sense
SETTLED_S = 2.0  # after a thaw or a heal: what comes late would have come by then
DRAINED_S = 300.0


@dataclass(slots=True)
class Scene:
    """One fault under way."""

    app: App
    load: Load
    struck_s: float | None = None  # when it broke
    frozen: list[Replica] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # more to report

    def strike(self, victim: Replica, number: Signals = SIGKILL) -> None:
        if number is SIGSTOP:
            self.frozen.append(victim)
        self.struck_s = time.monotonic()
        victim.signal(number)

    def thaw(self) -> None:
        for victim in self.frozen:
            victim.signal(SIGCONT)
        self.frozen.clear()

    async def worker(self, role: str, ident: str) -> Replica:
        workers = await asyncio.to_thread(self.app.workers, role)
        return next(worker for worker in workers if worker.ident == ident)

    async def long_prompts(self) -> None:
        """Start some that will be computing, then on their way, for a while."""
        numbers, length = random.Random(self.load.name), self.app.setup.long_prompt_tokens
        if self.app.setup.engine is None:
            prompts = [random_prompt(numbers, length) for _ in range(LONG_PROMPTS)]
        else:  # what a model goes on with should not hang on a rounding error
            prompts = [(ask.prompt * length)[:length] for ask in self.load.asks[:LONG_PROMPTS]]
        named = self.app.setup.engine is not None
        asks = [Ask(prompt, 60, named_tokens=named) for prompt in prompts]
        await self.load.late(asks)

    async def seen(self, what: str, look: Callable[[], str | None]) -> str:
        """The first worker that `look` finds."""
        until_s = time.monotonic() + SEEN_S
        while time.monotonic() < until_s:
            found = await asyncio.to_thread(look)
            if found is not None:
                return found
        raise TimeoutError(f"never seen within {SEEN_S:.0f} s: {what}")


Act = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`gap`: which target its longest gap has: kill, freeze, migration, or none; `late`: which one the wait
    of the streams that it starts itself. `demands`: counts of its row without which nothing happened."""

    name: str
    says: str
    act: Act
    gap: str = ""
    late: str = ""
    demands: tuple[str, ...] = ()
    where: str = "local"  # local | slow (reads take a second) | nodes (hosts of their own)
    tokens: int = 250
    prepare: Callable[[App], None] | None = None
    restore: Callable[[App], None] | None = None
    reconnect: bool = False  # the client asks again when its stream is cut


# ---------------------------------------------------------------- processes die


async def sigkill_decode(scene: Scene) -> None:
    ident = scene.load.busiest()
    victim = await scene.worker("decode", ident)
    scene.notes["struck_streams"] = sum(live.decode_worker == ident for live in scene.load.live)
    scene.strike(victim)


def _computing(app: App) -> str | None:
    """The prefill worker with most sequences in its batch."""
    running = by_worker(app.samples(), "kvrelay_queue", state="running", pool="prefill")
    return _largest(running)


def _being_read(app: App) -> str | None:
    """The prefill worker whose KV is being read now."""
    samples = app.samples()
    if not total(samples, "kvrelay_reads_in_flight", pool="decode"):
        return None
    return _largest(by_worker(samples, "kvrelay_leases", pool="prefill"))


def _largest(values: dict[str, float]) -> str | None:
    worker = max(values, key=lambda name: values[name], default=None)
    return worker if worker is not None and values[worker] > 0 else None


async def at_prefill(scene: Scene, look: Callable[[App], str | None], number: Signals) -> None:
    """Strike the prefill worker that `look` finds, once long prompts are there."""
    workers = {worker.ident: worker for worker in await asyncio.to_thread(scene.app.workers, "prefill")}
    await scene.long_prompts()
    victim = workers[await scene.seen(look.__name__, partial(look, scene.app))]
    scene.strike(victim, number)


async def sigkill_prefill_computing(scene: Scene) -> None:
    await at_prefill(scene, _computing, SIGKILL)


async def sigkill_prefill_transferring(scene: Scene) -> None:
    await at_prefill(scene, _being_read, SIGKILL)


async def sigkill_frontend(scene: Scene) -> None:
    frontends = await asyncio.to_thread(scene.app.replicas, "Frontend")
    scene.strike(frontends[0])


async def sigkill_controller(scene: Scene) -> None:
    """Serve's own: Ray starts it anew, and it finds its replicas again, every one."""
    before = {replica.ident for replica in await asyncio.to_thread(scene.app.replicas)}
    scene.strike(_controller(scene.app))
    await _controller_is_back(scene)
    await asyncio.sleep(SETTLED_S)
    await asyncio.to_thread(scene.app.wait_until, "all replicas run", scene.app.at_strength)
    after = {replica.ident for replica in await asyncio.to_thread(scene.app.replicas)}
    scene.notes["replaced_replicas"] = len(before - after)


async def sigkill_controller_draining(scene: Scene) -> None:
    """Its successor finds a worker that drains, or has ended, and must not count on it."""
    app, pool = scene.app, scene.app.pool("decode")
    leaving, controller = partial(app.replicas, pool, "STOPPING"), _controller(app)
    await asyncio.to_thread(app.scale, pool, app.setup.decode - 1)
    await asyncio.to_thread(app.wait_until, "a decode worker drains", lambda: bool(leaving()))
    pids = [worker.pid for worker in await asyncio.to_thread(leaving)]
    scene.strike(controller)
    scene.notes["orphans"] = sum(psutil.pid_exists(pid) for pid in pids)
    await _controller_is_back(scene)
    took_s = await asyncio.to_thread(app.wait_until, "only workers that serve run", app.at_strength)
    scene.notes["mended_s"] = round(took_s, 1)


def _controller(app: App) -> Replica:
    """Serve's own, which is no replica."""
    assert isinstance(app.cluster, LocalCluster)
    process = next(p for p in app.cluster.processes() if "ServeController" in _title(p))
    return Replica("", "", process.pid, "")


async def _controller_is_back(scene: Scene) -> None:
    took_s = await asyncio.to_thread(
        scene.app.wait_until, "Serve's controller is back", lambda: bool(scene.app.replicas())
    )
    scene.notes["controller_back_s"] = round(took_s, 1)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# ---------------------------------------------------------------- processes freeze


def freeze_s(app: App) -> float:
    """Beyond every deadline that others have for a worker: its silence, and the leases it holds or has."""
    deadlines = app.setup.deadlines
    return max(deadlines.silence_ms, 2 * deadlines.transfer_ms) / 1e3 + 2


async def _thaw_later(scene: Scene) -> None:
    await asyncio.sleep(freeze_s(scene.app))
    scene.thaw()
    await asyncio.sleep(SETTLED_S)


async def sigstop_decode(scene: Scene) -> None:
    scene.strike(await scene.worker("decode", scene.load.busiest()), SIGSTOP)
    await _thaw_later(scene)


async def sigstop_prefill(scene: Scene) -> None:
    await at_prefill(scene, _computing, SIGSTOP)
    await _thaw_later(scene)


# ---------------------------------------------------------------- somebody asks for less, or for other


MOVED = ("migrations_moved",)
LEFT_OF_A_STREAM = 0.5  # with so much still to come it is there when its worker drains


async def scale_down(scene: Scene) -> None:
    """`leaving_streams`: those of the workers that have gone, which all have to be moved."""
    pool = scene.app.pool("decode")
    before = {worker.ident for worker in await asyncio.to_thread(scene.app.workers, "decode")}
    placed = [
        live.decode_worker
        for live in scene.load.live
        if live.n_events <= (1 - LEFT_OF_A_STREAM) * live.ask.n_shown
    ]
    scene.struck_s = time.monotonic()
    await asyncio.to_thread(scene.app.scale, pool, 1)
    took_s = await asyncio.to_thread(
        scene.app.wait_until, "one decode worker is left", lambda: scene.app.count(pool) == 1, DRAINED_S
    )
    gone = before - {worker.ident for worker in await asyncio.to_thread(scene.app.workers, "decode")}
    scene.notes["drain_s"] = round(took_s, 1)
    scene.notes["leaving_streams"] = sum(worker in gone for worker in placed)


def scale_back(app: App) -> None:
    app.scale(app.pool("decode"), app.setup.decode)


async def rolling_update(scene: Scene, **args: Any) -> None:
    """`serve deploy` with other args: every replica is replaced, no pool shrinks meanwhile."""
    app = scene.app
    old = {replica.ident for replica in await asyncio.to_thread(app.replicas)}
    scene.struck_s = time.monotonic()
    deploying = asyncio.create_task(asyncio.to_thread(app.redeploy, app.setup.changed(**args)))
    lowest = scene.notes["target_before"] = app.wanted[app.pool("decode")]
    until_s = scene.struck_s + DRAINED_S

    def replaced() -> bool:
        running = {replica.ident for replica in app.replicas()}
        # None are named while Serve builds; at strength there are as many as before.
        return len(running) == len(old) and not old & running and app.at_strength()

    while not (deploying.done() and await asyncio.to_thread(_holds, replaced)):
        lowest = min(lowest, await asyncio.to_thread(_target, app, lowest))
        if time.monotonic() > until_s:
            raise TimeoutError("the rolling update does not end")
        await asyncio.sleep(0.1)
    await deploying
    scene.notes |= {"rollout_s": round(time.monotonic() - scene.struck_s, 1), "lowest_target": lowest}


async def rolling_update_layout(scene: Scene) -> None:
    """To half the block size: old and new workers cannot read each other's KV."""
    setup = scene.app.setup
    engine = dict(setup.variant["engine"])
    engine["block_tokens"] //= 2
    await rolling_update(scene, models=[setup.served({**setup.variant, "engine": engine})])


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except (OSError, KeyError, ValueError):
        return False


def _target(app: App, unknown: int) -> int:
    """Of the decode pool; `unknown` while Serve does not say."""
    try:
        return app.targets().get(app.pool("decode"), unknown)  # none are named while Serve builds
    except (OSError, KeyError, ValueError):
        return unknown


def to_four(app: App) -> None:
    app.scale(app.pool("decode"), 4)
    app.wait_until("four decode workers", app.at_strength)


def older_wire(app: App) -> None:
    app.redeploy(app.setup.changed(link={"wire_version": 1}))
    app.wait_until("the older wire version everywhere", app.at_strength, DRAINED_S)


# ---------------------------------------------------------------- clients


async def hang_up(scene: Scene) -> None:
    """More clients come, and leave in mid-stream without a word."""
    numbers = random.Random(7)
    asks = [Ask(random_prompt(numbers, 64), 400) for _ in range(HANGUPS)]
    leaving = await scene.load.extra(asks)
    async with asyncio.timeout(SEEN_S):
        while not all(exchange.n_events > 10 for exchange in leaving):
            await asyncio.sleep(0.02)
    before = await asyncio.to_thread(scene.app.total, "kvrelay_requests_total", outcome="cancelled")
    scene.struck_s = time.monotonic()
    for exchange in leaving:
        exchange.hang_up()

    def cancelled() -> bool:
        now = scene.app.total("kvrelay_requests_total", outcome="cancelled")
        return now - before >= HANGUPS

    took_s = await asyncio.to_thread(scene.app.wait_until, "all hang-ups are noticed", cancelled, SEEN_S)
    scene.notes["cancelled_in_s"] = round(took_s, 2)


async def nothing(scene: Scene) -> None:
    """How the same streams fare undisturbed."""
    scene.struck_s = time.monotonic()
    await asyncio.sleep(1)


UNDISTURBED = Fault("undisturbed", "nothing breaks", nothing)

FAULTS = [
    Fault("sigkill_decode", "a decode worker is killed", sigkill_decode, "kill"),
    Fault(
        "sigkill_prefill_computing",
        "a prefill worker is killed while it computes long prompts",
        sigkill_prefill_computing,
        "kill",
        late="kill",
    ),
    Fault(
        "sigkill_prefill_transferring",
        "a prefill worker is killed while its KV is being read",
        sigkill_prefill_transferring,
        "kill",
        late="kill",
        demands=("handoff_failures",),
        where="slow",
    ),
    Fault(
        "sigstop_decode", "a decode worker freezes, and thaws past every deadline", sigstop_decode, "freeze"
    ),
    Fault(
        "sigstop_prefill",
        "a prefill worker freezes, and thaws past every deadline",
        sigstop_prefill,
        "freeze",
        late="freeze",
    ),
    Fault(
        "sigkill_frontend",
        "a frontend is killed; clients ask again",
        sigkill_frontend,
        reconnect=True,
    ),
    Fault(
        "scale_down_3_to_1",
        "two of three decode workers have to go",
        scale_down,
        "migration",
        demands=MOVED,
        restore=scale_back,
    ),
    Fault(
        "rolling_update",
        "`serve deploy` with changed args while four decode workers run",
        partial(rolling_update, revision="2"),
        "migration",
        demands=MOVED,
        prepare=to_four,
        restore=scale_back,
    ),
    Fault(
        "rolling_update_wire",
        "`serve deploy` from the older wire version to the newer",
        partial(rolling_update, link={"wire_version": 2}),
        "migration",  # none: streams of the older version end where they are
        prepare=older_wire,
    ),
    Fault(
        "rolling_update_layout",
        "`serve deploy` with another block size: old and new workers cannot read each other's KV",
        rolling_update_layout,
        "migration",
        prepare=to_four,  # so that one pool is ahead of the other
        restore=scale_back,
    ),
    Fault("hangup_32", "32 clients hang up in mid-stream", hang_up),
    Fault("sigkill_controller", "Serve's controller is killed", sigkill_controller),
    Fault(
        "sigkill_controller_draining",
        "Serve's controller is killed while a decode worker drains",
        sigkill_controller_draining,
        demands=("orphans",),
        restore=scale_back,
    ),
]
