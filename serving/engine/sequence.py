"""A request inside the engine, what a step computes, and who computes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine.base import (
    BlockHash,
    BlockId,
    KVMemory,
    Mode,
    SamplingParams,
    TokenLogprobs,
    Work,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens with their blocks. `tokens[:computed]` have KV in `blocks`; the rest is still to compute.

    Invariants: `computed < len(tokens)` while it runs; block `i` holds tokens `[i*B, (i+1)*B)`;
    `hashes[i]` names block `i` once it is full and computed.
    """

    work: Work
    tokens: array[int]  # 'I'; grows by the generated tokens
    blocks: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens whose KV was found, at the (first) start

    @property
    def mode(self) -> Mode:
        return self.work.mode

    @property
    def params(self) -> SamplingParams:
        return self.work.params

    @property
    def n_generated(self) -> int:
        """Tokens generated so far, over all attempts of the request."""
        return len(self.tokens) - self.work.n_prompt

    @property
    def n_remaining(self) -> int:
        """Tokens without KV; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class PrefillSlice:
    """Compute `tokens[start:start + count]` of `sequence`; its blocks are allocated."""

    sequence: Sequence
    start: int
    count: int

    @property
    def draws(self) -> bool:
        """The slice reaches the last token, so the step draws the next one."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """Decodes first (one token each, at position `len(tokens) - 1`), then prompt slices."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[PrefillSlice] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.decodes) + sum(piece.count for piece in self.prefills)

    @property
    def drawing(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of `Drawn.tokens`."""
        return self.decodes + [piece.sequence for piece in self.prefills if piece.draws]


@dataclass(slots=True)
class Drawn:
    """One token per entry of `StepPlan.drawing`; logprobs by index for those that asked."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Runner(Protocol):
    """Computes a plan. Owns the pool's memory and the weights; knows nothing of scheduling."""

    memory: KVMemory
    layout: str
    context_tokens: int
    eos_token_ids: frozenset[int]

    def run(self, plan: StepPlan) -> Drawn:
        """Write KV for every planned token into its block and draw for `plan.drawing`.

        Changes the pool's memory only; the sequences are advanced by the scheduler.
        """

    def accept(self, sequence: Sequence, n_tokens: int) -> str | None:
        """The transferred blocks of the first `n_tokens` are about to be used; a text if they are wrong."""
