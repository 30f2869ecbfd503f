"""How a long start-up step shows that it moves: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]  # (what is being done now, share done of the whole 0..1)

PLAIN_EVERY_S = 2.0  # between two plain lines of one stage


@contextmanager
def shown_progress(title: str, progress: Progress | None = None) -> Iterator[Progress]:
    """A Progress for the length of the block: `progress` itself if given, else one written to stderr."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        started = time.monotonic()
        yield _plain(title)
        print(f"{title}: done in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=1.0)

        def report(stage: str, share: float) -> None:
            bars.update(task, completed=share, description=f"{title}: {stage}")

        yield report


def _plain(title: str) -> Progress:
    last_stage: str | None = None
    last_at = 0.0

    def report(stage: str, share: float) -> None:
        nonlocal last_stage, last_at
        now = time.monotonic()
        if stage != last_stage or now - last_at >= PLAIN_EVERY_S:
            last_stage, last_at = stage, now
            print(f"{title}: {stage} ({share:.0%})", file=sys.stderr, flush=True)

    return report
