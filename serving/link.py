"""One authenticated, multiplexed TCP connection: length-prefixed msgpack frames, callbacks, beats.

A connection opens with Hello from both sides, each with a fresh nonce, then Proof: an HMAC-SHA256 over
both hellos and the direction, keyed by the link key. Of a hello it covers the fields of wire version 2 and
never more, so that ends of which one knows later fields agree on the bytes. Nothing else is read before the
proof holds, and until then a frame may have 4 KiB at most. After it every side sends Beat each `BEAT_S`;
a link silent for `DEAD_S` is aborted (a silent partition is invisible to both sockets), and so is one
whose peer begins a frame and does not end it within `FRAME_S`.

Frame: u32 little-endian length, then the payload. No pickle crosses a link. A message that does not decode,
or that its handler cannot take, ends its own link and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import msgspec

from serving import __version__, wire
from serving.errors import FrameRefused, HandshakeRefused, LinkError
from serving.half_open import HalfOpen
from serving.log_limit import LogLimit
from serving.wire import AnyMessage, Beat, Hello, Message, Proof, Refusal

log = logging.getLogger("kvrelay.link")

BEAT_S = 0.5
DEAD_S = 2.0
HANDSHAKE_S = 5.0
HANDSHAKE_FRAME_BYTES = 4096
HALF_OPEN = 256  # connections that wait for their handshake
HALF_OPEN_AN_ADDRESS = 64
FRAME_BYTES = 32 << 20
FRAME_S = 30.0  # from a frame's first byte to its last
REFUSAL_S = 1.0  # how long a refused peer may take to read why
SEND_BUFFER_BYTES = 64 << 20  # a peer that reads slower than this lags behind is cut off
NONCE_BYTES = 32
KINDS = ("frontend", "worker", "control")
SIGNED_FIELDS = ("wire", "oldest_wire", "package", "kind", "ident", "epoch", "nonce")
IDENT_CHARS = 256

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is on its links; `epoch` is fresh per incarnation, `wire_version` the newest
    it speaks."""

    kind: str  # frontend | worker | control
    ident: str
    epoch: int
    wire_version: int = wire.WIRE_VERSION

    @classmethod
    def fresh(cls, kind: str, ident: str, wire_version: int = wire.WIRE_VERSION) -> Identity:
        return cls(kind, ident, int.from_bytes(os.urandom(7), "little"), wire_version)


class LinkHandler(Protocol):
    """Called on the event loop; must not block or raise."""

    def on_open(self, link: Link) -> None: ...

    def on_message(self, link: Link, message: AnyMessage) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None:
        """Exactly once per opened link, whoever ended it."""


class _State(Enum):
    HELLO = 0
    PROOF = 1
    OPEN = 2
    CLOSED = 3


