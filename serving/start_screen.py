"""What `kvrelay serve` shows while it starts: a spinner with what is being waited for, or plain lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class StartScreen:
    """Writes to stderr; on a terminal one line that changes, elsewhere a line a stage."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._spinner: Any = None
        self._last = ""

    def __enter__(self) -> StartScreen:
        if sys.stderr.isatty():
            from rich.console import Console

            self._spinner = Console(stderr=True, highlight=False).status("", spinner="dots")
            self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, stage: str) -> None:
        if self._spinner is not None:
            room = self._spinner.console.width - 2  # of the spinner itself
            self._spinner.update(stage if len(stage) <= room else f"{stage[: room - 3]}...")
        elif stage != self._last:
            print(f"[{time.monotonic() - self._started:5.1f} s] {stage}", file=sys.stderr, flush=True)
        self._last = stage
