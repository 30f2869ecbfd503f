"""Lines of the log: one JSON object each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from typing import Any

import pytest

from serving.json_lines import JsonLines


@pytest.fixture
def told() -> Any:
    """A logger, and what it wrote."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines("prefill", "w1"))
    logger = logging.Logger("kvrelay.test")
    logger.addHandler(handler)
    return logger, lambda: [json.loads(line) for line in out.getvalue().splitlines()]


def test_fields_stand_beside_the_message(told: Any) -> None:
    logger, lines = told
    logger.info("two\nlines of %s", "text", extra={"fields": {"worker": "w", "odd": object}})
    (line,) = lines()
    assert (line["level"], line["logger"], line["message"]) == (
        "INFO",
        "kvrelay.test",
        "two\nlines of text",
    )
    assert (line["worker"], line["odd"]) == ("w", "<class 'object'>")


def test_an_exception_is_readable_even_where_print_is_not_the_usual_one(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.print", lambda *objects, **how: how["file"].write(str(objects)))
    logger, lines = told
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    (line,) = lines()
    assert line["exception"].startswith("Traceback (most recent call last):\n  File")
    assert line["exception"].endswith("ValueError: why")


def test_every_line_says_when_and_which_process(told: Any) -> None:
    logger, lines = told
    record = logging.LogRecord("kvrelay.test", logging.INFO, __file__, 1, "m", None, None)
    record.created = 1_700_000_000.25
    logger.handle(record)
    (line,) = lines()
    assert line["time"] == "2023-11-14T22:13:20.250Z"
    assert (line["role"], line["ident"], line["pid"]) == ("prefill", "w1", os.getpid())
    assert line["host"] == socket.gethostname()


def test_durations_are_rounded_and_nothing_else(told: Any) -> None:
    logger, lines = told
    logger.info("m", extra={"fields": {"a_s": 1.23456789, "b_ms": 9.87654, "c": 1.23456789, "d_s": None}})
    (line,) = lines()
    assert (line["a_s"], line["b_ms"], line["c"], line["d_s"]) == (1.2346, 9.88, 1.23456789, None)
