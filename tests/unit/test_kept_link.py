"""A kept link: dialled again after every loss, with bounded waits, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import pytest

from serving import kept_link
from serving.errors import LinkError
from serving.kept_link import FIRST_RETRY_S, LAST_RETRY_S, KeptLink
from serving.link import Identity, Link, LinkServer, dial
from serving.wire import AnyMessage, Cancel
from tests.unit.handoff_fakes import until

KEY = b"k" * 32
LONG_S = 20.0


class Recorder:
    def __init__(self, hang_up: bool = False) -> None:
        self.hang_up = hang_up
        self.opened: list[Link] = []
        self.messages: list[AnyMessage] = []
        self.lost: list[str] = []

    def on_open(self, link: Link) -> None:
        self.opened.append(link)
        if self.hang_up:
            link.close("not you")

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)


class Server:
    """`start` may be called again after `stop`: another incarnation at the same address."""

    def __init__(self) -> None:
        self.handler = Recorder()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self.me = Identity.fresh("worker", "w")
        self.server = LinkServer(self.me, KEY, self.handler)
        self.address = await self.server.start("127.0.0.1", int(self.address.split(":")[1]))

    async def stop(self) -> None:
        await self.server.stop()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@contextlib.asynccontextmanager
async def kept_to(address: str, handler: Recorder) -> AsyncIterator[KeptLink]:
    kept = KeptLink(address, Identity.fresh("frontend", "f"), KEY, handler)
    kept.start()
    try:
        yield kept
    finally:
        await kept.stop()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the link would have slept; the tenth time it sleeps for ever."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0 if len(slept) < 10 else 3600)

    names = ("get_running_loop", "CancelledError", "Event")
    fake = SimpleNamespace(sleep=sleep, **{name: getattr(asyncio, name) for name in names})
    monkeypatch.setattr(kept_link, "asyncio", fake)
    return slept


async def test_a_lost_link_is_dialled_again(server: Server) -> None:
    here = Recorder()
    async with kept_to(server.address, here) as kept:
        for n in range(1, 4):
            await until(lambda n=n: len(here.opened) == len(server.handler.opened) == n, LONG_S)
            kept.send(Cancel(n))
            await until(lambda n=n: len(server.handler.messages) == n, LONG_S)
            server.handler.opened[-1].close("a blip")
            await until(lambda n=n: len(here.lost) == n, LONG_S)
    assert [m.attempt for m in server.handler.messages] == [1, 2, 3]


async def test_what_is_sent_without_a_link_is_dropped(server: Server) -> None:
    here = Recorder()
    kept = KeptLink(server.address, Identity.fresh("frontend", "f"), KEY, here)
    assert kept.link is None
    kept.send(Cancel(1))
    kept.start()
    await until(lambda: here.opened, LONG_S)
    kept.send(Cancel(2))
    await until(lambda: server.handler.messages, LONG_S)
    assert server.handler.messages == [Cancel(2)]
    await kept.stop()


async def test_stop_is_final(server: Server) -> None:
    here = Recorder()
    async with kept_to(server.address, here) as kept:
        await until(lambda: kept.link, LONG_S)
    await until(lambda: here.lost, LONG_S)
    assert here.lost == ["no longer wanted"]
    await kept.stop()
    # Whoever dials later is somebody else.
    other = await dial(
        server.address, Identity.fresh("frontend", "other"), KEY, Recorder(), timeout_s=LONG_S
    )
    await until(lambda: len(server.handler.opened) == 2, LONG_S)
    assert [link.peer.ident for link in server.handler.opened if link.peer] == ["f", "other"]
    assert len(here.opened) == len(here.lost) == 1
    other.close("done")


async def test_stop_ends_a_dial_that_nobody_answers() -> None:
    connected, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()  # its hello, and its end
        writer.close()
        left.set()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    here = Recorder()
    async with kept_to(f"127.0.0.1:{port}", here):
        await asyncio.wait_for(connected.wait(), LONG_S)
    assert (here.opened, here.lost) == ([], [])
    await asyncio.wait_for(left.wait(), LONG_S)
    listener.close()


async def test_stop_before_the_first_turn_of_the_loop() -> None:
    here = Recorder()
    async with kept_to("127.0.0.1:9", here):
        pass
    assert (here.opened, here.lost) == ([], [])


async def test_waits_grow_to_a_bound_while_nobody_is_there(waits: list[float], monkeypatch) -> None:
    async def refused(*args: object, **more: object) -> Link:
        raise LinkError("nobody there")

    monkeypatch.setattr(kept_link, "dial", refused)
    async with kept_to("host:1", Recorder()):
        await until(lambda: len(waits) == 10, LONG_S)
    assert waits[0] == FIRST_RETRY_S
    assert all(later in (2 * earlier, LAST_RETRY_S) for earlier, later in itertools.pairwise(waits))
    assert waits[-1] == LAST_RETRY_S


async def test_a_peer_that_opens_and_hangs_up_is_not_hammered(server: Server, waits: list[float]) -> None:
    """As a frontend does to a stranger at a worker's address."""
    async with kept_to(server.address, Recorder(hang_up=True)):
        await until(lambda: len(waits) == 10, LONG_S)
    assert waits[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waits[-1] == LAST_RETRY_S


async def test_a_lasting_link_starts_the_waits_anew(
    server: Server, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_link, "LASTING_S", 0.0)
    async with kept_to(server.address, Recorder(hang_up=True)):
        await until(lambda: len(waits) == 10, LONG_S)
    assert set(waits) == {FIRST_RETRY_S}


async def test_a_restarted_server_is_found_with_its_new_epoch(server: Server) -> None:
    here = Recorder()
    async with kept_to(server.address, here) as kept:
        await until(lambda: kept.link, LONG_S)
        first = server.me.epoch
        await server.stop()
        await until(lambda: kept.link is None, LONG_S)
        await server.start()
        await until(lambda: kept.link, LONG_S)
        epochs = [link.peer.epoch for link in here.opened if link.peer]
        assert epochs == [first, server.me.epoch]
        assert epochs[0] != epochs[1]


async def test_the_log_names_the_address_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptLink("127.0.0.1:1", Identity.fresh("frontend", "f"), KEY, Recorder())
    with caplog.at_level(logging.INFO, "kvrelay.link"):
        kept.start()
        await until(lambda: caplog.messages, LONG_S)
    await kept.stop()
    assert caplog.messages[0] == "no link yet to 127.0.0.1:1: Connection refused"
