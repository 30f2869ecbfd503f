"""The scheduler under a runner that checks every slot it reads: what all tests of the engine's core use."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from zlib import crc32

from kvrouter.deadline import Order
from serving.engine.base import (
    AttemptId,
    BlockId,
    ChunkReady,
    Counters,
    Failed,
    Finished,
    KVMemory,
    Mode,
    Reserved,
    SamplingParams,
    Started,
    StepOutput,
    Work,
)
from serving.engine.scheduler import Scheduler
from serving.engine.sequence import Drawn, Sequence, StepPlan
from serving.kv.block_pool import BlockPool

EOS = 2
PREFILL, DECODE, LOCAL = Mode.PREFILL, Mode.DECODE, Mode.LOCAL


def prompt(n_tokens: int, salt: int = 0) -> array[int]:
    """Deterministic tokens; equal `salt` means equal beginnings."""
    return array("I", [100 + crc32(f"{salt}.{i}".encode()) % 1000 for i in range(n_tokens)])


def work(
    attempt: int,
    tokens: array[int],
    mode: Mode = Mode.LOCAL,
    *,
    max_tokens: int = 4,
    n_prompt: int | None = None,
    namespace: int = 7,
    priority: int = 0,
    pull_tokens: int = 0,
    **params: object,
) -> Work:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **params)  # type: ignore[arg-type]
    n_prompt = n_prompt or len(tokens)
    return Work(AttemptId(attempt), mode, tokens, n_prompt, sampling, namespace, priority, pull_tokens)


def next_token(tokens: array[int]) -> int:
    """The fake model: greedy, of the whole text, never EOS."""
    return 1000 + crc32(tokens.tobytes()) % 1000


def continuation(tokens: array[int], n_tokens: int) -> list[int]:
    """What the fake model answers: the reference for every path through the scheduler."""
    text = array("I", tokens)
    for _ in range(n_tokens):
        text.append(next_token(text))
    return text[len(tokens) :].tolist()


def checksums(tokens: array[int], namespace: int) -> list[int]:
    """Of the text up to each token: what tells its KV from any other."""
    sums, running = [], namespace
    for token in tokens:
        running = crc32(token.to_bytes(4, "little"), running)
        sums.append(running)
    return sums


class CheckingRunner:
    """Remembers which text each slot belongs to and checks that a sequence only reads its own text."""

    def __init__(self, n_blocks: int, block_tokens: int, context_tokens: int = 4096) -> None:
        self.memory = KVMemory(0, block_tokens * 8, n_blocks)
        self.layout = "checking"
        self.context_tokens = context_tokens
        self.eos_token_ids = frozenset({EOS})
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) -> checksum of the text up to it
        self.scripted: dict[int, list[int]] = {}  # attempt -> tokens to draw instead
        self.refuse: str | None = None  # what `accept` says
        self.largest_step = 0
        self._size = block_tokens

    def run(self, plan: StepPlan) -> Drawn:
        self.largest_step = max(self.largest_step, plan.n_tokens)
        pieces = [(seq, seq.computed, 1) for seq in plan.decodes]
        pieces += [(piece.sequence, piece.start, piece.count) for piece in plan.prefills]
        for seq, start, count in pieces:
            assert start == seq.computed
            self.check(seq, start)
            self.write(seq, start, start + count)
        tokens = []
        for seq in plan.drawing:
            script = self.scripted.get(seq.work.attempt)
            tokens.append(script.pop(0) if script else next_token(seq.tokens))
        return Drawn(tokens)

    def accept(self, sequence: Sequence, n_tokens: int) -> str | None:
        return self.refuse

    def write(self, seq: Sequence, start: int, end: int) -> None:
        for at, checksum in enumerate(checksums(seq.tokens[:end], seq.work.namespace)):
            if at >= start:
                self.slots[seq.blocks[at // self._size], at % self._size] = checksum

    def check(self, seq: Sequence, end: int) -> None:
        for at, checksum in enumerate(checksums(seq.tokens[:end], seq.work.namespace)):
            block = seq.blocks[at // self._size]
            assert self.slots.get((block, at % self._size)) == checksum, (
                f"wrong KV at {at} in block {block}"
            )

    def holds(self, tokens: array[int], first: int, blocks: list[BlockId], namespace: int = 7) -> bool:
        """`blocks` hold the KV of `tokens` from block `first` of them on."""
        start, sums = first * self._size, checksums(tokens, namespace)
        end = min(start + len(blocks) * self._size, len(tokens))
        return all(
            self.slots.get((blocks[at // self._size - first], at % self._size)) == sums[at]
            for at in range(start, end)
        )

    def copy(self, source: CheckingRunner, pairs: list[tuple[BlockId, BlockId]]) -> None:
        """The transfer."""
        for theirs, ours in pairs:
            for offset in range(self._size):
                if (theirs, offset) in source.slots:
                    self.slots[ours, offset] = source.slots[theirs, offset]


@dataclass
class Told:
    """All outputs, by attempt; positions are checked to have no hole and no repeat."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # position of the first token told
    started: dict[int, Started] = field(default_factory=dict)
    reserved: dict[int, Reserved] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    chunks: dict[int, list[ChunkReady]] = field(default_factory=dict)

    def add(self, output: StepOutput) -> None:
        for attempt, position, token in zip(output.attempts, output.positions, output.tokens, strict=True):
            known = self.tokens.setdefault(attempt, [])
            assert position == self.first.setdefault(attempt, position) + len(known)
            assert attempt not in self.finished
            known.append(token)
        for start in output.started:
            assert self.started.setdefault(start.attempt, start) is start
        for reserved in output.reserved:
            void = self.reserved.get(reserved.attempt)
            assert void is None or not void.claim()  # the engine took it back
            self.reserved[reserved.attempt] = reserved
        for chunk in output.chunks:
            self.chunks.setdefault(chunk.attempt, []).append(chunk)
        for end in output.finished:
            assert end.attempt not in self.failed
            assert self.finished.setdefault(end.attempt, end) is end
        for failure in output.failed:
            assert failure.attempt not in self.finished
            assert self.failed.setdefault(failure.attempt, failure) is failure


