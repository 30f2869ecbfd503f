"""MoveRole by itself: what it tells the engine and the reader, word by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from decode.moves import MoveRole
from serving.config import Deadlines
from serving.engine.base import AttemptId, BlockId, Capabilities, ChunkReady, Engine
from serving.kv.io import KvIo
from serving.kv.peer_link import PeerLink
from serving.wire import AnyMessage, Attach, Chunk, Confirm, Confirmed, Detach, Ready, Refused, Renew
from tests.unit.handoff_fakes import until

A = AttemptId(1)
ATTACH = Attach(A, 0, n_tokens=20, reserve_tokens=12)


class FakeEngine:
    """Records the verbs."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(migrate_kv=True)
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((verb, *arguments))


class FakeIo:
    def __init__(self) -> None:
        self.watched: set[AttemptId] = set()
        self.attend = self.watched.add
        self.dismiss = self.watched.discard


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send = self.sent.append

    @property
    def last(self) -> Any:
        return self.sent[-1]


class Rig:
    def __init__(self, pause_s: float = 5.0) -> None:
        self.engine, self.io = FakeEngine(), FakeIo()
        self.running = {A}
        self.moved: list[AttemptId] = []
        self.pauses: list[float] = []
        self.role = MoveRole(
            engine=cast(Engine, self.engine),
            kv_io=cast(KvIo, self.io),
            deadlines=Deadlines(),
            runs=self.running.__contains__,
            on_moved=self.moved.append,
            on_pause=self.pauses.append,
            pause_s=pause_s,
        )
        self.link, self.other = FakeLink(), FakeLink()

    def hear(self, message: AnyMessage, link: FakeLink | None = None) -> bool:
        return self.role.on_message(cast(PeerLink, link or self.link), message)

    def chunk(self, share: int, first: int, blocks: list[int], token: int | None = None) -> None:
        ids = [BlockId(block) for block in blocks]
        tokens = [] if token is None else [7, token]
        self.role.on_chunk(ChunkReady(A, first, ids, token is not None, token, share=share, tokens=tokens))

    def copied(self) -> None:
        self.hear(ATTACH)
        self.chunk(1, 0, [11, 12])

    def paused(self) -> None:
        self.copied()
        self.hear(Ready(A, 1))
        self.chunk(1, 2, [13], token=8)


async def test_the_way_it_goes() -> None:
    rig = Rig()
    assert rig.hear(ATTACH)
    assert rig.engine.told == [("share", A, 1, 20, 32)]
    assert rig.io.watched == {A}
    rig.chunk(1, 0, [11, 12])
    assert rig.link.last == Chunk(A, 0, b"\x0b\0\0\0\x0c\0\0\0", False, 1, 20_000)
    rig.hear(Renew(A, 1))
    rig.hear(Ready(A, 1))
    assert rig.engine.told[1:] == [("pause", A)]
    rig.chunk(1, 2, [13], token=8)
    assert rig.link.last == Chunk(A, 2, b"\x0d\0\0\0", True, 1, 5000, 8, b"\x07\0\0\0\x08\0\0\0")
    rig.hear(Confirm(A, 1))
    assert rig.link.last == Confirmed(A, 1)
    assert rig.engine.told[2:] == [("release", A)]
    assert rig.moved == [A]
    assert rig.role.idle
    assert rig.io.watched == set()
    assert len(rig.pauses) == 1
    assert rig.role.counters.outcomes == {"moved": 1}


async def test_chunks_of_an_earlier_try_are_not_the_next_one_s() -> None:
    """The pause of the first try is on its way when it is given up and another reader comes: with its last
    chunk the second would be confirmed while the request draws on."""
    rig = Rig()
    rig.copied()
    rig.hear(Ready(A, 1))
    rig.hear(Detach(A))
    rig.hear(ATTACH, rig.other)
    assert [verb for verb, *_ in rig.engine.told] == ["share", "pause", "resume", "share"]
    rig.chunk(1, 2, [13], token=8)
    assert rig.other.sent == []
    rig.hear(Confirm(A, 2), rig.other)
    assert isinstance(rig.other.last, Refused)
    assert rig.moved == []


@pytest.mark.parametrize("first", [2, 3], ids=["all-told", "more"])
async def test_what_the_reader_has_is_not_told(first: int) -> None:
    rig = Rig()
    rig.hear(Attach(A, first, n_tokens=40, reserve_tokens=12))
    rig.chunk(1, 0, [11, 12])
    assert rig.link.sent == []
    assert rig.engine.told[1:] == [("pause", A)]  # at once
    rig.chunk(1, 2, [13, 14], token=8)
    assert (rig.link.last.first, len(rig.link.last.blocks) // 4) == (first, 4 - first)


@pytest.mark.parametrize(
    ("word", "outcome", "answered"),
    [
        (Detach(A), "detached", False),
        (Confirm(A, 9), "refused", True),
        (Ready(A, 9), "refused", True),
        (Renew(A, 9), "refused", True),
    ],
    ids=["detach", "confirm", "ready", "renew"],
)
@pytest.mark.parametrize("state", ["shared", "copied", "paused"])
async def test_words_that_end_it(word: AnyMessage, outcome: str, answered: bool, state: str) -> None:
    """A word of another lease is a reader's that is confused."""
    rig = Rig()
    rig.hear(ATTACH) if state == "shared" else rig.copied() if state == "copied" else rig.paused()
    rig.hear(word)
    assert rig.role.counters.outcomes == {outcome: 1}
    assert bool(rig.link.sent and isinstance(rig.link.last, Refused)) is answered
    assert rig.engine.told[-1] == ("resume", A)
    assert rig.moved == []
    assert len(rig.pauses) == (state == "paused")


async def test_a_pause_is_not_prolonged() -> None:
    rig = Rig(pause_s=0.05)
    rig.paused()

    def renewed() -> bool:
        rig.hear(Renew(A, 1))
        return bool(rig.role.counters.outcomes)

    await until(renewed)
    assert rig.role.counters.outcomes == {"expired": 1}
    assert rig.engine.told[-1] == ("resume", A)
    assert isinstance(rig.link.last, Refused)
    assert rig.hear(Confirm(A, 1)) is False  # it is nobody's business here


async def test_words_of_others_change_nothing() -> None:
    rig = Rig()
    rig.paused()
    for word in (Detach(A), Confirm(A, 1), Renew(A, 1)):
        assert rig.hear(word, rig.other) is False
    rig.hear(ATTACH, rig.other)
    assert isinstance(rig.other.last, Refused)
    assert rig.role.counters.outcomes == {"refused": 1}
    assert not rig.role.idle


async def test_prompts_are_somebody_else_s() -> None:
    rig = Rig()
    assert rig.hear(Attach(AttemptId(2), 0)) is False
    assert rig.hear(Attach(A, 0))  # a reader that does not know that it decodes
    assert isinstance(rig.link.last, Refused)
    assert rig.hear(Attach(AttemptId(2), 0, n_tokens=3))  # one that is over
    assert rig.link.last == Refused(2, "not running")
    assert rig.engine.told == []


async def test_stop_refuses_who_is_there() -> None:
    rig = Rig()
    rig.paused()
    rig.role.stop()
    assert isinstance(rig.link.last, Refused)
    assert rig.role.idle
