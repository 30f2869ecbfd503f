"""`kvrelay serve` after its checks: start, say ready, watch, stop on a signal."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from serving.errors import StartError
from serving.local_cluster import LocalCluster
from serving.preflight import Plan
from serving.start_screen import StartScreen

READY_S = 180.0
WATCH_S = 0.5
LOG_LINES = 12
CLOSE_S = 10.0  # the longest that answers in flight hold up a stop


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP interrupts the main thread, the second ends every wait."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.count = 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt
        self._cluster.hurry()


def serve(plan: Plan, *, host: str, port: int, cpus: float, ready: Callable[[str, Path], None]) -> int:
    """Serve `plan` until a signal (returns 0). Raises StartError if it cannot start or Ray ends.

    `ready` hears the API's URL and the directory of the logs."""
    handle, name = tempfile.mkstemp(prefix=f"kvrelay-{port}-", suffix=".log")
    os.close(handle)
    log = Path(name)
    cluster = LocalCluster(
        cpus=cpus, host=host, port=port, longest_request_s=plan.longest_request_s, log=log
    )
    signals = _Signals(cluster)
    signals.install()
    try:
        with StartScreen() as screen:
            screen.say("starting Ray")
            cluster.start()
            screen.say("starting Serve")
            cluster.serve(
                plan.path,
                timeout_s=READY_S,
                on_status=lambda s: screen.say(f"waiting for {s.summary}"),
                health_path=plan.route_prefix + "/health",
            )
        ready(cluster.url + plan.route_prefix, cluster.logs)
        while True:
            time.sleep(WATCH_S)
            cluster.check()
    except KeyboardInterrupt:
        cluster.close(limit_s=CLOSE_S, waits=_say_waits)
        print("Stopping.", file=sys.stderr, flush=True)
        log.unlink(missing_ok=True)
        return 0
    except StartError as error:
        cluster.save_logs()
        raise StartError(_with_log(error.message, log)) from None
    finally:
        cluster.stop()


def _say_waits(answers: int) -> None:
    print(
        f"Waiting up to {CLOSE_S:g} s for {answers} answer{'s' * (answers != 1)} in flight; "
        "Ctrl-C again stops now.",
        file=sys.stderr,
        flush=True,
    )


def _with_log(message: str, log: Path) -> str:
    """`message`, where the log is, and its end if the message does not already tell the cause."""
    where = f"log: {log}"
    message = message.removesuffix(f"; see {log}")
    if not message.startswith(("Ray", "`serve run`")):
        return f"{message}\n{where}"
    with suppress(OSError):
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join([message, *(f"  | {line[:160]}" for line in lines[-LOG_LINES:]), where])
    return f"{message}\n{where}"
