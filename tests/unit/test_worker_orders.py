"""What a worker makes of Control's orders: draining, roles, and what comes when it is about to leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from serving import worker_orders
from serving.wire import Orders
from serving.worker_host import WorkerHost
from serving.worker_orders import OrderedWorker
from tests.unit.handoff_fakes import until

LONG_S = 20.0


class Host:
    """A WorkerHost that is `busy` for as long as a test likes."""

    def __init__(self) -> None:
        self.me = SimpleNamespace(ident="w")
        self.role = "decode"
        self.whys: set[str] = set()
        self.busy = False
        self.played: list[str] = []

    @property
    def draining(self) -> bool:
        return bool(self.whys)

    def drain(self, why: str) -> None:
        self.whys.add(why)

    def undrain(self, why: str) -> None:
        self.whys.discard(why)

    def play(self, role: str) -> None:
        assert self.draining
        self.role = role
        self.played.append(role)


class Rig:
    def __init__(self) -> None:
        self.host = Host()
        self.worker = OrderedWorker(cast(WorkerHost, self.host), "decode")

    def order(self, *, drain: bool = False, role: str | None = None, **others: Any) -> None:
        roles = {"another": "prefill"} | ({} if role is None else {"w": role})
        self.worker.on_orders(Orders(1, ["another", *(["w"] if drain else [])], roles))

    async def settled(self) -> None:
        await until(lambda: self.worker._switching is None, LONG_S)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(worker_orders, "POLL_S", 0.001)
    return Rig()


@pytest.mark.parametrize("other", [set(), {"unfit"}], ids=["well", "unfit"])
async def test_it_drains_and_is_taken_back(rig: Rig, other: set[str]) -> None:
    """No order takes back what drains for a reason of its own."""
    rig.host.whys |= other
    for drain, whys in ((False, set()), (True, {"ordered"}), (True, {"ordered"}), (False, set())):
        rig.order(drain=drain)
        assert rig.host.whys == whys | other


async def test_it_drains_before_it_plays_the_other_role(rig: Rig) -> None:
    rig.host.busy = True
    rig.order(role="prefill")
    await until(lambda: rig.host.draining, LONG_S)
    assert rig.host.played == []
    rig.host.busy = False
    await rig.settled()
    assert (rig.host.role, rig.host.draining) == ("prefill", False)
    rig.order()
    await rig.settled()
    assert (rig.host.role, rig.host.draining) == ("decode", False)


async def test_a_role_that_is_called_back_before_it_was_played_changes_nothing(rig: Rig) -> None:
    rig.host.busy = True
    rig.order(role="prefill")
    await until(lambda: rig.host.draining, LONG_S)
    rig.order()
    await rig.settled()
    assert (rig.host.role, rig.host.draining) == ("decode", False)


async def test_an_order_to_drain_outlives_a_change_of_roles(rig: Rig) -> None:
    rig.order(drain=True, role="prefill")
    await rig.settled()
    assert (rig.host.role, rig.host.draining) == ("prefill", True)
    rig.order(role="prefill")
    assert not rig.host.draining


@pytest.mark.parametrize("switching", [False, True])
async def test_a_worker_that_leaves_follows_no_order_any_more(rig: Rig, switching: bool) -> None:
    """Orders are told to all whenever one of them changes."""
    rig.host.busy = True
    if switching:
        rig.order(role="prefill")
        await until(lambda: rig.host.draining, LONG_S)
    await rig.worker.stop()
    rig.host.drain("leaves")
    rig.order()
    rig.order(role="prefill")
    assert rig.worker._switching is None
    assert (rig.host.role, rig.host.draining) == ("decode", True)
