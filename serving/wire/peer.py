"""Messages between a reader and an owner of KV, both workers."""

from __future__ import annotations

from typing import ClassVar

from serving.wire.base import Message
from serving.wire.fields import U64


class PeerHello(Message, tag="peer"):
    """Reader -> owner: my agent's metadata; the owner answers with its own."""

    metadata: bytes
    layout: str


class PeerWelcome(Message, tag="peer-ok"):
    metadata: bytes
    layout: str
    agent: str
    base_address: U64
    block_bytes: U64
    n_blocks: U64
    device: U64
    kind: str = "DRAM"  # memory type: DRAM or VRAM


class Attach(Message, tag="attach"):
    """Reader -> owner: I take the KV of `attempt`; tell me its chunks from block `first` on.

    With `n_tokens` it takes over an attempt that decodes there: a live hand-off.
    """

    attempt: U64
    first: U64
    n_tokens: U64 = 0  # the reader knows so many of a live attempt's tokens (since 2)
    reserve_tokens: U64 = 0  # and has room for so many more (since 2)


class Ready(Message, tag="ready"):
    """Reader -> owner of a live attempt: I have what you announced; stop, and tell me the rest."""

    since: ClassVar[int] = 2
    attempt: U64
    generation: U64


class Lend(Message, tag="lend"):
    """Reader -> owner: pin what you have cached of these tokens and tell me its blocks from `first` on.

    The owner goes on as with an `Attach`: one last Chunk, or Refused.
    """

    attempt: U64  # the reader's name for the loan, unknown to the owner: `loan_of` its own attempt
    namespace: U64
    tokens: bytes  # u32 LE
    first: U64


class Chunk(Message, tag="chunk"):
    """Owner -> reader: these blocks are final and leased until `lease_ms` from now."""

    attempt: U64
    first: U64
    blocks: bytes  # u32 LE, ids in the owner's pool
    last: bool
    generation: U64  # of the lease
    lease_ms: U64
    token: U64 | None = None  # with `last`: first generated token; None: finished, nothing to do
    tokens: bytes = b""  # with `last` of a live attempt: u32 LE, those the reader does not know (since 2)
    state: bytes = b""  # with `last`: what an engine that moves KV by itself needs (since 2)


class Renew(Message, tag="renew"):
    """Reader -> owner: still reading; prolong the lease."""

    attempt: U64
    generation: U64


class Confirm(Message, tag="confirm"):
    """Reader -> owner: all is read; was the lease whole until now?  Ends the lease if so."""

    attempt: U64
    generation: U64


class Confirmed(Message, tag="confirmed"):
    attempt: U64
    generation: U64


class Refused(Message, tag="refused"):
    """Owner -> reader: unknown, expired or failed; do not use what you read."""

    attempt: U64
    reason: str


class Detach(Message, tag="detach"):
    """Reader -> owner: I no longer want `attempt` (cancelled, failed)."""

    attempt: U64


_LOAN = 1 << 63  # frontends leave this bit of their attempts clear


def loan_of(attempt: int) -> int:
    """The name under which `attempt` borrows a prefix: unique, as attempts are, and none of them."""
    return attempt | _LOAN
