"""How benchmarks talk to a person: a line for what is being done, a table at the end."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.options import Number, OptionParser

COUNT = Number(least=1, most=10_000_000, whole=True)
POSITIVE = Number(above=0, most=10_000_000)


def command(name: str, doc: str | None) -> OptionParser:
    """The parser of `python -m benchmarks.NAME`; its `--help` shows the module's docstring as it is."""
    return OptionParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


class Progress:
    """Says on stderr what runs now; silent when the output is for a script."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = None if quiet else Console(file=sys.stderr)

    def say(self, what: str) -> None:
        if self._console is not None:
            self._console.print(f"[dim]..[/dim] {what}")


def print_report(title: str, report: dict[str, Any]) -> None:
    """`report` as a two-column table; nested objects become dotted names."""
    grid = Table(title=title, show_header=False)
    grid.add_column(justify="left")
    grid.add_column(justify="right")
    for name, value in flat(report):
        grid.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value))
    Console().print(grid)


def flat(report: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in report.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows
