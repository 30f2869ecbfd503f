"""A worker's look at itself: does its engine still answer, and does it get its blocks back?

    canary    When no step ended for a while, or attempts failed without one, a tiny generation is asked
              of the engine. FAILURES in a row, or an engine that died: the worker is *unfit*, takes no new
              requests and has itself replaced. One that could not begin because others hold the blocks,
              with nothing to compute, says nothing of the engine: no failure, and it is asked again.
    blocks    With nothing in flight every block can be had. One that cannot is a leak, which only makes
              the worker *ill*: it says so and goes on.

A step that ends is as good as a canary, so a busy worker sends none. The canary's prompt and answer
together are shorter than a block: nothing of them is ever cached, and no KV event tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from array import array
from dataclasses import dataclass
from typing import Literal, Protocol

from kvrouter.hashing import namespace_seed
from serving.config import HealthConfig
from serving.engine.base import (
    TOKEN_TYPECODE,
    AttemptId,
    Engine,
    EngineDied,
    Load,
    Mode,
    SamplingParams,
    StepOutput,
    Work,
)
from serving.metrics import Labels, Registry

log = logging.getLogger("kvrelay.worker")

FAILURES = 3  # in a row
UNFIT_DRAIN_S = 30.0  # so long an unfit worker's requests may take to go elsewhere
AGAIN_S = 1.0  # after a failure, and between canaries that failing attempts call for
LOOK_S = 1.0  # at the blocks
ILL_CHARS = 200  # of a text that goes out with every beat
LEAK_S = 10.0  # so long below the floor
PROMPT = (1, 2, 3)  # any tokens: what is answered does not matter
NEW_TOKENS = 2
_OWN_NAMES = 1 << 63  # frontends leave this bit of their attempts clear


DrainReason = Literal["ordered", "changes role", "unfit", "leaves"]  # each ends on its own


class Watched(Protocol):
    """The worker that looks at itself."""

    engine: Engine

    @property
    def busy(self) -> bool:
        """Attempts, reads or leases are under way."""

    def work_is_runnable(self) -> None:
        """Say so in the next beats, until the engine's next output."""

    def drain(self, why: DrainReason) -> None: ...

    def undrain(self, why: DrainReason) -> None: ...


@dataclass(slots=True)
class _Asked:
    """A canary under way."""

    attempt: AttemptId
    answer: asyncio.Future[str]  # "": all is well
    begun: bool = False
    load: Load | None = None  # as the engine told it last, since


