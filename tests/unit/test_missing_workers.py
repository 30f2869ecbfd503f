"""Workers that Control has no link to: orders and their place on the list stand while Serve lists them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest

from serving import control_host, missing_workers
from serving.control_host import ControlHost
from serving.errors import Unavailable
from serving.link import Identity
from serving.wire import Orders
from tests.unit.control_rig import KEY, LONG_S, Party, Rig
from tests.unit.handoff_fakes import until


class ListedRig(Rig):
    """Control asks a Serve that lists `listed`; None: its controller is away."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: set[str] | None = {"w", "other"}
        self.looks = 0
        self.orders: list[list[str]] = []  # as the worker of `joins_again` heard of

    async def serve_lists(self) -> Collection[str]:
        self.looks += 1
        if self.listed is None:
            raise Unavailable("Serve's controller did not answer")
        return self.listed

    async def starts(self, draining: list[str] | None = None) -> None:
        self.host = ControlHost(me=Identity.fresh("control", "control"), key=KEY, listed=self.serve_lists)
        self.host.orders.restore({"draining": draining or [], "roles": {}})
        self.address = await self.host.start("127.0.0.1")

    async def looks_again(self, times: int = 3) -> None:
        wanted = self.looks + times
        await until(lambda: self.looks >= wanted, LONG_S)

    async def freezes(self, party: Party) -> None:
        await party.client.stop()
        await self.gone(party)

    async def comes_back(self, party: Party, epoch: int | None = None) -> None:
        """The same process, or another one under its name."""
        again = Party("worker", party.me.ident)
        again.client._me = party.me if epoch is None else again.me
        again.client._on_orders = self._hears
        self.orders.clear()
        self.parties.append(again)
        await again.client.connect(self.address)
        await until(lambda: self.orders, LONG_S)

    def _hears(self, orders: Orders) -> None:
        self.orders.append(list(orders.draining))

    def draining(self, ident: str) -> bool:
        return bool(self.host.admin.told(ident)["ordered_to_drain"])


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ListedRig]:
    monkeypatch.setattr(missing_workers, "LOOK_S", 0.02)
    monkeypatch.setattr(control_host, "ABSENT_S", 0.05)
    rig = ListedRig()
    await rig.starts()
    yield rig
    await rig.stop()


async def test_an_order_outlives_any_absence_of_its_worker(rig: ListedRig) -> None:
    w = await rig.joins("worker", "w")
    rig.host.orders.drain("w")
    await rig.freezes(w)
    await rig.looks_again()
    await until(lambda: not rig.host._absent, LONG_S)
    assert rig.draining("w")
    await rig.comes_back(w)
    assert rig.orders[-1] == ["w"]
    rig.host.orders.undrain("w")
    await until(lambda: rig.orders[-1] == [], LONG_S)


async def test_an_order_and_its_worker_end_when_serve_no_longer_lists_it(rig: ListedRig) -> None:
    w = await rig.joins("worker", "w")
    rig.host.orders.drain("w")
    await rig.freezes(w)
    rig.listed = None
    await asyncio.sleep(0.2)
    assert rig.draining("w"), "nobody said that it is gone"
    rig.listed = {"other"}
    await until(lambda: not rig.host.orders.draining, LONG_S)
    assert rig.host.known_workers == {}


async def test_nobody_is_asked_while_nobody_is_missing(rig: ListedRig) -> None:
    w = await rig.joins("worker", "w")
    await rig.freezes(w)
    await rig.looks_again()
    await rig.comes_back(w)
    await asyncio.sleep(0.1)
    looks = rig.looks
    await asyncio.sleep(0.2)
    assert rig.looks == looks


async def test_another_process_under_the_name_has_none_of_its_orders(rig: ListedRig) -> None:
    w = await rig.joins("worker", "w")
    rig.host.orders.drain("w")
    await rig.freezes(w)
    await rig.comes_back(w, epoch=2)
    assert rig.orders[-1] == []
    rig.host.orders.drain("w")
    await rig.looks_again(0)
    await asyncio.sleep(0.2)
    assert rig.draining("w"), "the end of the first is not the end of the second"


async def test_orders_of_an_earlier_control_wait_for_their_workers(rig: ListedRig) -> None:
    await rig.host.stop()
    await rig.starts(draining=["w", "long gone"])
    await until(lambda: rig.host.orders.draining == {"w"}, LONG_S)
    await rig.looks_again()
    await rig.comes_back(Party("worker", "w"))
    assert rig.orders[-1] == ["w"]


async def test_a_frozen_worker_is_shown_as_silent_and_can_be_drained(rig: ListedRig) -> None:
    w = await rig.joins("worker", "w")
    await rig.freezes(w)
    status, told = rig.host.admin.answer("workers", {})
    (shown,) = told["workers"]
    assert (status, shown["worker"], shown["reported"], shown["safe_to_remove"]) == (200, "w", False, False)
    assert shown["unsafe_because"] == "it does not report"
    assert shown["pool"] == "x"
    assert rig.host.workers == {}, "only linked ones serve"
    status, told = rig.host.admin.answer("drain", {"worker": "w"})
    assert (status, told["ordered_to_drain"]) == (200, True)
    await rig.comes_back(w)
    assert rig.orders[-1] == ["w"]
