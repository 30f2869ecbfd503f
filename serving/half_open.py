"""Connections that have not proved the link key yet: a few an address, and not many in all.

When there is one too many the oldest is ended, not the newest refused: an honest handshake takes
milliseconds, so a peer that holds connections open cannot keep others out.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")


class HalfOpen(Generic[C]):
    """Connections in the order in which they came, with the address that each came from."""

    def __init__(self, most: int, most_an_address: int) -> None:
        self._most = most
        self._most_an_address = most_an_address
        self._addresses: dict[C, str] = {}  # oldest first
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: C, address: str) -> C | None:
        """Returns the connection to end for it, which is forgotten by now."""
        surplus: C | None = None
        if self._counts.get(address, 0) >= self._most_an_address:
            surplus = next(c for c, a in self._addresses.items() if a == address)
        elif len(self._addresses) >= self._most:
            surplus = next(iter(self._addresses))
        if surplus is not None:
            self.remove(surplus)
        self._addresses[connection] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        return surplus

    def remove(self, connection: C) -> None:
        """It proved the key, or it is gone. Idempotent."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
