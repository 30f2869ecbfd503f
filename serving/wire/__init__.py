"""Every message that crosses a process, one struct each: the whole protocol on one page.

Encoding: msgpack arrays `[tag, field, ...]` (msgspec), length-prefixed by the link (serving/link.py).
A field may only ever be *added at the end with a default*, and a new message says `since` which version it
exists, so wire versions N and N-1 understand each other: an old reader ignores fields it does not know and
is sent no message it does not know; a new reader fills in the defaults.
Token ids travel as little-endian u32 bytes, attempts and hashes as u64 bytes: columns, not objects.

    link      Hello, Proof, Refusal, Beat                                    any link
    worker    Submit, Cancel, Peers, SnapshotRequest                         frontend -> worker
              Step, Snapshot, Draining                                       worker -> frontend
    peer      PeerHello, PeerWelcome, Attach, Lend, Detach, Renew,
              Ready, Confirm, Chunk, Confirmed, Refused                             reader <-> owner of KV
    control   Register, MetricsPush, MetricsPull, ScrapeRequest, ScrapeReply,
              Settings, Members, Orders, WorkerReport, FrontendReport,
              AdminRequest, AdminReply                                       party <-> control
"""

from __future__ import annotations

import msgspec

from serving.wire.base import (
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    Message,
)
from serving.wire.columns import (
    pack_u32,
    pack_u64,
    unpack_u32,
    unpack_u64,
)
from serving.wire.control import (
    AdminReply,
    AdminRequest,
    ArrivalRow,
    Family,
    Fitted,
    FrontendReport,
    Members,
    MetricsPull,
    MetricsPush,
    Orders,
    Register,
    Sample,
    ScrapeReply,
    ScrapeRequest,
    Settings,
    WorkerReport,
)
from serving.wire.link import (
    Beat,
    Hello,
    Proof,
    Refusal,
)
from serving.wire.peer import (
    Attach,
    Chunk,
    Confirm,
    Confirmed,
    Detach,
    Lend,
    PeerHello,
    PeerWelcome,
    Ready,
    Refused,
    Renew,
    loan_of,
)
from serving.wire.worker import (
    LAYOUT,
    STEP,
    Begun,
    Cancel,
    Draining,
    Ended,
    Events,
    Handoff,
    LoadReport,
    Logprobs,
    PeerAddress,
    Peers,
    Pull,
    Snapshot,
    SnapshotRequest,
    Step,
    Stored,
    Submit,
    Tokens,
)

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
    | Ready
    | Chunk
    | Renew
    | Confirm
    | Confirmed
    | Refused
    | Detach
    | Draining
    | Register
    | MetricsPull
    | MetricsPush
    | ScrapeRequest
    | ScrapeReply
    | Settings
    | Members
    | Orders
    | WorkerReport
    | FrontendReport
    | AdminRequest
    | AdminReply
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises `msgspec.MsgspecError` for bytes that are no message of this protocol."""
    return _decoder.decode(data)


__all__ = [
    "LAYOUT",
    "OLDEST_WIRE_VERSION",
    "STEP",
    "WIRE_VERSION",
    "AdminReply",
    "AdminRequest",
    "AnyMessage",
    "ArrivalRow",
    "Attach",
    "Beat",
    "Begun",
    "Cancel",
    "Chunk",
    "Confirm",
    "Confirmed",
    "Detach",
    "Draining",
    "Ended",
    "Events",
    "Family",
    "Fitted",
    "FrontendReport",
    "Handoff",
    "Hello",
    "Lend",
    "LoadReport",
    "Logprobs",
    "Members",
    "Message",
    "MetricsPull",
    "MetricsPush",
    "Orders",
    "PeerAddress",
    "PeerHello",
    "PeerWelcome",
    "Peers",
    "Proof",
    "Pull",
    "Ready",
    "Refusal",
    "Refused",
    "Register",
    "Renew",
    "Sample",
    "ScrapeReply",
    "ScrapeRequest",
    "Settings",
    "Snapshot",
    "SnapshotRequest",
    "Step",
    "Stored",
    "Submit",
    "Tokens",
    "WorkerReport",
    "decode",
    "encode",
    "loan_of",
    "pack_u32",
    "pack_u64",
    "unpack_u32",
    "unpack_u64",
]
