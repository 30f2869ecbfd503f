"""The engine seam: typed work in, one batch of outputs per step out.

An engine knows nothing of HTTP, SSE, text or Ray. It runs on its own thread; every verb below may be
called from any thread, returns at once and takes effect before the engine's next step. All blocks of
its pool are owned by that thread.

How a request lives here, by `Mode`:

    LOCAL    submit -> tokens ... -> finished
    PREFILL  submit -> chunks ... -> first token -> (finished, or leased until `release`)
    DECODE   submit -> reserved -> [KV arrives outside] -> `kv_arrived` -> tokens ... -> finished

Blocks that are reserved before a peer has begun with their KV are on loan: who can use them now takes them
back, and another `reserved` follows. For a peer needs blocks to begin, and those it has are freed when they
are read, into ours: if ours were kept for what it cannot begin, both could wait for ever. `Reserved.claim`
ends the loan; `kv_begun` says that there is something to read.

LOCAL and PREFILL may *pull* (`Work.pull_tokens`): they begin with `submit -> reserved -> [KV of a prefix
arrives outside] -> prefix_arrived`, and compute what did not come. A peer that is pulled from `lend`s.

Between two steps LOCAL and DECODE attempts can leave for another engine (`MigratingEngine`), where they
arrive as DECODE attempts:

    tokens ... -> `share`: a chunk, tokens ... -> `pause`: last chunk -> `release`, or `resume` and on

`cancel` has an edge in every state and is idempotent. After `cancel` no output names the attempt.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import msgspec

AttemptId = NewType("AttemptId", int)  # u64, unique over all frontends and time
BlockId = NewType("BlockId", int)  # index into the pool's memory
BlockHash = NewType("BlockHash", int)  # u64, chained (kvrouter.hashing)

LENT = 0  # ChunkReady.token of a loan, which draws none
TOKEN_TYPECODE = "I"  # array('I'): token ids are unsigned 32 bit everywhere


class Mode(str, Enum):
    LOCAL = "local"  # prefill and decode on this worker
    PREFILL = "prefill"  # up to the first token, then keep the KV for a reader
    DECODE = "decode"  # the prompt's KV comes from a peer


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"


class Guided(msgspec.Struct, frozen=True, array_like=True):
    """What an answer is bound to. `source`: a JSON schema, a regular expression, an EBNF grammar, or ""."""

    kind: str  # json, json_object, regex or grammar
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to draw tokens, validated at the door; `None` is "off", never a sentinel number."""

    max_tokens: int  # >= 1, total to generate over all attempts
    seed: int  # u64; the frontend draws one when the client gave none
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int | None = None  # >= 1
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # (0, 10]
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # no EOS and no stop token before this many
    logprobs: int | None = None  # top logprobs beside the chosen one; 0 = the chosen one alone
    guided: Guided | None = None  # engines with `Capabilities.guided` (since 2)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(slots=True)
class Work:
    """One attempt at (a piece of) a request.

    `tokens` is the prompt followed by what earlier attempts already generated; the next token to draw
    has position `len(tokens)`. `n_prompt` marks where the client's prompt ends: penalties, `min_tokens`
    and `max_tokens` count from there, so a resumed request goes on as if nothing had happened.
    """

    attempt: AttemptId
    mode: Mode
    tokens: array[int]  # typecode 'I'
    n_prompt: int  # 1 <= n_prompt <= len(tokens)
    params: SamplingParams
    namespace: int  # hash seed of (model, adapter, salt); see kvrouter.hashing.namespace_seed
    priority: int = 0  # higher is computed sooner: each halves the slack (serving.engine.prefill_order)
    pull_tokens: int = 0  # LOCAL, PREFILL: a peer may have so many leading ones, full blocks but not all
    reserve_tokens: int = 0  # DECODE: it decodes elsewhere, where so many more may be drawn; 0: it does not
    adapter: str | None = None  # a LoRA by the name it is configured under
    waited_s: float = 0.0  # its client, for the next token: elsewhere, before it came here


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the unmodified distribution) of one drawn token."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # (token, logprob), best first


@dataclass(slots=True)
class Reserved:
    """Every block the prompt needs is reserved, before `claim` only lent. The first `n_cached` hold their
    KV already."""

    attempt: AttemptId
    # DECODE: of the whole prompt, and of what is reserved; a pull: the full ones of its `pull_tokens`.
    blocks: list[BlockId]
    n_cached: int  # leading blocks that need no transfer
    _claims: deque[None] = field(default_factory=lambda: deque([None]), repr=False, compare=False)

    def claim(self) -> bool:
        """True for the first who asks, from any thread: a reader that is about to write to the blocks, or
        the engine, which then gives them to others."""
        try:
            self._claims.pop()  # a deque's `pop` is atomic
        except IndexError:
            return False
        return True


