"""Links: handshake, framing, beats, and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from serving import link as link_module
from serving.errors import HandshakeRefused, LinkError
from serving.link import Identity, Link, LinkServer, dial
from serving.wire import AnyMessage, Beat, Cancel, Draining, Hello, decode, encode

KEY = b"k" * 32


class Recorder:
    def __init__(self) -> None:
        self.opened: list[Link] = []
        self.messages: list[AnyMessage] = []
        self.lost: list[str] = []
        self.event = asyncio.Event()

    def on_open(self, link: Link) -> None:
        self.opened.append(link)
        self.event.set()

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)
        self.event.set()

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        self.event.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.event.clear()
                await self.event.wait()


@contextlib.asynccontextmanager
async def server(key: bytes = KEY):
    handler = Recorder()
    server = LinkServer(Identity.fresh("worker", "w"), key, handler)
    address = await server.start("127.0.0.1")
    try:
        yield address, handler
    finally:
        await server.stop()


async def test_messages_cross_both_ways_and_beats_carry_the_step():
    async with server() as (address, there):
        here = Recorder()
        link = await dial(
            address, Identity.fresh("frontend", "f"), KEY, here, beat=lambda: Beat(step=7, runnable=True)
        )
        await there.until(lambda: there.opened)
        assert link.peer is not None
        assert link.peer.ident == "w"
        for attempt in range(1000):
            link.send(Cancel(attempt))
        await there.until(lambda: len(there.messages) == 1000)
        assert [m.attempt for m in there.messages] == list(range(1000))
        there.opened[0].send(Cancel(5))
        await here.until(lambda: here.messages)
        await there.until(lambda: True)
        async with asyncio.timeout(5):
            while there.opened[0].peer_beat != Beat(step=7, runnable=True):
                await asyncio.sleep(0.05)
        link.close("done")
        await there.until(lambda: there.lost)
        await here.until(lambda: here.lost)
        assert here.lost == ["done"]


async def test_a_wrong_key_opens_nothing_on_either_side():
    async with server() as (address, there):
        here = Recorder()
        with pytest.raises(LinkError):
            await dial(address, Identity.fresh("frontend", "f"), b"x" * 32, here)
        assert not there.opened
        assert not here.opened


class LaterHello(Hello, tag="hello"):
    """Of a version to come."""

    features: list[str] = []  # noqa: RUF012


def later(hello: Hello) -> LaterHello:
    return LaterHello(*[getattr(hello, name) for name in Hello.__struct_fields__], ["new"])


@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_hello_with_a_later_field_proves_the_key_all_the_same(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the field and whoever does not agree on what the proof covers."""
    init = Link.__init__

    def of_tomorrow(link: Link, *args: object, dialled: bool, **more: object) -> None:
        init(link, *args, dialled=dialled, **more)
        if dialled is (who == "dialler"):
            link._hello = later(link._hello)

    monkeypatch.setattr(Link, "__init__", of_tomorrow)
    async with server() as (address, there):
        link = await dial(address, Identity.fresh("frontend", "f"), KEY, Recorder())
        await there.until(lambda: there.opened)
        link.close("done")
        with pytest.raises(LinkError, match="wrong link key"):
            await dial(address, Identity.fresh("frontend", "f"), b"x" * 32, Recorder())


async def test_the_proof_is_that_of_every_version_so_far() -> None:
    """Written down when there were two: a peer of then computes it so."""
    dialler = Hello(2, 1, "1.0.0", "frontend", "f#1", 1 << 40, bytes(range(32)))
    listener = Hello(1, 1, "0.9", "worker", "w", 7, bytes(32))
    link = Link(Identity.fresh("worker", "w"), KEY, Recorder(), dialled=True)
    proofs = {
        "fa148a6b7d51d15d4a64f7ebd6457e9d4a45d5a260a05e45d0494d4d29a8777e": (dialler, listener, True),
        "4873dfd275710fb980377b7795c19d5bd26567854a3b6714beb4b23baa3418de": (listener, dialler, False),
    }
    for proof, hellos in proofs.items():
        assert link._mac(*hellos).hex() == proof
    assert link._mac(later(dialler), listener, True) == link._mac(dialler, listener, True)
    assert Hello.__struct_fields__[:7] == link_module.SIGNED_FIELDS