class Canary:
    """`start` and `stop` are a pair, on one event loop; `on_step` hears all outputs of the engine there."""

    def __init__(self, worker: Watched, config: HealthConfig, registry: Registry) -> None:
        self._worker = worker
        self._engine = worker.engine
        self._config = config
        self._unfit_s = 0.0  # since when
        self._loop = asyncio.get_running_loop()
        self._worked_s = self._loop.time()  # when the last step ended
        self._doubt = asyncio.Event()
        self._asked: _Asked | None = None
        self._undecided = False  # the last one had no room
        self._failures = 0
        self._why = ""
        self._load: Load | None = None
        self._low_since_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._seconds = registry.histogram("canary_seconds", "Generations a worker asks of itself")
        self._failed = registry.counter("canary_failures", "Those of them that failed or were late")
        self._roomless = registry.counter("canary_no_room", "Those of them that others left no block for")
        registry.gauge("worker_ill", "1 for what is wrong with a worker now", self._ills, ("reason",))

    def start(self) -> None:
        self._worked_s = self._loop.time()
        self._tasks = [self._loop.create_task(self._watch_blocks())]
        if self._config.canary_s:
            self._tasks.append(self._loop.create_task(self._watch_engine()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @property
    def unfit(self) -> bool:
        return self._failures >= FAILURES or self._engine.died is not None

    @property
    def ill(self) -> str:
        """What is wrong, in a line; empty when nothing is."""
        if self._engine.died is not None:
            return f"the engine died: {self._engine.died!r}"[:ILL_CHARS]
        if self.unfit:
            return f"{self._failures} canaries in a row failed: {self._why[:ILL_CHARS]}"
        return self._leak

    def check(self) -> None:
        """Raises EngineDied when the worker should be replaced: an unfit one once its requests are
        elsewhere, or had time enough to be."""
        if self._engine.died is not None:
            raise EngineDied(self.ill)
        late = self._loop.time() - self._unfit_s > UNFIT_DRAIN_S
        if self.unfit and (late or not self._worker.busy):
            raise EngineDied(self.ill)

    def on_step(self, output: StepOutput) -> None:
        self._load = output.load
        if output.load.batch_tokens:
            self._worked_s = self._loop.time()
        elif output.failed:
            self._doubt.set()
        if self._asked is not None:
            self._follow(self._asked, output)

    def _follow(self, asked: _Asked, output: StepOutput) -> None:
        asked.load = output.load
        asked.begun = asked.begun or any(one.attempt == asked.attempt for one in output.started)
        whys = [one.message for one in output.failed if one.attempt == asked.attempt]
        whys += ["" for one in output.finished if one.attempt == asked.attempt]
        if whys and not asked.answer.done():
            asked.answer.set_result(whys[0])

    # ------------------------------------------------------------ the engine

    async def _watch_engine(self) -> None:
        while self._engine.died is None:
            await self._due()
            began_s = self._loop.time()
            why = await self._ask()
            self._undecided = why is None
            if self._worked_s > began_s:
                why = ""  # it was not the canary's turn, but something went on
            if why is None:
                self._roomless.inc()
                continue
            if not why:
                self._seconds.observe(self._loop.time() - began_s)
                self._well()
                continue
            self._failed.inc()
            self._why = why
            was_unfit = self._failures >= FAILURES
            self._failures += 1
            log.warning("canary failed, %d in a row: %s", self._failures, why)
            if self.unfit and not was_unfit:
                self._unfit_s = self._loop.time()
                self._worker.drain("unfit")

    async def _due(self) -> None:
        """Until there is reason to ask."""
        if self._failures or self._undecided:
            await asyncio.sleep(AGAIN_S)
        if self._failures:
            return
        while (left_s := self._worked_s + self._config.canary_s - self._loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._doubt.wait()
                await asyncio.sleep(AGAIN_S)
                self._doubt.clear()
                return

    async def _ask(self) -> str | None:
        """Why the canary failed; empty when it did not, None when that says nothing of the engine."""
        attempt = AttemptId(_OWN_NAMES | int.from_bytes(os.urandom(8), "little"))
        asked = self._asked = _Asked(attempt, self._loop.create_future())
        work = Work(
            attempt=attempt,
            mode=Mode.LOCAL,
            tokens=array(TOKEN_TYPECODE, PROMPT),
            n_prompt=len(PROMPT),
            params=SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, ignore_eos=True),
            namespace=namespace_seed("canary"),
        )
        timeout_s = self._config.canary_timeout_s
        try:
            self._worker.work_is_runnable()
            self._engine.submit(work)
            async with asyncio.timeout(timeout_s):
                return await asked.answer
        except TimeoutError:
            return None if self._had_no_room(asked) else f"no answer within {timeout_s:g} s"
        except (EngineDied, ValueError) as error:
            return str(error)
        finally:
            self._engine.cancel(attempt)
            self._asked = None

    def _had_no_room(self, asked: _Asked) -> bool:
        """The engine heard of it, could not begin it and has nothing else to compute: hand-offs that are
        on their way, or leases, have the blocks. An engine that hangs says nothing at all."""
        load = asked.load
        if load is None or asked.begun:
            return False
        if self._engine.capabilities.tells_begun:
            return not load.runnable
        return load.blocks.free == 0  # it counts as runnable whatever waits

    def _well(self) -> None:
        if self.unfit:
            log.warning("canaries are answered again")
            self._worker.undrain("unfit")
        self._failures = 0

    # ------------------------------------------------------------ the blocks

    async def _watch_blocks(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look_at_blocks()

    def look_at_blocks(self) -> None:
        """Idle or not, short of blocks or not, as of now. An idle pool is whole: all free or cached."""
        load = self._load
        if load is None or self._asked is not None or not self._engine.capabilities.block_states:
            return
        blocks = load.blocks
        floor = self._config.free_blocks_floor
        if floor is None:
            floor = blocks.total
        # Who leases, or may still be written to, is busy: else nobody knows of that lease any more.
        idle = not load.running and not load.waiting and not self._worker.busy
        if not idle or blocks.free + blocks.cached >= floor:
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = self._loop.time()

    @property
    def _leak(self) -> str:
        since_s, load = self._low_since_s, self._load
        if load is None or since_s is None or self._loop.time() - since_s < LEAK_S:
            return ""
        blocks = load.blocks
        return f"{blocks.free + blocks.cached} of {blocks.total} blocks can be had while nothing runs"

    def _ills(self) -> dict[Labels, float]:
        return {("canary",): float(self.unfit), ("blocks",): float(bool(self._leak))}
