"""How frontends of `kvrelay serve` close: new requests, answers in flight, what is left at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.closing import ClosingSocket
from serving.local import closing
from serving.local.closing import close_frontends
from tests.scripted import Reply
from tests.unit.app_rig import LONG_S, App, prompt
from tests.unit.handoff_fakes import until


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp"))  # socket paths are short
    yield path
    shutil.rmtree(path)


class Frontend:
    """Refuses, waits and ends as it is told, and keeps what it was told."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.told: list[str] = []

    def refuse_new(self) -> None:
        self.told.append("refuse")

    async def end_answers(self) -> None:
        self.told.append(f"end {self.in_flight}")
        self.in_flight = 0


class Asked:
    """`close_frontends` in a thread, and what came of it."""

    def __init__(self, directory: Path, limit_s: float) -> None:
        self.hurry = False
        self.waits: list[int] = []
        self._call = asyncio.to_thread(
            close_frontends,
            directory,
            limit_s=limit_s,
            hurry=lambda: self.hurry,
            waits=self.waits.append,
        )
        self._began_s = time.monotonic()
        self._task = asyncio.ensure_future(self._call)

    async def took_s(self) -> float:
        await self._task
        return time.monotonic() - self._began_s


async def test_without_answers_in_flight_nothing_is_waited_for_or_said(directory: Path) -> None:
    frontend = Frontend(0)
    listening = ClosingSocket(frontend, directory)
    await listening.start()
    asked = Asked(directory, limit_s=LONG_S)
    assert await asked.took_s() < LONG_S / 2
    assert (asked.waits, frontend.told) == ([], ["refuse", "end 0"])
    await listening.stop()
    assert list(directory.iterdir()) == []


async def test_answers_in_flight_are_waited_for(directory: Path) -> None:
    frontend = Frontend(3)
    listening = ClosingSocket(frontend, directory)
    await listening.start()
    asked = Asked(directory, limit_s=LONG_S)
    await until(lambda: asked.waits, LONG_S)
    assert frontend.told == ["refuse"]
    frontend.in_flight = 0
    assert await asked.took_s() < LONG_S
    assert (asked.waits, frontend.told) == ([3], ["refuse", "end 0"])
    await listening.stop()


@pytest.mark.parametrize("hurried", [False, True], ids=["at the limit", "on a second Ctrl-C"])
async def test_what_is_left_is_ended(*, directory: Path, hurried: bool) -> None:
    frontend = Frontend(2)
    listening = ClosingSocket(frontend, directory)
    await listening.start()
    asked = Asked(directory, limit_s=LONG_S if hurried else 0.3)
    await until(lambda: asked.waits, LONG_S)
    asked.hurry = hurried
    assert await asked.took_s() < LONG_S
    assert frontend.told == ["refuse", "end 2"]
    await listening.stop()


async def test_a_frontend_that_is_gone_or_says_nothing_holds_nobody_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "FIRST_WORD_S", 0.1)
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as frozen:
        gone.bind(str(directory / "1.sock"))  # nobody listens
        frozen.bind(str(directory / "2.sock"))
        frozen.listen()
        assert await Asked(directory, limit_s=LONG_S).took_s() < LONG_S / 2


# ---------------------------------------------------------------- the real frontend


def error_code(reply: Reply) -> str:
    return str(reply.json["error"]["code"])


async def test_at_the_end_every_answer_has_a_terminal_event() -> None:
    async with App(profile={"step_ms": 20}) as app:
        host = app.frontends[0]
        asking = [
            asyncio.ensure_future(
                app.client().complete(prompt=prompt(30, salt), max_tokens=500, stream=salt > 0)
            )
            for salt in range(3)
        ]
        await until(lambda: len(app.coordinator()._live) == 3, LONG_S)
        await until(lambda: all(run.sent for run in app.coordinator()._live), LONG_S)
        assert host.in_flight == 3
        host.refuse_new()
        late = await app.client().complete(prompt=prompt(30), max_tokens=2)
        assert (late.status, error_code(late)) == (503, "stopping")
        assert late.headers["retry-after"] == "1"
        await host.end_answers()
        assert host.in_flight == 0
        assert all(task.done() for task in asking)  # all is with the sockets when `end_answers` returns
        whole, *streams = [task.result() for task in asking]
        assert (whole.status, error_code(whole)) == (503, "stopping")
        for stream in streams:
            assert (stream.status, stream.complete) == (200, True)
            assert b'"code":"stopping"' in stream.body.rstrip().rpartition(b"\n\n")[2]


async def test_a_drain_lets_answers_end() -> None:
    async with App() as app:
        asking = asyncio.ensure_future(app.complete(prompt(30), max_tokens=40))
        await until(lambda: app.coordinator().in_flight, LONG_S)
        await app.frontends[0].drain(LONG_S)
        assert asking.done()
        assert asking.result().text


def test_the_socket_is_named_after_its_process(directory: Path) -> None:
    assert ClosingSocket(Frontend(0), directory)._path.name == f"{os.getpid()}.sock"
