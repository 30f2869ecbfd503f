"""A frontend of `kvrelay serve` closes when that asks it to, over a Unix socket in the cluster's directory.

Who connects is told how many answers are still in flight, a number a line, while nothing new is taken; 0 is
the last line. When the asker closes its half of the connection its patience is over: what is left then ends
with an error. Never undone: the process ends next. The directory is its owner's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Protocol

POLL_S = 0.02


class Closes(Protocol):
    """What a frontend does when it closes."""

    @property
    def in_flight(self) -> int:
        """HTTP requests that are not answered to their end."""

    def refuse_new(self) -> None: ...

    async def end_answers(self) -> None:
        """Every answer that is left ends with an error; returns when that is with the sockets."""


class ClosingSocket:
    """`start` and `stop` are a pair."""

    def __init__(self, frontend: Closes, directory: Path) -> None:
        self._frontend = frontend
        self._path = directory / f"{os.getpid()}.sock"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._asked, self._path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frontend = self._frontend
        frontend.refuse_new()
        patience = asyncio.ensure_future(reader.read())
        try:
            with contextlib.suppress(OSError):
                while frontend.in_flight and not patience.done():
                    writer.write(f"{frontend.in_flight}\n".encode())
                    await asyncio.wait({patience}, timeout=POLL_S)
                await frontend.end_answers()
                writer.write(b"0\n")
                await writer.drain()
        finally:
            patience.cancel()
            writer.close()
