"""Random and mutated bytes for a link, before and after its handshake: it ends, and its process does not.

Longer: `--hypothesis-profile=fuzz-long`.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serving import wire
from serving.errors import FrameRefused, KVRelayError
from serving.link import FRAME_BYTES, Identity, Link, _State
from serving.step_check import check_step
from serving.wire import AnyMessage, Hello, Step
from tests.fuzzing import fuzzed, memory_under, mutated, split
from tests.unit.test_wire_golden import MESSAGES, example

ORIGINALS = [wire.encode(example(kind)) for kind in MESSAGES]
ME = Identity("worker", "w", 1)
KEY = b"k" * 32
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.binary(max_size=16),
        st.text(max_size=8),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=8,
)
TAGS = st.sampled_from([kind.__struct_config__.tag for kind in MESSAGES]) | st.text(max_size=8)


class Transport(asyncio.Transport):
    """Remembers that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0


class Handler:
    def __init__(self) -> None:
        self.messages: list[AnyMessage] = []
        self.opened = 0

    def on_open(self, link: Link) -> None:
        self.opened += 1

    def on_message(self, link: Link, message: AnyMessage) -> None:
        self.messages.append(message)

    def on_lost(self, link: Link, reason: str) -> None: ...


def receive(chunks: list[bytes], state: _State) -> tuple[Link, Handler]:
    """What a link makes of `chunks` once it is in `state`."""

    async def run() -> tuple[Link, Handler]:
        handler, transport = Handler(), Transport()
        link = Link(ME, KEY, handler, dialled=False)
        link.connection_made(transport)
        if state is not _State.HELLO:
            link.peer = Hello(1, 1, "1", "frontend", "f", 1, b"n" * 32)
            link._state = state
        if state is _State.OPEN:
            link._limit = FRAME_BYTES
        for chunk in chunks:
            if not transport.ended:
                link.data_received(chunk)
        link.connection_lost(None)
        return link, handler

    return asyncio.run(run())


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@fuzzed(150)
@given(
    st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4), st.sampled_from(list(_State)[:3])
)
def test_any_bytes(data: bytes, cuts: list[int], state: _State) -> None:
    link, handler = receive(split(data, cuts), state)
    assert link.closed
    assert not (handler.opened and state is not _State.OPEN)


@fuzzed(250)
@given(st.lists(mutated(ORIGINALS), max_size=3), st.lists(st.integers(0, 2000), max_size=3))
def test_mutated_messages(payloads: list[bytes], cuts: list[int]) -> None:
    """Whatever gets through has types and ranges as the protocol says."""
    data = b"".join(framed(payload) for payload in payloads)
    _, handler = receive(split(data, cuts), _State.OPEN)
    for message in handler.messages:
        assert wire.decode(wire.encode(message)) == message or "nan" in repr(message)
        if isinstance(message, Step):
            try:
                check_step(message)
            except FrameRefused:
                continue
            columns = message.tokens
            assert columns is None or len(columns.attempts) == 2 * len(columns.tokens)


@fuzzed(100)
@given(TAGS, st.lists(VALUES, max_size=8))
def test_well_formed_msgpack_of_any_shape(tag: str, fields: list[Any]) -> None:
    payload = msgspec.msgpack.encode([tag, *fields])
    for state in (_State.HELLO, _State.PROOF):
        _, handler = receive([framed(payload)], state)
        assert handler.opened == 0
    receive([framed(payload)], _State.OPEN)


@fuzzed(200)
@given(mutated(ORIGINALS) | st.binary(max_size=200))
def test_the_decoder_raises_its_own_error_and_allocates_little(payload: bytes) -> None:
    """Announced lengths are not believed: 4 bytes can claim 4 GiB."""
    with memory_under(1 << 20):
        try:
            wire.decode(payload)
        except msgspec.MsgspecError:
            return


@fuzzed(50)
@given(st.sampled_from([b"\xdd", b"\xc6", b"\xdb", b"\xdf"]), st.integers(1 << 20, (1 << 32) - 1))
def test_a_claimed_length_is_not_allocated(kind: bytes, claimed: int) -> None:
    claim = kind + struct.pack(">I", claimed)
    with memory_under(1 << 20):
        for prefix in (b"", b"\x93\xa4snap\x01", b"\x9c\xa6submit\x01\xa5local", b"\x92\xa7metrics\x01"):
            try:
                wire.decode(prefix + claim)
            except msgspec.MsgspecError:
                continue


def test_errors_of_a_link_are_of_our_tree() -> None:
    link, _ = receive([b"\xff" * 8], _State.HELLO)
    assert isinstance(link.opened.exception(), KVRelayError)