class Link(asyncio.Protocol):
    """Either end of a connection. `beat` supplies the fields of the beats we send."""

    def __init__(
        self,
        me: Identity,
        key: bytes,
        handler: LinkHandler,
        *,
        dialled: bool,
        beat: Callable[[], Beat] = Beat,
        half_open: HalfOpen[Link] | None = None,
        refusals: LogLimit | None = None,
    ) -> None:
        self.me = me
        self.peer: Hello | None = None
        self.peer_beat: Beat | None = None  # the last one
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._key = key
        self._handler = handler
        self._dialled = dialled
        self._beat = beat
        self._half_open: HalfOpen[Link] = HalfOpen(1, 1) if half_open is None else half_open
        self._refusals = refusals or LogLimit()
        self._state = _State.HELLO
        self._buffer = bytearray()
        self._limit = HANDSHAKE_FRAME_BYTES
        self._reason = "closed by the peer"
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._begun_s: float | None = None  # when the frame began whose rest is still to come
        self._hello = Hello(
            wire=me.wire_version,
            oldest_wire=wire.OLDEST_WIRE_VERSION,
            package=__version__,
            kind=me.kind,
            ident=me.ident,
            epoch=me.epoch,
            nonce=os.urandom(NONCE_BYTES),
        )

    # -- verbs

    @property
    def closed(self) -> bool:
        return self._state is _State.CLOSED

    @property
    def name(self) -> str:
        """The peer, for logs."""
        return f"{self.peer.kind} {self.peer.ident}" if self.peer else "an unknown peer"

    @property
    def silent_s(self) -> float:
        """Since the peer was last heard; it beats every `BEAT_S`."""
        return asyncio.get_running_loop().time() - self._heard_s

    @property
    def wire_version(self) -> int:
        """The newest version that both ends speak."""
        return (
            min(self.me.wire_version, self.peer.wire) if self.peer is not None else wire.OLDEST_WIRE_VERSION
        )

    def send(self, message: Message) -> None:
        """Queue one frame; silently dropped when the link is closed (its owner hears `on_lost`), or when
        the peer is too old to know the message."""
        if self._state is _State.OPEN and (message.since == 1 or message.since <= self.wire_version):
            self._write(message)

    def close(self, reason: str) -> None:
        """End the link now. Idempotent; `on_lost` follows if it was open, and no other call."""
        if self._state is _State.CLOSED:
            return
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()
        else:
            self._state = _State.CLOSED  # before it was connected

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._state is _State.CLOSED:
            self._transport.abort()
            return
        host, *_ = transport.get_extra_info("peername") or ("?",)
        surplus = self._half_open.add(self, host)
        if surplus is not None:
            surplus._refuse("too many connections wait for their handshake")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        self._timer = loop.call_later(HANDSHAKE_S, self._handshake_late)
        self._write(self._hello)

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        try:
            while end - start >= 4 and self._transport is not None and not self._transport.is_closing():
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > self._limit:
                    raise FrameRefused(f"a frame of {length} bytes; allowed: {self._limit}")
                if end - start - 4 < length:
                    break
                message = self._decode(bytes(memoryview(buffer)[start + 4 : start + 4 + length]))
                start += 4 + length
                self._receive(message)
        except LinkError as error:
            self._refuse(error.message)
            return
        if start:
            del buffer[:start]
        if not buffer:
            self._begun_s = None
        elif start or self._begun_s is None:
            self._begun_s = self._heard_s

    def connection_lost(self, exc: Exception | None) -> None:
        was_open = self._state is _State.OPEN
        self._state = _State.CLOSED
        self._half_open.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        self._buffer.clear()
        reason = f"{type(exc).__name__}: {exc}" if exc is not None else self._reason
        if not self.opened.done():
            self.opened.set_exception(HandshakeRefused(reason))
            self.opened.exception()  # a server has nobody waiting for it
        if was_open:
            try:
                self._handler.on_lost(self, reason)
            except Exception:
                log.exception("link to %s: its loss was not taken note of", self.name)

    # -- inside

    def _decode(self, payload: bytes) -> AnyMessage:
        try:
            return wire.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameRefused(f"bytes that are no message: {error}") from None

    def _receive(self, message: AnyMessage) -> None:
        if self._state is _State.OPEN:
            if isinstance(message, Beat):
                self.peer_beat = message
            else:
                self._guarded(type(message), self._handler.on_message, self, message)
        elif isinstance(message, Refusal):
            raise HandshakeRefused(f"{self.name} refused the link: {message.reason[:200]}")
        elif self._state is _State.HELLO and isinstance(message, Hello):
            self._on_hello(message)
        elif self._state is _State.PROOF and isinstance(message, Proof):
            self._on_proof(message)
        else:
            raise HandshakeRefused(f"{type(message).__name__} during the handshake")

    def _guarded(self, kind: type[Message], call: Callable[..., None], *arguments: object) -> None:
        """A peer that passed the handshake can still send what its handler did not think of."""
        try:
            call(*arguments)
        except LinkError:
            raise
        except Exception:
            if (more := self._refusals.pass_on()) is not None:
                log.exception("link to %s: %s could not be handled%s", self.name, kind.__name__, more)
            raise FrameRefused(f"{kind.__name__} could not be handled") from None

    def _on_hello(self, hello: Hello) -> None:
        if len(hello.nonce) != NONCE_BYTES or hello.nonce == self._hello.nonce:
            raise HandshakeRefused("a hello without a nonce of its own")
        texts = (hello.kind, hello.ident, hello.package)
        if hello.kind not in KINDS or not all(t.isprintable() and len(t) <= IDENT_CHARS for t in texts):
            raise HandshakeRefused("a hello of nobody we know")
        if hello.wire < wire.OLDEST_WIRE_VERSION or hello.oldest_wire > self.me.wire_version:
            raise HandshakeRefused(
                f"wire versions {hello.oldest_wire}..{hello.wire} (package {hello.package}) do not meet "
                f"ours {wire.OLDEST_WIRE_VERSION}..{self.me.wire_version} (package {__version__})"
            )
        self.peer = hello
        self._state = _State.PROOF
        self._write(Proof(self._mac(self._hello, hello, self._dialled)))

    def _on_proof(self, proof: Proof) -> None:
        assert self.peer is not None
        expected = self._mac(self.peer, self._hello, not self._dialled)
        if not hmac.compare_digest(proof.mac, expected):
            raise HandshakeRefused("wrong link key")
        self._state = _State.OPEN
        self._limit = FRAME_BYTES
        self._half_open.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        self._tick(asyncio.get_running_loop().time())
        if not self.opened.done():
            self.opened.set_result(None)
        self._guarded(Proof, self._handler.on_open, self)

    def _mac(self, signer: Hello, other: Hello, signer_dialled: bool) -> bytes:
        direction = b"dialler" if signer_dialled else b"listener"
        text = direction + _signed(signer) + _signed(other)
        return hmac.new(self._key, text, hashlib.sha256).digest()

    def _write(self, message: Message) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        payload = wire.encode(message)
        transport.write(_LENGTH.pack(len(payload)) + payload)
        if transport.get_write_buffer_size() > SEND_BUFFER_BYTES:
            self.close(f"reads too slowly: {SEND_BUFFER_BYTES} bytes behind")

    def _tick(self, due_s: float) -> None:
        """Send a beat; abort if the peer was silent. A tick that ran late itself blames nobody."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - due_s > BEAT_S:
            self._heard_s = now
            self._begun_s = None if self._begun_s is None else now
        elif now - self._heard_s > DEAD_S:
            self.close(f"silent for {now - self._heard_s:.1f} s")
            return
        elif self._begun_s is not None and now - self._begun_s > FRAME_S:
            self.close(f"a frame that does not end within {FRAME_S:.0f} s")
            return
        self._write(self._beat())
        due = now + BEAT_S
        self._timer = loop.call_at(due, self._tick, due)

    def _handshake_late(self) -> None:
        self._refuse(f"handshake not done within {HANDSHAKE_S} s")

    def _refuse(self, reason: str) -> None:
        """Tell the peer why, then close. A refused peer is logged once, without its bytes."""
        if (more := self._refusals.pass_on()) is not None:
            log.warning("link to %s refused: %s%s", self.name, reason, more)
        self._reason = reason
        if self._state is not _State.CLOSED and self._transport is not None:
            self._write(Refusal(reason[:200]))
            self._transport.close()
            asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)
            if self._state is not _State.OPEN:
                self._state = _State.CLOSED


def _signed(hello: Hello) -> bytes:
    """As an end encodes it that knows no later field."""
    fields = [getattr(hello, name) for name in SIGNED_FIELDS]
    return msgspec.msgpack.encode([Hello.__struct_config__.tag, *fields])


async def dial(
    address: str,
    me: Identity,
    key: bytes,
    handler: LinkHandler,
    *,
    timeout_s: float = DEAD_S,
    beat: Callable[[], Beat] = Beat,
    refusals: LogLimit | None = None,
) -> Link:
    """An open link to `host:port`. Raises LinkError when the peer cannot be reached or refuses."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    link: Link | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await loop.create_connection(
                lambda: Link(me, key, handler, dialled=True, beat=beat, refusals=refusals), host, int(port)
            )
            await asyncio.shield(link.opened)
    except TimeoutError:
        raise LinkError(f"{address}: no answer within {timeout_s} s") from None
    except LinkError as error:
        raise type(error)(f"{address}: {error.message}") from None
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # asyncio's own text has the address once more
        raise LinkError(f"{address}: {os.strerror(error.errno or 0) if known else error}") from None
    except ValueError as error:
        raise LinkError(f"{address}: {error}") from None
    finally:
        if link is not None and link._state is not _State.OPEN:
            link.close("given up")
    return link


