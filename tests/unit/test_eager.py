"""The eager sender against servers that suspend, fail, or never read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving import eager
from serving.eager import EagerSender


class Server:
    """A `send` that waits while `paused`; `how`: on an event, on a bare yield, or on a sleep."""

    def __init__(self, how: str = "event") -> None:
        self.messages: list[Any] = []
        self.resume = asyncio.Event()
        self.resume.set()
        self.how = how
        self.error: Exception | None = None

    async def send(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        if not self.resume.is_set():
            if self.how == "event":
                await self.resume.wait()
            else:
                while not self.resume.is_set():
                    await asyncio.sleep(0 if self.how == "yield" else 0.001)
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")


def no_overflow() -> None:
    raise AssertionError("overflow")


async def test_writes_happen_at_once_and_in_no_task() -> None:
    server = Server()
    tasks = len(asyncio.all_tasks())
    sender = EagerSender(server.send, no_overflow)
    sender.start(200, [])
    sender.write(b"a")
    sender.end(b"b")
    assert [m["type"] for m in server.messages] == ["http.response.start"] + ["http.response.body"] * 2
    assert [m["more_body"] for m in server.messages[1:]] == [True, False]
    assert sender.closed.done()
    assert not sender.failed
    assert len(asyncio.all_tasks()) == tasks


@pytest.mark.parametrize("how", ["event", "yield", "sleep"])
async def test_a_paused_server_gets_everything_in_order(how: str) -> None:
    server = Server(how)
    sender = EagerSender(server.send, no_overflow)
    sender.start(200, [])
    server.resume.clear()
    for i in range(10):
        sender.write(b"%d" % i)
    await asyncio.sleep(0.01)
    assert server.body == b""
    server.resume.set()
    await asyncio.sleep(0.01)
    assert server.body == b"0123456789"
    assert len(server.messages) < 5, "what waited leaves joined"
    sender.write(b"x")
    assert server.body == b"0123456789x", "eager again"
    server.resume.clear()
    sender.write(b"y")
    sender.end(b"z")
    sender.end(b"twice")
    assert not sender.closed.done()
    server.resume.set()
    await asyncio.wait_for(sender.closed, 1)
    assert server.body == b"0123456789xyz"
    assert server.messages[-1]["more_body"] is False


async def test_paused_from_the_head_on() -> None:
    server = Server()
    server.resume.clear()
    sender = EagerSender(server.send, no_overflow)
    sender.start(200, [])
    sender.write(b"a")
    sender.end(b"b")
    server.resume.set()
    await asyncio.wait_for(sender.closed, 1)
    assert server.messages[0]["type"] == "http.response.start"
    assert server.body == b"ab"


async def test_a_slow_client_overflows_once() -> None:
    server = Server()
    server.resume.clear()
    overflows = []
    sender = EagerSender(server.send, lambda: overflows.append(1), limit_bytes=100)
    for _ in range(50):
        sender.write(b"0123456789")
    assert overflows == [1]


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "DRAIN_TIMEOUT_S", 0.01)
    server = Server()
    server.resume.clear()
    sender = EagerSender(server.send, no_overflow)
    sender.write(b"a")
    sender.end(b"b")
    await asyncio.wait_for(sender.closed, 1)
    assert sender.failed
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("paused", [False, True])
async def test_a_send_that_raises_means_the_client_is_gone(paused: bool) -> None:
    server = Server()
    sender = EagerSender(server.send, no_overflow)
    sender.write(b"a")
    if paused:
        server.resume.clear()
        sender.write(b"b")
        sender.write(b"c")
    server.error = OSError("gone")
    server.resume.set()
    if not paused:
        sender.write(b"b")
    await asyncio.wait_for(sender.closed, 1)
    assert sender.failed
    sender.write(b"ignored")
    sender.end(b"ignored")
