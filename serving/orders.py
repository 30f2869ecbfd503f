"""What Control tells single workers to do: to drain, to play the other pool's role. Pure.

Orders name processes. They outlive a restart of Control, and end when their worker is gone for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from serving.wire import Orders

ROLES = ("prefill", "decode")


class OrderBook:
    """The orders in force. `changed` is called after every change, with what `restore` takes."""

    def __init__(self, changed: Callable[[dict[str, Any]], None] = lambda values: None) -> None:
        self.draining: set[str] = set()
        self.roles: dict[str, str] = {}  # of lent workers only
        self._version = 1
        self._changed = changed

    def message(self) -> Orders:
        return Orders(self._version, sorted(self.draining), dict(self.roles))

    @property
    def workers(self) -> set[str]:
        """Those that some order names."""
        return self.draining | self.roles.keys()

    def drain(self, worker: str) -> None:
        """Idempotent, as all of these."""
        self._change(self.draining | {worker}, self.roles)

    def undrain(self, worker: str) -> None:
        self._change(self.draining - {worker}, self.roles)

    def lend(self, worker: str, role: str) -> None:
        """`worker` is to play `role`, which is not its pool's."""
        self._change(self.draining, {**self.roles, worker: role})

    def call_back(self, worker: str) -> None:
        """`worker` is to play its own pool's role again."""
        self._change(self.draining, {w: r for w, r in self.roles.items() if w != worker})

    def forget(self, worker: str) -> None:
        """It is gone for good."""
        self._change(self.draining - {worker}, {w: r for w, r in self.roles.items() if w != worker})

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take up what another Control had; anything that is not an order is left out."""
        draining, roles = values.get("draining"), values.get("roles")
        if isinstance(draining, list):
            self.draining = {str(worker) for worker in draining}
        if isinstance(roles, dict):
            self.roles = {str(worker): role for worker, role in roles.items() if role in ROLES}

    def _change(self, draining: set[str], roles: dict[str, str]) -> None:
        if (draining, roles) == (self.draining, self.roles):
            return
        self.draining, self.roles = draining, roles
        self._version += 1
        self._changed({"draining": sorted(draining), "roles": dict(roles)})
