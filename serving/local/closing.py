"""Ask the frontends of a local cluster to close (serving/closing.py), and wait for their last answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.02
FIRST_WORD_S = 1.0  # a frontend that says nothing for so long is not waited for
LAST_WORDS_S = 2.0  # from the end of our patience until what was left has been told so
FORWARD_S = 0.1  # what frontends have written last is with the clients, through HAProxy


class _Frontend:
    """One connection; `open`: answers in flight there, None before its first word."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(FIRST_WORD_S)
            self._socket.connect(str(path))
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self._said = b""
        self.open: int | None = None

    def listen(self) -> bool:
        """Take what was said; False once it has said everything."""
        try:
            while said := self._socket.recv(4096):
                self._said += said
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return False
        else:
            self.close()
            return False
        *lines, self._said = self._said.split(b"\n")
        if lines:
            self.open = int(lines[-1])
        return True

    def lose_patience(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def close_frontends(
    directory: Path, *, limit_s: float, hurry: Callable[[], bool], waits: Callable[[int], None]
) -> None:
    """Returns when nothing is in flight, or nothing is left of what was after `limit_s`, or after `hurry`.

    `waits` is called once, with the number of answers, if there is anything to wait for.
    """
    frontends = []
    for path in directory.glob("*.sock"):
        with suppress(OSError):  # a process that has ended
            frontends.append(_Frontend(path))
    began_s = time.monotonic()
    told, ends_s = False, None
    while True:
        frontends = [frontend for frontend in frontends if frontend.listen()]
        now_s = time.monotonic()
        if now_s - began_s > FIRST_WORD_S:
            for silent in [frontend for frontend in frontends if frontend.open is None]:
                silent.close()
                frontends.remove(silent)
        if not frontends or (ends_s is not None and now_s > ends_s):
            break
        counts = [frontend.open for frontend in frontends if frontend.open is not None]
        if not told and len(counts) == len(frontends) and sum(counts) > 0:
            told = True
            waits(sum(counts))
        if ends_s is None and (now_s - began_s > limit_s or hurry()):
            ends_s = now_s + LAST_WORDS_S
            for frontend in frontends:
                frontend.lose_patience()
        time.sleep(POLL_S)
    for frontend in frontends:
        frontend.close()
    if told:
        time.sleep(FORWARD_S)
