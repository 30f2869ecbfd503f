"""Links under attack: connections that stay half open, frames that never end, bad messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import msgpack
import pytest

from serving import link as link_module
from serving.half_open import HalfOpen
from serving.link import Identity, Link, LinkServer, dial
from serving.log_limit import LogLimit
from serving.wire import AnyMessage, Cancel, Hello, SnapshotRequest, encode

KEY = b"k" * 32
NONCE = b"n" * 32


class Recorder:
    """Raises on a Cancel of attempt 13."""

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
        if message == Cancel(13):
            raise RuntimeError("nobody thought of this")

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        self.event.set()
        if reason == "raise":
            raise RuntimeError("nor of this")

    async def until(self, n_lost: int = 0, n_messages: int = 0) -> None:
        async with asyncio.timeout(10):
            while len(self.lost) < n_lost or len(self.messages) < n_messages:
                self.event.clear()
                await self.event.wait()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, Recorder, LinkServer]]:
    handler = Recorder()
    server = LinkServer(Identity.fresh("worker", "w"), KEY, handler)
    address = await server.start("127.0.0.1")
    try:
        yield address, handler, server
    finally:
        await server.stop()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the other side hangs up, politely or not."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


async def open_link(address: str, handler: Recorder | None = None) -> Link:
    return await dial(address, Identity.fresh("frontend", "f"), KEY, handler or Recorder(), timeout_s=10)


# ---------------------------------------------------------------- before the key


async def test_a_server_listens_on_its_interface_only() -> None:
    async with listening() as (address, _, server):
        assert server._server is not None
        assert {sock.getsockname()[0] for sock in server._server.sockets} == {"127.0.0.1"}
        with socket.socket() as other, pytest.raises(OSError, match=r"refused"):
            other.connect(("127.0.0.2", int(address.split(":")[1])))


async def test_half_open_connections_make_room_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HALF_OPEN_AN_ADDRESS", 4)
    async with listening() as (address, handler, server):
        idle = [await connect(address) for _ in range(12)]
        reader, _ = idle[0]
        assert b"too many connections wait" in await rest(reader)
        assert len(server._half_open) <= 4
        link = await open_link(address)  # an honest one gets through, and stays when more come
        for _ in range(8):
            idle.append(await connect(address))
        link.send(Cancel(1))
        await handler.until(n_messages=1)
        assert not link.closed
        for _, writer in idle:
            writer.close()
        link.close("done")


@pytest.mark.parametrize(
    ("most", "most_an_address", "came", "ended"),
    [
        (9, 2, ["a1", "a2", "b1", "a3"], ["a1"]),
        (9, 2, ["a1", "a2", "a3", "a4"], ["a1", "a2"]),
        (2, 2, ["a1", "b1", "c1", "d1"], ["a1", "b1"]),
    ],
    ids=["one-address", "twice", "all"],
)
def test_the_oldest_goes(most: int, most_an_address: int, came: list[str], ended: list[str]) -> None:
    waiting: HalfOpen[str] = HalfOpen(most, most_an_address)
    assert [gone for name in came if (gone := waiting.add(name, name[0])) is not None] == ended
    for name in came:
        waiting.remove(name)
        waiting.remove(name)
    assert len(waiting) == 0
    assert waiting._counts == {}


def hello(**changes: object) -> bytes:
    fields = {
        "wire": 1, "oldest_wire": 1, "package": "1", "kind": "frontend", "ident": "f", "epoch": 1,
        "nonce": NONCE,
    }  # fmt: skip
    return bytes(msgpack.packb(["hello", *(fields | changes).values()]))


@pytest.mark.parametrize(
    "payload",
    [
        hello(kind="root"),
        hello(kind="frontend\n"),
        hello(ident="x" * 300),
        hello(ident="evil\x1b[2J"),
        hello(package="1\n2"),
        hello(nonce=b""),
        hello(epoch=-1),
        hello(wire="1"),
        hello(wire=0),
        b"\x91" * 2000,
        msgpack.packb(["settings", 1, {"a": 1}]),
    ],
    ids=[
        "kind", "kind-newline", "long-ident", "terminal-codes", "package", "nonce", "epoch", "type",
        "version", "nested", "no-hello",
    ],
)  # fmt: skip
async def test_a_malformed_hello_is_refused(payload: bytes) -> None:
    async with listening() as (address, handler, _):
        reader, writer = await connect(address)
        writer.write(framed(payload))
        await rest(reader)  # ends
        writer.close()
        assert handler.opened == []
        (await open_link(address)).close("done")


async def test_a_handshake_byte_by_byte_does_not_prolong_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.2)
    async with listening() as (address, _, server):
        reader, writer = await connect(address)

        async def drip() -> None:
            for byte in framed(encode(Hello(1, 1, "1", "frontend", "f", 1, NONCE))):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        await rest(reader)
        dripping.cancel()
        writer.close()
        async with asyncio.timeout(10):
            while len(server._half_open):
                await asyncio.sleep(0.01)


async def test_refusals_are_logged_a_few_times_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (address, _, server):
        for _ in range(30):
            reader, writer = await connect(address)
            writer.write(framed(b"\xc1garbage"))
            await rest(reader)
            writer.close()
        lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
        assert len(lines) == 5
        assert "garbage" not in "".join(lines)
        assert server._refusals._held == 25


def test_log_limit_tells_what_it_held_back() -> None:
    now = [0.0]
    limit = LogLimit(burst=2, period_s=10, clock=lambda: now[0])
    assert [limit.pass_on() for _ in range(5)] == ["", "", None, None, None]
    now[0] = 10.0
    assert limit.pass_on() == " (and 3 more before it)"
    assert limit.pass_on() == ""


# ---------------------------------------------------------------- with the key


async def test_a_frame_that_does_not_end_ends_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come now and then are no sign of life."""
    monkeypatch.setattr(link_module, "FRAME_S", 0.3)
    monkeypatch.setattr(link_module, "BEAT_S", 0.05)
    async with listening() as (address, handler, _):
        link = await open_link(address)
        other = await open_link(address, heard := Recorder())
        assert link._timer is not None
        assert link._transport is not None
        link._timer.cancel()  # no beats: they would be read as part of the frame
        link._transport.write(struct.pack("<I", 1000))

        async def drip() -> None:
            while True:
                link._transport.write(b"x")  # type: ignore[union-attr]
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        await handler.until(n_lost=1)
        dripping.cancel()
        assert "does not end" in handler.lost[0]
        assert heard.lost == []
        other.close("done")


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x92\xa6cancel\xff",  # a negative attempt
        b"\x92\xa6cancel\xa1x",
        b"\x93\xa4snap\x01\xdd\x00\x20\x00\x00",  # 2 Mi chains, more than a snapshot may have
        b"\x93\xa8settings\x01" + b"\x81\xa1a" * 20_000 + b"\xc0",  # nested beyond any stack
        encode(Cancel(13)),
    ],
    ids=["no-msgpack", "negative", "type", "too-many", "nested", "handler-raises"],
)
async def test_one_bad_message_ends_that_link_only(
    payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (address, handler, _):
        bad_handler, good_handler = Recorder(), Recorder()
        bad = await open_link(address, bad_handler)
        good = await open_link(address, good_handler)
        assert bad._transport is not None
        bad._transport.write(framed(payload) + framed(encode(SnapshotRequest())))
        await handler.until(n_lost=1)
        await bad_handler.until(n_lost=1)
        assert SnapshotRequest() not in handler.messages, "nothing after it was read"
        good.send(Cancel(1))
        async with asyncio.timeout(10):
            while Cancel(1) not in handler.messages:
                await asyncio.sleep(0.01)
        assert good_handler.lost == []
        good.close("done")


async def test_a_handler_that_fails_to_note_a_loss_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (address, handler, server):
        await open_link(address)
        (accepted,) = server._links
        accepted.close("raise")
        await handler.until(n_lost=1)
        assert handler.lost == ["raise"]
        assert "not taken note of" in caplog.text
        (await open_link(address)).close("done")


async def test_a_refused_peer_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REFUSAL_S", 0.1)
    async with listening() as (address, handler, server):
        link = await open_link(address)
        (accepted,) = server._links
        assert link._transport is not None
        link._transport.pause_reading()
        while accepted._transport is not None and not accepted._transport.get_write_buffer_size():
            accepted._transport.write(b"\0" * (1 << 16))  # more than the kernel takes
        accepted._refuse("enough")
        await handler.until(n_lost=1)
        link.close("done")
