"""Log records as lines of JSON."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

# Decimals of durations, by the unit that the field's name carries.
DECIMALS = {"_s": 4, "_ms": 2}


class JsonLines(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` adds fields.

    Every line says which process wrote it: `role` and `ident` as given, pid and host.
    """

    def __init__(self, role: str, ident: str) -> None:
        super().__init__()
        self._process = {"role": role, "ident": ident, "pid": os.getpid(), "host": socket.gethostname()}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        line.update(_rounded(getattr(record, "fields", {})))
        if record.exc_info:
            # Not `formatException`: that prints, and Serve replaces `print` by one that garbles it.
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return orjson.dumps(line, default=str).decode()


def _rounded(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        decimals = DECIMALS.get(name[name.rfind("_") :]) if isinstance(value, float) else None
        yield name, value if decimals is None else round(value, decimals)