async def test_versions_that_do_not_meet_are_refused_by_name(monkeypatch):
    async with server() as (address, _):
        monkeypatch.setattr(link_module.wire, "WIRE_VERSION", 9)
        monkeypatch.setattr(link_module.wire, "OLDEST_WIRE_VERSION", 8)
        here = Recorder()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        hello = Hello(2, 2, "9.9", "frontend", "f", 1, b"n" * 32)
        payload = encode(hello)
        writer.write(struct.pack("<I", len(payload)) + payload)
        data = await asyncio.wait_for(reader.read(), 5)
        assert b"wire versions 2..2" in data
        writer.close()
        assert not here.opened


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", len(encode(Cancel(1)))) + encode(Cancel(1)),
        struct.pack("<I", 0),
    ],
    ids=["http", "huge-length", "no-msgpack", "message-before-handshake", "empty"],
)
async def test_garbage_is_refused_and_hurts_nobody_else(data):
    async with server() as (address, there):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(data)
        await asyncio.wait_for(reader.read(), 5)  # ends: the server closed it
        writer.close()
        assert not there.opened
        good = await dial(address, Identity.fresh("frontend", "f"), KEY, Recorder())
        assert not good.closed
        good.close("done")


async def test_an_echoed_hello_is_no_authentication():
    """A peer without the key cannot pass by reflecting our own frames."""
    async with server() as (address, there):
        reader, writer = await asyncio.open_connection(*address.split(":"))

        async def reflect() -> None:
            while data := await reader.read(4096):
                writer.write(data)

        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reflect(), 5)
        writer.close()
        assert not there.opened


async def test_a_peer_that_never_says_hello_is_dropped(monkeypatch):
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.1)
    async with server() as (address, _):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_a_silent_peer_is_aborted(monkeypatch):
    monkeypatch.setattr(link_module, "DEAD_S", 0.3)
    monkeypatch.setattr(link_module, "BEAT_S", 0.1)
    async with server() as (address, there):
        here = Recorder()
        link = await dial(address, Identity.fresh("frontend", "f"), KEY, here)
        await there.until(lambda: there.opened)
        assert link._timer is not None
        link._timer.cancel()  # frozen: no beats, no notice
        await there.until(lambda: there.lost)
        assert "silent" in there.lost[0]


async def test_after_close_nothing_more_is_heard():
    """Not even what came with the frame that made its handler close."""
    async with server() as (address, there):
        there.on_message = lambda link, message: (there.messages.append(message), link.close("enough"))
        link = await dial(address, Identity.fresh("frontend", "f"), KEY, Recorder(), timeout_s=20)
        for attempt in range(1000):
            link.send(Cancel(attempt))
        await there.until(lambda: there.lost)
        assert there.messages == [Cancel(0)]


async def test_a_server_that_stops_opens_nothing_more():
    handler = Recorder()
    server = LinkServer(Identity.fresh("worker", "w"), KEY, handler)
    host, port = (await server.start("127.0.0.1")).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))  # perhaps not accepted yet
    await server.stop()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 20)  # ends
    writer.close()
    assert handler.opened == []


async def test_nobody_listening_is_a_link_error():
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:9"):
        await dial("127.0.0.1:9", Identity.fresh("frontend", "f"), KEY, Recorder())


def test_an_older_message_without_new_fields_decodes():
    import msgspec

    old = msgspec.msgpack.encode(["cancel", 3])
    assert decode(old) == Cancel(3)
    newer = msgspec.msgpack.encode(["cancel", 3, "a field of tomorrow"])
    assert decode(newer) == Cancel(3)


@pytest.mark.parametrize(("mine", "theirs", "arrives"), [(2, 2, True), (2, 1, False), (1, 2, False)])
async def test_a_message_newer_than_the_peer_is_not_sent(mine: int, theirs: int, arrives: bool):
    accepting, dialling = Recorder(), Recorder()
    server = LinkServer(Identity.fresh("worker", "w", theirs), KEY, accepting)
    address = await server.start("127.0.0.1")
    link = await dial(address, Identity.fresh("frontend", "f", mine), KEY, dialling)
    assert link.wire_version == min(mine, theirs)
    link.send(Draining(True))
    link.send(Cancel(3))
    await accepting.until(lambda: Cancel(3) in accepting.messages)
    assert (Draining(True) in accepting.messages) is arrives
    await server.stop()


def test_handshake_refused_is_a_link_error():
    assert issubclass(HandshakeRefused, LinkError)