@dataclass(slots=True)
class ChunkReady:
    """PREFILL: the KV of blocks `[first, first + len(blocks))` of this prompt is final and pinned.

    `last` is set on the chunk that ends the prompt; `token` is then the first generated token, or None
    when the request already finished on it (nobody needs the KV). What `lend` found is one such chunk with
    the token LENT; with None when it found nothing.

    Of a shared attempt (`share` not 0, see MigratingEngine) the last chunk has the last token drawn, or
    None where there is nothing to take over.
    """

    attempt: AttemptId
    first: int  # index of blocks[0] within the prompt
    blocks: list[BlockId]
    last: bool
    token: int | None = None
    state: bytes = b""  # with `last`, of an engine that moves KV by itself: what its peer needs for that
    share: int = 0  # of a shared attempt: the serial number that `share` was given
    tokens: list[int] = field(default_factory=list)  # with `last` of one: those its reader does not know


@dataclass(slots=True)
class Finished:
    attempt: AttemptId
    reason: FinishReason


@dataclass(slots=True)
class Started:
    """The attempt got its blocks and runs; `n_cached` prompt tokens, cached or pulled, are not computed."""

    attempt: AttemptId
    n_cached: int


@dataclass(slots=True)
class Failed:
    """Over. Blocks that waited for KV may be in quarantine: `end_quarantine` once nothing writes them."""

    attempt: AttemptId
    message: str
    retryable: bool = False  # another worker may well succeed
    in_step: bool = False  # computing it raised: if that happens elsewhere too, it is the request's fault


@dataclass(slots=True)
class Moved:
    """DECODE, of an engine that moves KV by itself: the prompt's KV is here, its owner may forget it."""

    attempt: AttemptId
    seconds: float


@dataclass(slots=True)
class StoredRun:
    """Blocks that became findable, a chain: `hashes[0]` follows `parent` (None at a prompt's start)."""

    parent: BlockHash | None
    hashes: list[BlockHash]


@dataclass(slots=True)
class BlockStates:
    """Every block counted once, by precedence used > leased > quarantined > cached > free."""

    total: int
    used: int
    leased: int
    quarantined: int
    cached: int
    free: int

    @property
    def conserved(self) -> bool:
        return self.total == self.used + self.leased + self.quarantined + self.cached + self.free


MOST_PARKED = 64  # told; that many may be more


@dataclass(slots=True)
class Load:
    """What the engine looks like right after a step."""

    step: int
    running: int  # sequences that decode, or whose prompt is begun and holds its blocks
    waiting: int  # all others
    waiting_tokens: int  # prompt tokens still to compute; of waiting ones those not cached when they came
    batch_tokens: int  # tokens computed by this step
    step_ms: float
    runnable: bool  # work is left that the next step could advance
    blocks: BlockStates
    # The first prompts to compute, by when they are due: attempt, tokens left, due. None: it does not tell.
    prompts: list[tuple[AttemptId, int, float]] | None = None
    computed_tokens: int | None = None  # of prompts, in all
    # Sequences that the step decoded and the KV tokens they held; (0, 0) if it computed prompts as well.
    # None: it does not tell.
    decoded: tuple[int, int] | None = None
    # Those that only lack room: blocks for KV that a peer has, or a place in the batch, or the blocks they
    # gave way to others. The first `MOST_PARKED`. None: it does not tell.
    parked: list[AttemptId] | None = None


@dataclass(slots=True)
class Counters:
    """Monotone totals since the engine started; what tests and metrics read."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0  # step time attributed to prompt tokens
    decode_seconds: float = 0.0
    content_checks: int = 0  # sim: blocks whose transferred bytes were checked
    content_errors: int = 0
    prompt_tokens_pulled: int = 0  # read from a peer's cache instead of computed
    event_gaps: int = 0  # an engine that is polled: times its KV events were lost, and its index cleared
    poll_errors: int = 0
    lost_transfers: int = 0  # an engine that moves KV by itself: hand-offs whose end it never told
    deferred_aborts: int = 0  # cancels that waited until a transfer was over


@dataclass(slots=True)
class StepOutput:
    """All that one step produced. The token columns are parallel lists, one entry a token."""

    load: Load
    attempts: list[AttemptId] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # 0 = the token after the prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into the columns
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    chunks: list[ChunkReady] = field(default_factory=list)
    stored: list[StoredRun] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; asked-for features it lacks are refused with a 400 at the door."""

    streamed_handoff: bool = True
    seeded_resume: bool = True
    logprobs: bool = True
    penalties: bool = True
    logit_bias: bool = True
    block_states: bool = True
    migrate_kv: bool = False
    moves_kv: bool = False  # by itself: see SelfMovingEngine
    guided: bool = False  # answers can be bound to a schema, a pattern or a grammar
    tells_begun: bool = True  # `started` comes as a prompt begins, not with its first token


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The block pool's memory: one contiguous region, block `b` at `address + b * block_bytes`."""

    address: int
    block_bytes: int
    n_blocks: int
    device: int = 0
    kind: str = "DRAM"  # NIXL's memory type: DRAM or VRAM
    owner: object = None  # keeps the region alive: KV memory is never freed while a peer may read it

    @property
    def n_bytes(self) -> int:
        return self.block_bytes * self.n_blocks