class LinkServer:
    """Accepts links on one interface. `start` and `stop` are a pair."""

    def __init__(
        self, me: Identity, key: bytes, handler: LinkHandler, *, beat: Callable[[], Beat] = Beat
    ) -> None:
        self._me = me
        self._key = key
        self._handler = handler
        self._beat = beat
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._half_open: HalfOpen[Link] = HalfOpen(HALF_OPEN, HALF_OPEN_AN_ADDRESS)
        self._refusals = LogLimit()
        self._stopped = False

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `host` only; returns the `host:port` that peers dial."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, port)
        bound: Any = self._server.sockets[0].getsockname()
        return f"{bound[0]}:{bound[1]}"

    async def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
            for link in list(self._links):
                link.close("the process is stopping")
            await asyncio.sleep(0)  # their `on_lost` comes with the loop's next turn

    def _accept(self) -> Link:
        link = Link(
            self._me,
            self._key,
            self._handler,
            dialled=False,
            beat=self._beat,
            half_open=self._half_open,
            refusals=self._refusals,
        )
        self._links.add(link)
        if self._stopped:  # accepted by the kernel before
            link.close("the process is stopping")
        link.opened.add_done_callback(lambda _: self._forget_closed())
        return link

    def _forget_closed(self) -> None:
        self._links = {link for link in self._links if not link.closed}
