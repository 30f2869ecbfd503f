"""Every message that crosses a process, one struct each: the whole protocol on one page.

Encoding: msgpack arrays `[tag, field, ...]` (msgspec), length-prefixed by the link (serving/link.py).
A field may only ever be *added at the end with a default*, so wire versions N and N-1 understand each
other: an old reader ignores what it does not know, a new reader fills in the default.
Token ids travel as little-endian u32 bytes, attempts and hashes as u64 bytes: columns, not objects.

    Hello, Proof, Welcome, Beat, Bye              any link
    Submit, Cancel, Peers                         frontend -> worker
    Step, Snapshot                                worker -> frontend
    SnapshotRequest                               frontend -> worker
    PeerHello, PeerWelcome, Attach, Lend, Detach,
    Renew, Confirm, Chunk, Confirmed, Refused     reader <-> owner of KV
    Register, MetricsPush, MetricsPull,
    ScrapeRequest, ScrapeReply, Settings, Members party <-> control
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import msgspec

from serving.engine.base import SamplingParams

WIRE_VERSION = 1
OLDEST_WIRE_VERSION = 1


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the tag is the first element of the array."""


# ---------------------------------------------------------------- any link


class Hello(Message, tag="hello"):
    """First frame of both sides: who I am, and the nonce the other side must sign."""

    wire: int
    oldest_wire: int
    package: str  # package version
    kind: str  # frontend | worker | control
    ident: str  # stable name of the process (Serve replica id)
    epoch: int  # u64, fresh per incarnation
    nonce: bytes  # 32 bytes


class Proof(Message, tag="proof"):
    """HMAC-SHA256 over both hellos, keyed by the link key; direction-bound."""

    mac: bytes


class Refusal(Message, tag="refusal"):
    """Why the link is closed; the last frame before it is."""

    reason: str


class Beat(Message, tag="beat"):
    """Sent every 0.5 s; `step` and `runnable` let the reader tell a hung engine from an idle one."""

    step: int = 0
    runnable: bool = False


# ---------------------------------------------------------------- frontend -> worker


class Handoff(msgspec.Struct, array_like=True):
    """Where the KV of a decode attempt comes from."""

    address: str  # host:port of the owner's link
    ident: str
    epoch: int
    attempt: int  # the owner's attempt


class Pull(msgspec.Struct, array_like=True):
    """A worker that is believed to have a prefix of the prompt cached, which is faster to read than to
    compute. A hint: whatever becomes of it, the prompt gets computed."""

    address: str  # host:port of its link
    ident: str
    epoch: int
    tokens: int  # so many leading ones
    within_ms: int  # how long an answer is worth waiting for


class Submit(Message, tag="submit"):
    """One attempt. `tokens`: u32 LE bytes, the prompt and what was already generated."""

    attempt: int
    mode: str  # Mode value
    tokens: bytes
    n_prompt: int
    params: SamplingParams
    namespace: int
    request_id: str
    deadline_ms: int  # time left for this attempt when it was sent
    handoff: Handoff | None = None
    priority: int = 0
    pull: Pull | None = None  # LOCAL, PREFILL


class Cancel(Message, tag="cancel"):
    attempt: int


class PeerAddress(msgspec.Struct, array_like=True):
    address: str
    ident: str
    epoch: int
    layout: str


class Peers(Message, tag="peers"):
    """The workers this frontend sees, so that workers can warm their agent connections."""

    peers: list[PeerAddress]


class SnapshotRequest(Message, tag="snap?"):
    """Asks for the worker's whole cache content after a gap or a new epoch."""


# ---------------------------------------------------------------- worker -> frontend


class Tokens(msgspec.Struct, array_like=True):
    """The tokens of one or more steps for one frontend; entry i of each column belongs together."""

    attempts: bytes  # u64 LE
    positions: bytes  # u32 LE
    tokens: bytes  # u32 LE


class Logprobs(msgspec.Struct, array_like=True):
    row: int  # index into the columns of Tokens
    logprob: float
    top: list[tuple[int, float]]


class Ended(msgspec.Struct, array_like=True):
    """Attempt over on this worker. `reason`: stop | length; or, with `error`, failed."""

    attempt: int
    reason: str
    error: str | None = None
    retryable: bool = False


class Begun(msgspec.Struct, array_like=True):
    """The attempt is scheduled; `n_cached` prompt tokens were found in the cache, here or at a peer."""

    attempt: int
    n_cached: int


class Stored(msgspec.Struct, array_like=True):
    parent: int | None
    hashes: bytes  # u64 LE, a chain


class Events(msgspec.Struct, array_like=True):
    """KV events; `seq` counts frames of events from this epoch, starting at 1."""

    seq: int
    stored: list[Stored]
    removed: bytes  # u64 LE
    cleared: bool = False


class LoadReport(msgspec.Struct, array_like=True):
    step: int
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int  # free + cached: what a new request could get
    total_blocks: int
    step_ms: float
    role: str = ""
    # Reads of KV from peers since the report before; of a streamed hand-off its last chunk alone.
    moves: int = 0
    moved_tokens: int = 0
    move_ms: float = 0.0  # summed


