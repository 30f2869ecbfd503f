"""Continuous batching: which sequences the next step computes, and what its tokens mean. Pure.

    verbs (submit, cancel, kv_begun, kv_arrived, prefix_arrived, lend, share, pause, resume, release)
        ->  schedule  ->  [runner]  ->  apply  ->  collect

A step computes all decodes, one token each, then prompt slices under the token budget, in the order in
which prompts are due (PromptQueue: also who holds blocks, and who gives them back). When a decode finds no
block for its next token, and none is on loan, the newest decode is preempted: its blocks stay in the cache,
from now on it is due since it arrived, and it is computed again with its generated tokens. So the oldest
decode always goes on. A prompt that the whole pool cannot hold fails; an answer that has filled it ends,
as at the end of the context.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Iterator, Set
from typing import cast

from kvrouter.deadline import Order
from serving.engine.base import (
    LENT,
    TOKEN_TYPECODE,
    AttemptId,
    ChunkReady,
    Counters,
    Failed,
    Finished,
    FinishReason,
    Load,
    Mode,
    Reserved,
    Started,
    StepOutput,
    Work,
)
from serving.engine.live_sequence import BlockTables, LiveSequence, Stage
from serving.engine.migration import Shares
from serving.engine.prefill_order import PrefillOrder
from serving.engine.prompt_queue import PromptQueue
from serving.engine.sequence import Drawn, Sequence, StepPlan
from serving.engine.stopping import finish_reason
from serving.kv.block_pool import BlockPool


class Scheduler:
    """Owns the sequences and, through `pool`, the blocks. All calls from one thread."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        chunk_tokens: int,  # most tokens of a step; prompts get at least one block of it
        max_batch: int,  # most sequences of a step
        context_tokens: int,
        eos_token_ids: Set[int],
        counters: Counters,
        order: Order = Order.DEADLINE,
    ) -> None:
        self.pool = pool
        self.counters = counters
        self._tables = BlockTables(pool, block_tokens)
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._context_tokens = context_tokens
        self._eos = eos_token_ids
        self._live: dict[AttemptId, LiveSequence] = {}
        self._order = PrefillOrder(order, chunk_tokens)
        self._arrivals = 0
        self._prompts = PromptQueue(self._tables, counters)
        self._ready: list[LiveSequence] = []  # in the order of prompts
        self._decodes: list[LiveSequence] = []  # oldest first
        self._short: list[LiveSequence] = []  # decodes without a block for their next token
        self._shares = Shares(block_tokens)
        self._decoded: tuple[int, int] = (0, 0)  # by the last step: see Load
        self._out = StepOutput(self.load())

    # ------------------------------------------------------------ verbs

    def submit(self, work: Work, now_s: float) -> None:
        """Queue `work`, which arrived at `now_s`; what can never run fails now. An attempt that is live
        already is ignored."""
        if work.attempt in self._live:
            return
        tokens = array(TOKEN_TYPECODE, work.tokens)
        seq = LiveSequence(work, tokens)
        left = min(work.params.max_tokens - seq.n_generated, self._context_tokens - len(tokens))
        seq.reserve = min(work.reserve_tokens, left)
        if seq.n_generated >= work.params.max_tokens:
            self._out.finished.append(Finished(seq.attempt, FinishReason.LENGTH))
        elif len(tokens) >= self._context_tokens:
            text = f"{len(tokens)} tokens leave no room in a context of {self._context_tokens}"
            self._out.failed.append(Failed(seq.attempt, text))
        elif (why := self._tables.too_large(seq)) is not None:
            self._out.failed.append(Failed(seq.attempt, why))
        else:
            self._live[seq.attempt] = seq
            self._arrivals += 1
            seq.number, seq.arrived_s = self._arrivals, now_s - work.waited_s
            if seq.mode is not Mode.DECODE:  # its last token is always computed
                seq.pull_blocks = min(work.pull_tokens, len(tokens) - 1) // self._block_tokens
                seq.remote = seq.pull_blocks > 0
                seq.left = self._tables.uncached(seq)
                if seq.remote:
                    seq.left = min(seq.left, len(tokens) - seq.pull_blocks * self._block_tokens)
            seq.due_s = self._order.due_s(work.priority, seq.left, len(tokens), seq.arrived_s)
            self._prompts.add(seq)

    def cancel(self, attempt: AttemptId, quarantine: bool = False) -> None:
        """Forget `attempt` in whatever stage it is, a lease included. Idempotent."""
        seq = self._live.pop(attempt, None)
        if seq is None:
            self.pool.release(attempt)
            return
        self._shares.close(attempt)
        self._leave(seq)
        if quarantine:
            self.pool.quarantine(attempt, first=seq.found)
        else:
            self.pool.free(attempt)

    def fail(
        self, attempt: AttemptId, message: str, *, retryable: bool = False, in_step: bool = False
    ) -> None:
        if attempt in self._live:
            self.cancel(attempt)
            self._out.failed.append(Failed(attempt, message, retryable, in_step))

    def fail_all(self, message: str, *, retryable: bool = False) -> None:
        """Every live attempt fails; leases stay. Blocks that wait for KV, which a read may be writing, are
        under quarantine from now on."""
        for attempt, seq in list(self._live.items()):
            self.cancel(attempt, quarantine=seq.stage is Stage.RESERVED)
            self._out.failed.append(Failed(attempt, message, retryable))

    def reserved(self, attempt: AttemptId, drawn: Iterable[int] = ()) -> Sequence | None:
        """The sequence, if it holds blocks and waits for KV; with what was `drawn` elsewhere."""
        seq = self._live.get(attempt)
        if seq is None or seq.stage is not Stage.RESERVED:
            return None
        seq.tokens.extend(drawn)
        return seq

    def kv_begun(self, attempt: AttemptId) -> None:
        """See Engine."""
        if (seq := self._live.get(attempt)) is not None and not seq.there:
            self._prompts.begun(seq)

    def kv_arrived(self, attempt: AttemptId, token: int) -> None:
        """The reserved blocks hold the KV of all before `token`, which was told already; go on after it.

        It is the first token, or for a live attempt the last that `reserved` knows. Ignored when the
        attempt does not wait for KV (any more).
        """
        seq = self._live.get(attempt)
        if seq is None or seq.stage is not Stage.RESERVED:
            return
        if not seq.work.reserve_tokens:
            seq.tokens.append(token)
        seq.reserve = 0
        seq.computed = len(seq.tokens) - 1
        self._prompts.arrived(seq)
        self._tables.commit(seq)
        if (reason := self._reason(seq, token)) is not None:
            self._finish(seq, reason)
            return
        seq.stage = Stage.READY
        insort(self._ready, seq)

    def prefix_arrived(self, attempt: AttemptId, n_blocks: int) -> None:
        """See Engine. Fewer blocks than were cached anyway count as those."""
        seq = self._live.get(attempt)
        if seq is None or not seq.remote or not seq.pull_blocks:
            return
        if seq.stage is Stage.RESERVED:
            seq.pulled = max(n_blocks - seq.found, 0)
            seq.computed = (seq.found + seq.pulled) * self._block_tokens
            self._tables.commit(seq)
        self._prompts.pulled(seq)

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> None:
        """See Engine. The name of an attempt that lives here gets nothing."""
        blocks = [] if attempt in self._live else self._tables.lend(attempt, namespace, tokens)
        self._out.chunks.append(ChunkReady(attempt, 0, blocks, True, LENT if blocks else None))

    def release(self, attempt: AttemptId) -> None:
        """The lease ends; or, while the prompt still computes, there will be none. What is paused has
        moved. Idempotent."""
        seq = self._live.get(attempt)
        if seq is not None and seq.mode is Mode.PREFILL:
            seq.wanted = False
        elif seq is not None and seq.stage is Stage.PAUSED:
            self.cancel(attempt)
        self.pool.release(attempt)

    def share(self, attempt: AttemptId, serial: int, n_tokens: int, most_tokens: int) -> None:
        """See MigratingEngine."""
        seq = self._live.get(attempt)
        self._out.chunks.append(self._shares.open(attempt, seq, serial, n_tokens, most_tokens))
        self._pause_full()

    def pause(self, attempt: AttemptId) -> None:
        """See MigratingEngine."""
        share = self._shares.pausable(attempt)
        if share is not None:
            seq, stage = share.sequence, share.sequence.stage
            self._leave(seq)
            seq.stage = Stage.PAUSED
            self._short = [other for other in self._short if other is not seq]
            self._out.chunks.append(self._shares.paused(share, stage))

    def resume(self, attempt: AttemptId) -> None:
        """See MigratingEngine. Out of a pause it is the oldest decode: its client has waited."""
        share = self._shares.close(attempt)
        if share is None or share.paused_in is None:
            return
        seq = share.sequence
        seq.stage = share.paused_in
        if seq.stage is Stage.READY:
            insort(self._ready, seq)
            return
        self._decodes.insert(0, seq)
        if len(seq.blocks) * self._block_tokens == seq.computed:
            self._short.append(seq)

    # ------------------------------------------------------------ one step

    @property
    def has_decodes(self) -> bool:
        """A step could compute decodes."""
        return bool(self._decodes or self._ready)

    @property
    def runnable(self) -> bool:
        """`schedule` would find something to compute or to start."""
        return bool(self._decodes or self._ready) or self._prompts.runnable

    @property
    def n_live(self) -> int:
        return len(self._live)

    def load(self, batch_tokens: int = 0, step_ms: float = 0.0) -> Load:
        running = len(self._decodes) + self._prompts.n_started + self._shares.n_paused
        return Load(
            step=self.counters.steps,
            running=running,
            waiting=len(self._live) - running,
            waiting_tokens=self._prompts.todo,
            batch_tokens=batch_tokens,
            step_ms=step_ms,
            runnable=self.runnable,
            blocks=self.pool.states(),
            prompts=self._prompts.first(),
            computed_tokens=self.counters.prompt_tokens_computed,
            decoded=self._decoded,
            parked=self._prompts.parked(self._ready),
        )

    def schedule(self, decode: bool = True) -> StepPlan:
        """What the next step computes; without `decode` only prompts. An empty plan: nothing can run."""
        if self._short:
            self._grow()
        if not self._prompts and not self._ready:
            return StepPlan(list(self._decodes) if decode else [])
        for seq in self._prompts.reserve():
            n_blocks = seq.pull_blocks or -(-(len(seq.tokens) + seq.reserve) // self._block_tokens)
            n_cached = min(seq.found, n_blocks)
            seq.offer = Reserved(seq.attempt, seq.blocks[:n_blocks], n_cached)
            self._out.reserved.append(seq.offer)
        places = self._max_batch - len(self._decodes) - self._shares.n_paused
        n_decodes = min(len(self._decodes) + len(self._ready), self._max_batch) if decode else 0
        budget = max(self._chunk_tokens - n_decodes, self._block_tokens)
        prefills = self._prompts.slices(places, budget, self._ready)
        for piece in prefills:
            self._tell_started(cast(LiveSequence, piece.sequence))
        joining = max(places - len(prefills), 0)
        for seq in self._ready[:joining]:
            seq.stage = Stage.DECODE
            self._decodes.append(seq)
            self._tell_started(seq)
        del self._ready[:joining]
        return StepPlan(list(self._decodes) if decode else [], prefills)

    def took(self, plan: StepPlan, step_ms: float) -> None:
        """`plan` took that long: later deadlines count on it."""
        if plan.prefills:
            self._order.learn(plan, step_ms)

    def apply(self, plan: StepPlan, drawn: Drawn) -> None:
        """`plan` was computed: advance its sequences by it and by the tokens it drew.

        Raises ValueError when `drawn` is not one token per entry of `plan.drawing`.
        """
        if len(drawn.tokens) != len(plan.drawing):
            raise ValueError(f"{len(drawn.tokens)} tokens drawn for {len(plan.drawing)} sequences")
        out, tokens, eos = self._out, drawn.tokens, self._eos
        block_tokens, context = self._block_tokens, self._context_tokens
        attempts, positions, column = out.attempts, out.positions, out.tokens
        ended: list[tuple[LiveSequence, FinishReason]] = []
        held = 0
        for seq, token in zip(cast(list[LiveSequence], plan.decodes), tokens, strict=False):
            computed = seq.computed = seq.computed + 1
            held += computed
            text = seq.tokens
            text.append(token)
            n_generated = len(text) - seq.n_prompt
            attempts.append(seq.attempt)
            positions.append(n_generated - 1)
            column.append(token)
            if computed % block_tokens == 0:
                self._tables.commit(seq)
                if len(seq.blocks) * block_tokens == computed:
                    self._short.append(seq)
            reason = finish_reason(seq.work.params, eos, n_generated, token)
            if reason is not None:
                ended.append((seq, reason))
            elif len(text) >= context:
                ended.append((seq, FinishReason.LENGTH))
        self._decoded = (0, 0) if plan.prefills else (len(plan.decodes), held)
        for seq, reason in ended:
            self._finish(seq, reason)
        if ended:
            self._decodes = [seq for seq in self._decodes if seq.stage is Stage.DECODE]
            self._short = [seq for seq in self._short if seq.stage is Stage.DECODE]
        if self._shares:
            self._pause_full()
        if plan.prefills:
            self._apply_prefills(plan, iter(tokens[len(plan.decodes) :]))
        out.logprobs = drawn.logprobs
        self.counters.tokens_generated += len(tokens)

    @property
    def has_output(self) -> bool:
        out = self._out
        return bool(out.tokens or out.started or out.finished or out.failed or out.reserved or out.chunks)

    def collect(self, batch_tokens: int = 0, step_ms: float = 0.0) -> StepOutput:
        """Everything since the last call, with the load as it is now."""
        out = self._out
        out.stored, out.removed = self.pool.drain_events()
        out.load = self.load(batch_tokens, step_ms)
        self._out = StepOutput(out.load)
        return out

    # ------------------------------------------------------------ stages

    def _grow(self) -> None:
        """A block for each decode that needs one, if need be one on loan or of the newest decodes."""
        for seq in self._short:
            while seq.stage is Stage.DECODE and not self.pool.grow(seq.attempt):
                if not self._prompts.take_back():
                    self._preempt(self._decodes[-1])
        self._short = []

    def _pause_full(self) -> None:
        """Those whose reader has no room for their next token."""
        for attempt in self._shares.full():
            self.pause(attempt)

    def _preempt(self, seq: LiveSequence) -> None:
        """Back to the prompts. Its client waits for the next token: no slack any more, no size."""
        self._leave(seq)
        self._out.chunks += self._shares.lose(seq.attempt)
        seq.left = self._tables.give_back(seq)
        seq.remote = False
        self.counters.preemptions += 1
        if self._tables.too_large(seq) is not None:
            self._finish(seq, FinishReason.LENGTH)
            return
        seq.due_s = seq.arrived_s
        self._prompts.add(seq)

    def _tell_started(self, seq: LiveSequence) -> None:
        if not seq.begun:
            seq.begun = True
            pulled = seq.pulled * self._block_tokens
            cached = seq.found * self._block_tokens
            seq.cached = cached + pulled
            self.counters.prompt_tokens_cached += cached
            self.counters.prompt_tokens_pulled += pulled
            self._out.started.append(Started(seq.attempt, seq.cached))

    def _apply_prefills(self, plan: StepPlan, tokens: Iterator[int]) -> None:
        for piece in plan.prefills:
            seq, draws = cast(LiveSequence, piece.sequence), piece.draws
            self._prompts.advance(seq, piece.count)
            self.counters.prompt_tokens_computed += piece.count
            self._tables.commit(seq)
            if draws:
                self._prompts.remove(seq)
                self._prefilled(seq, next(tokens))
            elif seq.mode is Mode.PREFILL and len(seq.hashes) > seq.announced:
                self._announce(seq, len(seq.hashes), last=False, token=None)

    def _prefilled(self, seq: LiveSequence, token: int) -> None:
        """All of `seq` is computed and drew `token`."""
        seq.tokens.append(token)
        self._out.attempts.append(seq.attempt)
        self._out.positions.append(seq.n_generated - 1)
        self._out.tokens.append(token)
        reason = self._reason(seq, token)
        if seq.mode is Mode.PREFILL:
            # An end here, or a reader that is gone, leaves nothing to hand over.
            until = len(seq.blocks) if reason is None and seq.wanted else seq.announced
            self._announce(seq, until, last=True, token=token if reason is None else None)
        if reason is not None:
            self._finish(seq, reason)
        elif seq.mode is Mode.PREFILL:
            del self._live[seq.attempt]
            seq.stage = Stage.GONE
            if seq.wanted:
                self.pool.lease(seq.attempt)
            else:
                self.pool.free(seq.attempt)
        else:
            seq.stage = Stage.DECODE
            self._decodes.append(seq)

    def _announce(self, seq: LiveSequence, until: int, *, last: bool, token: int | None) -> None:
        first, seq.announced = seq.announced, until
        self._out.chunks.append(ChunkReady(seq.attempt, first, seq.blocks[first:until], last, token))

    def _reason(self, seq: LiveSequence, token: int) -> FinishReason | None:
        reason = finish_reason(seq.params, self._eos, seq.n_generated, token)
        if reason is None and len(seq.tokens) >= self._context_tokens:
            return FinishReason.LENGTH
        return reason

    def _finish(self, seq: LiveSequence, reason: FinishReason) -> None:
        """The caller takes `seq` out of the queue it is in."""
        del self._live[seq.attempt]
        self._shares.close(seq.attempt)
        seq.stage = Stage.GONE
        self.pool.free(seq.attempt)
        self._out.finished.append(Finished(seq.attempt, reason))

    def _leave(self, seq: LiveSequence) -> None:
        """Take `seq` out of the queue of its stage."""
        match seq.stage:
            case Stage.WAITING | Stage.PREFILL | Stage.RESERVED:
                self._prompts.remove(seq)
            case Stage.READY:
                self._ready.remove(seq)
            case Stage.DECODE:
                self._decodes.remove(seq)
        seq.stage = Stage.GONE
