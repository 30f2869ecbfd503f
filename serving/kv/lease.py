"""Leases: how long an owner keeps a request's blocks pinned for a reader. Pure; time is a parameter.

A lease outlives its reader's own deadline, so whoever still holds a whole lease holds whole blocks. What
ended is remembered for a while: a late renewal or confirmation gets a clear no, and a repeated
confirmation the same yes.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from serving.engine.base import AttemptId

_NOTE = struct.Struct("<QQ")


def pack_note(attempt: AttemptId, generation: int) -> bytes:
    """What a reader's agent sends along with a read under that lease: a sign of life."""
    return _NOTE.pack(attempt, generation)


def unpack_note(note: bytes) -> tuple[AttemptId, int] | None:
    """None for what is no such note."""
    if len(note) != _NOTE.size:
        return None
    attempt, generation = _NOTE.unpack(note)
    return AttemptId(attempt), generation


class LeaseEnd(str, Enum):
    CONFIRMED = "confirmed"  # read in full while the lease was whole
    EXPIRED = "expired"
    RELEASED = "released"  # the reader or the request no longer needs it


@dataclass(slots=True)
class Lease:
    attempt: AttemptId
    generation: int  # unique over all leases of this table
    expires_s: float


class LeaseTable:
    """At most one lease an attempt. Every verb is idempotent and first ends what is due at `now_s`;
    attempts that ended that way are handed out by the next `expire`."""

    def __init__(self, *, remember: int = 4096) -> None:
        self._live: dict[AttemptId, Lease] = {}
        self._ended: OrderedDict[AttemptId, tuple[int, LeaseEnd]] = OrderedDict()
        self._remember = remember
        self._last_generation = 0
        self._due: list[AttemptId] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._live

    def grant(self, attempt: AttemptId, now_s: float, duration_s: float) -> Lease | None:
        """The lease of `attempt`, new or prolonged to `now_s + duration_s`; None once it has ended."""
        lease = self._current(attempt, now_s)
        if lease is None:
            if attempt in self._ended:
                return None
            self._last_generation += 1
            lease = self._live[attempt] = Lease(attempt, self._last_generation, now_s)
        lease.expires_s = max(lease.expires_s, now_s + duration_s)
        return lease

    def renew(self, attempt: AttemptId, generation: int, now_s: float, duration_s: float) -> bool:
        """Prolong; False if that lease is not whole any more."""
        lease = self._current(attempt, now_s)
        if lease is None or lease.generation != generation:
            return False
        lease.expires_s = max(lease.expires_s, now_s + duration_s)
        return True

    def confirm(self, attempt: AttemptId, generation: int, now_s: float) -> bool:
        """Was the lease whole from its grant until now? Ends it if so."""
        lease = self._current(attempt, now_s)
        if lease is None:
            return self._ended.get(attempt) == (generation, LeaseEnd.CONFIRMED)
        if lease.generation != generation:
            return False
        self._end(lease, LeaseEnd.CONFIRMED)
        return True

    def release(self, attempt: AttemptId) -> bool:
        """End the lease whatever its state; False if there was none."""
        lease = self._live.get(attempt)
        if lease is None:
            return False
        self._end(lease, LeaseEnd.RELEASED)
        return True

    def expire(self, now_s: float) -> list[AttemptId]:
        """Attempts whose lease ran out, each named once."""
        for lease in [lease for lease in self._live.values() if lease.expires_s <= now_s]:
            self._lapse(lease)
        due, self._due = self._due, []
        return due

    def ended(self, attempt: AttemptId) -> LeaseEnd | None:
        """How the lease of `attempt` ended, while that is remembered."""
        end = self._ended.get(attempt)
        return end[1] if end else None

    def _current(self, attempt: AttemptId, now_s: float) -> Lease | None:
        lease = self._live.get(attempt)
        if lease is not None and lease.expires_s <= now_s:
            self._lapse(lease)
            return None
        return lease

    def _lapse(self, lease: Lease) -> None:
        self._end(lease, LeaseEnd.EXPIRED)
        self._due.append(lease.attempt)

    def _end(self, lease: Lease, how: LeaseEnd) -> None:
        del self._live[lease.attempt]
        self._ended[lease.attempt] = (lease.generation, how)
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
