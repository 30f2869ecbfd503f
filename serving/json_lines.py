"""Log records as lines of JSON."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import orjson


class JsonLines(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            # Not `formatException`: that prints, and Serve replaces `print` by one that garbles it.
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return orjson.dumps(line, default=str).decode()
