"""Which replicas Serve says exist, per deployment; fed by MembershipRouter, read by frontends and workers.

A module of its own because Serve pickles a request router's class by value together with its module:
state beside the class would be a private copy. This module is imported by reference, once a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Members = dict[str, dict[str, Any]]  # replica id -> what record_replica_metadata() returned
Subscriber = Callable[[Members], None]

_lock = threading.RLock()  # held while subscribers are called: a list never overtakes a newer one
_latest: dict[str, Members] = {}
_subscribers: dict[str, list[Subscriber]] = {}


def publish(deployment: str, members: Members) -> None:
    """Replace the member list of `deployment`; subscribers are called on the caller's thread."""
    with _lock:
        _latest[deployment] = members
        for subscriber in list(_subscribers.get(deployment, ())):
            subscriber(members)


def subscribe(deployment: str, subscriber: Subscriber) -> None:
    """Call `subscriber` with the list known now, if any, and with every later one."""
    with _lock:
        _subscribers.setdefault(deployment, []).append(subscriber)
        latest = _latest.get(deployment)
        if latest is not None:
            subscriber(latest)
