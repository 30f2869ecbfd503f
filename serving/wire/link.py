"""Messages of any link: the handshake and the beat."""

from __future__ import annotations

from serving.wire.base import Message
from serving.wire.fields import U64


class Hello(Message, tag="hello"):
    """First frame of both sides: who I am, and the nonce the other side must sign. No proof covers fields
    that come to be after `nonce`: older ends do not know them."""

    wire: int
    oldest_wire: int
    package: str  # package version
    kind: str  # frontend | worker | control
    ident: str  # stable name of the process (Serve replica id)
    epoch: U64  # fresh per incarnation
    nonce: bytes  # 32 bytes


class Proof(Message, tag="proof"):
    """HMAC-SHA256 over both hellos (serving.link.SIGNED_FIELDS), keyed by the link key; direction-bound."""

    mac: bytes


class Refusal(Message, tag="refusal"):
    """Why the link is closed; the last frame before it is."""

    reason: str


class Beat(Message, tag="beat"):
    """Sent every 0.5 s; `step` and `runnable` let the reader tell a hung engine from an idle one."""

    step: U64 = 0
    runnable: bool = False
    ill: str = ""  # of a worker: what is wrong with it (since 2)
