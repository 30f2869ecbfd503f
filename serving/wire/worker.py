"""Messages between a frontend and a worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from serving.engine.base import SamplingParams
from serving.wire.base import Message
from serving.wire.fields import FEW, MANY, ROWS, U64, Amount

# ---------------------------------------------------------------- frontend -> worker


class Handoff(msgspec.Struct, array_like=True):
    """Where the KV of a decode attempt comes from."""

    address: str  # host:port of the owner's link
    ident: str
    epoch: U64
    attempt: U64  # the owner's attempt
    live: bool = False  # it still generates: a migration (since 2)


class Pull(msgspec.Struct, array_like=True):
    """A worker that is believed to have a prefix of the prompt cached, which is faster to read than to
    compute. A hint: whatever becomes of it, the prompt gets computed."""

    address: str  # host:port of its link
    ident: str
    epoch: U64
    tokens: U64  # so many leading ones
    within_ms: U64  # how long an answer is worth waiting for


class Submit(Message, tag="submit"):
    """One attempt. `tokens`: u32 LE bytes, the prompt and what was already generated."""

    attempt: U64
    mode: str  # Mode value
    tokens: bytes
    n_prompt: U64
    params: SamplingParams
    namespace: U64
    request_id: str
    deadline_ms: U64  # time left for this attempt when it was sent
    handoff: Handoff | None = None
    priority: int = 0
    pull: Pull | None = None  # LOCAL, PREFILL
    reserve_tokens: U64 = 0  # with a live hand-off: so many may be drawn there meanwhile (since 2)
    adapter: str = ""  # LoRA (since 2)
    uncached_tokens: U64 | None = None  # to compute there, as predicted (since 2)
    waited_ms: U64 = 0  # its client, for its next token (since 2)


class Cancel(Message, tag="cancel"):
    attempt: U64


class PeerAddress(msgspec.Struct, array_like=True):
    address: str
    ident: str
    epoch: U64
    layout: str


class Peers(Message, tag="peers"):
    """The workers this frontend sees, so that workers can warm their agent connections."""

    peers: Annotated[list[PeerAddress], FEW]


class SnapshotRequest(Message, tag="snap?"):
    """Asks for the worker's whole cache content after a gap or a new epoch."""


# ---------------------------------------------------------------- worker -> frontend


class Tokens(msgspec.Struct, array_like=True):
    """The tokens of one or more steps for one frontend; entry i of each column belongs together."""

    attempts: bytes  # u64 LE
    positions: bytes  # u32 LE
    tokens: bytes  # u32 LE


class Logprobs(msgspec.Struct, array_like=True):
    row: U64  # index into the columns of Tokens
    logprob: float
    top: Annotated[list[tuple[U64, float]], FEW]


# Ended.reason
STEP = "step"
LAYOUT = "layout"


class Ended(msgspec.Struct, array_like=True):
    """Attempt over on this worker. `reason`: stop | length | moved (a reader of a live hand-off goes on
    with it, since 2); or, with `error`, failed: STEP when computing it raised, LAYOUT when the owner of its
    KV has it in another layout."""

    attempt: U64
    reason: str
    error: str | None = None
    retryable: bool = False


class Begun(msgspec.Struct, array_like=True):
    """The attempt is scheduled; `n_cached` prompt tokens were found in the cache, here or at a peer."""

    attempt: U64
    n_cached: U64


class Stored(msgspec.Struct, array_like=True):
    parent: U64 | None
    hashes: bytes  # u64 LE, a chain


class Events(msgspec.Struct, array_like=True):
    """KV events; `seq` counts frames of events from this epoch, starting at 1."""

    seq: U64
    stored: Annotated[list[Stored], MANY]
    removed: bytes  # u64 LE
    cleared: bool = False


class LoadReport(msgspec.Struct, array_like=True):
    step: U64
    running: U64
    waiting: U64
    waiting_tokens: U64
    free_blocks: U64  # free + cached: what a new request could get
    total_blocks: U64
    step_ms: Amount
    role: str = ""
    # Reads of KV from peers since the report before; of a streamed hand-off its last chunk alone.
    moves: U64 = 0
    moved_tokens: U64 = 0
    move_ms: Amount = 0.0  # summed
    # The first prompts to compute, soonest due first: attempt, tokens left, due in so many ms (since 2).
    queue: Annotated[list[tuple[U64, U64, int]], FEW] | None = None
    computed_tokens: U64 | None = None  # of prompts, since this epoch began (since 2)
    # Sequences that the step decoded, KV tokens they held; 0, 0 if it computed prompts too (since 2).
    decoded: tuple[U64, U64] | None = None
    parked: Annotated[list[U64], FEW] | None = None  # attempts that only lack room there (since 2)


class Step(Message, tag="step"):
    """One frame per engine step per frontend; whatever is empty is None."""

    tokens: Tokens | None = None
    logprobs: Annotated[list[Logprobs], MANY] | None = None
    begun: Annotated[list[Begun], ROWS] | None = None
    ended: Annotated[list[Ended], ROWS] | None = None
    events: Events | None = None
    load: LoadReport | None = None
    # Prompts that other frontends have sent just now: attempt, tokens to compute (since 2).
    placed: Annotated[list[tuple[U64, U64]], FEW] | None = None


class Snapshot(Message, tag="snap"):
    """Cache content as chains, and the sequence number it is up to date with."""

    seq: U64
    stored: Annotated[list[Stored], MANY]


class Draining(Message, tag="drain"):
    """This worker wants no new requests, and those it has moved elsewhere; or (`on` false) no longer so."""

    since: ClassVar[int] = 2
    on: bool
