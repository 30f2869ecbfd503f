"""Deploy a configuration on a running Ray, and wait until it answers; every wait has a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import urlopen

from serving.errors import StartError
from serving.local.status import Status, failure_line

POLL_S = 0.1


def deploy(
    config: Path,
    environment: Mapping[str, str],
    log: Path,
    *,
    deadline: float,
    on_status: Callable[[Status], None] | None,
    check: Callable[[], None],
) -> None:
    """`serve run config` in a child process, and follow it until every deployment is healthy.

    `deadline` is of `time.monotonic`; `check` raises when waiting makes no sense any more. Raises
    StartError with the application's own message if it fails, or with what was waited for.
    """
    logged = log.stat().st_size if log.exists() else 0
    reader, writer = os.pipe()
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "serving.local.deploy", str(config), str(writer)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb") as lines:
        try:
            _follow(child, lines, deadline, on_status, check)
        except _Failed as failed:
            said = log.read_bytes()[logged:].decode(errors="replace")
            cause = failure_line(failed.message) or failure_line(said, only_raised=True)
            raise StartError(cause or f"`serve run` failed; see {log}") from None
        except TimeoutError as error:
            raise StartError(f"not ready in time: {error}; see {log}") from None
        finally:
            child.kill()
            child.wait()


class _Failed(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def _follow(
    child: subprocess.Popen[bytes],
    lines: BinaryIO,
    deadline: float,
    on_status: Callable[[Status], None] | None,
    check: Callable[[], None],
) -> None:
    pending, waiting_for = b"", "Serve"
    while True:
        ended = child.poll() is not None
        pending += lines.read() or b""
        *whole, pending = pending.split(b"\n")
        for line in whole:
            status = Status.of(json.loads(line))
            waiting_for = status.summary
            if status.state == "failed":
                raise _Failed(status.message)
            if on_status is not None:
                on_status(status)
            if status.state == "running":
                return
        if ended:
            raise _Failed("")
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(waiting_for)
        time.sleep(POLL_S)


def wait_until_answered(url: str, *, deadline: float, check: Callable[[], None]) -> None:
    """Until GET `url` answers 200. Raises StartError naming the last answer; `check` as in `deploy`."""
    while True:
        try:
            with urlopen(url, timeout=5) as answer:
                answer.read()
            return
        except HTTPError as error:
            reason = f"HTTP {error.code}"
            error.close()
        except OSError as error:
            reason = str(error)
        check()
        if time.monotonic() > deadline:
            raise StartError(f"not ready in time: {url} says {reason}")
        time.sleep(POLL_S)
