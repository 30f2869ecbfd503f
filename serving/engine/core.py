"""The engine's thread: verbs in, scheduler and runner in turn, one output a step.

Callers only append to the inbox; everything else belongs to the thread, which takes no lock while it
steps and sleeps without a timeout when nothing can run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import numpy as np

from kvrouter.deadline import Order
from serving.config import EngineConfig
from serving.engine.base import (
    AttemptId,
    BlockStates,
    Capabilities,
    Counters,
    EngineDied,
    StepOutput,
    StoredRun,
    Work,
)
from serving.engine.pacing import DecodeGrid
from serving.engine.scheduler import Scheduler
from serving.engine.sequence import Drawn, Runner, Sequence, StepPlan
from serving.engine.step_rescue import rescue
from serving.kv.block_pool import BlockPool

log = logging.getLogger(__name__)

# Of a runner that says nothing else; serving.engine.factory tells frontends the same.
CAPABILITIES = Capabilities(migrate_kv=True)
STOP_S = 5.0  # for the running step to end; a runner that hangs ends with the process
LOST_STEPS = 3  # in a row that none of several requests survived: it is the engine, not what it was asked


class EngineCore:
    """`serving.engine.base.Engine` on top of a `Runner`.

    A step whose runner raises is run again in halves (serving.engine.step_rescue): a request that no step
    survives fails alone, the others go on (`step_failures` counts, `last_error` tells). Steps that nothing
    survives, a few in a row, and an error of the scheduler or of `on_step` end the thread: `died` is set,
    live attempts are told if that is still possible, and `submit` raises EngineDied.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        capabilities: Capabilities | None = None,
        counters: Counters | None = None,  # shared with the runner where that counts too
        decode_period_s: float | None = None,  # paced decode: see DecodeGrid
        order: Order = Order.DEADLINE,  # of prompts: see PrefillOrder
        vocab_size: int | None = None,  # of a runner that a token beyond it would break
    ) -> None:
        self.capabilities = capabilities or CAPABILITIES
        self.counters = counters or Counters()
        self.memory = runner.memory
        self.layout = runner.layout
        self.block_tokens: int = config.block_tokens
        self.context_tokens = runner.context_tokens
        self.died: BaseException | None = None
        self.step_failures = 0
        self.last_error: str | None = None
        self._lost_steps = 0  # in a row
        self._runner = runner
        self._pool = BlockPool(runner.memory.n_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_tokens=config.block_tokens,
            chunk_tokens=config.chunk_tokens,
            max_batch=config.max_batch,
            context_tokens=runner.context_tokens,
            eos_token_ids=runner.eos_token_ids,
            counters=self.counters,
            order=order,
        )
        self._vocab_size = vocab_size
        self._grid = None if decode_period_s is None else DecodeGrid(decode_period_s)
        self._load = self._scheduler.load()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._on_step: Callable[[StepOutput], None] = _ignore
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # ------------------------------------------------------------ verbs, from any thread

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """See Engine. Verbs may be called before; they wait. Raises RuntimeError the second time."""
        self._on_step = on_step
        self._thread.start()

    def submit(self, work: Work) -> None:
        """See Engine. Raises EngineDied; ValueError for a token that the model does not have."""
        if self.died is not None:
            raise EngineDied(f"the engine died: {self.died!r}")
        if self._vocab_size is not None and np.asarray(work.tokens).max() >= self._vocab_size:
            raise ValueError(f"a token id that is not below {self._vocab_size}")
        self._post(partial(self._scheduler.submit, work, time.monotonic()))

    def cancel(self, attempt: AttemptId, *, quarantine: bool = False) -> None:
        self._post(partial(self._scheduler.cancel, attempt, quarantine))

    def end_quarantine(self, attempt: AttemptId) -> None:
        self._post(partial(self._pool.end_quarantine, attempt))

    def kv_arrived(self, attempt: AttemptId, token: int, drawn: Items[int] = ()) -> None:
        self._post(partial(self._accept, attempt, token, drawn))

    def kv_begun(self, attempt: AttemptId) -> None:
        self._post(partial(self._scheduler.kv_begun, attempt))

    def prefix_arrived(self, attempt: AttemptId, n_blocks: int) -> None:
        self._post(partial(self._accept_prefix, attempt, n_blocks))

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> None:
        self._post(partial(self._tell, partial(self._scheduler.lend, attempt, namespace, tokens)))

    def share(self, attempt: AttemptId, serial: int, n_tokens: int, most_tokens: int) -> None:
        share = partial(self._scheduler.share, attempt, serial, n_tokens, most_tokens)
        self._post(partial(self._tell, share))

    def pause(self, attempt: AttemptId) -> None:
        self._post(partial(self._tell, partial(self._scheduler.pause, attempt)))

    def resume(self, attempt: AttemptId) -> None:
        self._post(partial(self._scheduler.resume, attempt))

    def release(self, attempt: AttemptId) -> None:
        self._post(partial(self._scheduler.release, attempt))

    def request_snapshot(self, callback: Callable[[list[StoredRun]], None]) -> None:
        """Call `callback` on the engine's thread with all cached content.

        It stands exactly between two outputs: events told before are in it, later ones are not.
        """
        self._post(partial(self._snapshot, callback))

    def block_states(self) -> BlockStates:
        """As of the last output."""
        return self._load.blocks

    def stop(self) -> None:
        """See Engine; idempotent. Live attempts get no further output."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                log.error("the engine hangs: its thread did not end within %g s and is left behind", STOP_S)

    def _post(self, verb: Callable[[], None]) -> None:
        with self._wake:
            if self.died is None:
                self._inbox.append(verb)
                self._wake.notify()

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine's thread ends")
            self.died = error
            self.last_error = repr(error)
            with contextlib.suppress(Exception):
                self._scheduler.fail_all(f"the engine died: {error!r}", retryable=True)
                self._emit(self._scheduler.collect())

    def _turn(self) -> None:
        """Take in what was asked, then run one step, or tell what changed, or sleep."""
        inbox = self._inbox
        asked = len(inbox)
        for _ in range(asked):
            inbox.popleft()()
        scheduler = self._scheduler
        now_s = time.monotonic()
        due_s = self._decodes_due_s(now_s)
        plan = scheduler.schedule(decode=due_s is None or due_s <= now_s)
        if plan.decodes or plan.prefills:
            self._step(plan)
        elif asked or scheduler.has_output or (self._load.runnable and not scheduler.runnable):
            self._emit(scheduler.collect())
        else:
            with self._wake:
                if not inbox and not self._stopping:
                    self._wake.wait(None if due_s is None else due_s - now_s)

    def _decodes_due_s(self, now_s: float) -> float | None:
        """When held-back decodes may run; None when nothing holds them back."""
        if self._grid is None:
            return None
        if not self._scheduler.has_decodes:
            self._grid.reset()
            return None
        return self._grid.due_s(now_s)

    def _step(self, plan: StepPlan) -> None:
        scheduler, counters = self._scheduler, self.counters
        began_s = time.monotonic()
        try:
            drawn = self._runner.run(plan)
        except Exception as error:
            log.exception("a step failed")
            self.step_failures += 1
            self.last_error = repr(error)
            plan, drawn = self._rescue(plan, error)
            if not plan.n_tokens:
                self._emit(scheduler.collect())
                return
        self._lost_steps = 0
        if plan.decodes and self._grid is not None:
            self._grid.advance()
        n_decodes = len(plan.decodes)
        n_tokens = plan.n_tokens
        scheduler.apply(plan, drawn)
        step_s = time.monotonic() - began_s
        scheduler.took(plan, step_s * 1e3)
        decode_s = step_s * n_decodes / n_tokens
        counters.steps += 1
        counters.decode_seconds += decode_s
        counters.prefill_seconds += step_s - decode_s
        self._emit(scheduler.collect(n_tokens, step_s * 1e3))

    def _rescue(self, plan: StepPlan, error: Exception) -> tuple[StepPlan, Drawn]:
        """What of a failed step can be computed all the same; the rest has failed. Raises EngineDied."""
        rescued = rescue(plan, self._runner)
        if not rescued.plan.n_tokens and len(rescued.guilty) > 1:  # one alone says nothing of the engine
            self._lost_steps += 1
            if self._lost_steps >= LOST_STEPS:
                raise EngineDied(f"{LOST_STEPS} steps in a row failed as a whole: {error!r}") from error
        for sequence in rescued.guilty:
            message = f"the engine failed its step: {error!r}"
            self._scheduler.fail(sequence.work.attempt, message, retryable=True, in_step=True)
        return rescued.plan, rescued.drawn

    def _accept(self, attempt: AttemptId, token: int, drawn: Items[int]) -> None:
        """Use transferred blocks only after the runner looked at them."""
        sequence = self._scheduler.reserved(attempt, drawn)
        if sequence is None:
            return
        if self._vocab_size is not None and (most := max([token, *drawn])) >= self._vocab_size:
            wrong: str | None = f"its token {most} is not below {self._vocab_size}"
        else:
            live = sequence.work.reserve_tokens > 0  # then `token` is among its tokens, and has no KV
            wrong = self._wrong(sequence, len(sequence.tokens) - live)
        if wrong is None:
            self._scheduler.kv_arrived(attempt, token)
        else:
            self._scheduler.fail(attempt, f"transferred KV refused: {wrong}", retryable=True)

    def _accept_prefix(self, attempt: AttemptId, n_blocks: int) -> None:
        """The same; what is wrong with a prefix is computed over."""
        sequence = self._scheduler.reserved(attempt)
        if sequence is not None and n_blocks:
            wrong = self._wrong(sequence, n_blocks * self.block_tokens)
            if wrong is not None:
                log.error("pulled KV refused, its prompt is computed: %s", wrong)
                n_blocks = 0
        self._scheduler.prefix_arrived(attempt, n_blocks)

    def _wrong(self, sequence: Sequence, n_tokens: int) -> str | None:
        try:
            return self._runner.accept(sequence, n_tokens)
        except Exception as error:
            log.exception("accept failed")
            return repr(error)

    def _tell(self, verb: Callable[[], None]) -> None:
        """Its chunk is told at once: the next step may be long, and a reader waits."""
        verb()
        self._emit(self._scheduler.collect())

    def _snapshot(self, callback: Callable[[list[StoredRun]], None]) -> None:
        self._emit(self._scheduler.collect())
        callback(self._pool.chains())

    def _emit(self, output: StepOutput) -> None:
        self._load = output.load
        self._on_step(output)


def _ignore(output: StepOutput) -> None:
    """No listener before `start`."""