class Engine(Protocol):
    """See the module docstring for the order of calls."""

    capabilities: Capabilities
    memory: KVMemory
    layout: str  # fingerprint of model, dtype, block and heads (serving.kv.layout)
    block_tokens: int
    context_tokens: int
    counters: Counters
    died: BaseException | None  # why the thread ended, if it did by itself

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """Start the engine's thread; it calls `on_step` after every step that produced something.

        `on_step` must not block: it runs on the engine's thread.
        """

    def submit(self, work: Work) -> None: ...

    def cancel(self, attempt: AttemptId, *, quarantine: bool = False) -> None:
        """Forget `attempt` and free what it holds; idempotent.

        With `quarantine` its blocks stay out of use until `end_quarantine`: a read into them may still
        be in flight.
        """

    def end_quarantine(self, attempt: AttemptId) -> None: ...

    def kv_arrived(self, attempt: AttemptId, token: int, drawn: Sequence[int] = ()) -> None:
        """DECODE: the blocks of `Reserved` hold the KV of all tokens before `token`; go on after that.

        `token` has position 0; or, with `Work.reserve_tokens`, is the last of the work's tokens and
        of those `drawn` since, for which there is room.
        """

    def kv_begun(self, attempt: AttemptId) -> None:
        """DECODE: a peer has some of its KV. From now on it can use its blocks; idempotent."""

    def release(self, attempt: AttemptId) -> None:
        """PREFILL, `lend`: nobody needs the blocks of `attempt` any more (read, expired or refused);
        idempotent."""

    def prefix_arrived(self, attempt: AttemptId, n_blocks: int) -> None:
        """A pull is over: the first `n_blocks` of `Reserved` hold their KV, the rest is to be computed.

        No read into its blocks is in flight any more. 0 is right for whatever went wrong, and at any time:
        before `Reserved` it means that nobody need wait. Ignored when the attempt does not pull (any more).
        """

    def lend(self, attempt: AttemptId, namespace: int, tokens: array[int]) -> None:
        """Pin what is cached of `tokens` until `release(attempt)`, and tell it as one last ChunkReady.

        `attempt` is the reader's name for the loan, of no attempt that lives here.
        """

    def request_snapshot(self, callback: Callable[[list[StoredRun]], None]) -> None:
        """Call `callback` on the engine's thread with all cached content, exactly between two outputs."""

    def stop(self) -> None:
        """End the thread; waits for the running step, a few seconds at most. The memory stays allocated."""


class SelfMovingEngine(Engine, Protocol):
    """An engine with `Capabilities.moves_kv`. Its `memory` counts blocks and has no address: our own
    transfer moves nothing. A DECODE attempt is reserved without blocks; the owner's one chunk has none
    either but a `state`, and what follows is

        reserved -> `take_over` -> moved, tokens ... -> finished
    """

    def take_over(self, attempt: AttemptId, token: int, state: bytes) -> None:
        """In place of `kv_arrived`: fetch the KV that `state` tells of; go on after `token`, position 0."""


class MigratingEngine(Engine, Protocol):
    """An engine with `Capabilities.migrate_kv`: what it decodes can leave for another one.

    A paused attempt ends by `release` when its reader goes on with it: no output tells that.
    """

    def share(self, attempt: AttemptId, serial: int, n_tokens: int, most_tokens: int) -> None:
        """Tell the full blocks of a decoding attempt as a chunk, and go on with it.

        Its reader knows its first `n_tokens` and has room for `most_tokens`: when there are so many it is
        paused. `serial` (not 0) comes back in its chunks. One that does not decode (any more), or is out
        of those bounds, is told as a last chunk without a token, and not shared.
        """

    def pause(self, attempt: AttemptId) -> None:
        """Stop a shared attempt before its next step and tell the rest as its last chunk. Its blocks stay
        in use until `release`, `resume` or `cancel`. Ignored when it is not shared or is paused already."""

    def resume(self, attempt: AttemptId) -> None:
        """Nobody takes it over: share it no more, go on if it was paused. Idempotent."""


class EngineDied(Exception):
    """The engine's thread ended on an exception; the worker is of no use any more."""