class Rig:
    """A scheduler, its pool and a CheckingRunner, stepped by hand."""

    def __init__(
        self,
        n_blocks: int = 64,
        block_tokens: int = 8,
        chunk_tokens: int = 64,
        max_batch: int = 16,
        context_tokens: int = 4096,
        *,
        order: Order = Order.DEADLINE,
        step_s: float = 0.01,
    ) -> None:
        self.now_s = 1000.0  # `step_s` later with each step
        self.step_s = step_s
        self.runner = CheckingRunner(n_blocks, block_tokens, context_tokens)
        self.pool = BlockPool(n_blocks)
        self.counters = Counters()
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            context_tokens=context_tokens,
            eos_token_ids=self.runner.eos_token_ids,
            counters=self.counters,
            order=order,
        )
        self.told = Told()

    def submit(self, *works: Work) -> None:
        for piece in works:
            self.scheduler.submit(piece, self.now_s)

    def step(self) -> StepOutput:
        promised = self.scheduler.runnable
        plan = self.scheduler.schedule()
        if plan.n_tokens:
            assert promised
            self.scheduler.apply(plan, self.runner.run(plan))
        self.now_s += self.step_s
        output = self.scheduler.collect(plan.n_tokens)
        assert output.load.blocks.conserved
        assert output.load.waiting_tokens >= 0
        self.told.add(output)
        return output

    def run(self, most_steps: int = 10_000) -> int:
        """Step until nothing can run; the number of steps."""
        for n in range(most_steps):
            if self.step().load.batch_tokens == 0 and not self.scheduler.runnable:
                return n
        raise AssertionError(f"still busy after {most_steps} steps: no progress")

    def assert_idle(self) -> None:
        """Nothing is held: every block is cached or free, nothing is left to compute."""
        assert self.scheduler.n_live == 0
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.runnable) == (0, 0, 0, False)
        assert load.blocks.cached + load.blocks.free == load.blocks.total


def hand_over(source: Rig, target: Rig, attempt: int) -> None:
    """What the two roles do between PREFILL's last chunk and DECODE's first step."""
    chunks = source.told.chunks[attempt]
    theirs = [block for chunk in chunks for block in chunk.blocks]
    ours = target.told.reserved[attempt]
    assert len(theirs) == len(ours.blocks)
    target.runner.copy(source.runner, list(zip(theirs, ours.blocks, strict=True))[ours.n_cached :])
    source.scheduler.release(AttemptId(attempt))
    token = chunks[-1].token
    assert token is not None
    target.scheduler.kv_arrived(AttemptId(attempt), token)


def arrive(rig: Rig, attempt: int) -> None:
    """The KV of a reserved attempt is here."""
    seq = rig.scheduler.reserved(AttemptId(attempt))
    assert seq is not None
    rig.runner.write(seq, 0, len(seq.tokens))
    rig.scheduler.kv_arrived(AttemptId(attempt), next_token(seq.tokens))
