"""Lines of the log: one JSON object each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from serving.json_lines import JsonLines


@pytest.fixture
def told() -> Any:
    """A logger, and what it wrote."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
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
