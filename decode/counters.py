"""Totals of the hand-offs one worker took over, and of those that were live."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.errors import (
    LayoutMismatch,
    LeaseRefused,
    LinkError,
    PeerGone,
    TransferError,
    TransferTimeout,
)

# Most specific first.
_KINDS: list[tuple[type[Exception], str]] = [
    (LayoutMismatch, "layout_mismatch"),
    (LeaseRefused, "lease_refused"),
    (PeerGone, "peer_gone"),
    (TransferTimeout, "timeout"),
    (TransferError, "transfer"),
    (LinkError, "link"),
]


@dataclass(slots=True)
class HandoffCounters:
    """Monotone totals, but for `last_tail_ms`."""

    handoffs: int = 0  # taken over in full
    blocks: int = 0  # moved; blocks that decode already held are not
    bytes: int = 0
    seconds: float = 0.0  # attach to `kv_arrived`, summed
    tail_seconds: float = 0.0  # last chunk announced to `kv_arrived`, summed
    last_tail_ms: float | None = None
    cancelled: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by kind

    def taken(self, blocks: int, block_bytes: int, seconds: float, tail_seconds: float) -> None:
        self.handoffs += 1
        self.blocks += blocks
        self.bytes += blocks * block_bytes
        self.seconds += seconds
        self.tail_seconds += tail_seconds
        self.last_tail_ms = tail_seconds * 1e3

    def failed(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1


@dataclass(slots=True)
class MoveCounters:
    """Monotone totals of live hand-offs, of one direction."""

    outcomes: dict[str, int] = field(default_factory=dict)
    bytes: int = 0  # read, of those that came to be

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def failure_kind(error: BaseException) -> str:
    """A label for metrics."""
    return next((kind for cls, kind in _KINDS if isinstance(error, cls)), "internal")
