"""TensorRT-LLM as an engine: attempts in, its own async results out, one output a turn of the loop.

    LOCAL     context_and_generation, streamed
    PREFILL   context_only: its one token goes out at once, its state with the last chunk
    DECODE    reserved without blocks -> `take_over` -> generation_only: what the engine says first is the
              sign that the KV is here; its list begins with the token that prefill told already

The engine lives as long as this object. Everything but the verbs happens on one thread with an event loop;
events and statistics are polled on others (serving.engine.trtllm.polled). An error of a request ends that
request; any other ends the engine: `died` says why, and the worker has itself replaced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from serving.config import TrtllmConfig
from serving.engine.base import (
    AttemptId,
    BlockStates,
    ChunkReady,
    Counters,
    EngineDied,
    Failed,
    Finished,
    FinishReason,
    KVMemory,
    Load,
    Mode,
    Moved,
    Reserved,
    Started,
    StepOutput,
    StoredRun,
    Work,
)
from serving.engine.trtllm.aborts import Aborts
from serving.engine.trtllm.api import Api, one_line
from serving.engine.trtllm.asking import Asking
from serving.engine.trtllm.capabilities import capabilities_of
from serving.engine.trtllm.events import EventTranslator
from serving.engine.trtllm.live import Live, Stage
from serving.engine.trtllm.load import is_runnable, load_of
from serving.engine.trtllm.polled import Polled, Steps
from serving.engine.trtllm.sampling import token_logprobs
from serving.engine.trtllm.state import StateError, pack_state, unpack_state
from serving.engine.trtllm.watchdog import LOOK_S, Pulse, Watchdog

log = logging.getLogger("kvrelay.engine")

SHUTDOWN_S = 20.0


class TrtllmEngine:
    """`serving.engine.base.SelfMovingEngine`; made by serving.engine.trtllm.build, after a first answer."""

    def __init__(
        self,
        *,
        api: Api,
        llm: Any,
        asking: Asking,
        config: TrtllmConfig,
        events: EventTranslator,
        memory: KVMemory,
        layout: str,
        block_tokens: int,
        context_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capabilities = capabilities_of(config)
        self.memory = memory
        self.layout = layout
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens
        self.counters = Counters()
        self.died: BaseException | None = None
        self.events = events
        self._api = api
        self._llm = llm
        self._asking = asking
        self._config = config
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._aborts = Aborts(self._loop)
        self._watchdog = Watchdog(llm, clock)
        self._live: dict[AttemptId, Live] = {}
        self._abandoned: set[Live] = set()  # cancelled or given up, and not at their end in the engine
        self._lent: set[AttemptId] = set()  # handed over, their readers not heard of
        self._step = 0
        self._out: StepOutput | None = None
        self._n_drawn = 0
        self._on_step: Callable[[StepOutput], None] = _ignore
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="trtllm", daemon=True)
        self._polled = Polled(
            llm=llm,
            events=events,
            total_blocks=memory.n_blocks,
            counters=self.counters,
            post=self._post,
            on_events=self._take_events,
            on_step=self._iterated,
        )

    # ------------------------------------------------------------ verbs, from any thread

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """See Engine. Verbs may be called before; they wait. Raises RuntimeError the second time."""
        self._on_step = on_step
        self._thread.start()
        self._polled.start()

    def submit(self, work: Work) -> None:
        """See Engine. Raises EngineDied."""
        if self.died is not None:
            raise EngineDied(f"the engine died: {self.died}")
        self._post(partial(self._submit, work))

    def cancel(self, attempt: AttemptId, *, quarantine: bool = False) -> None:
        self._post(partial(self._cancel, attempt))

    def end_quarantine(self, attempt: AttemptId) -> None:
        pass

    def kv_arrived(self, attempt: AttemptId, token: int, drawn: Sequence[int] = ()) -> None:
        self._post(partial(self._fail, attempt, "its KV came without the engine's state", False))

    def take_over(self, attempt: AttemptId, token: int, state: bytes) -> None:
        self._post(partial(self._take_over, attempt, state))

    def release(self, attempt: AttemptId) -> None:
        """The engine has freed its blocks, or does so when its own time-out passes: it cannot be told."""
        self._post(partial(self._lent.discard, attempt))

    def kv_begun(self, attempt: AttemptId) -> None:
        pass

    def prefix_arrived(self, attempt: AttemptId, n_blocks: int) -> None:
        pass

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> None:
        self._post(lambda: self._output().chunks.append(ChunkReady(attempt, 0, [], True, None)))

    def request_snapshot(self, callback: Callable[[list[StoredRun]], None]) -> None:
        self._post(partial(self._snapshot, callback))

    def block_states(self) -> BlockStates:
        return self._polled.blocks()

    def stop(self) -> None:
        """See Engine; idempotent. An engine that died is left to the end of its process: its own
        shutdown may hang."""
        self._polled.stop()
        if self._stopping:
            return
        self._stopping = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SHUTDOWN_S)
        if self.died is None and self._watchdog.fatal() is None:
            closing = threading.Thread(target=self._llm.shutdown, name="trtllm-shutdown", daemon=True)
            closing.start()
            closing.join(SHUTDOWN_S)

    def _post(self, verb: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(verb)

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._watch)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def _watch(self) -> None:
        """Once a second."""
        if self.died is None:
            pulse = Pulse(
                runnable=is_runnable(self._live.values()),
                in_flight=len(self._live) + len(self._abandoned) + len(self._lent),
                abandoned=sum(live.stage is Stage.MOVING for live in self._abandoned),
                free_blocks=self._polled.free_blocks,
                total_blocks=self._polled.blocks().total,
                step=self._step,
            )
            said = self._watchdog.look(pulse)
            if said is not None:
                self._die(said)
        self._loop.call_later(LOOK_S, self._watch)

    def _die(self, why: str) -> None:
        """Nobody waits for an engine that is gone."""
        if self.died is not None:
            return
        log.error("the engine is lost: %s", why)
        self.died = EngineDied(why)
        for attempt in list(self._live):
            self._fail(attempt, f"the engine died: {why}", True)
        self._output()  # even if nothing was live: it wakes whoever looks

    # ------------------------------------------------------------ requests

    def _submit(self, work: Work) -> None:
        if self.died is not None:
            self._output().failed.append(Failed(work.attempt, f"the engine died: {self.died}", True))
            return
        waits = work.mode is Mode.DECODE
        live = Live(work, Stage.WAITING if waits else Stage.COMPUTING, self._clock())
        self._live[work.attempt] = live
        self.events.expect(work.tokens, work.namespace)
        if waits or work.pull_tokens:
            self._output().reserved.append(Reserved(work.attempt, [], 0))
        if not waits:
            self._ask(live, None)

    def _take_over(self, attempt: AttemptId, state: bytes) -> None:
        live = self._live.get(attempt)
        if live is None or live.stage is not Stage.WAITING:
            return
        try:
            handed = unpack_state(self._api, state)
        except StateError as error:
            self._fail(attempt, str(error), False)
            return
        live.stage = Stage.MOVING
        live.began_s = self._clock()
        live.taken = len(handed.first_gen_tokens)
        config = self._config
        n_tokens = len(live.work.tokens)
        limit_ms = config.transfer_timeout_ms + config.transfer_ms_per_1k_tokens * n_tokens / 1e3
        live.deadline = self._loop.call_later(limit_ms / 1e3, self._transfer_late, live, limit_ms)
        self._ask(live, handed)

    def _ask(self, live: Live, handed: Any) -> None:
        """Give it to the engine, whose refusals at this point are the request's fault."""
        try:
            live.output = self._asking.ask(live.work, handed)
        except (ValueError, TypeError, NotImplementedError, self._api.request_error) as error:
            self._fail(live.attempt, one_line(error), False)
        except Exception as error:
            self._fail(live.attempt, one_line(error), True)
            self._die(f"it takes no requests: {error!r}")
        else:
            live.task = self._loop.create_task(self._follow(live))

    async def _follow(self, live: Live) -> None:
        """To its end, whoever still listens."""
        try:
            failure = await self._read(live)
            if failure is not None and not live.cancelled:
                self._fail(live.attempt, *failure)
        finally:
            live.end_deadline()
            self._abandoned.discard(live)

    async def _read(self, live: Live) -> tuple[str, bool] | None:
        """Why it failed, and whether another worker may do better; None when it did not."""
        steps = live.output.__aiter__()
        while True:
            try:
                await steps.__anext__()
            except StopAsyncIteration:
                return "the engine ended it without a reason", True
            except self._api.request_error as error:
                return one_line(error), False
            except Exception as error:
                log.exception("attempt %d", live.attempt)
                self._loop.call_soon(self._die, repr(error))
                return f"the engine died: {one_line(error)}", True
            try:
                if self._advance(live):
                    return None
            except Exception as error:  # ours: it costs this attempt, and no other
                log.exception("attempt %d", live.attempt)
                self._aborts.abort(live.output)
                return f"what the engine said cannot be understood: {one_line(error)}", False

    def _advance(self, live: Live) -> bool:
        """Tell what is new; True at its end."""
        if live.stage is Stage.MOVING:
            self._arrived(live)
        completion = live.output.outputs[0]
        reason = completion.finish_reason
        if live.cancelled:
            return reason is not None
        out = self._output()
        if not live.started:
            self._started(live, out)
        index, tokens = live.new_tokens()
        for n, token in enumerate(tokens, index):
            if live.work.params.logprobs is not None:
                entry = live.logprobs_at(n)
                if entry is None:
                    raise ValueError(f"no logprobs for token {n}")
                drawn = token_logprobs(entry, token, live.work.params.logprobs)
                out.logprobs[len(out.tokens)] = drawn
            out.attempts.append(live.attempt)
            out.positions.append(live.first_position + n)
            out.tokens.append(token)
        self._n_drawn += len(tokens)
        self.counters.tokens_generated += len(tokens)
        if reason is None:
            return False
        self._ended(live, reason)
        return True

    def _started(self, live: Live, out: StepOutput) -> None:
        live.started = True
        if live.work.mode is Mode.DECODE:
            return
        n_tokens = len(live.work.tokens)
        cached = min(int(live.output.cached_tokens or 0), n_tokens - 1)
        out.started.append(Started(live.attempt, cached))
        self.counters.prompt_tokens_cached += cached
        self.counters.prompt_tokens_computed += n_tokens - cached
        if n_tokens > self.block_tokens:
            self._polled.expect_events()

    def _arrived(self, live: Live) -> None:
        live.end_deadline()
        live.stage = Stage.COMPUTING
        if live.cancelled:
            self._aborts.abort(live.output)  # it waited for this
        else:
            self._output().moved.append(Moved(live.attempt, self._clock() - live.began_s))

    def _ended(self, live: Live, reason: str) -> None:
        work, attempt = live.work, live.attempt
        if work.mode is Mode.PREFILL and reason in ("length", "not_finished"):
            if live.first_position + live.taken >= work.params.max_tokens:
                self._finished(live, FinishReason.LENGTH)
                return
            token = int(live.output.outputs[0].token_ids[0])
            try:
                state = pack_state(self._api, live.output)
            except StateError as error:
                self._fail(attempt, str(error), True)
                return
            del self._live[attempt]
            self._lent.add(attempt)
            self._output().chunks.append(ChunkReady(attempt, 0, [], True, token, state=state))
        elif reason in ("stop", "length"):
            self._finished(live, FinishReason(reason))
        else:
            self._fail(attempt, f"the engine ended it: {reason}", True)

    def _finished(self, live: Live, reason: FinishReason) -> None:
        del self._live[live.attempt]
        out = self._output()
        if live.work.mode is Mode.PREFILL:  # nobody needs its KV
            out.chunks.append(ChunkReady(live.attempt, 0, [], True, None))
        out.finished.append(Finished(live.attempt, reason))

    def _fail(self, attempt: AttemptId, why: str, retryable: bool) -> None:
        live = self._live.pop(attempt, None)
        if live is None:
            return
        self._let_go(live)
        self._output().failed.append(Failed(attempt, why, retryable))

    def _cancel(self, attempt: AttemptId) -> None:
        self._lent.discard(attempt)
        live = self._live.pop(attempt, None)
        if live is not None:
            self._let_go(live)
            self._output()  # the load changed

    def _let_go(self, live: Live) -> None:
        """Nobody hears of it any more; the engine may still have it."""
        live.cancelled = True
        if live.output is None or live.task is None or live.output.finished:
            live.end_deadline()
            return
        self._abandoned.add(live)
        if live.stage is Stage.MOVING:  # until its first word: see the table of troubles in the docs
            self.counters.deferred_aborts += 1
            return
        self._aborts.abort(live.output)

    def _transfer_late(self, live: Live, limit_ms: float) -> None:
        """The notice of its end can get lost. It is not aborted: that is what wedges."""
        live.deadline = None
        self.counters.lost_transfers += 1
        why = f"the prompt's KV was not here within {limit_ms:.0f} ms"
        log.warning("attempt %d: %s", live.attempt, why)
        self._fail(live.attempt, why, True)

    # ------------------------------------------------------------ what is polled

    def _take_events(self, steps: Steps) -> None:
        for stored, removed in steps:
            self._flush()  # one output a step: within one, removals count first
            out = self._output()
            out.stored, out.removed = stored, removed

    def _iterated(self) -> None:
        self._step += 1
        self._output()

    def _snapshot(self, callback: Callable[[list[StoredRun]], None]) -> None:
        self._flush()
        callback(self.events.chains())

    # ------------------------------------------------------------ output

    def _output(self) -> StepOutput:
        """What goes out at the end of this turn of the loop."""
        if self._out is None:
            self._out = StepOutput(self._load())
            self._loop.call_soon(self._flush)
        return self._out

    def _flush(self) -> None:
        out, self._out = self._out, None
        if out is None:
            return
        if out.tokens or out.moved or out.finished:
            self._step += 1
        out.load = self._load()
        self._n_drawn = 0
        self._on_step(out)

    def _load(self) -> Load:
        polled, lives = self._polled, self._live.values()
        return load_of(lives, polled.reading, polled.blocks(), step=self._step, n_drawn=self._n_drawn)


def _ignore(output: StepOutput) -> None:
    """No listener before `start`."""