class Step(Message, tag="step"):
    """One frame per engine step per frontend; whatever is empty is None."""

    tokens: Tokens | None = None
    logprobs: list[Logprobs] | None = None
    begun: list[Begun] | None = None
    ended: list[Ended] | None = None
    events: Events | None = None
    load: LoadReport | None = None


class Snapshot(Message, tag="snap"):
    """Cache content as chains, and the sequence number it is up to date with."""

    seq: int
    stored: list[Stored]


# ---------------------------------------------------------------- reader <-> owner


class PeerHello(Message, tag="peer"):
    """Reader -> owner: my agent's metadata; the owner answers with its own."""

    metadata: bytes
    layout: str


class PeerWelcome(Message, tag="peer-ok"):
    metadata: bytes
    layout: str
    agent: str
    base_address: int
    block_bytes: int
    n_blocks: int
    device: int
    kind: str = "DRAM"  # memory type: DRAM or VRAM


class Attach(Message, tag="attach"):
    """Reader -> owner: I take the KV of `attempt`; tell me its chunks from block `first` on."""

    attempt: int
    first: int


class Lend(Message, tag="lend"):
    """Reader -> owner: pin what you have cached of these tokens and tell me its blocks from `first` on.

    The owner goes on as with an `Attach`: one last Chunk, or Refused.
    """

    attempt: int  # the reader's name for the loan, unknown to the owner: `loan_of` its own attempt
    namespace: int
    tokens: bytes  # u32 LE
    first: int


class Chunk(Message, tag="chunk"):
    """Owner -> reader: these blocks are final and leased until `lease_ms` from now."""

    attempt: int
    first: int
    blocks: bytes  # u32 LE, ids in the owner's pool
    last: bool
    generation: int  # of the lease
    lease_ms: int
    token: int | None = None  # with `last`: first generated token; None: finished, nothing to do


class Renew(Message, tag="renew"):
    """Reader -> owner: still reading; prolong the lease."""

    attempt: int
    generation: int


class Confirm(Message, tag="confirm"):
    """Reader -> owner: all is read; was the lease whole until now?  Ends the lease if so."""

    attempt: int
    generation: int


class Confirmed(Message, tag="confirmed"):
    attempt: int
    generation: int


class Refused(Message, tag="refused"):
    """Owner -> reader: unknown, expired or failed; do not use what you read."""

    attempt: int
    reason: str


class Detach(Message, tag="detach"):
    """Reader -> owner: I no longer want `attempt` (cancelled, failed)."""

    attempt: int


# ---------------------------------------------------------------- party <-> control


class Register(Message, tag="register"):
    """Party -> control, first message after the handshake; repeated when something changes."""

    kind: str  # frontend | worker
    ident: str
    labels: dict[str, str]  # model, variant, pool, ...
    address: str | None = None


class Sample(msgspec.Struct, array_like=True):
    suffix: str  # "", "_total", "_bucket", "_sum", "_count"
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    name: str
    type: str  # counter | gauge | histogram
    help: str
    samples: list[Sample]


class MetricsPull(Message, tag="metrics?"):
    """Control -> party: send a snapshot now."""

    serial: int


class MetricsPush(Message, tag="metrics"):
    """Party -> control: my whole state; replaces the one before."""

    serial: int
    families: list[Family]


class ScrapeRequest(Message, tag="scrape?"):
    """Frontend -> control: the metrics of the whole application."""

    serial: int


class ScrapeReply(Message, tag="scrape"):
    serial: int
    families: list[Family]


class Settings(Message, tag="settings"):
    """Control -> party: live settings, whole; `version` grows."""

    version: int
    values: dict[str, Any]


class Members(Message, tag="members"):
    """Control -> party: who is registered (ident -> kind and labels)."""

    version: int
    parties: list[Register]


AnyMessage = (
    Hello
    | Proof
    | Refusal
    | Beat
    | Submit
    | Cancel
    | Peers
    | SnapshotRequest
    | Step
    | Snapshot
    | PeerHello
    | PeerWelcome
    | Attach
    | Lend
    | Chunk
    | Renew
    | Confirm
    | Confirmed
    | Refused
    | Detach
    | Register
    | MetricsPull
    | MetricsPush
    | ScrapeRequest
    | ScrapeReply
    | Settings
    | Members
)

_LOAN = 1 << 63  # frontends leave this bit of their attempts clear


def loan_of(attempt: int) -> int:
    """The name under which `attempt` borrows a prefix: unique, as attempts are, and none of them."""
    return attempt | _LOAN


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises `msgspec.MsgspecError` for bytes that are no message of this protocol."""
    return _decoder.decode(data)


def pack_u32(values: list[int] | array[int]) -> bytes:
    """Little-endian u32 bytes; raises OverflowError for values outside 0 .. 2**32 - 1."""
    column = values if isinstance(values, array) and values.typecode == "I" else array("I", values)
    return _little_endian(column)


def unpack_u32(data: bytes) -> array[int]:
    """Inverse of `pack_u32`; raises ValueError if the length is no multiple of 4."""
    return _column("I", data)


def pack_u64(values: list[int]) -> bytes:
    return _little_endian(array("Q", values))


def unpack_u64(data: bytes) -> array[int]:
    return _column("Q", data)


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(typecode: str, data: bytes) -> array[int]:
    column = array(typecode)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
