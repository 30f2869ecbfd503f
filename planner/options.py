"""Options of a command line as one table: what each may be, and what it goes with.

A mistake is one line on stderr that says what, where and what is allowed, and exit code 2, before anything
is run or measured.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Number", "Option", "OptionParser"]


@dataclass(frozen=True, slots=True)
class Number:
    """What an option may be; called with the text, as argparse does. Never nan, never infinite."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False

    def __call__(self, text: str) -> float:
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not self._holds(value):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {self}")
        return value

    def _holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (
            ("at least", self.least),
            ("above", self.above),
            ("at most", self.most),
            ("below", self.below),
        )
        said = " and ".join(f"{words} {limit:,}" for words, limit in limits if limit is not None)
        return ("a whole number" if self.whole else "a number") + (f", {said}" if said else "")


@dataclass(frozen=True, slots=True)
class Option:
    """`allowed`: a Number, choices, `str`; None: a switch. `only_with`: a condition by its words; what does
    not meet it would be ignored, so it is refused, and its default only holds where it does."""

    flag: str
    allowed: Callable[[str], Any] | Sequence[str] | None
    default: Any
    help: str
    only_with: str | None = None
    metavar: str | tuple[str, ...] | None = None  # of several values, as many

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


class OptionParser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self.options: list[Option] = []

    def error(self, message: str) -> NoReturn:
        self.exit(self.failed(message))

    def failed(self, message: str) -> int:
        """The same of what is no option's fault; returns the exit code."""
        self._print_message(f"{self.prog}: {' '.join(message.split())}\n", sys.stderr)
        return 2

    def wrong(self, flag: str, message: str) -> NoReturn:
        """As argparse says it of an option's value."""
        self.error(f"argument {flag}: {message}")

    def table(self, title: str, options: Sequence[Option]) -> None:
        group = self.add_argument_group(title)
        for option in options:
            self.options.append(option)
            notes = [f"{option.only_with} only"] if option.only_with else []
            notes += [f"default {option.default}"] if option.default not in (None, False, "") else []
            said = option.help + (f" ({'; '.join(notes)})" if notes else "")
            settings: dict[str, Any] = {"help": said.strip().replace("%", "%%"), "default": None}
            if option.allowed is None:
                settings["action"] = "store_const"
                settings["const"] = True
            elif callable(option.allowed):
                settings["type"] = option.allowed
                settings["metavar"] = option.metavar
                settings["nargs"] = len(option.metavar) if isinstance(option.metavar, tuple) else None
            else:
                settings["choices"] = tuple(option.allowed)
            group.add_argument(option.flag, **settings)

    def settle(
        self, args: argparse.Namespace, holds: Callable[[argparse.Namespace], Mapping[str, bool]]
    ) -> None:
        """Defaults for what was not given; an error for what was given and would be ignored.

        Options without `only_with` first: `holds` says of every condition whether `args` meet it.
        """
        for option in self.options:
            if option.only_with is None and getattr(args, option.dest) is None:
                setattr(args, option.dest, option.default)
        met = holds(args)
        for option in self.options:
            if option.only_with is None:
                continue
            given = getattr(args, option.dest) is not None
            if given and not met[option.only_with]:
                self.wrong(option.flag, f"without effect here; it goes with {option.only_with}")
            if not given:
                setattr(args, option.dest, option.default)

    def will_write(self, flag: str, start: str, endings: Sequence[str]) -> None:
        """`start` and each of `endings` is a file that can be written; folders are made."""
        if not Path(start).name or start.endswith("/") or Path(start).is_dir():
            self.wrong(flag, f"{start!r} is a folder; allowed: what the names of the files begin with")
        for ending in endings:
            path = Path(start + ending)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                was_there = path.exists()
                path.open("ab").close()
                if not was_there:
                    path.unlink()
            except OSError as error:
                why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
                self.wrong(flag, f"{str(path)!r}: {why}; allowed: a file that can be written")
